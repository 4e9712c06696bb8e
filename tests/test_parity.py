"""The sharded optimizer equals the unsharded one on every rank, for every layout of matrices and every exact mode."""

import itertools
from dataclasses import replace

import pytest
import torch
from parity import EXACT, TOLERANCE, Case, case, parity_error, trajectory, worst_error
from ranks import on_threads
from simulated import (
    LAYOUTS,
    SIMPLE,
    ReferenceMuon,
    build_mesh,
    reference_orthogonalize,
    shard,
    shards_of,
    simulated_ranks,
)

from dtensor_muon import Muon, planner
from dtensor_muon.plan import Target

# wide, tall, square, one row, one column, fewer rows than ranks, uneven, zero-size; the first shape is a full bucket
SHAPES = [(12, 20), (20, 12), (8, 8), (1, 8), (8, 1), (3, 10), (10, 9), (0, 4), (12, 20), (12, 20)]
# long enough for the Gram iteration, with as many matrices as ranks, so that they share the small work
LONG = [(6, 40)] * 5 + [(33, 5)] * 2
MODES = ("owner", "duplicated", "distributed")


@pytest.mark.parametrize(("name", "mode"), list(itertools.product(LAYOUTS, MODES)))
def test_matches_unsharded(name, mode):
    assert parity_error(replace(case(LAYOUTS[name], SHAPES, tp_mode=mode), steps=1)) <= TOLERANCE


@pytest.mark.parametrize("name", ["fsdp0", "fsdp_tp_row", "hsdp", "one_rank"])
def test_auto_matches_unsharded_over_several_steps(name):
    assert parity_error(replace(case(LAYOUTS[name], SHAPES + LONG), steps=3)) <= TOLERANCE


@pytest.mark.parametrize("name", ["fsdp0", "tp_row", "fsdp_tp_col", "fsdp_tp_row"])
@pytest.mark.parametrize("iteration", ["plain", "gram"])
def test_both_iterations_match_unsharded_on_sharded_matrices(name, iteration, monkeypatch):
    monkeypatch.setattr(planner, "choose_iteration", lambda *_: iteration)
    seen = []
    price = planner._price
    monkeypatch.setattr(planner, "_price", lambda *args: seen.append(args[3]) or price(*args))
    assert parity_error(case(LAYOUTS[name], LONG, tp_mode="distributed")) <= TOLERANCE
    assert iteration in seen


@pytest.mark.parametrize(
    "targets", list(itertools.product((Target.STACK, Target.LONG, Target.GATHER), repeat=2)), ids=str
)
@pytest.mark.parametrize("name", ["fsdp_tp_row", "fsdp_tp_col", "hsdp"])
def test_every_mixture_of_targets_matches_unsharded(name, targets, monkeypatch):
    def forced(entry, _count):
        if planner._is_possible(entry.layout, targets):
            yield targets
        else:
            yield (Target.STACK,) * len(entry.layout.axes)

    monkeypatch.setattr(planner, "_candidates", forced)
    shapes = [(12, 20), (12, 20), (12, 20), (20, 12), (10, 9), (3, 10)]
    assert parity_error(replace(case(LAYOUTS[name], shapes), steps=1)) <= TOLERANCE


def test_two_meshes_in_one_optimizer():
    layouts = [LAYOUTS[name] for name in ("fsdp0", "fsdp_tp_col", "fsdp0", "fsdp_tp_row", "fsdp_tp_norm", "unnamed0")]
    shapes = [(12, 20), (12, 20), (10, 9), (10, 9), (12, 20), (12, 20)]
    assert parity_error(Case(tuple(zip(shapes, layouts, strict=True)))) <= TOLERANCE


def test_many_shapes_at_once():
    shapes = [(rows, cols) for rows in range(1, 6) for cols in (2, 5, 9)]
    assert parity_error(replace(case(LAYOUTS["fsdp0"], shapes), steps=1)) <= TOLERANCE


@pytest.mark.parametrize("name", ["fsdp0", "fsdp_tp_col"])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 9])
def test_any_number_of_matrices(name, count):
    run = replace(case(LAYOUTS[name], [(10, 9)] * count, tp_mode="owner"), steps=1)
    assert parity_error(run) <= TOLERANCE


def local_shards_only(rank, run, path):
    """The mistake that parity must notice: each shard is orthogonalized as if it were the matrix."""
    results = []
    for step in range(run.steps):
        shards = []
        for (before, _), grad, (_, layout) in zip(path[step], run.grads(step), run.tensors, strict=True):
            local = layout.cut(grad, rank).double() * 0.0975
            scale = max(grad.shape) ** 0.5
            shards.append(layout.cut(before, rank) - EXACT["lr"] * scale * reference_orthogonalize(local, SIMPLE))
        results.append(shards)
    return results


@pytest.mark.parametrize(
    ("name", "is_right"), [("fsdp0", False), ("tp_row", False), ("fsdp_tp_col", False), ("replicate", True)]
)
def test_orthogonalizing_local_shards_fails_parity(name, is_right):
    run = replace(case(LAYOUTS[name], [(12, 20), (20, 12)]), steps=1)
    path = trajectory(run, ReferenceMuon())
    error = worst_error(run, path, on_threads(run.world, local_shards_only, run, path))
    assert error <= TOLERANCE if is_right else error > 0.1


@pytest.mark.parametrize("name", ["fsdp0", "fsdp_tp_row"])
def test_runs_under_local_tensor_mode(name):
    """The package reads sizes that are symbols there, so its users can simulate ranks as well."""
    layout, shape = LAYOUTS[name], (10, 9)
    run = replace(case(layout, [shape]), steps=1)
    path = trajectory(run, ReferenceMuon())
    with simulated_ranks(layout.world) as mode:
        mesh = build_mesh(layout)
        param = torch.nn.Parameter(shard(mode, run_weights(mode, run), mesh, layout))
        optimizer = Muon([param], **EXACT)
        param.grad = shard(mode, run_grads(mode, run), mesh, layout)
        optimizer.step()
        with mode.disable():
            results = [[[local.clone()]] for local in shards_of(param)]
    assert worst_error(run, path, results) <= TOLERANCE


def run_weights(mode, run):
    with mode.disable():
        return run.weights()[0]


def run_grads(mode, run):
    with mode.disable():
        return run.grads(0)[0]
