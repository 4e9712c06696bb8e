"""Weights on the whole mesh beside weights on its submeshes, of which every rank knows its own only."""

import pytest
import torch
from parity import EXACT, TOLERANCE
from ranks import on_threads
from simulated import ReferenceMuon, relative_error
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dtensor_muon import Muon, balance

# as `fully_shard(model, mesh=mesh["fsdp"])` leaves a model of which only some layers are tensor parallel
ON_FSDP = [(24, 16)] * 3
ON_BOTH = [(16, 24)] * 2 + [(8, 24)] * 3


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in ON_FSDP + ON_BOTH]


def step(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    fsdp, tp = mesh.get_local_rank("fsdp"), mesh.get_local_rank("tp")

    def cut(full, is_tp):
        if not is_tp:
            return DTensor.from_local(full.chunk(2)[fsdp].clone(), mesh["fsdp"], [Shard(0)], run_check=False)
        local = full.chunk(2)[tp].chunk(2)[fsdp].clone()
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())

    kinds = [False] * len(ON_FSDP) + [True] * len(ON_BOTH)
    params = [torch.nn.Parameter(cut(full, is_tp)) for full, is_tp in zip(tensors(0), kinds, strict=True)]
    optimizer = Muon(params, **EXACT)
    for param, grad, is_tp in zip(params, tensors(1), kinds, strict=True):
        param.grad = cut(grad, is_tp)
    optimizer.step()
    worst = 0.0
    for param, full, grad, is_tp in zip(params, tensors(0), tensors(1), kinds, strict=True):
        wanted = ReferenceMuon().step(full, grad, {})
        before, after = (cut(value, is_tp).to_local() for value in (full, wanted))
        worst = max(worst, relative_error(param.detach().to_local(), before, after))
    return worst


def test_ranks_of_sibling_submeshes_plan_the_same():
    assert max(on_threads(4, step)) <= TOLERANCE


def test_loads_of_submeshes_would_make_plans_differ(monkeypatch):
    """The negative control: with the work of the own submesh counted, the ranks disagree."""
    monkeypatch.setattr(balance, "frozenset", lambda _: frozenset(), raising=False)
    with pytest.raises(AssertionError, match="the ranks planned different steps"):
        on_threads(4, step)
