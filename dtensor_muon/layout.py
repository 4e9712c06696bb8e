"""DTensor placements -> where each matrix dim lives: `ParamLayout`.

[Note: order of sharding]
Several mesh axes may shard the same tensor dim. The order in which they cut it decides which rows a rank holds, and
they must be undone in the reverse order. `Shard` placements are applied in mesh order; `_StridedShard(d, split_factor)`
says that later axes with a total of `split_factor` shards of `d` were applied before it (FSDP is applied to a parameter
that TP has sharded already, but stands left of it in the mesh). Every cut follows `torch.chunk`: all shards have
`ceil(size / num_shards)` rows but the last non-empty one, and the rest are empty.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

# Mesh axis names that mean tensor parallelism: torch's tutorials and torchtitan, expert tensor parallelism, Megatron.
TP_AXIS_NAMES = ("tp", "etp", "tensor", "tensor_parallel", "model_parallel")


@dataclass(frozen=True, slots=True)
class ShardedAxis:
    """A mesh axis of more than one rank.

    Attributes:
        axis: Index of the axis in the mesh.
        name: Its name, `""` when the mesh has none.
        size: Its number of ranks.
        dim: The tensor dim that it shards; None when it replicates.
    """

    axis: int
    name: str
    size: int
    dim: int | None


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """How a parameter is stored.

    Attributes:
        shape: Global shape `[*batch, rows, cols]`.
        mesh: None for a plain tensor.
        placements: As the DTensor has them; empty for a plain tensor.
        axes: Axes of more than one rank, in the order in which they were applied; replicating axes first.
    """

    shape: tuple[int, ...]
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]
    axes: tuple[ShardedAxis, ...]

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of one whole matrix."""
        return self.shape[-2], self.shape[-1]

    @property
    def num_matrices(self) -> int:
        """Matrices in the parameter: the product of its leading dims."""
        return math.prod(self.shape[:-2])

    @property
    def tp_axis(self) -> ShardedAxis | None:
        """The axis whose blocks `tp_mode="blockwise"` keeps apart, or None.

        It is the axis with a tensor-parallel name (`TP_AXIS_NAMES`); on a mesh without names it is the sharded axis
        if there is just one.
        """
        matrix_axes = [axis for axis in self.axes if self.matrix_dim(axis) is not None]
        named = [axis for axis in matrix_axes if axis.name in TP_AXIS_NAMES]
        if named:
            return named[0]
        unnamed = [axis for axis in matrix_axes if not axis.name]
        return unnamed[0] if len(unnamed) == 1 else None

    @property
    def partition_dim(self) -> int | None:
        """The matrix dim (0 rows, 1 columns) that the TP axis shards, or else the only one that any axis shards.

        None when no axis or several axes of different dims shard the matrix.
        """
        if self.tp_axis is not None:
            return self.matrix_dim(self.tp_axis)
        dims = {self.matrix_dim(axis) for axis in self.axes} - {None}
        return dims.pop() if len(dims) == 1 else None

    def matrix_dim(self, axis: ShardedAxis) -> int | None:
        """0 when `axis` shards the rows, 1 the columns, None when it replicates or shards a leading dim."""
        first = len(self.shape) - 2
        return None if axis.dim is None or axis.dim < first else axis.dim - first


def infer_layout(param: torch.Tensor, name: str = "parameter") -> ParamLayout:
    """Reads mesh, TP axis, partition dim and the order of sharding from a parameter.

    Args:
        param: A DTensor or a plain tensor of any number of dims.
        name: Its name in error messages.

    Returns:
        Its layout; a plain tensor has no axes.

    Raises:
        NotImplementedError: A placement that is not `Shard`, `_StridedShard` or `Replicate`, or an order of sharding
            that cannot be known.
    """
    shape = tuple(param.shape)
    if not isinstance(param, DTensor):
        return ParamLayout(shape, None, (), ())
    mesh, placements = param.device_mesh, tuple(param.placements)
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    replicated: list[ShardedAxis] = []
    by_dim: dict[int, list[tuple[ShardedAxis, int]]] = {}
    for index, placement in enumerate(placements):
        size = mesh.size(index)
        if placement.is_partial() or not _is_known(placement):
            raise NotImplementedError(
                f"{describe_tensor(name, param)}: Muon cannot work on the placement {placement!r} of mesh axis "
                f"{index}; redistribute the parameter to Shard or Replicate placements before it reaches the optimizer"
            )
        if size == 1:
            continue
        if placement.is_replicate():
            replicated.append(ShardedAxis(index, names[index], size, None))
        else:
            dim = _dim_of(placement) % len(shape)
            factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            by_dim.setdefault(dim, []).append((ShardedAxis(index, names[index], size, dim), factor))
    ordered = [axis for dim in sorted(by_dim) for axis in _application_order(by_dim[dim], name, param)]
    return ParamLayout(shape, mesh, placements, (*replicated, *ordered))


