"""Real processes over gloo: models as trainers build them, missing gradients, disagreement, the all-to-all."""

import re
from dataclasses import replace

import pytest
import torch
from parity import (
    EXACT,
    TOLERANCE,
    case,
    full_tensors,
    mesh_of,
    parity_error,
    set_grad,
    sharded_params,
    trajectory,
    worst_error,
)
from ranks import GlooRanks
from simulated import LAYOUTS, Layout, R, ReferenceMuon, S, strided
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_muon import Muon

WORLD = 4


@pytest.fixture(scope="module")
def gloo():
    ranks = GlooRanks(WORLD)
    yield ranks
    ranks.stop()


SHAPES = [(12, 20), (10, 9), (3, 10), (12, 20)]


@pytest.mark.parametrize("name", ["fsdp0", "unnamed0", "tp_row", "fsdp_tp_row", "fsdp_tp_col", "hsdp"])
@pytest.mark.parametrize("mode", ["owner", "distributed"])
def test_parity(gloo, name, mode):
    run = replace(case(LAYOUTS[name], SHAPES, tp_mode=mode), steps=1)
    assert parity_error(run, launch=lambda _, *args: gloo.run(*args)) <= TOLERANCE


def test_duplicated_parity(gloo):
    run = replace(case(LAYOUTS["fsdp_tp_col"], SHAPES, tp_mode="duplicated"), steps=1)
    assert parity_error(run, launch=lambda _, *args: gloo.run(*args)) <= TOLERANCE


FSDP = Layout((4,), (S(0),), ((0, 0),), ("fsdp",))
# how a trainer builds a model, and the layouts of `up` and `down` that come out
BUILDS = {
    "fsdp": (FSDP, FSDP),
    "fsdp_unnamed": (LAYOUTS["unnamed0"], LAYOUTS["unnamed0"]),
    "hsdp": (LAYOUTS["hsdp"], LAYOUTS["hsdp"]),
    "tp": (
        Layout((4,), (S(0),), ((0, 0),), ("tp",)),
        Layout((4,), (S(1),), ((0, 1),), ("tp",)),
    ),
    "fsdp_tp": (
        Layout((2, 2), (strided(0, 2), S(0)), ((1, 0), (0, 0)), ("fsdp", "tp")),
        Layout((2, 2), (S(0), S(1)), ((1, 1), (0, 0)), ("fsdp", "tp")),
    ),
}


def build_model(build, weights):
    """Two linear layers from full weights, sharded as a trainer does it."""
    up, down = weights
    model = nn.Sequential(
        nn.Linear(up.shape[1], up.shape[0], bias=False), nn.ReLU(), nn.Linear(down.shape[1], down.shape[0], bias=False)
    )
    with torch.no_grad():
        model[0].weight.copy_(up)
        model[2].weight.copy_(down)
    mesh = mesh_of(BUILDS[build][0])
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if build == "tp":
        return parallelize_module(model, mesh, plan)
    if build == "fsdp_tp":
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["fsdp"]
    fully_shard(model, mesh=mesh)
    model.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return model


def train_built_model(rank, build, run, path):
    """Like `parity.train`, on a model that torch sharded; the gradients are cut by hand."""
    model = build_model(build, run.weights())
    params, layouts = list(model.parameters()), [layout for _, layout in run.tensors]
    for param, full, layout in zip(params, run.weights(), layouts, strict=True):
        assert tuple(param.placements) == layout.placements
        assert torch.equal(param.to_local(), layout.cut(full, rank))
    optimizer = Muon(model.named_parameters(), **EXACT | run.options)
    results = []
    for step in range(run.steps):
        for param, grad, layout, (before, _) in zip(params, run.grads(step), layouts, path[step], strict=True):
            with torch.no_grad():
                param.to_local().copy_(layout.cut(before, rank))
            set_grad(rank, param, grad, layout)
        optimizer.step()
        results.append([param.detach().to_local().clone() for param in params])
    return results


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("shapes", [[(13, 10), (9, 13)], [(3, 8), (5, 3)]], ids=["uneven", "fewer_rows_than_ranks"])
def test_models_as_trainers_build_them(gloo, build, shapes):
    run = replace(case(FSDP, shapes), tensors=tuple(zip(shapes, BUILDS[build], strict=True)), steps=2)
    path = trajectory(run, ReferenceMuon())
    assert worst_error(run, path, gloo.run(train_built_model, build, run, path)) <= TOLERANCE


