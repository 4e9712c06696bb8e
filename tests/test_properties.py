"""Random meshes, placements, shapes, dtypes, options and gradient patterns against the unsharded reference.

`PROPERTY_EXAMPLES=3000 pytest tests/test_properties.py` runs the long profile, on more ranks.
"""

import math
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parity import EXACT, TOLERANCE, Fused, full_tensors, fused_weight, set_grad, sharded_params
from parity import reference_step as muon_step
from ranks import on_threads
from simulated import Layout, R, ReferenceMuon, S, strided
from torch import Tensor
from torch.distributed.tensor.placement_types import _StridedShard

from dtensor_muon import Muon, clip_grad_norm_, get_muon_scale_factor

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "300"))
MOST_RANKS = 6 if EXAMPLES <= 300 else 12
PROFILE = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@dataclass(frozen=True)
class Draw:
    """One random step."""

    tensors: tuple[tuple[tuple[int, ...], Layout], ...]
    is_matrix: tuple[bool, ...]
    options: dict[str, Any]
    dtype: torch.dtype
    missing: frozenset[tuple[int, int]]
    fused: tuple[Fused | None, ...]

    @property
    def world(self) -> int:
        return self.tensors[0][1].world

    def full(self, seed: int, dtype: torch.dtype) -> list[Tensor]:
        return [tensor.to(dtype) for tensor in full_tensors([shape for shape, _ in self.tensors], seed)]

    def gradient(self, index: int) -> Tensor | None:
        """The unsharded gradient: zero where only some ranks miss it, None where all do."""
        shape, layout = self.tensors[index]
        here = [rank for rank in range(self.world) if (rank, index) not in self.missing]
        if not here:
            return None
        full = self.full(1, self.dtype)[index]
        positions = torch.arange(full.numel()).reshape(shape)
        result = torch.zeros_like(full)
        for rank in here:
            mine = layout.cut(positions, rank).flatten()
            result.view(-1)[mine] = full.flatten()[mine]
        return result


@st.composite
def layouts(draw, mesh, ndim):
    dims = [draw(st.sampled_from([None, *range(ndim)])) for _ in mesh]
    order = draw(st.permutations(range(len(mesh))))
    big = [axis for axis, size in enumerate(mesh) if size > 1]
    if len(big) > 1 and draw(st.booleans()):
        # strided: the axis on the right cuts the same dim first
        dims[big[0]] = dims[big[-1]] = draw(st.integers(0, ndim - 1))
        order = sorted(order, reverse=True)
    placements = []
    for axis, dim in enumerate(dims):
        if dim is None:
            placements.append(R())
            continue
        before = order[: order.index(axis)]
        factor = math.prod(mesh[other] for other in before if other > axis and dims[other] == dim)
        placements.append(strided(dim, factor) if factor > 1 else S(dim))
    cuts = tuple((axis, dims[axis]) for axis in order if dims[axis] is not None)
    names = ("dp", "fsdp", "tp")[-len(mesh) :]
    return Layout(tuple(mesh), tuple(placements), cuts, names)


