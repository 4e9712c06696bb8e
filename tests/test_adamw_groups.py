"""AdamW groups: equal to torch.optim.AdamW on full tensors, alone and beside Muon groups."""

import pytest
import torch
from parity import full_tensors, set_grad, sharded_params
from ranks import on_threads
from simulated import LAYOUTS, Layout, R, S

from dtensor_muon import Muon

VECTOR = {
    "fsdp0": Layout((4,), (S(0),), ((0, 0),), ("fsdp",)),
    "hsdp": LAYOUTS["hsdp"],
    "fsdp_tp_col": LAYOUTS["fsdp_tp_col"],
    "norm": Layout((2, 2), (S(0), R()), ((0, 0),), ("fsdp", "tp")),
}
# bias, norm, fewer elements than ranks, embedding, empty
SHAPES = [(12,), (7,), (3,), (10, 9), (0,)]
STEPS = 3


def train_adamw(rank, layout, options):
    params = sharded_params(rank, [(weight, layout) for weight in full_tensors(SHAPES, 0)])
    optimizer = Muon([{"params": params, "optimizer": "adamw", **options}, {"params": [], "optimizer": "muon"}])
    for step in range(STEPS):
        for param, grad in zip(params, full_tensors(SHAPES, 100 + step), strict=True):
            set_grad(rank, param, grad, layout)
        optimizer.step()
    for param in params:
        state = optimizer.state[param]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert tuple(state["exp_avg"].placements) == tuple(param.placements) == layout.placements
        assert float(state["step"]) == STEPS
    return [param.to_local().detach() for param in params]


@pytest.mark.parametrize("name", VECTOR)
@pytest.mark.parametrize(
    "options", [{"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.01, "weight_decay": 0.0, "betas": (0.5, 0.6), "eps": 1e-3}]
)
def test_equals_torch_on_full_tensors(name, options):
    layout = VECTOR[name]
    full = [torch.nn.Parameter(weight) for weight in full_tensors(SHAPES, 0)]
    reference = torch.optim.AdamW(full, **({"betas": (0.9, 0.95), "eps": 1e-8} | options), foreach=True)
    for step in range(STEPS):
        for param, grad in zip(full, full_tensors(SHAPES, 100 + step), strict=True):
            param.grad = grad
        reference.step()
    for rank, shards in enumerate(on_threads(layout.world, train_adamw, layout, options)):
        for shard, param in zip(shards, full, strict=True):
            torch.testing.assert_close(shard, layout.cut(param.detach(), rank), rtol=1e-6, atol=1e-7)


def test_the_alias_adam():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = Muon([{"params": [param], "optimizer": "adam"}])
    assert optimizer.param_groups[0]["optimizer"] == "adamw"


@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_gradient_of_another_dtype(param_dtype, grad_dtype):
    mine, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 8).to(param_dtype)) for _ in range(2))
    grad = torch.arange(8.0)
    mine.grad_dtype = None
    mine.grad, theirs.grad = grad.to(grad_dtype), grad.to(param_dtype)
    Muon([{"params": [mine], "optimizer": "adamw", "lr": 0.1, "weight_decay": 0.1}]).step()
    torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1, betas=(0.9, 0.95), foreach=True).step()
    torch.testing.assert_close(mine, theirs)
    assert mine.grad.dtype == grad_dtype


def test_a_model_with_both_groups_updates_each_once():
    matrix, vector = torch.nn.Parameter(torch.eye(4)), torch.nn.Parameter(torch.ones(4))
    optimizer = Muon(
        [{"params": [matrix], "lr": 0.0}, {"params": [vector], "optimizer": "adamw", "lr": 0.5, "weight_decay": 0.0}]
    )
    matrix.grad, vector.grad = torch.eye(4), torch.ones(4)
    optimizer.step()
    assert torch.equal(matrix, torch.eye(4))
    torch.testing.assert_close(vector.detach(), torch.full((4,), 0.5))
