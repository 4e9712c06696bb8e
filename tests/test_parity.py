"""The sharded optimizer equals the unsharded one on every rank; simulated ranks."""

import itertools

import pytest
import torch
from simulated import (
    LAYOUTS,
    ReferenceMuon,
    build_mesh,
    relative_error,
    shard,
    shards_of,
    simulated_ranks,
)

from dtensor_muon import Muon

# fp32 rounding over five Newton-Schulz steps and a sum in another order; the bound
TOLERANCE = 1e-5

# wide, tall, square, one row, one column, fewer rows than ranks, uneven, zero-size; the first shape is a full bucket
SHAPES = [(12, 20), (20, 12), (8, 8), (1, 8), (8, 1), (3, 10), (10, 9), (0, 4), (12, 20), (12, 20)]
EXACT = {"lr": 0.02, "weight_decay": 0.0, "coefficient_type": "simple", "fp32_matmul_prec": "highest"}
EXACT_MODES = ("auto", "owner", "duplicated", "distributed")


def full_tensors(shapes, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * scale for shape in shapes]


def check_parity(layout, shapes, options, steps=2, reference=None):
    """Runs both optimizers on the same gradients and returns the largest error over ranks, parameters and steps."""
    reference = reference or ReferenceMuon(weight_decay=options.get("weight_decay", 0.0))
    weights, states = full_tensors(shapes, 0, 0.1), [{} for _ in shapes]
    worst = 0.0
    with simulated_ranks(layout.world) as mode:
        mesh = build_mesh(layout)
        params = [torch.nn.Parameter(shard(mode, weight, mesh, layout)) for weight in weights]
        optimizer = Muon(
            params,
            **{"lr": 0.02, "weight_decay": 0.0, "coefficient_type": "simple", "fp32_matmul_prec": "highest"} | options,
        )
        for step in range(steps):
            with mode.disable():
                grads = full_tensors(shapes, 100 + step)
            for param, grad in zip(params, grads, strict=True):
                param.grad = shard(mode, grad, mesh, layout)
            optimizer.step()
            with mode.disable():
                for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
                    assert tuple(param.placements) == layout.placements
                    assert tuple(optimizer.state[param]["momentum_buffer"].placements) == layout.placements
                    before = weights[index]
                    weights[index] = reference.step(before, grad, states[index])
                    grads_after = shards_of(param.grad)
                    for rank, got in enumerate(shards_of(param)):
                        wanted = layout.cut(weights[index], rank)
                        worst = max(worst, relative_error(got, layout.cut(before, rank), wanted))
                        assert torch.equal(grads_after[rank], layout.cut(grad, rank))
                        # both go on from the same weights, so that errors of one step are not counted in the next
                        got.copy_(wanted)
                    weights[index] = weights[index].float()
    return worst


@pytest.mark.parametrize(("name", "mode"), list(itertools.product(LAYOUTS, EXACT_MODES)))
def test_matches_unsharded(name, mode):
    assert check_parity(LAYOUTS[name], SHAPES, {"tp_mode": mode}) <= TOLERANCE
