"""Newton-Schulz on sharded matrices, large enough for panels, triangles, Gram segments and shared polynomials."""

import pytest
import torch
from simulated import LAYOUTS, ReferenceMuon, build_mesh, relative_error, shard, shards_of, simulated_ranks

from dtensor_muon import Muon
from dtensor_muon.plan import Target

# wide, tall; more matrices than ranks so that polynomials are shared, and fewer
SHAPES = [(130, 300)] * 5 + [(300, 130)] * 2


def largest_error(layout, options, shapes):
    generator = torch.Generator().manual_seed(0)
    weights, grads = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2))
    with simulated_ranks(layout.world) as mode:
        mesh = build_mesh(layout)
        params = [torch.nn.Parameter(shard(mode, weight, mesh, layout)) for weight in weights]
        optimizer = Muon(params, lr=0.02, weight_decay=0.0, coefficient_type="simple", tp_mode="distributed", **options)
        for param, grad in zip(params, grads, strict=True):
            param.grad = shard(mode, grad, mesh, layout)
        optimizer.step()
        plans = optimizer._planned().plans
        with mode.disable():
            worst = 0.0
            for param, weight, grad in zip(params, weights, grads, strict=True):
                wanted = ReferenceMuon().step(weight, grad, {})
                for rank, got in enumerate(shards_of(param)):
                    error = relative_error(got, layout.cut(weight, rank), layout.cut(wanted, rank))
                    worst = max(worst, error)
    return worst, plans


@pytest.mark.parametrize("name", ["fsdp0", "fsdp1", "fsdp_tp_col", "hsdp"])
def test_equals_whole_matrices_in_fp32(name):
    error, plans = largest_error(LAYOUTS[name], {"fp32_matmul_prec": "highest"}, SHAPES)
    assert error <= 1e-5
    assert [plan.shares_small_work for plan in plans] == [len(plan.members) == 5 for plan in plans]
    assert all(Target.LONG in plan.targets for plan in plans)


@pytest.mark.parametrize("name", ["fsdp1", "fsdp_tp_row"])
def test_gram_segments_in_bf16(name):
    """The bound is the Gram iteration's own against fp64 (3e-2), plus the rounding of what travels (2^-8)."""
    error, plans = largest_error(LAYOUTS[name], {"fp32_matmul_prec": "medium"}, [(260, 1100)] * 5)
    assert [plan.iteration for plan in plans] == ["gram"]
    assert error <= 4e-2
