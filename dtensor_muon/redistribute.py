"""Storage layout <-> compute layout of one bucket. The only module that moves data.

[Note: axis views]
A bucket is moved one mesh axis at a time. For one move, the local tensors of the ranks along that axis are a DTensor
that is sharded on it; what the other axes hold does not matter, so the view calls them replicated. On the parameter's
own placements DTensor would gather `_StridedShard` storage over the whole axis, which is right, but sends as many times
the bytes as the axis has ranks.

[Note: all-to-all]
On a CPU mesh DTensor replaces the all-to-all of `Shard -> Shard` by an all-gather. The op behind it runs on every
backend, but cuts evenly, so both dims are padded to a multiple of the ranks before it and narrowed after it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import _group_or_group_name
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from dtensor_muon.layout import ShardedAxis, int_or_symbol, local_sizes
from dtensor_muon.plan import BucketPlan, Target, kept_matrices, long_dim_of

_Undo = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Computed:
    """A bucket in its compute layout.

    Attributes:
        matrices: `[n, rows, cols]` on this rank, in the compute dtype.
        to_storage: Takes the updates, shaped like `matrices`, back: one tensor per member, like its local shard.
    """

    matrices: Tensor
    to_storage: Callable[[Tensor], list[Tensor]]


class BucketMover:
    """Moves one bucket; holds what depends on this rank: its sizes before each cut, and its number of matrices."""

    def __init__(self, plan: BucketPlan) -> None:
        self.plan = plan
        self._sizes, _ = local_sizes(plan.layout)
        self._slots = plan.slots()
        self._num_slots = plan.num_owners * plan.matrices_per_owner
        self._num_owned = _num_owned(plan)
        self._num_kept = kept_matrices(plan.layout)
        self._real = _real_matrices(plan)

    def to_compute(self, shards: list[Tensor]) -> Computed:
        """Brings a bucket into its compute layout.

        Args:
            shards: One per member: the local shard of its Newton-Schulz input, in the compute dtype. The
                tensors are not modified; the list is emptied, so that their memory is free while the stack moves.
        """
        undo: list[_Undo] = []
        stack = self._stack(shards)
        shapes = [shard.shape for shard in shards]
        shards.clear()
        for axis, target in self.plan.moves():
            stack, back = self._move(stack, axis, target)
            undo.append(back)
        per_owner = self.plan.matrices_per_owner
        owned = stack if self._num_owned is None else stack.narrow(0, 0, self._num_owned)
        num_owned = owned.shape[0]
        if self._real is not None:
            owned = owned[self._real]

        def to_storage(updates: Tensor) -> list[Tensor]:
            if self._real is not None:
                some = updates
                updates = some.new_zeros((num_owned, *some.shape[1:]))
                updates[self._real] = some
            if self._num_owned is not None:
                updates = _pad(updates, 0, per_owner)
            for back in reversed(undo):
                updates = back(updates)
            return self._unstack(updates, shapes)

        return Computed(owned, to_storage)

    def reduce_sum(self, value: Tensor) -> Tensor:
        """Sums a tensor over the axes on which the matrices stay sharded."""
        return self._reduce(value, Partial("sum"), Replicate())

    def reduce_max(self, value: Tensor) -> Tensor:
        """Takes the maximum over the axes on which the matrices stay sharded."""
        return self._reduce(value, Partial("max"), Replicate())

    def scatter_sum(self, value: Tensor) -> Tensor:
        """Sums `[n, ...]` over these axes; each rank receives its share of the first dim, padded to equal shares."""
        return self._reduce(_pad(value, 0, self._shared_slots), Partial("sum"), Shard(0))

    def gather_shared(self, value: Tensor, count: int) -> Tensor:
        """Gathers the shares of `scatter_sum` and returns the first `count` elements."""
        for axis in reversed(self.plan.long_axes):
            value = _gather(value, self._mesh, axis, 0, value.shape[0] * axis.size)
        return value.narrow(0, 0, count)

    @property
    def _shared_slots(self) -> int:
        ranks = self.plan.num_pieces
        return -(-self.plan.matrices_per_owner // ranks) * ranks

    def _reduce(self, value: Tensor, source: Placement, destination: Placement) -> Tensor:
        for axis in self.plan.long_axes:
            value = _redistribute(value, self._mesh, axis.axis, source, destination)
        return value

    @property
    def _mesh(self) -> DeviceMesh:
        if self.plan.layout.mesh is None:
            raise AssertionError("a bucket of plain tensors has no axes to move")
        return self.plan.layout.mesh

    def _stack(self, shards: Sequence[Tensor]) -> Tensor:
        """Returns `[slots, local rows, local cols]`."""
        if not self.plan.stack_axes:
            return _matrices(torch.stack(list(shards)))
        pieces: list[Tensor] = []
        for shard in shards:
            matrices = _matrices(shard)
            if shard.ndim > 2:
                matrices = _pad(matrices, 0, self._num_kept)
            pieces.extend(matrices.unbind(0))
        slots: list[Tensor] = [torch.zeros_like(pieces[0])] * self._num_slots
        for slot, piece in zip(self._slots, pieces, strict=True):
            slots[slot] = piece
        return torch.stack(slots)

    def _unstack(self, updates: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        if not self.plan.stack_axes:
            return list(updates.unflatten(0, (len(shapes), *shapes[0][:-2])).unbind(0))
        pieces = [updates[slot] for slot in self._slots]
        result: list[Tensor] = []
        for index, shape in enumerate(shapes):
            mine = pieces[index * self._num_kept : (index + 1) * self._num_kept]
            if len(shape) == 2:
                result.append(mine[0])
            else:
                num_local = math.prod(shape[:-2])
                result.append(torch.stack(mine).narrow(0, 0, num_local).reshape(shape))
        return result

    def _move(self, x: Tensor, axis: ShardedAxis, target: Target) -> tuple[Tensor, _Undo]:
        """Applies one target; returns the moved tensor and what takes it back."""
        layout = self.plan.layout
        matrix_dim = layout.matrix_dim(axis)
        if target is Target.KEEP:
            return x, _same
        long_dim = 1 + long_dim_of(layout)
        destination = {Target.STACK: 0, Target.LONG: long_dim}.get(target)
        if matrix_dim is None:
            if destination is None:
                return x, _same
            size = x.shape[destination]
            moved = _slice(x, self._mesh, axis, destination)
            return moved, lambda y: _gather(y, self._mesh, axis, destination, size)
        source, size = 1 + matrix_dim, self._sizes[axis.axis]
        if destination is None:
            mine = x.shape[source]
            moved = _gather(_pad(x, source, -(-size // axis.size)), self._mesh, axis, source, size)
            return moved, lambda y: _slice(y, self._mesh, axis, source).narrow(source, 0, mine)
        if source == destination:
            return x, _same
        return _all_to_all(x, self._mesh, axis, source, destination, size)


def agree(mesh: DeviceMesh, like: Tensor, fingerprint: int) -> bool:
    """Returns whether all ranks of a mesh hold the same number (of at most 62 bits). Collective over the mesh."""
    both = like.new_tensor([fingerprint, -fingerprint], dtype=torch.int64)
    highest = _reduce_over_mesh(both, mesh)
    return bool((highest == both).all())


def any_rank(mesh: DeviceMesh, flags: Tensor) -> Tensor:
    """Returns the elementwise maximum of an integer tensor over all ranks of a mesh. Collective over the mesh."""
    return _reduce_over_mesh(flags, mesh)


def reduce_over_axes(mesh: DeviceMesh, axes: Sequence[int], value: Tensor, operation: str) -> Tensor:
    """Returns the `"sum"` or `"max"` of a tensor over some axes of a mesh. Collective over the axes."""
    for axis in axes:
        value = _redistribute(value, mesh, axis, Partial(operation), Replicate())
    return value


def gather_texts(mesh: DeviceMesh, text: str) -> dict[int, str]:
    """Returns the texts of all ranks of a mesh by their global rank. Collective over the mesh."""
    found = {dist.get_rank(): text}
    for axis in range(mesh.ndim):
        parts: list[dict[int, str]] = [{} for _ in range(mesh.size(axis))]
        dist.all_gather_object(parts, found, group=mesh.get_group(axis))
        found = {rank: text for texts in parts for rank, text in texts.items()}
    return found


def _reduce_over_mesh(value: Tensor, mesh: DeviceMesh) -> Tensor:
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            value = _redistribute(value, mesh, axis, Partial("max"), Replicate())
    return value


def _slice(x: Tensor, mesh: DeviceMesh, axis: ShardedAxis, dim: int) -> Tensor:
    """`Replicate -> Shard(dim)` along one axis; the dim is padded to a multiple of the ranks first."""
    chunk = -(-x.shape[dim] // axis.size)
    pieces = _pad(x, dim, chunk * axis.size).unflatten(dim, (axis.size, chunk)).movedim(dim, 0)
    return _redistribute(pieces, mesh, axis.axis, Replicate(), Shard(0)).squeeze(0)


def _gather(x: Tensor, mesh: DeviceMesh, axis: ShardedAxis, dim: int, size: int) -> Tensor:
    """`Shard(dim) -> Replicate` along one axis, from equal pieces; the result keeps `size` elements of the dim."""
    pieces = _redistribute(x.unsqueeze(0), mesh, axis.axis, Shard(0), Replicate())
    return pieces.movedim(0, dim).contiguous().flatten(dim, dim + 1).narrow(dim, 0, size)


def _redistribute(x: Tensor, mesh: DeviceMesh, axis: int, source: Placement, destination: Placement) -> Tensor:
    """`DTensor.redistribute` along one mesh axis, of dim 0 in equal pieces or of partial values.

    See [Note: axis views]. The sizes of the other dims may differ between the ranks of other axes; DTensor does not
    look at them, so the view gives them as 1.
    """
    shape = [1] * x.ndim
    if x.ndim:
        shape[0] = x.shape[0] * mesh.size(axis) if source.is_shard() else x.shape[0]
    view = DTensor.from_local(
        x.contiguous(),
        mesh,
        _on_axis(mesh, axis, source),
        run_check=False,
        shape=torch.Size(shape),
        stride=(1,) * x.ndim,
    )
    return view.redistribute(placements=_on_axis(mesh, axis, destination)).to_local()


def _on_axis(mesh: DeviceMesh, axis: int, placement: Placement) -> list[Placement]:
    placements: list[Placement] = [Replicate()] * mesh.ndim
    placements[axis] = placement
    return placements


def _all_to_all(
    x: Tensor, mesh: DeviceMesh, axis: ShardedAxis, source: int, destination: int, size: int
) -> tuple[Tensor, _Undo]:
    """`Shard(source) -> Shard(destination)` along one axis; see [Note: all-to-all].

    Args:
        x: Local tensor.
        mesh: The bucket's mesh.
        axis: The axis along which it moves.
        source: The dim that is sharded before.
        destination: The dim that is sharded after; it keeps its padding.
        size: Of the source dim on all ranks of the axis together.
    """
    group = _group_or_group_name(mesh.get_group(axis.axis))
    mine, whole = x.shape[source], x.shape[destination]
    chunk = -(-size // axis.size)
    even = -(-whole // axis.size) * axis.size

    def exchange(tensor: Tensor, gather: int, scatter: int) -> Tensor:
        moved: Tensor = torch.ops._dtensor.shard_dim_alltoall(tensor.contiguous(), gather, scatter, group)
        return moved

    def back(y: Tensor) -> Tensor:
        y = exchange(_pad(y, source, chunk * axis.size), destination, source)
        return y.narrow(source, 0, mine).narrow(destination, 0, whole)

    moved = exchange(_pad(_pad(x, source, chunk), destination, even), source, destination)
    return moved.narrow(source, 0, size), back


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """Appends zeros to a dim until it has `size` elements."""
    if x.shape[dim] is size:
        return x
    missing = int_or_symbol(size - x.shape[dim])
    if isinstance(missing, int) and missing == 0:
        return x
    return torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing])


def _owner(plan: BucketPlan) -> int:
    """Returns which owner of the stack this rank is."""
    owner: int = 0
    for axis in plan.stack_axes:
        if plan.layout.mesh is not None:
            owner = owner * axis.size + plan.layout.mesh.get_local_rank(axis.axis)
    return owner


def _real_matrices(plan: BucketPlan) -> list[int] | None:
    """Returns which of its matrices this rank computes, None for all.

    Where fewer experts are on this rank than on others, the stack holds zeros in their place. Simulated ranks, which
    are all one, compute these as well.
    """
    num_kept, owner = kept_matrices(plan.layout), _owner(plan)
    num_real = math.prod(local_sizes(plan.layout)[1][:-2])
    if not plan.stack_axes or not isinstance(num_real, int) or not isinstance(owner, int) or num_real == num_kept:
        return None
    first = owner * plan.matrices_per_owner
    mine = [matrix for matrix, slot in enumerate(plan.slots()) if first <= slot < first + plan.matrices_per_owner]
    return [place for place, matrix in enumerate(mine) if matrix % num_kept < num_real]


def _num_owned(plan: BucketPlan) -> int | None:
    """Returns how many of its slots this rank computes, None for all; see [Note: slots] in `plan`."""
    if plan.layout.mesh is None or not plan.counts:
        return None
    owner = _owner(plan)
    # a sum of steps rather than a look-up: the rank is symbolic on simulated meshes
    mine, first, previous = 0, 0, 0
    for count, owners in plan.counts:
        reached = torch.sym_min(1, torch.sym_max(0, owner - first + 1))
        mine = mine + (count - previous) * reached
        first, previous = first + owners, count
    return int_or_symbol(mine)


def _same(x: Tensor) -> Tensor:
    return x


def _matrices(x: Tensor) -> Tensor:
    """Views a matrix or a stack of matrices as `[n, rows, cols]`."""
    return x.unsqueeze(0) if x.ndim == 2 else x.flatten(0, -3)
