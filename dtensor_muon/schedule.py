"""Runs the buckets of a step: prepare, to_compute, compute, to_storage, apply."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from dtensor_muon.distributed_ns import orthogonalize_sharded
from dtensor_muon.functional import apply_updates, get_muon_scale_factor, muon_inputs
from dtensor_muon.lane import Lane
from dtensor_muon.layout import local_tensor
from dtensor_muon.newton_schulz import matmul_precision
from dtensor_muon.plan import BucketPlan, Target, long_dim_of
from dtensor_muon.redistribute import BucketMover, Computed


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive members of a bucket that share a parameter group, and so the options of the local math."""

    group: dict[str, Any]
    params: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A planned bucket with the parameters in it, in the order of `plan.members`, and what orthogonalizes them."""

    plan: BucketPlan
    mover: BucketMover
    segments: tuple[Segment, ...]
    orthogonalize: Callable[..., Tensor]


def run(
    buckets: Sequence[Bucket],
    gradients: Mapping[Tensor, Tensor],
    momentum_of: Callable[[Tensor], Tensor],
    lane: Lane | None,
) -> None:
    """Updates the parameters of all buckets.

    Args:
        buckets: In the same order on every rank.
        gradients: Local gradient of each parameter that takes part; the same parameters on every rank.
        momentum_of: Returns a parameter's local momentum buffer.
        lane: Where a bucket moves while the one before it computes; None works on one bucket after the other.
    """
    pending: tuple[Bucket, Computed] | None = None
    for bucket in buckets:
        if not any(param in gradients for segment in bucket.segments for param in segment.params):
            continue
        with record_function("Muon::prepare"):
            inputs = _prepare(bucket, gradients, momentum_of)
        with record_function("Muon::to_compute"):
            if lane is None:
                computed = bucket.mover.to_compute(inputs)
            else:
                with lane.beside(inputs):
                    computed = bucket.mover.to_compute(inputs)
        del inputs
        if lane is None:
            _finish(bucket, computed, gradients)
            continue
        if pending is not None:
            _finish(*pending, gradients, lane)
        pending = bucket, computed
    if pending is not None:
        _finish(*pending, gradients, lane)


def _finish(bucket: Bucket, computed: Computed, gradients: Mapping[Tensor, Tensor], lane: Lane | None = None) -> None:
    if lane is not None:
        lane.join(computed.matrices)
    with record_function("Muon::compute"):
        updates = _compute(bucket, computed)
    with record_function("Muon::to_storage"):
        shards = computed.to_storage(updates)
    with record_function("Muon::apply"):
        _apply(bucket, gradients, shards, updates.shape[-2:])


def _prepare(
    bucket: Bucket, gradients: Mapping[Tensor, Tensor], momentum_of: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    dtype = bucket.plan.compute_dtype
    inputs: list[Tensor] = []
    for segment in bucket.segments:
        present = [param for param in segment.params if param in gradients]
        group = segment.group
        ready: dict[Tensor, Tensor] = {}
        if present:
            results = muon_inputs(
                [local_tensor(param) for param in present],
                [gradients[param] for param in present],
                [momentum_of(param) for param in present],
                lr=group["lr"],
                momentum=group["momentum"],
                nesterov=group["nesterov"],
                weight_decay=group["weight_decay"],
                use_decoupled_weight_decay=group["use_decoupled_weight_decay"],
                dtype=dtype,
            )
            ready = dict(zip(present, results, strict=True))
        for param in segment.params:
            inputs.append(ready[param] if param in ready else torch.zeros_like(local_tensor(param), dtype=dtype))
    return inputs


def _compute(bucket: Bucket, computed: Computed) -> Tensor:
    plan, options = bucket.plan, bucket.plan.options
    precision: AbstractContextManager[None] = nullcontext()
    if options.fp32_matmul_prec != "medium":
        precision = matmul_precision(options.fp32_matmul_prec)
    with precision:
        if Target.LONG not in plan.targets:
            return bucket.orthogonalize(computed.matrices, options.coefficients, iteration=plan.iteration)
        return orthogonalize_sharded(
            computed.matrices,
            options.coefficients,
            bucket.mover,
            iteration=plan.iteration,
            long_dim=long_dim_of(plan.layout),
        )


def _apply(bucket: Bucket, gradients: Mapping[Tensor, Tensor], shards: Sequence[Tensor], block: Sequence[int]) -> None:
    layout = bucket.plan.layout
    kept = [
        target is Target.KEEP and layout.matrix_dim(axis) is not None
        for axis, target in zip(layout.axes, bucket.plan.targets, strict=True)
    ]
    rows, cols = block if any(kept) else layout.matrix_shape
    first = 0
    for segment in bucket.segments:
        updates = dict(zip(segment.params, shards[first : first + len(segment.params)], strict=True))
        first += len(segment.params)
        present = [param for param in segment.params if param in gradients]
        if present:
            group = segment.group
            factor = get_muon_scale_factor(rows, cols, group["scale_mode"]) * group["extra_scale_factor"]
            apply_updates(
                [local_tensor(param) for param in present], [updates[param] for param in present], group["lr"], factor
            )