@st.composite
def draws(draw):
    sizes = st.integers(1, 4)
    mesh = draw(
        st.one_of(
            st.lists(sizes, min_size=1, max_size=3).filter(lambda sizes: math.prod(sizes) <= MOST_RANKS),
            st.sampled_from([[2, 2], [2, 2], [2, 3], [3, 2]]),
            st.sampled_from([[2, 2, 2], [1, 2, 2], [2, 1, 2], [2, 2, 1]]),
        )
    )
    tensors, kinds, fused = [], [], []
    plain = draw(st.booleans())  # without fused weights, for which there is no mode "distributed"
    for _ in range(draw(st.integers(1, 3))):
        matrix = draw(st.booleans()) or not tensors
        ndim = draw(st.sampled_from([2, 2, 2, 3])) if matrix else draw(st.integers(1, 2))
        shape = tuple(draw(st.integers(0 if matrix else 1, 9)) for _ in range(ndim))
        description = None
        if matrix and not plain and draw(st.booleans()):
            sizes, groups = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)), draw(st.integers(1, 4))
            dim, heads = draw(st.sampled_from([0, 0, 1])), draw(st.booleans())
            description = fused_weight(sizes, groups, dim, heads)
            shape = list(shape)
            shape[ndim - 2 + dim] = groups * sum(sizes)
        tensors.append((tuple(shape), draw(layouts(mesh, ndim))))
        kinds.append(matrix)
        fused.append(description)
    world = math.prod(mesh)
    mode = draw(st.sampled_from(["auto", "owner", "duplicated"] + ["distributed"] * (not any(fused))))
    # a replica that alone misses a gradient would make replicas differ, so ranks miss one by whole replicas or all do
    missing = set()
    for index, (_, layout) in enumerate(tensors):
        sharding = [axis for axis, _ in layout.cuts]
        absent = draw(st.sets(st.integers(0, world - 1), max_size=world))
        spots = {tuple(layout.coordinates(rank)[axis] for axis in sharding) for rank in absent}
        if draw(st.booleans()):
            missing |= {
                (rank, index) for rank in range(world) if tuple(layout.coordinates(rank)[a] for a in sharding) in spots
            }
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]))
    options = {
        "tp_mode": mode,
        "nesterov": draw(st.booleans()),
        "momentum": draw(st.sampled_from([0.0, 0.9])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "use_decoupled_weight_decay": draw(st.booleans()),
        "scale_mode": draw(st.sampled_from(["spectral", "shape_scaling", "unit_rms_norm"])),
        "momentum_dtype": torch.float32 if dtype is torch.bfloat16 else None,
    }
    return Draw(tuple(tensors), tuple(kinds), options, dtype, frozenset(missing), tuple(fused))


def groups_of(run, params):
    matrices = [param for param, matrix in zip(params, run.is_matrix, strict=True) if matrix]
    others = [param for param, matrix in zip(params, run.is_matrix, strict=True) if not matrix]
    groups = [{"params": matrices, **run.options}]
    return groups + ([{"params": others, "optimizer": "adamw", "weight_decay": 0.1}] if others else [])


def sharded_step(rank, run):
    params = sharded_params(rank, [(w, lay) for w, (_, lay) in zip(run.full(0, run.dtype), run.tensors, strict=True)])
    for param, fused in zip(params, run.fused, strict=True):
        if fused is not None:
            param.fused_dim = fused.attribute
    optimizer = Muon(groups_of(run, params), **EXACT)
    for index, (param, grad) in enumerate(zip(params, run.full(1, run.dtype), strict=True)):
        if (rank, index) not in run.missing:
            set_grad(rank, param, grad, run.tensors[index][1])
    norm = clip_grad_norm_(params, math.inf)
    optimizer.step()
    return norm, [param.detach().to_local().clone() for param in params]


def reference_step(run, index):
    weight, grad = run.full(0, run.dtype)[index], run.gradient(index)
    if grad is None:
        return weight.double()
    if not run.is_matrix[index]:
        param = torch.nn.Parameter(weight.clone())
        param.grad = grad
        torch.optim.AdamW([param], lr=EXACT["lr"], betas=(0.9, 0.95), weight_decay=0.1).step()
        return param.detach().double()
    options = run.options
    reference = ReferenceMuon(
        lr=EXACT["lr"],
        momentum=options["momentum"],
        nesterov=options["nesterov"],
        weight_decay=options["weight_decay"],
        decoupled=options["use_decoupled_weight_decay"],
        scale=lambda rows, cols: get_muon_scale_factor(rows, cols, options["scale_mode"]),
    )
    return muon_step(reference, run.fused[index], weight, grad, {})


def worst_error(run, results):
    worst = 0.0
    for index, (weight, (_, layout)) in enumerate(zip(run.full(0, run.dtype), run.tensors, strict=True)):
        wanted = reference_step(run, index)
        for rank, shards in enumerate(results):
            assert shards[index].shape == layout.cut(wanted, rank).shape
            # of the whole update, since a shard may hold next to nothing of it
            error = (shards[index].double() - layout.cut(wanted, rank)).norm()
            rounding = torch.finfo(run.dtype).eps * (weight.double().norm() + wanted.norm()) * 2
            update = (wanted - weight.double()).norm()
            worst = max(worst, float((error - rounding).clamp_min(0) / (update + 1e-30)))
    return worst


def kinds_of(run):
    kinds = {
        "strided": any(isinstance(p, _StridedShard) for _, layout in run.tensors for p in layout.placements),
        "three axes": len(run.tensors[0][1].mesh) == 3 and run.world > 1,
        "eight ranks": run.world == 8,
        "distributed": run.options["tp_mode"] == "distributed",
        "fused": any(run.fused),
        "missing": bool(run.missing),
    }
    return {kind for kind, is_seen in kinds.items() if is_seen}


def test_random_steps_equal_the_unsharded_optimizer():
    seen = Counter()

    @PROFILE
    @given(draws())
    def check(run):
        seen.update(kinds_of(run))
        norms, results = zip(*on_threads(run.world, sharded_step, run), strict=True)
        assert worst_error(run, results) <= TOLERANCE
        grads = [grad for grad in map(run.gradient, range(len(run.tensors))) if grad is not None]
        wanted = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
        assert len(set(norms)) == 1
        # sums of fp64 in another order
        assert norms[0] == pytest.approx(wanted, rel=1e-13)

    check()
    # a kind that hardly appears is not tested
    assert min(seen[kind] for kind in ("strided", "three axes", "distributed", "fused", "missing")) > EXAMPLES / 15
    assert seen["eight ranks"] >= EXAMPLES // 30, seen


def test_the_comparison_can_fail():
    """The negative control: one rank's shard off by a thousandth of the update."""
    layout = Layout((4,), (S(0),), ((0, 0),), ("fsdp",))
    options = {"tp_mode": "auto", "nesterov": True, "momentum": 0.9, "weight_decay": 0.0}
    run = Draw(
        (((8, 8), layout),),
        (True,),
        {**options, "use_decoupled_weight_decay": True, "scale_mode": "spectral"},
        torch.float32,
        frozenset(),
        (None,),
    )
    results = [result for _, result in on_threads(4, sharded_step, run)]
    assert worst_error(run, results) <= TOLERANCE
    results[2][0] += 1e-4
    assert worst_error(run, results) > TOLERANCE