BATCH, STEPS = 8, 3


def train_on_data(rank, build, weights):
    """Forward and backward; the data-parallel ranks split a batch, tensor-parallel ones share their part."""
    model = build_model(build, weights)
    optimizer = Muon(model.named_parameters(), **EXACT)
    parts = {"fsdp": 4, "hsdp": 4, "fsdp_unnamed": 4, "tp": 1, "fsdp_tp": 2}[build]
    part = rank * parts // WORLD
    for step in range(STEPS):
        (batch,) = full_tensors([(BATCH, weights[0].shape[1])], 200 + step)
        model(batch.chunk(parts)[part]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor().detach() for param in model.parameters()]


@pytest.mark.parametrize("build", ["fsdp", "hsdp", "fsdp_tp"])
def test_training_equals_one_process(gloo, build):
    weights = full_tensors([(16, 12), (8, 16)], 0, 0.3)
    params, reference = [weight.double().requires_grad_() for weight in weights], ReferenceMuon()
    states = [{}, {}]
    for step in range(STEPS):
        (batch,) = full_tensors([(BATCH, 12)], 200 + step)
        loss = (torch.relu(batch.double() @ params[0].T) @ params[1].T).square().mean()
        grads = torch.autograd.grad(loss, params)
        params = [
            reference.step(param.detach(), grad, state).requires_grad_()
            for param, grad, state in zip(params, grads, states, strict=True)
        ]
    for shards in gloo.run(train_on_data, build, weights):
        for got, wanted, start in zip(shards, params, weights, strict=True):
            # orthogonalization lifts the gradients' rounding in small singular directions
            assert (got - wanted).norm() <= 1e-4 * (wanted - start).norm()


def step_without_some_gradients(rank, name, absent):
    """Parameter 0 has no gradient on the ranks in `absent`, parameter 1 on none, parameter 2 (AdamW) like 0."""
    layout = LAYOUTS[name]
    vector = Layout(layout.mesh, (S(0), *[R()] * (len(layout.mesh) - 1)), ((0, 0),), layout.names)
    layouts, shapes = [layout, layout, vector], [(10, 9), (10, 9), (8,)]
    params = sharded_params(rank, list(zip(full_tensors(shapes, 0, 0.1), layouts, strict=True)))
    groups = [{"params": params[:2]}, {"params": params[2:], "optimizer": "adamw"}]
    optimizer = Muon(groups, **EXACT)
    for index, (param, grad) in enumerate(zip(params, full_tensors(shapes, 1), strict=True)):
        if index == 1 or rank not in absent:
            set_grad(rank, param, grad, layouts[index])
    before = [param.to_local().clone() for param in params]
    optimizer.step()
    assert [param.grad is None for param in params] == [rank in absent, False, rank in absent]
    moments = optimizer.state[params[0]]["momentum_buffer"], optimizer.state[params[2]]["exp_avg"]
    return (
        before,
        [param.to_local().detach() for param in params],
        [bool(moment.to_local().any()) for moment in moments],
        float(optimizer.state[params[2]]["step"]),
    )


# on hsdp, both replicas of a shard miss it
@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("fsdp0", (0,)),
        ("fsdp0", (1, 3)),
        ("fsdp0", (0, 1, 2)),
        ("fsdp_tp_row", (0,)),
        ("fsdp_tp_row", (0, 1, 2)),
        ("hsdp", (1, 3)),
    ],
)
def test_a_rank_without_a_gradient_counts_as_zero(gloo, name, absent):
    layout = LAYOUTS[name]
    (weight, grad), reference = (full_tensors([(10, 9)] * 2, seed)[0] for seed in (0, 1)), ReferenceMuon()
    weight = weight * 0.1
    for rank in absent:
        known = torch.arange(90).reshape(10, 9)
        grad = grad.clone()
        grad.view(-1)[layout.cut(known, rank).flatten()] = 0
    wanted = reference.step(weight, grad, {})
    for rank, (_, after, _, count) in enumerate(gloo.run(step_without_some_gradients, name, absent)):
        shard = layout.cut(wanted, rank)
        assert (after[0] - shard).abs().max() <= 1e-6 if shard.numel() else True
        assert count == 1


