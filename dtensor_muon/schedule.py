"""Runs the buckets of a step: prepare, to_compute, compute, to_storage, apply.

[Note: waves]
Whenever a bucket moves, its ranks wait for the slowest of them, but the ranks are balanced over the whole step, not
within each bucket. So buckets that fit into the memory bound of one together form a wave: all of them move, all are
computed, all move back, and the ranks wait for each other twice a wave instead of twice a bucket.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from dtensor_muon.distributed_ns import orthogonalize_sharded
from dtensor_muon.functional import apply_updates, get_muon_scale_factor, muon_inputs
from dtensor_muon.fused import View, merge, split
from dtensor_muon.lane import Lane
from dtensor_muon.layout import local_tensor
from dtensor_muon.newton_schulz import matmul_precision
from dtensor_muon.plan import AssembledSplit, BucketPlan, Target, long_dim_of
from dtensor_muon.planner import DEFAULT_BUCKET_BYTES
from dtensor_muon.redistribute import BucketMover, Computed


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter, or the part of it that a view takes."""

    param: Tensor
    view: View | None = None

    def of(self, local: Tensor) -> Tensor:
        """Returns the member's part of the parameter's shard, or of a tensor shaped like it, sharing its memory."""
        return local if self.view is None else self.view.of(local)

    def matrices(self, part: Tensor) -> Tensor:
        """Returns a part as matrices, the shard of the layout that was planned."""
        return part if self.view is None else self.view.matrices(part)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive members of a bucket that share a parameter group, and so the options of the local math."""

    group: dict[str, Any]
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A planned bucket with the parameters in it, in the order of `plan.members`, and what orthogonalizes them."""

    plan: BucketPlan
    mover: BucketMover
    segments: tuple[Segment, ...]
    orthogonalize: Callable[..., Tensor]


def waves_of(buckets: Sequence[Bucket], limit: int | None) -> tuple[tuple[Bucket, ...], ...]:
    """Groups consecutive buckets that may be in flight together; see [Note: waves].

    Args:
        buckets: In the order of the plan.
        limit: Bound on the extra memory of a wave, in bytes; None is that of a bucket. A bucket that needs more is a
            wave of its own.
    """
    waves: list[list[Bucket]] = []
    room = 0.0
    for bucket in buckets:
        needed = bucket.plan.price.in_flight_bytes
        if waves and needed <= room:
            waves[-1].append(bucket)
        else:
            waves.append([bucket])
            room = limit or DEFAULT_BUCKET_BYTES
        room -= needed
    return tuple(map(tuple, waves))


def run(
    waves: Sequence[Sequence[Bucket]],
    gradients: Mapping[Tensor, Tensor],
    momentum_of: Callable[[Tensor], Tensor],
    lane: Lane | None,
) -> None:
    """Updates the parameters of all buckets.

    Args:
        waves: The buckets, in the same waves on every rank.
        gradients: Local gradient of each parameter that takes part; the same parameters on every rank.
        momentum_of: Returns a parameter's local momentum buffer.
        lane: Where a wave moves while the one before it computes; None works on one wave after the other.
    """
    pending: list[tuple[Bucket, Computed]] = []
    for wave in waves:
        moved: list[tuple[Bucket, Computed]] = []
        for bucket in wave:
            if not any(member.param in gradients for segment in bucket.segments for member in segment.members):
                continue
            with record_function("Muon::prepare"):
                inputs = _prepare(bucket, gradients, momentum_of)
            with record_function("Muon::to_compute"), nullcontext() if lane is None else lane.beside(inputs):
                moved.append((bucket, bucket.mover.to_compute(inputs)))
            del inputs
        if lane is None:
            _finish(moved, gradients)
        else:
            _finish(pending, gradients, lane)
            pending = moved
    _finish(pending, gradients, lane)


def _finish(
    wave: Sequence[tuple[Bucket, Computed]], gradients: Mapping[Tensor, Tensor], lane: Lane | None = None
) -> None:
    updates: list[Tensor] = []
    for bucket, computed in wave:
        if lane is not None:
            lane.join(computed.matrices)
        with record_function("Muon::compute"):
            updates.append(_compute(bucket, computed))
    for (bucket, computed), update in zip(wave, updates, strict=True):
        with record_function("Muon::to_storage"):
            shards = computed.to_storage(update)
        with record_function("Muon::apply"):
            _apply(bucket, gradients, shards, update.shape[-2:])


