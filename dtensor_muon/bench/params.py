"""Parameters to measure with: shapes from text, placements from the name of a layout."""

import math
import re
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

DEFAULT_SHAPES = "512x512*8,1376x512*4,512x1376*4"
LAYOUTS = ("plain", "fsdp0", "fsdp1", "tp_col", "tp_row", "hsdp", "fsdp_tp_row", "fsdp_tp_col")
TWO_AXES = ("hsdp", "fsdp_tp_row", "fsdp_tp_col")


def parse_shapes(text: str) -> list[tuple[int, ...]]:
    """Returns the shapes of `"512x1376*4,64x64"`: one per matrix, or stack of matrices.

    Raises:
        ValueError: The text has another form.
    """
    shapes: list[tuple[int, ...]] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+(?:x\d+){1,2})(?:\*(\d+))?\s*", part)
        if match is None:
            raise ValueError(f"shapes has {part!r}; write ROWSxCOLS or EXPERTSxROWSxCOLS, and *COUNT behind it")
        shapes += [tuple(map(int, match[1].split("x")))] * int(match[2] or 1)
    return shapes


def check_layout(shapes: Sequence[Sequence[int]], layout: str, world: int) -> None:
    """Checks that the shapes can be laid on so many ranks.

    Raises:
        ValueError: An unknown layout, a world that it cannot be laid on, or a dim that the ranks do not divide.
    """
    sizes, _ = _mesh_shape(layout, world)
    for shape in shapes:
        _local_shape(shape, layout, sizes)


def build_mesh(layout: str, world: int, device_type: str) -> DeviceMesh | None:
    """Returns the mesh of a layout, None for plain tensors.

    Raises:
        ValueError: An unknown layout, or a world that it cannot be laid on.
    """
    sizes, names = _mesh_shape(layout, world)
    return init_device_mesh(device_type, sizes, mesh_dim_names=names) if sizes else None


def make_tensors(
    shapes: Sequence[Sequence[int]], layout: str, mesh: DeviceMesh | None, device: torch.device, seed: int, scale: float
) -> list[torch.Tensor]:
    """Returns tensors of random values, each rank making its own shard only; replicas are equal.

    Raises:
        ValueError: A dim that the ranks do not divide: the benchmark measures even shards.
    """
    sizes = () if mesh is None else mesh.shape
    shard = 0
    if mesh is not None:
        for axis, placement in enumerate(_placements(layout, 2, sizes)):
            if not placement.is_replicate():
                shard = shard * sizes[axis] + mesh.get_local_rank(axis)
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(2**32 * seed + shard)
    tensors: list[torch.Tensor] = []
    for shape in shapes:
        x = torch.randn(_local_shape(shape, layout, sizes), device=device, generator=generator) * scale
        if mesh is not None:
            placements = _placements(layout, len(shape), sizes)
            strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
            x = DTensor.from_local(x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides))
        tensors.append(x)
    return tensors


def _mesh_shape(layout: str, world: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns sizes and names of the mesh axes, none for plain tensors."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {', '.join(map(repr, LAYOUTS))}")
    if layout == "plain":
        return (), ()
    if layout in TWO_AXES:
        if world < 4 or world % 2:
            raise ValueError(f"world is {world}; layout {layout!r} needs an even number of at least 4")
        if layout == "hsdp":
            return (2, world // 2), ("dp_replicate", "fsdp")
        return (world // 2, 2), ("fsdp", "tp")
    return (world,), ("tp" if layout.startswith("tp") else "fsdp",)


def _placements(layout: str, ndim: int, sizes: Sequence[int]) -> list[Placement]:
    """Returns the placements of a matrix, or of a stack of matrices, whose rows or columns are sharded."""
    rows, cols = ndim - 2, ndim - 1
    table: dict[str, list[Placement]] = {
        "plain": [],
        "fsdp0": [Shard(rows)],
        "fsdp1": [Shard(cols)],
        "tp_col": [Shard(rows)],
        "tp_row": [Shard(cols)],
        "hsdp": [Replicate(), Shard(rows)],
        "fsdp_tp_row": [Shard(rows), Shard(cols)],
        "fsdp_tp_col": [_StridedShard(rows, split_factor=sizes[-1] if sizes else 1), Shard(rows)],
    }
    return table[layout]


def _local_shape(shape: Sequence[int], layout: str, sizes: Sequence[int]) -> list[int]:
    """Returns the shape of a rank's shard."""
    local = list(shape)
    for size, placement in zip(sizes, _placements(layout, len(shape), sizes), strict=True):
        if not placement.is_replicate():
            dim = placement.dim  # type: ignore[attr-defined]
            if local[dim] % size:
                raise ValueError(
                    f"shape {tuple(shape)}, layout {layout!r}: {local[dim]} does not divide by {size} ranks"
                )
            local[dim] //= size
    return local
