"""Chooses a plan: groups matrices into buckets, prices the compute layouts, bounds memory, balances the ranks."""

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dtensor_muon.balance import balance
from dtensor_muon.cost import DeviceProfile, default_profile, sharded_flops
from dtensor_muon.fused import cuts_fall_on_groups, matrices_of
from dtensor_muon.gram import choose_iteration
from dtensor_muon.layout import ParamLayout, ShardedAxis
from dtensor_muon.newton_schulz import work_dtype
from dtensor_muon.plan import (
    MODE_TARGETS,
    BucketPlan,
    MatrixEntry,
    Price,
    Target,
    kept_matrices,
    long_dim_of,
    ordered_moves,
)

# enough to fill a link with every message, little beside the gradients of a model that needs sharding
DEFAULT_BUCKET_BYTES = 2**30
_ModeName = {Target.STACK: "owner", Target.LONG: "distributed", Target.GATHER: "duplicated", Target.KEEP: "local"}


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What the planner may assume and use.

    Attributes:
        profile: Rates of the device; None takes the preset of the device type.
        max_bucket_bytes: Bound on the extra memory of a rank while it works on one bucket, in bytes. None is 1 GiB, or
            what one matrix on every owner needs where that is more.
    """

    profile: DeviceProfile | None = None
    max_bucket_bytes: int | None = None

    def __post_init__(self) -> None:
        limit = self.max_bucket_bytes
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise ValueError(f"max_bucket_bytes is {limit!r}; it must be a number of bytes of at least 1, or None")
        if self.profile is not None and not isinstance(self.profile, DeviceProfile):
            raise ValueError(f"device_profile is {self.profile!r}; it must be a DeviceProfile or None")


def build(entries: Sequence[MatrixEntry], settings: PlanSettings | None = None) -> tuple[BucketPlan, ...]:
    """Groups parameters into buckets and chooses a compute layout and an iteration for each.

    Args:
        entries: The parameters of the Muon groups, in the same order on every rank.
        settings: Device profile and memory bound.

    Returns:
        The buckets, the most expensive matrices first. Parameters without elements are in none.

    Raises:
        NotImplementedError: A mode that the layout does not allow; names the parameter.
    """
    settings = settings or PlanSettings()
    grouped: dict[tuple[object, ...], list[int]] = {}
    for index, entry in enumerate(entries):
        if math.prod(entry.layout.shape):
            key = (entry.layout, entry.device_type, entry.compute_dtype, entry.options, entry.split)
            grouped.setdefault(key, []).append(index)
    plans = [plan for members in grouped.values() for plan in _plan_buckets(entries, members, settings)]
    plans.sort(key=lambda plan: -plan.price.flops / plan.matrices_per_owner)
    return tuple(balance(plans))


def mode_name(plan: BucketPlan) -> str:
    """Returns the mode of a bucket in the words of `tp_mode`, axis by axis where they differ."""
    return _mode_name(plan.layout, plan.targets)


def _mode_name(layout: ParamLayout, targets: Sequence[Target]) -> str:
    moves = ordered_moves(layout, targets)
    names = {_ModeName[target] for _, target in moves}
    if len(names) > 1:
        return ", ".join(f"{axis.name or axis.axis}: {_ModeName[target]}" for axis, target in moves)
    return names.pop() if names else "local"


def _plan_buckets(
    entries: Sequence[MatrixEntry], members: Sequence[int], settings: PlanSettings
) -> Iterator[BucketPlan]:
    """Splits same-shape parameters into buckets of bounded memory and plans each."""
    whole = _choose(entries, tuple(members), settings)
    size = _bucket_size(entries, whole, settings)
    if size >= len(members):
        yield whole
        return
    for start in range(0, len(members), size):
        yield _choose(entries, tuple(members[start : start + size]), settings)


def _bucket_size(entries: Sequence[MatrixEntry], whole: BucketPlan, settings: PlanSettings) -> int:
    """Returns how many parameters fit into a bucket: a multiple of what keeps all owners busy, where one fits."""
    profile = settings.profile or default_profile(entries[whole.members[0]].device_type)

    def in_flight(count: int) -> float:
        entry = entries[whole.members[0]]
        return _price(entry, whole.members[:count], whole.targets, whole.iteration, profile).price.in_flight_bytes

    round_robin = max(1, whole.num_owners // kept_matrices(whole.layout))
    limit = settings.max_bucket_bytes or max(DEFAULT_BUCKET_BYTES, in_flight(round_robin))
    low, high = 0, len(whole.members)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if in_flight(middle) <= limit else (low, middle - 1)
    if low == 0:
        warnings.warn(
            f"max_bucket_bytes={limit} is less than the {in_flight(1):.0f} bytes that one matrix of shape "
            f"{whole.layout.shape} needs; such matrices are worked on one at a time",
            stacklevel=2,
        )
    return max(1, low - low % round_robin if low >= round_robin else low)


def _choose(entries: Sequence[MatrixEntry], members: tuple[int, ...], settings: PlanSettings) -> BucketPlan:
    """Returns the cheapest plan of a bucket, and remembers the runner-up."""
    entry = entries[members[0]]
    profile = settings.profile or default_profile(entry.device_type)
    iterations = {"auto"} if entry.split else {"plain", _chosen_iteration(entry, *entry.layout.matrix_shape)}
    candidates = [
        _price(entry, members, targets, iteration, profile)
        for targets in _candidates(entry, len(members))
        for iteration in sorted(iterations)
    ]
    best, *others = sorted(candidates, key=lambda plan: plan.price.seconds)
    if not others:
        return best
    name = _mode_name(others[0].layout, others[0].targets)
    return replace(best, runner_up=f"{name}, {others[0].iteration}: {others[0].price.seconds * 1e3:.3f} ms")


def _chosen_iteration(entry: MatrixEntry, rows: int, cols: int) -> str:
    return choose_iteration(rows, cols, entry.options.coefficients, entry.compute_dtype, entry.device_type)


def _candidates(entry: MatrixEntry, num_params: int) -> Iterator[tuple[Target, ...]]:
    """Yields the target combinations that the mode allows, the preferred one first.

    `auto` lets the ranks of an axis repeat each other's work only where there are fewer matrices than ranks, so that
    some of them would be idle otherwise.
    """
    count = num_params * kept_matrices(entry.layout)
    layout, mode = entry.layout, entry.options.tp_mode
    block_axis = _block_axis(entry) if mode == "blockwise" else None
    _check_split(entry, block_axis)
    choices: list[tuple[Target, ...]] = []
    for axis in layout.axes:
        if axis == block_axis or (axis.dim is not None and layout.matrix_dim(axis) is None):
            choices.append((Target.KEEP,))
        elif mode == "blockwise":
            choices.append((Target.STACK,))
        elif mode == "auto":
            repeats = (Target.GATHER,) if count < axis.size else ()
            sharded = () if entry.split else (Target.LONG,)
            choices.append((Target.STACK, *sharded, *repeats))
        else:
            choices.append((MODE_TARGETS[mode],))
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


def _check_split(entry: MatrixEntry, block_axis: ShardedAxis | None) -> None:
    """Refuses the modes in which no rank holds whole groups of a fused dim."""
    if entry.split is None:
        return
    layout, fused, mode = entry.layout, entry.split.fused, entry.options.tp_mode
    cut = mode == "distributed"
    if block_axis is not None and layout.matrix_dim(block_axis) == fused.dim:
        cut = not cuts_fall_on_groups(layout.matrix_shape[fused.dim], [block_axis.size], fused.group_size)
    if cut:
        raise NotImplementedError(
            f"{entry.name} (shape {layout.shape}, placements {layout.placements}, fused sizes {fused.sizes} in "
            f"{fused.num_groups} groups): the shards cut through groups, so tp_mode={mode!r} cannot split it; "
            'choose tp_mode="auto" or "owner" and no block_period, or shard it between groups'
        )


def _is_possible(layout: ParamLayout, targets: Sequence[Target]) -> bool:
    """A matrix that stays sharded on its long dim keeps every axis that shards this dim: see `distributed_ns`."""
    if Target.LONG not in targets:
        return True
    long_dim = len(layout.shape) - 2 + long_dim_of(layout)
    return all(target is Target.LONG for axis, target in zip(layout.axes, targets, strict=True) if axis.dim == long_dim)


def _price(
    entry: MatrixEntry, members: tuple[int, ...], targets: tuple[Target, ...], iteration: str, profile: DeviceProfile
) -> BucketPlan:
    """Predicts what the busiest rank does, from evenly cut shards."""
    plan = BucketPlan(
        members,
        entry.layout,
        targets,
        iteration,
        entry.compute_dtype,
        entry.options,
        entry.split,
        Price(0.0, 0.0, 0.0, 0.0),
    )
    flops, sent_bytes, seconds, working_bytes = 0.0, 0.0, 0.0, 0.0
    fused = None if entry.split is None else entry.split.fused
    for rows, cols, copies in matrices_of(fused, _block_shape(entry.layout, targets)):
        part = _part_price(entry, plan, (rows, cols), copies, profile)
        flops += part.flops
        sent_bytes += part.sent_bytes
        seconds += part.seconds
        working_bytes += part.in_flight_bytes
    for axis, numel, launches in _moved(plan):
        sent = numel * entry.compute_dtype.itemsize
        sent_bytes += sent
        seconds += profile.move_seconds(sent, launches, axis.name)
    return replace(plan, price=Price(flops, sent_bytes, seconds, _in_flight_bytes(plan, working_bytes)))


def _part_price(
    entry: MatrixEntry, plan: BucketPlan, shape: tuple[int, int], copies: int, profile: DeviceProfile
) -> Price:
    """What orthogonalizing the assembled matrices of one shape costs, of which each member holds `copies`."""
    short, long = min(shape), max(shape)
    iteration = _chosen_iteration(entry, *shape) if plan.iteration == "auto" else plan.iteration
    dtype = work_dtype(entry.compute_dtype, entry.device_type, iteration, short)
    count, piece = plan.matrices_per_owner * copies, -(-long // plan.num_pieces)
    num_small = -(-count // plan.num_pieces) if plan.shares_small_work else count
    flops, kernels, sums = sharded_flops(
        short, piece, num_small, count, entry.options.coefficients, iteration, dtype, entry.device_type
    )
    if entry.device_type == "cpu":
        kernels *= count
    seconds, sent_bytes = profile.compute_seconds(flops, kernels, dtype), 0.0
    for axis in plan.long_axes:
        sent = sums * 2 * (axis.size - 1) / axis.size * count * short * (short + 1) / 2 * dtype.itemsize
        sent_bytes += sent
        seconds += profile.move_seconds(sent, sums * (2 if plan.shares_small_work else 1), axis.name)
    # a split copies the parts out of the assembled matrices and back
    width = entry.compute_dtype.itemsize * (3 if entry.split else 2)
    working = count * (short * piece * (width + 2 * dtype.itemsize) + 4 * short * short * dtype.itemsize)
    return Price(flops, sent_bytes, seconds, working)


def _moved(plan: BucketPlan) -> Iterator[tuple[ShardedAxis, float, int]]:
    """Yields, per axis that moves, the elements that a rank sends along it there and back, and the collectives."""
    layout = plan.layout
    numel: float = plan.matrices_per_owner * plan.num_owners * math.prod(layout.matrix_shape)
    for axis in layout.axes:
        if layout.matrix_dim(axis) is not None:
            numel /= axis.size
    for axis, target in plan.moves():
        replicated, moving = axis.dim is None, target is not Target.KEEP
        if target is Target.GATHER and not replicated:
            yield axis, (axis.size - 1) * numel, 1
            numel *= axis.size
        elif target is not Target.GATHER and replicated and moving:
            numel /= axis.size
            yield axis, (axis.size - 1) * numel, 1
        elif target is Target.STACK or (target is Target.LONG and layout.matrix_dim(axis) != long_dim_of(layout)):
            yield axis, 2 * (axis.size - 1) / axis.size * numel, 2


def _in_flight_bytes(plan: BucketPlan, working_bytes: float) -> float:
    """Returns the extra memory of a rank at the worst moment: inputs and buffers of a move, or of the iteration."""
    stored = len(plan.members) * math.prod(plan.layout.shape)
    for axis in plan.layout.axes:
        stored = stored if axis.dim is None else -(-stored // axis.size)
    computed = plan.matrices_per_owner * math.prod(_block_shape(plan.layout, plan.targets)) // plan.num_pieces
    return max(3 * max(stored, computed) * plan.compute_dtype.itemsize, working_bytes)


def _block_shape(layout: ParamLayout, targets: Sequence[Target]) -> tuple[int, int]:
    """Rows and columns of what is orthogonalized: the matrix, or its largest block."""
    shape = list(layout.matrix_shape)
    for axis, target in zip(layout.axes, targets, strict=True):
        dim = layout.matrix_dim(axis)
        if target is Target.KEEP and dim is not None:
            shape[dim] = -(-shape[dim] // axis.size)
    return shape[0], shape[1]