def _is_known(placement: Placement) -> bool:
    return placement.is_replicate() or placement.is_shard() or isinstance(placement, _StridedShard)


def _dim_of(placement: Placement) -> int:
    return int(placement.dim)  # type: ignore[attr-defined]


def _application_order(axes: Sequence[tuple[ShardedAxis, int]], name: str, param: DTensor) -> list[ShardedAxis]:
    """Sorts the axes of one dim, given in mesh order with their split factors; see [Note: order of sharding]."""
    order: list[ShardedAxis] = []
    for axis, factor in reversed(axes):
        position, product = 0, 1
        while product < factor and position < len(order):
            product *= order[position].size
            position += 1
        if product != factor:
            later = ", ".join(f"axis {other.axis} of {other.size}" for other in order) or "none"
            raise NotImplementedError(
                f"{describe_tensor(name, param)}: axis {axis.axis} has split_factor={factor}, which is not the product "
                f"of axes to its right that shard dim {axis.dim} ({later}), so the order of sharding is unknown; "
                "shard the parameter with parallelize_module, then fully_shard"
            )
        order.insert(position, axis)
    return order


def move_dims(layout: ParamLayout, shape: tuple[int, ...], new_dims: Sequence[int]) -> ParamLayout:
    """Returns the layout after dim `d` has become dim `new_dims[d]` of a tensor of another shape."""

    def placed(placement: Placement) -> Placement:
        if isinstance(placement, _StridedShard):
            return _StridedShard(new_dims[_dim_of(placement)], split_factor=placement.split_factor)
        return placement if placement.is_replicate() else Shard(new_dims[_dim_of(placement)])

    axes = tuple(axis if axis.dim is None else replace(axis, dim=new_dims[axis.dim]) for axis in layout.axes)
    return replace(layout, shape=shape, placements=tuple(map(placed, layout.placements)), axes=axes)


def local_sizes(layout: ParamLayout) -> tuple[dict[int, int], tuple[int, ...]]:
    """Returns the sizes on this rank on the way from the whole tensor to its shard; uneven shards differ by rank.

    Returns:
        Per axis index that shards, the size of its dim before that axis cut it; and the shape of the local shard.
    """
    current = list(layout.shape)
    before: dict[int, int] = {}
    for axis in layout.axes:
        if axis.dim is not None and layout.mesh is not None:
            before[axis.axis] = current[axis.dim]
            current[axis.dim] = chunk_size(current[axis.dim], axis.size, layout.mesh.get_local_rank(axis.axis))
    return before, tuple(current)


def local_part(whole: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
    """Returns the view of a whole tensor that is this rank's shard."""
    for axis in layout.axes:
        if axis.dim is not None and layout.mesh is not None:
            size, rank = whole.shape[axis.dim], layout.mesh.get_local_rank(axis.axis)
            start = torch.sym_min(-(-size // axis.size) * rank, size)
            whole = whole.narrow(axis.dim, int_or_symbol(start), chunk_size(size, axis.size, rank))
    return whole


def chunk_size(size: int, num_chunks: int, index: int) -> int:
    """Returns the size of chunk `index` under `torch.chunk`; works on the symbolic ranks of simulated meshes."""
    full = (size + num_chunks - 1) // num_chunks
    start = torch.sym_min(full * index, size)
    return int_or_symbol(torch.sym_min(start + full, size) - start)


def int_or_symbol(value: int) -> int:
    """Unwraps a symbolic integer that is the same on every simulated rank."""
    node = getattr(value, "node", None)
    constant = node.maybe_as_int() if node is not None else value
    return value if constant is None else int(constant)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of a tensor that this rank holds, sharing its memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    # detaching a DTensor would go through its dispatcher, which costs more than the rest of a small step
    with torch.no_grad():
        return tensor.to_local()


def mesh_of(tensor: torch.Tensor) -> DeviceMesh | None:
    """Returns the mesh of a DTensor, None for a plain tensor."""
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def describe_tensor(name: str, tensor: torch.Tensor) -> str:
    """Returns one phrase with the name, global shape, dtype and, for a DTensor, placements and mesh axes."""
    text = f"{name} (shape {tuple(tensor.shape)}, {tensor.dtype}"
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        names = mesh.mesh_dim_names or tuple(f"axis {index}" for index in range(mesh.ndim))
        axes = ", ".join(f"{axis}={mesh.size(index)}" for index, axis in enumerate(names))
        text += f", placements {tuple(tensor.placements)}, mesh {axes}"
    return text + ")"
