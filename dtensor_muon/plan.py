"""Layouts and options -> buckets, each with the layout it is computed in. Made once; looks at no rank.

[Note: compute layout]
Every mesh axis of a bucket gets one `Target`. The stack of the bucket's matrices has dims `[matrices, rows, cols]`:

    KEEP    leave the axis as it is: it shards a leading dim (whole experts), or the blocks are computed apart
    STACK   `Shard(d) -> Shard(0)`, or a slice of the stack where the axis replicates: each rank gets whole matrices
    LONG    `Shard(short) -> Shard(long)`: the matrix stays sharded, on its long dim, and Gram sums are reduced
    GATHER  `Shard(d) -> Replicate`: every rank of the axis repeats the work

The modes of the optimizer are the uniform choices (owner: STACK, distributed: LONG, duplicated: GATHER); `auto` takes
the cheapest choice of all. Replicating axes come first, so that the slice shrinks what the others move; then the
sharded ones in the reverse of their order of application (see [Note: order of sharding] in `layout`).

[Note: slots]
`n` matrices on the `P` owners of the STACK axes become a stack of `P * ceil(n / P)` slots, owner `j` has the slots from
`j * ceil(n / P)`. The real matrices come first in each owner's slots, so that it computes a prefix. The owners that get
one more than the others start at `first_owner` and go round; it is chosen so that remainders of different buckets
land on different ranks.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from dtensor_muon.cost import DeviceProfile, default_profile, newton_schulz_flops
from dtensor_muon.layout import ParamLayout, ShardedAxis
from dtensor_muon.options import MatrixOptions


class Target(Enum):
    """What becomes of a mesh axis while a bucket is computed; see [Note: compute layout]."""

    KEEP = "keep"
    STACK = "stack"
    LONG = "long"
    GATHER = "gather"


_MODE_TARGETS = {"owner": Target.STACK, "distributed": Target.LONG, "duplicated": Target.GATHER}


@dataclass(frozen=True, slots=True)
class MatrixEntry:
    """A parameter as the planner sees it.

    Attributes:
        name: For messages.
        layout: Where it is stored.
        device_type: Of its local tensor.
        compute_dtype: In which it travels and is multiplied.
        options: How it is orthogonalized.
    """

    name: str
    layout: ParamLayout
    device_type: str
    compute_dtype: torch.dtype
    options: MatrixOptions


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Same-shape parameters that travel together.

    Attributes:
        members: Indices into the entries that the plan was built from.
        layout: The layout that they share.
        targets: One per axis of `layout.axes`.
        compute_dtype: In which they travel and are multiplied.
        options: How they are orthogonalized.
        first_owner: See [Note: slots].
        flops: Of the busiest rank.
        sent_bytes: That the busiest rank sends.
        seconds: Predicted for the busiest rank.
    """

    members: tuple[int, ...]
    layout: ParamLayout
    targets: tuple[Target, ...]
    compute_dtype: torch.dtype
    options: MatrixOptions
    first_owner: int
    flops: float
    sent_bytes: float
    seconds: float

    @property
    def stack_axes(self) -> tuple[ShardedAxis, ...]:
        """The axes that share out the stack, the first to cut it first."""
        return tuple(axis for axis, target in self.moves() if target is Target.STACK)

    @property
    def num_owners(self) -> int:
        """Ranks (or groups of ranks) among which the stack is shared."""
        return math.prod(axis.size for axis in self.stack_axes)

    @property
    def num_matrices(self) -> int:
        """Matrices in the stack of one rank before it moves, the larger count where they are unevenly spread."""
        return len(self.members) * kept_matrices(self.layout)

    @property
    def matrices_per_owner(self) -> int:
        """Slots of one owner."""
        return -(-self.num_matrices // self.num_owners)

    def moves(self) -> tuple[tuple[ShardedAxis, Target], ...]:
        """Axes with their targets in the order in which they move."""
        return ordered_moves(self.layout, self.targets)

    def slots(self) -> list[int]:
        """Returns the slot of each matrix of the stack."""
        owners, per_owner = self.num_owners, self.matrices_per_owner
        counts = [
            (self.num_matrices + owners - 1 - (owner - self.first_owner) % owners) // owners for owner in range(owners)
        ]
        return [owner * per_owner + place for owner, count in enumerate(counts) for place in range(count)]


def kept_matrices(layout: ParamLayout) -> int:
    """Returns how many of a parameter's matrices one rank holds (pieces of), the largest count over the ranks."""
    batch = list(layout.shape[:-2])
    for axis in layout.axes:
        if axis.dim is not None and axis.dim < len(batch):
            batch[axis.dim] = -(-batch[axis.dim] // axis.size)
    return math.prod(batch)


def ordered_moves(layout: ParamLayout, targets: Sequence[Target]) -> tuple[tuple[ShardedAxis, Target], ...]:
    """Returns axes and targets in the order in which they move; see [Note: compute layout]."""
    pairs = list(zip(layout.axes, targets, strict=True))
    replicated = [pair for pair in pairs if pair[0].dim is None]
    sharded = [pair for pair in pairs if pair[0].dim is not None]
    return tuple(replicated + sharded[::-1])


def build(entries: Sequence[MatrixEntry]) -> tuple[BucketPlan, ...]:
    """Groups parameters into buckets and chooses a compute layout for each.

    Args:
        entries: The parameters of the Muon groups, in the same order on every rank.

    Returns:
        The buckets, the most expensive matrices first. Parameters without elements are in none.

    Raises:
        NotImplementedError: A mode that the layout does not allow; names the parameter.
    """
    grouped: dict[tuple[object, ...], list[int]] = {}
    for index, entry in enumerate(entries):
        if math.prod(entry.layout.shape):
            key = (entry.layout, entry.device_type, entry.compute_dtype, entry.options)
            grouped.setdefault(key, []).append(index)
    plans = [_plan_bucket(entries, tuple(members)) for members in grouped.values()]
    plans.sort(key=lambda plan: -plan.flops / plan.matrices_per_owner)
    return tuple(_balance(plans))


def describe(plan: BucketPlan, entries: Sequence[MatrixEntry]) -> str:
    """Returns a line that is equal on two ranks exactly when they would run the same collectives and math."""
    layout = plan.layout
    targets = ", ".join(
        f"{axis.name or axis.axis}({axis.size}, dim {axis.dim})->{target.value}" for axis, target in plan.moves()
    )
    names = ", ".join(entries[member].name for member in plan.members)
    return (
        f"{layout.shape} {layout.placements} [{targets}] {plan.compute_dtype} {plan.options} "
        f"first owner {plan.first_owner}: {names}"
    )


def _plan_bucket(entries: Sequence[MatrixEntry], members: tuple[int, ...]) -> BucketPlan:
    entry = entries[members[0]]
    profile = default_profile(entry.device_type)
    candidates = [_price(entry, members, targets, profile) for targets in _candidates(entry)]
    return min(candidates, key=lambda plan: plan.seconds)


def _candidates(entry: MatrixEntry) -> Iterator[tuple[Target, ...]]:
    """Yields the target combinations that the mode allows, the preferred one first."""
    layout, mode = entry.layout, entry.options.tp_mode
    block_axis = _block_axis(entry) if mode == "blockwise" else None
    choices: list[tuple[Target, ...]] = []
    for axis in layout.axes:
        if axis == block_axis or (axis.dim is not None and layout.matrix_dim(axis) is None):
            choices.append((Target.KEEP,))
        elif mode == "blockwise":
            choices.append((Target.STACK,))
        elif mode == "auto":
            choices.append((Target.STACK, Target.LONG, Target.GATHER))
        else:
            choices.append((_MODE_TARGETS[mode],))
    for targets in itertools.product(*choices):
        if _is_possible(layout, targets):
            yield targets


def _block_axis(entry: MatrixEntry) -> ShardedAxis | None:
    layout = entry.layout
    unnamed = [axis for axis in layout.axes if layout.matrix_dim(axis) is not None and not axis.name]
    if layout.tp_axis is None and len(unnamed) > 1:
        raise NotImplementedError(
            f"{entry.name} (shape {layout.shape}, placements {layout.placements}, mesh without axis names): "
            'tp_mode="blockwise" cannot tell the tensor-parallel axis from the others; '
            'give the mesh mesh_dim_names with one of them named "tp"'
        )
    if layout.tp_axis is not None:
        earlier_cut = [axis for axis in layout.axes if axis.dim == layout.tp_axis.dim and axis != layout.tp_axis]
        if any(layout.axes.index(axis) < layout.axes.index(layout.tp_axis) for axis in earlier_cut):
            raise NotImplementedError(
                f"{entry.name} (shape {layout.shape}, placements {layout.placements}): "
                f'tp_mode="blockwise" needs the axis {layout.tp_axis.name!r} to be cut before the other axes of its '
                "dim; apply parallelize_module first and fully_shard second, or choose another tp_mode"
            )
    return layout.tp_axis


def _is_possible(layout: ParamLayout, targets: Sequence[Target]) -> bool:
    """A matrix that stays sharded on its long dim keeps every axis that shards this dim: see `distributed_ns`."""
    if Target.LONG not in targets:
        return True
    long_dim = len(layout.shape) - 2 + long_dim_of(layout)
    return all(target is Target.LONG for axis, target in zip(layout.axes, targets, strict=True) if axis.dim == long_dim)


def long_dim_of(layout: ParamLayout) -> int:
    """Returns the matrix dim on which Gram sums are split: 0 when there are more rows than columns, else 1."""
    rows, cols = layout.matrix_shape
    return 0 if rows > cols else 1


def _price(
    entry: MatrixEntry, members: tuple[int, ...], targets: tuple[Target, ...], profile: DeviceProfile
) -> BucketPlan:
    """Predicts flops, bytes and seconds of the busiest rank, from evenly cut shards."""
    layout, element = entry.layout, entry.compute_dtype.itemsize
    moves = ordered_moves(layout, targets)
    count = len(members) * kept_matrices(layout)
    owners = math.prod(axis.size for axis, target in moves if target is Target.STACK)
    per_owner = -(-count // owners)
    numel = per_owner * owners * math.prod(layout.matrix_shape)
    for axis in layout.axes:
        if layout.matrix_dim(axis) is not None:
            numel = -(-numel // axis.size)
    sent, launches = 0.0, 0
    short, long = _block_shape(layout, targets)
    for axis, target in moves:
        share = (axis.size - 1) / axis.size
        if target is Target.STACK or target is Target.LONG:
            launches += 2
            if axis.dim is None:
                numel = -(-numel // axis.size)
                sent += (axis.size - 1) * numel
                launches -= 1
            elif target is Target.STACK or layout.matrix_dim(axis) != long_dim_of(layout):
                sent += 2 * share * numel
        elif target is Target.GATHER and axis.dim is not None:
            sent += (axis.size - 1) * numel
            numel *= axis.size
            launches += 1
    steps = len(entry.options.coefficients)
    split = math.prod(axis.size for axis, target in moves if target is Target.LONG)
    for axis, target in moves:
        if target is Target.LONG:
            sent += steps * 2 * (axis.size - 1) / axis.size * per_owner * short * short
            launches += steps
    flops = per_owner * newton_schulz_flops(short, -(-long // split), steps)
    seconds = profile.seconds(flops, sent * element, launches)
    return BucketPlan(members, layout, targets, entry.compute_dtype, entry.options, 0, flops, sent * element, seconds)


def _block_shape(layout: ParamLayout, targets: Sequence[Target]) -> tuple[int, int]:
    """Short and long side of what is orthogonalized: the matrix, or its largest block."""
    shape = list(layout.matrix_shape)
    for axis, target in zip(layout.axes, targets, strict=True):
        dim = layout.matrix_dim(axis)
        if target is Target.KEEP and dim is not None:
            shape[dim] = -(-shape[dim] // axis.size)
    return min(shape), max(shape)


def _balance(plans: Sequence[BucketPlan]) -> Iterator[BucketPlan]:
    """Chooses `first_owner` bucket by bucket: the owners with one matrix more are those with the least work so far."""
    loads: dict[int, float] = {}
    for plan in plans:
        extra, owners = plan.num_matrices % plan.num_owners, plan.num_owners
        if plan.layout.mesh is None or not extra:
            yield plan
            continue
        ranks = _owner_ranks(plan)
        load = [sum(loads.get(rank, 0.0) for rank in group) for group in ranks]
        window = sum(load[:extra])
        best, first = window, 0
        for start in range(1, owners):
            window += load[(start + extra - 1) % owners] - load[start - 1]
            if window < best:
                best, first = window, start
        per_matrix = plan.flops / plan.matrices_per_owner
        for place in range(extra):
            for rank in ranks[(first + place) % owners]:
                loads[rank] = loads.get(rank, 0.0) + per_matrix
        yield replace(plan, first_owner=first)


def _owner_ranks(plan: BucketPlan) -> list[list[int]]:
    """Returns the global ranks that stand behind each owner."""
    if plan.layout.mesh is None:
        raise AssertionError("a bucket without a mesh has no owners")
    ranks = plan.layout.mesh.mesh
    stack = [axis.axis for axis in plan.stack_axes]
    others = [axis for axis in range(ranks.ndim) if axis not in stack]
    flat: list[list[int]] = ranks.permute(*stack, *others).reshape(plan.num_owners, -1).tolist()
    return flat
