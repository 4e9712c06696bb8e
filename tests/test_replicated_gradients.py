"""Gradients that every rank holds as a whole, as tensor parallelism without FSDP leaves those of embeddings."""

import pytest
import torch
from parity import EXACT, full_tensors, set_grad, sharded_params
from ranks import on_threads
from simulated import LAYOUTS
from torch.distributed.tensor import DTensor, Replicate

from dtensor_muon import Muon, clip_grad_norm_

SHAPES = [(12, 20), (10, 9), (7, 5)]


def step(rank, layout, replicated, max_norm):
    params = sharded_params(rank, [(weight, layout) for weight in full_tensors(SHAPES, 0)])
    optimizer = Muon([{"params": params[:2]}, {"params": params[2:], "optimizer": "adamw"}], **EXACT)
    for param, grad in zip(params, full_tensors(SHAPES, 1), strict=True):
        if replicated:
            param.grad = DTensor.from_local(
                grad.clone(), param.device_mesh, [Replicate()] * param.device_mesh.ndim, run_check=False
            )
        else:
            set_grad(rank, param, grad, layout)
    norm = clip_grad_norm_(params, max_norm)
    optimizer.step()
    scaled = [param.grad.full_tensor() if replicated else None for param in params]
    return norm, [param.detach().to_local().clone() for param in params], scaled


@pytest.mark.parametrize("name", ["fsdp0", "tp_row", "fsdp_tp_col", "fsdp_tp_col_3x2", "hsdp", "replicate"])
@pytest.mark.parametrize("max_norm", [1.0, float("inf")])
def test_same_step_as_with_shards(name, max_norm):
    layout = LAYOUTS[name]
    shards = on_threads(layout.world, step, layout, False, max_norm)
    whole = on_threads(layout.world, step, layout, True, max_norm)
    for (norm, params, _), (other_norm, others, scaled) in zip(shards, whole, strict=True):
        assert other_norm == pytest.approx(norm, rel=1e-12)
        for one, other in zip(params, others, strict=True):
            # the scale of the clipping may differ in its last bit
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        factor = min(1.0, max_norm / norm)
        for grad, full in zip(scaled, full_tensors(SHAPES, 1), strict=True):
            torch.testing.assert_close(grad, full * factor)
