"""Fused weights: several matrices stored in one parameter, and the views that take them apart.

[Note: parts]
A fused dim holds `G` groups of `sum(sizes)` rows, in each group the rows of every part one after another:

    G = 1   [ q q q q k k v v ]         contiguous [Q; K; V], flux `qkv`, gate/up
    G = 2   [ q q k v | q q k v ]       per query group (Megatron, torchtitan's `wqkv`); sizes (1, 1): row by row

Where every shard boundary falls on a group boundary, a part is a parameter of its own: a strided view of the local
shard, cut between the ranks as `torch.chunk` would cut the part alone. Nothing moves for the split, and parts of equal
shape are batched across parameters. Elsewhere the parameter travels whole and is split where it is assembled.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dtensor_muon.layout import ParamLayout, move_dims

_KEYS = ("sizes", "num_groups", "dim", "heads")


@dataclass(frozen=True, slots=True)
class FusedDim:
    """How the rows or columns of a weight `[..., rows, cols]` divide into separate matrices.

    Attributes:
        sizes: Rows of each part within one group, in their order.
        num_groups: Groups `G`; the fused dim has `G * sum(sizes)` rows. None is inferred from the global shape.
        dim: The fused dim of the matrix: 0 rows, 1 columns.
        heads: True makes each group of a part a matrix of its own (attention heads); False joins a part's groups into
            one matrix of `G * size` rows.

    Raises:
        ValueError: A value that is not allowed.
    """

    sizes: tuple[int, ...]
    num_groups: int | None = None
    dim: int = 0
    heads: bool = False

    def __post_init__(self) -> None:
        sizes = self.sizes
        if not isinstance(sizes, tuple | list) or not sizes or not all(_is_positive(size) for size in sizes):
            raise ValueError(f"FusedDim: sizes is {sizes!r}; it must be a tuple of whole numbers of at least 1")
        if self.num_groups is not None and not _is_positive(self.num_groups):
            raise ValueError(f"FusedDim: num_groups is {self.num_groups!r}; it must be at least 1, or None")
        if isinstance(self.dim, bool) or self.dim not in (0, 1):
            raise ValueError(f"FusedDim: dim is {self.dim!r}; it must be 0 (rows) or 1 (columns)")
        if not isinstance(self.heads, bool):
            raise ValueError(f"FusedDim: heads is {self.heads!r}; it must be True or False")
        object.__setattr__(self, "sizes", tuple(sizes))

    @classmethod
    def from_option(cls, value: "FusedDim | Mapping[str, Any]") -> "FusedDim":
        """Reads a description given as such or as a mapping of its attributes, the form that checkpoints keep.

        Raises:
            ValueError: It is neither, has an unknown or no `sizes` key, or a value that is not allowed.
        """
        if isinstance(value, FusedDim):
            return value
        if not isinstance(value, Mapping) or "sizes" not in value or not set(value) <= set(_KEYS):
            raise ValueError(f"fused is {value!r}; it must be a FusedDim, or a mapping with sizes and any of {_KEYS}")
        return cls(**value)

    def to_option(self) -> dict[str, Any]:
        """Returns the attributes as plain data; the inverse of `from_option`."""
        return {key: getattr(self, key) for key in _KEYS}

    @property
    def group_size(self) -> int:
        """Rows of one group."""
        return sum(self.sizes)

    def resolve(self, shape: Sequence[int], name: str = "parameter") -> "FusedDim":
        """Returns the description with `num_groups` filled in from a global shape `[..., rows, cols]`.

        Raises:
            ValueError: The shape is no matrix or does not fit; names the parameter, its global shape and the sizes.
        """
        where = f"{name} (global shape {tuple(shape)}, fused sizes {self.sizes})"
        if len(shape) < 2:
            raise ValueError(f"{where}: a fused weight must be a matrix or a stack of them; remove its description")
        length, total = shape[len(shape) - 2 + self.dim], self.group_size
        groups = length // total if self.num_groups is None else self.num_groups
        if groups * total != length or groups == 0:
            needed = (
                f"a multiple of the {total} of one group"
                if self.num_groups is None
                else f"{self.num_groups} groups of {total}"
            )
            what = "columns" if self.dim else "rows"
            raise ValueError(f"{where}: the {length} {what} are not {needed}; correct the sizes")
        return replace(self, num_groups=groups)


@dataclass(frozen=True, slots=True)
class View:
    """A part of a parameter, or a parameter seen as matrices of another shape.

    Attributes:
        num_batch_dims: Leading dims of the parameter before rows and columns.
        flatten: Whether all dims after the rows are the columns.
        fused: The description of the fused dim, None for the whole parameter.
        part: Which of its parts.
    """

    num_batch_dims: int
    flatten: bool = False
    fused: FusedDim | None = None
    part: int = 0

    def of(self, x: Tensor) -> Tensor:
        """Returns a view of the parameter's local shard, or of a tensor that is sharded like it."""
        fused = self.fused
        if fused is None:
            return x
        dim = self.num_batch_dims + fused.dim
        grouped = x.unflatten(dim, (x.shape[dim] // fused.group_size, fused.group_size))
        part: Tensor = grouped.narrow(dim + 1, sum(fused.sizes[: self.part]), fused.sizes[self.part])
        return torch.movedim(part, dim, self.num_batch_dims) if fused.heads else part

    def matrices(self, part: Tensor) -> Tensor:
        """Reshapes what is shaped like `of(x)` to `[..., rows, cols]`, as the part's layout has it."""
        first = self.num_batch_dims
        if self.fused is not None and self.fused.heads:
            first += 1
        elif self.fused is not None:
            part = part.flatten(first + self.fused.dim, first + self.fused.dim + 1)
        return part.flatten(first + 1) if self.flatten else part


@dataclass(frozen=True, slots=True)
class Part:
    """What the planner sees of a parameter: all of it, or one part.

    Attributes:
        suffix: Behind the parameter's name in messages.
        layout: Of the matrices.
        view: Takes them from the parameter's shard; None where it is the shard.
        fused: How the assembled matrix is split, where the shards cut through groups.
    """

    suffix: str
    layout: ParamLayout
    view: View | None = None
    fused: FusedDim | None = None


def parts_of(layout: ParamLayout, name: str, fused: FusedDim | None, flatten: bool = False) -> tuple[Part, ...]:
    """Returns the matrices in a parameter; see [Note: parts].

    Args:
        layout: Of the parameter.
        name: Its name, for messages.
        fused: The description of its fused dim, if it has one.
        flatten: Whether it is a convolution weight `[out, in, *kernel]`, seen as `[out, in * kernel]`.

    Raises:
        ValueError: The description does not fit the global shape.
        NotImplementedError: A flattened dim is sharded so that the shards are no even cut of the columns.
    """
    view = View(len(layout.shape) - 2)
    if flatten:
        view = View(0, flatten=True)
        layout = _flattened(layout, name)
    if fused is None:
        return (Part("", layout, view if flatten else None),)
    fused = fused.resolve(layout.shape, name)
    if flatten and fused.dim == 1:
        raise ValueError(f"{name} (global shape {layout.shape}): flatten=True goes with a fused dim of rows only")
    if not _is_aligned(layout, fused):
        return (Part("", layout, view if flatten else None, fused),)
    return tuple(
        Part(f"[part {index}]", _part_layout(layout, fused, size), replace(view, fused=fused, part=index))
        for index, size in enumerate(fused.sizes)
    )


def split(fused: FusedDim, x: Tensor) -> list[Tensor]:
    """Splits assembled matrices `[n, rows, cols]` into one stack `[n or n * G, rows, cols]` per part."""
    views = [View(1, fused=fused, part=part) for part in range(len(fused.sizes))]
    parts = [view.matrices(view.of(x)) for view in views]
    return [part.flatten(0, 1) for part in parts] if fused.heads else parts


def merge(fused: FusedDim, parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """The inverse of `split`: writes the parts into a tensor like `like`, which they were split from."""
    merged = like.new_empty(like.shape)
    for index, part in enumerate(parts):
        target = View(1, fused=fused, part=index).of(merged)
        target.copy_(part.reshape(target.shape))
    return merged


def matrices_of(fused: FusedDim | None, shape: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Returns `(rows, cols, count)` of the matrices in a block of `shape`."""
    if fused is None:
        return [(*shape, 1)]
    groups = shape[fused.dim] // fused.group_size
    count, joined = (groups, 1) if fused.heads else (1, groups)
    other = shape[1 - fused.dim]
    sizes = [size * joined for size in fused.sizes]
    return [(size, other, count) if fused.dim == 0 else (other, size, count) for size in sizes]


def cuts_fall_on_groups(length: int, num_shards: Sequence[int], group_size: int) -> bool:
    """Whether cutting a dim by one axis after another, as `torch.chunk` does, never cuts through a group."""
    sizes = {length}
    for shards in num_shards:
        smaller: set[int] = set()
        for size in sizes:
            chunk = -(-size // shards)
            if chunk < size and chunk % group_size:
                return False
            smaller |= {chunk, size - chunk * ((size - 1) // chunk)} if size else {0}
        sizes = smaller
    return True


def _is_aligned(layout: ParamLayout, fused: FusedDim) -> bool:
    cuts = [axis.size for axis in layout.axes if layout.matrix_dim(axis) == fused.dim]
    return cuts_fall_on_groups(layout.matrix_shape[fused.dim], cuts, fused.group_size)


def _part_layout(layout: ParamLayout, fused: FusedDim, size: int) -> ParamLayout:
    """The layout of one part, which is cut between the groups only."""
    batch, matrix = layout.shape[:-2], list(layout.matrix_shape)
    groups = fused.num_groups or 1
    first = len(batch)
    if not fused.heads:
        matrix[fused.dim] = groups * size
        return replace(layout, shape=(*batch, *matrix))
    matrix[fused.dim] = size
    new_dims = [*range(first), first + 1, first + 2]
    new_dims[first + fused.dim] = first
    return move_dims(layout, (*batch, groups, *matrix), new_dims)


def _flattened(layout: ParamLayout, name: str) -> ParamLayout:
    shape = layout.shape
    where = f"{name} (shape {shape}, placements {layout.placements})"
    if len(shape) < 3:
        raise ValueError(f"{where}: flatten=True is for convolution weights [out, in, *kernel] of three or more dims")
    for axis in layout.axes:
        uneven = axis.dim == 1 and math.prod(shape[2:]) > 1 and shape[1] % axis.size
        if axis.dim is not None and (axis.dim > 1 or uneven):
            raise NotImplementedError(
                f"{where}: flatten=True needs shards of output channels, or even shards of input channels; axis "
                f"{axis.name or axis.axis} of {axis.size} ranks cuts dim {axis.dim} of {shape[axis.dim]}; shard dim 0"
            )
    if sum(axis.dim == 1 for axis in layout.axes) > 1:
        raise NotImplementedError(
            f"{where}: flatten=True allows one mesh axis to shard the input channels; shard dim 0"
        )
    return move_dims(layout, (shape[0], math.prod(shape[1:])), list(range(len(shape))))


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