def _prepare(
    bucket: Bucket, gradients: Mapping[Tensor, Tensor], momentum_of: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    dtype = bucket.plan.compute_dtype
    inputs: list[Tensor] = []
    for segment in bucket.segments:
        present = [member for member in segment.members if member.param in gradients]
        group = segment.group
        ready: dict[Member, Tensor] = {}
        if present:
            results = muon_inputs(
                [member.of(local_tensor(member.param)) for member in present],
                [member.of(gradients[member.param]) for member in present],
                [member.of(momentum_of(member.param)) for member in present],
                lr=group["lr"],
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                weight_decay=group["weight_decay"],
                use_decoupled_weight_decay=group["use_decoupled_weight_decay"],
                dtype=dtype,
            )
            ready = dict(zip(present, results, strict=True))
        for member in segment.members:
            if member in ready:
                part = ready[member]
            else:
                part = torch.zeros_like(member.of(local_tensor(member.param)), dtype=dtype)
            inputs.append(member.matrices(part))
    return inputs


def _compute(bucket: Bucket, computed: Computed) -> Tensor:
    plan, options = bucket.plan, bucket.plan.options
    precision: AbstractContextManager[None] = nullcontext()
    if options.fp32_matmul_prec != "medium":
        precision = matmul_precision(options.fp32_matmul_prec)
    with precision:
        if plan.split is not None:
            return _orthogonalize_parts(bucket, plan.split, computed.matrices)
        if Target.LONG not in plan.targets:
            return bucket.orthogonalize(computed.matrices, options.coefficients, iteration=plan.iteration)
        return orthogonalize_sharded(
            computed.matrices,
            options.coefficients,
            bucket.mover,
            iteration=plan.iteration,
            long_dim=long_dim_of(plan.layout),
        )


def _orthogonalize_parts(bucket: Bucket, how: AssembledSplit, matrices: Tensor) -> Tensor:
    """Takes assembled matrices apart, and puts the orthogonalized and scaled parts together again."""
    parts = split(how.fused, matrices)
    by_shape: dict[torch.Size, list[int]] = {}
    for index, part in enumerate(parts):
        by_shape.setdefault(part.shape[1:], []).append(index)
    for (rows, cols), found in by_shape.items():
        counts = [parts[index].shape[0] for index in found]
        stack = torch.cat([parts[index] for index in found])
        updates = bucket.orthogonalize(stack, bucket.plan.options.coefficients, iteration=bucket.plan.iteration)
        updates = updates * get_muon_scale_factor(rows, cols, how.scale_mode)
        for index, update in zip(found, updates.split(counts), strict=True):
            parts[index] = update
    return merge(how.fused, parts, matrices)


def _apply(bucket: Bucket, gradients: Mapping[Tensor, Tensor], shards: Sequence[Tensor], block: Sequence[int]) -> None:
    layout = bucket.plan.layout
    split = bucket.plan.split
    # a block of whole heads holds whole matrices
    whole_dim = split.fused.dim if split is not None and split.fused.heads else None
    is_block = any(
        target is Target.KEEP and layout.matrix_dim(axis) not in (None, whole_dim)
        for axis, target in zip(layout.axes, bucket.plan.targets, strict=True)
    )
    rows, cols = block if is_block else layout.matrix_shape
    first = 0
    for segment in bucket.segments:
        updates = dict(zip(segment.members, shards[first : first + len(segment.members)], strict=True))
        first += len(segment.members)
        present = [member for member in segment.members if member.param in gradients]
        if present:
            group = segment.group
            factor: float = group["extra_scale_factor"]
            factor *= group["block_lr_multiplier" if is_block else "full_lr_multiplier"]
            if split is None:
                factor *= get_muon_scale_factor(rows, cols, group["scale_mode"])
            parts = [member.of(local_tensor(member.param)) for member in present]
            apply_updates(
                parts,
                [updates[member].reshape(part.shape) for member, part in zip(present, parts, strict=True)],
                group["lr"],
                factor,
            )
