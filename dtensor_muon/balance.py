"""Spreads the matrices of all buckets so that the ranks finish together."""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from dtensor_muon.plan import BucketPlan

# an owner may get this many times its even share: what it does not get travels as padding
_MAX_SHARE = 1.25


def balance(plans: Sequence[BucketPlan]) -> Iterator[BucketPlan]:
    """Sets the counts of the buckets, in the order given (the most expensive matrices first).

    Each bucket is poured onto the ranks that have the least work so far; see [Note: slots] in `plan`. The same on every
    rank of a bucket: only work of meshes with the same ranks counts. A submesh has siblings whose work this rank does
    not know, and its ranks would come to other counts than theirs for the buckets that they share.
    """
    loads_of: dict[frozenset[int], dict[int, float]] = {}
    for plan in plans:
        if plan.num_owners == 1:
            yield plan
            continue
        ranks = _owner_ranks(plan)
        loads = loads_of.setdefault(frozenset(itertools.chain.from_iterable(ranks)), {})
        per_matrix = plan.price.flops / plan.matrices_per_owner
        load = [max(loads.get(rank, 0.0) for rank in group) for group in ranks]
        counts = _pour(load, plan.num_matrices, per_matrix)
        for group, count in zip(ranks, counts, strict=True):
            for rank in group:
                loads[rank] = loads.get(rank, 0.0) + count * per_matrix
        runs = tuple((count, len(list(run))) for count, run in groupby(counts))
        yield plan if len(runs) == 1 else replace(plan, counts=runs)


def _pour(loads: Sequence[float], num_matrices: int, per_matrix: float) -> list[int]:
    """Returns how many matrices each owner gets so that the highest load is low and no owner gets far too many."""
    owners = len(loads)
    limit = max(-(-num_matrices // owners), int(_MAX_SHARE * num_matrices / owners))
    histogram = [(load, len(list(run))) for load, run in groupby(sorted(loads))]
    low, high = min(loads), max(loads) + per_matrix * num_matrices
    for _ in range(64):
        level = (low + high) / 2
        total = sum(count * _fits(level, load, per_matrix, limit) for load, count in histogram)
        low, high = (level, high) if total <= num_matrices else (low, level)
    counts = [_fits(low, load, per_matrix, limit) for load in loads]
    heap = [(load + counts[owner] * per_matrix, owner) for owner, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(num_matrices - sum(counts)):
        while True:
            load, owner = heapq.heappop(heap)
            if counts[owner] < limit:
                break
        counts[owner] += 1
        heapq.heappush(heap, (load + per_matrix, owner))
    return counts


def _fits(level: float, load: float, per_matrix: float, limit: int) -> int:
    return min(limit, max(0, math.floor((level - load) / per_matrix)))


def _owner_ranks(plan: BucketPlan) -> list[list[int]]:
    """Returns the global ranks that stand behind each owner."""
    if plan.layout.mesh is None:
        raise AssertionError("a bucket without a mesh has one owner")
    ranks = plan.layout.mesh.mesh
    stack = [axis.axis for axis in plan.stack_axes]
    others = [axis for axis in range(ranks.ndim) if axis not in stack]
    flat: list[list[int]] = ranks.permute(*stack, *others).reshape(plan.num_owners, -1).tolist()
    return flat