def test_a_parameter_without_gradients_on_all_ranks_is_untouched(gloo):
    for before, after, moments, count in gloo.run(step_without_some_gradients, "fsdp0", (0, 1, 2, 3)):
        assert torch.equal(before[0], after[0])
        assert torch.equal(before[2], after[2])
        assert before[1].numel() == 0 or not torch.equal(before[1], after[1])
        assert moments == [False, False]
        assert count == 0


def disagree(rank, name, what):
    """Rank 1 differs from the others."""
    layout, shapes = LAYOUTS[name], [(12, 20), (12, 20), (16,)]
    vector = Layout(layout.mesh, (S(0), *[R()] * (len(layout.mesh) - 1)), ((0, 0),), layout.names)
    params = sharded_params(rank, list(zip(full_tensors(shapes, 0), (layout, layout, vector), strict=True)))
    matrices, vectors, options = [("a", params[0]), ("b", params[1])], [("c", params[2])], dict(EXACT)
    if rank == 1:
        if what == "order":
            matrices.reverse()
        elif what == "missing":
            matrices.pop()
        elif what == "no matrix":
            matrices.clear()
        elif what == "missing vector":
            vectors.clear()
        elif what == "memory":
            options["max_bucket_bytes"] = 2000
        else:
            options["num_ns_steps"] = 4
    for param in params:
        param.grad = param.detach().clone()
    before = [param.to_local().clone() for param in params]
    groups = [
        {"params": [param for _, param in named], "param_names": [name for name, _ in named], "optimizer": kind}
        for kind, named in (("muon", matrices), ("adamw", vectors))
    ]
    try:
        Muon(groups, **options).step()
    except RuntimeError as error:
        return str(error), all(torch.equal(old, param.to_local()) for old, param in zip(before, params, strict=True))
    return "no error", False


@pytest.mark.parametrize("name", ["fsdp0", "fsdp_tp_row"])
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("order", "parameter b (12, 20)\n"),
        ("missing", "parameter b (12, 20)\n"),
        ("no matrix", "group of optimizer='muon'"),
        ("option", "num_ns_steps"),
        ("missing vector", "group of optimizer='adamw'"),
    ],
)
def test_ranks_with_different_plans_all_raise(gloo, name, what, named):
    for message, unchanged in gloo.run(disagree, name, what, timeout=40):
        assert message.startswith("the ranks have different parameter groups; the first difference:\nthis rank: ")
        assert named in message
        assert re.search(r"\nrank \d: ", message)
        assert "\nGive every rank the same parameters, in the same order, with the same options" in message
        assert unchanged


@pytest.mark.parametrize("name", ["fsdp0", "fsdp_tp_row"])
def test_ranks_with_the_same_groups_but_other_buckets_all_raise(gloo, name):
    for message, unchanged in gloo.run(disagree, name, "memory", timeout=40):
        assert message.startswith(
            "the ranks planned different steps; the first difference:\nthis rank: bucket (12, 20)"
        )
        assert ": a, b\n" in message
        assert ": a\n" in message
        assert unchanged


def collectives(rank, name, mode):
    layout, shapes = LAYOUTS[name], [(12, 20)] * 4
    params = sharded_params(rank, list(zip(full_tensors(shapes, 0), [layout] * 4, strict=True)))
    optimizer = Muon(params, **EXACT, tp_mode=mode)
    for _ in range(2):
        for param, grad in zip(params, full_tensors(shapes, 1), strict=True):
            set_grad(rank, param, grad, layout)
        with CommDebugMode() as counted:
            optimizer.step()
    return {str(op): count for op, count in counted.get_comm_counts().items()}


def test_shard_to_shard_is_an_all_to_all_on_cpu(gloo):
    expected = {"c10d_functional.all_reduce": 1, "_dtensor.shard_dim_alltoall": 2}
    assert gloo.run(collectives, "fsdp0", "owner") == [expected] * WORLD
