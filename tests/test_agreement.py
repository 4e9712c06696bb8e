"""Ranks that differ are told apart by name, at the first step or at the next one."""

import copy

import pytest
import torch
from parity import EXACT, full_tensors, set_grad, sharded_params
from ranks import on_threads
from simulated import LAYOUTS
from torch import nn

from dtensor_muon import Muon, build_param_groups
from dtensor_muon.param_groups import ParamOverride

LAYOUT = LAYOUTS["fsdp0"]


def build(rank, group_options, names=("a", "b", "v")):
    params = sharded_params(rank, [(full, LAYOUT) for full in full_tensors([(8, 4), (8, 4), (8,)], 0)])
    named = dict(zip(("a", "b", "v"), params, strict=True))
    groups = [
        {"params": [(name, named[name]) for name in names if name != "v"], **group_options},
        {"params": [("v", named["v"])], "optimizer": "adamw"},
    ]
    return params, Muon(groups, **EXACT)


def differs_at_the_first_step(rank, what):
    odd = rank == 2
    params, optimizer = build(
        rank,
        {"lr": 0.5} if odd and what == "lr" else {},
        ("b", "a", "v") if odd and what == "order" else ("a", "b", "v"),
    )
    if odd and what == "eps":
        optimizer.param_groups[1]["eps"] = 1e-3
    return message_of_a_step(rank, params, optimizer)


def message_of_a_step(rank, params, optimizer):
    """What a step raises that changes nothing."""
    before = [param.detach().to_local().clone() for param in params]
    for param, grad in zip(params, full_tensors([(8, 4), (8, 4), (8,)], 1), strict=True):
        set_grad(rank, param, grad, LAYOUT)
    with pytest.raises(RuntimeError, match="different parameter groups") as error:
        optimizer.step()
    assert all(torch.equal(old, param.to_local()) for old, param in zip(before, params, strict=True))
    return str(error.value)


@pytest.mark.parametrize(("what", "named"), [("lr", "lr=0.5"), ("order", "parameter b"), ("eps", "eps=0.001")])
def test_difference_at_the_first_step_is_named(what, named):
    assert all(named in message for message in on_threads(4, differs_at_the_first_step, what))


def routes_differently(rank, moved):
    params = sharded_params(rank, [(full, LAYOUT) for full in full_tensors([(8, 4), (8, 4), (8,)], 0)])
    model = nn.ParameterDict(zip(("up", "down", "gain"), params, strict=True))
    overrides = [ParamOverride(f"^{moved}$", {"optimizer": "adamw"})] if rank == 2 else []
    return message_of_a_step(rank, params, Muon(build_param_groups(model, overrides=overrides, **EXACT)))


@pytest.mark.parametrize(
    ("moved", "odd", "others"),
    [
        ("up", "parameter down (8, 4)", "parameter up (8, 4)"),
        ("down", "group of optimizer='adamw'", "parameter down (8, 4)"),
    ],
)
def test_parameter_routed_differently_is_named_in_both_versions(moved, odd, others):
    for rank, message in enumerate(on_threads(4, routes_differently, moved)):
        mine, another = (odd, others) if rank == 2 else (others, odd)
        assert f"this rank: {mine}" in message
        assert f"rank {0 if rank == 2 else 2}: {another}" in message


# which of the saved states a rank loads, one after another
LOADED = {
    "older state": lambda rank: [2 if rank == 1 else 3],
    "loaded twice": lambda rank: [2, 3] if rank == 1 else [3],
    "same state": lambda rank: [2],
}


def drifts(rank, drift, block_period=1):
    """Returns the step at which this rank raised, and what."""
    params, optimizer = build(rank, {"block_period": block_period})
    saved, pickled = [], []
    for step in range(6):
        saved.append(copy.deepcopy(optimizer.state_dict()))
        pickled.append(optimizer.__getstate__())
        if step == 3 and drift in LOADED:
            for place in LOADED[drift](rank):
                optimizer.load_state_dict(saved[place])
        if step == 3 and drift == "older pickle":
            optimizer.__setstate__(pickled[2 if rank == 1 else 3])
        if step == 3 and rank == 1:
            if drift == "lr":
                optimizer.param_groups[1]["lr"] = 0.25
            if drift == "counter":
                optimizer.state[params[2]]["step"] += 5
        for param, grad in zip(params, full_tensors([(8, 4), (8, 4), (8,)], step), strict=True):
            set_grad(rank, param, grad, LAYOUT)
        try:
            optimizer.step()
        except RuntimeError as error:
            return step, str(error)
    return None


DRIFTS = {
    "lr": ("lr=0.25", "lr=0.02"),
    "counter": ("step counter 8 of v", "step counter 3 of v"),
    "older state": ("step counter 2 of v", "step counter 3 of v"),
    "loaded twice": ("state dicts loaded: 2", "state dicts loaded: 1"),
}


@pytest.mark.parametrize("drift", DRIFTS)
def test_drift_raises_on_all_ranks_at_the_next_step(drift):
    odd, others = DRIFTS[drift]
    for rank, (step, error) in enumerate(on_threads(4, drifts, drift)):
        assert step == 4
        here, there = error.split("\n")[1:3]
        assert here.startswith("this rank: ")
        assert here.endswith(odd if rank == 1 else others) or drift == "lr"
        assert (odd if rank == 1 else others) in here
        assert there.startswith("rank 0: " if rank == 1 else "rank 1: ")
        assert (others if rank == 1 else odd) in there


def test_number_of_steps_raises_on_all_ranks_at_the_next_step():
    results = on_threads(4, drifts, "older pickle")
    assert [step for step, _ in results] == [4] * 4
    assert all(f"this rank {3 if rank == 1 else 4}, others 3 to 4" in error for rank, (_, error) in enumerate(results))


def test_older_state_of_a_group_with_a_block_period_raises():
    """Its step counters are in the fingerprint; where they decide the plan, its own check comes first."""
    for step, error in on_threads(4, drifts, "older state", 4):
        assert step == 4
        assert "step counter 2 of a to v" in error
        assert "step counter 3 of a to v" in error
    assert all(
        step == 3 and "planned different steps" in error for step, error in on_threads(4, drifts, "older state", 3)
    )


@pytest.mark.parametrize("drift", ["none", "same state"])
@pytest.mark.parametrize("block_period", [1, 3])
def test_without_drift_nothing_raises(drift, block_period):
    assert on_threads(4, drifts, drift, block_period) == [None] * 4
