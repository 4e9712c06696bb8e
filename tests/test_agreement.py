"""Ranks that differ are told apart by name, at the first step or at the next one."""

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
    optimizer = Muon(build_param_groups(model, overrides=overrides, **EXACT))
    before = [param.detach().to_local().clone() for param in params]
    for param, grad in zip(params, full_tensors([(8, 4), (8, 4), (8,)], 1), strict=True):
        set_grad(rank, param, grad, LAYOUT)
    with pytest.raises(RuntimeError, match="different parameter groups") as error:
        optimizer.step()
    assert all(torch.equal(old, param.to_local()) for old, param in zip(before, params, strict=True))
    return str(error.value)


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
        assert f"this rank:    {mine}" in message
        assert f"another rank: {another}" in message


def drifts(rank, drift):
    """Returns the step at which this rank raised, and what."""
    params, optimizer = build(rank, {})
    for step in range(6):
        if drift == "lr" and rank == 1 and step == 3:
            optimizer.param_groups[1]["lr"] = 0.25
        if drift == "steps" and rank == 1 and step == 3:
            optimizer._steps += 1
        for param, grad in zip(params, full_tensors([(8, 4), (8, 4), (8,)], step), strict=True):
            set_grad(rank, param, grad, LAYOUT)
        try:
            optimizer.step()
        except RuntimeError as error:
            return step, str(error)
    return None


@pytest.mark.parametrize(("drift", "message"), [("lr", "lr=0.25"), ("steps", "different numbers of steps")])
def test_drift_raises_on_all_ranks_at_the_next_step(drift, message):
    for step, error in on_threads(4, drifts, drift):
        assert step == 4
        assert message in error


def test_without_drift_nothing_raises():
    assert on_threads(4, drifts, "none") == [None] * 4
