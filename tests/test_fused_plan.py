"""What the planner makes of fused weights: buckets of parts, prices, agreement of the ranks, memory."""

import pytest
import torch
from parity import EXACT, case, set_grad, sharded_params
from ranks import RankFailedError, on_threads
from simulated import LAYOUTS
from test_schedule import PeakMemory, make_params, one_of

from dtensor_muon import FusedDim, Muon
from dtensor_muon.bench.count import WorkCounter


def rows_of(table):
    """The cells of explain(), by bucket."""
    lines = [line.split("  ") for line in table.splitlines()[1:-1]]
    return [[cell.strip() for cell in line if cell.strip()] for line in lines]


def explained(rank, layout, fused, names):
    params = sharded_params(rank, [(torch.ones(24, 20), layout) for _ in names])
    return Muon(list(zip(names, params, strict=True)), **EXACT, fused=fused).explain()


def test_parts_of_equal_shape_share_a_bucket_across_parameters():
    (table, *_) = on_threads(4, explained, LAYOUTS["fsdp0"], FusedDim((4, 1, 1)), list("abcd"))
    assert [row[:3] for row in rows_of(table)] == [
        ["a[part 0] (+3) 16x20", "4", "owner"],
        ["a[part 1] (+7) 4x20", "8", "owner"],
    ]


def test_weights_whose_groups_are_cut_stay_together():
    (table, *_) = on_threads(4, explained, LAYOUTS["fsdp0"], FusedDim((16, 4, 4)), list("abcd"))
    assert [row[:4] for row in rows_of(table)] == [["a (+3) 24x20", "4", "owner", "auto"]]


def mode_of_a_tall_weight(rank, layout, fused):
    (param,) = sharded_params(rank, [(torch.ones(4096, 256), layout)])
    return rows_of(Muon([("w", param)], **EXACT, fused=fused).explain())[0][2]


@pytest.mark.parametrize(
    ("fused", "mode"),
    [(None, "distributed"), (FusedDim((1, 1)), "distributed"), (FusedDim((2048, 1024, 1024)), "duplicated")],
)
def test_a_weight_whose_groups_are_cut_is_always_assembled(fused, mode):
    """One matrix on four ranks is cheapest where it lies, unless its parts have to be found first."""
    assert on_threads(4, mode_of_a_tall_weight, LAYOUTS["fsdp0"], fused) == [mode] * 4


@pytest.mark.parametrize("fused", [FusedDim((16, 4, 4)), FusedDim((9,), num_groups=4, heads=True), FusedDim((2, 1))])
@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_predicted_flops_and_bytes_are_those_that_run(fused, precision):
    rows = 36 if fused.heads else 24
    with one_of(3 if fused.heads else 4) as mesh:
        optimizer = Muon(make_params([(rows, 20)] * 8, mesh), fp32_matmul_prec=precision, tp_mode="owner", fused=fused)
        optimizer.step()
        with WorkCounter() as counted:
            optimizer.step()
        plans = optimizer._planned().plans
    assert counted.flops == sum(plan.price.flops for plan in plans)


def test_memory_is_bounded():
    limit = 2**20
    with one_of(4) as mesh:
        params = make_params([(192, 256)] * 8, mesh)
        optimizer = Muon(params, max_bucket_bytes=limit, tp_mode="owner", fused=FusedDim((128, 32, 32)))
        optimizer.step()
        assert len(optimizer._planned_waves()) >= 2
        with PeakMemory(optimizer) as memory:
            optimizer.step()
    assert 0 < memory.peak <= limit


def disagree(rank, layout, sizes, where):
    run = case(layout, [(24, 20)])
    (param,) = sharded_params(rank, [(run.weights()[0], layout)])
    description = FusedDim(sizes[min(rank, 1)])
    if where == "attribute":
        param.fused_dim = description
    optimizer = Muon([("wqkv", param)], **EXACT, **({"fused": description} if where == "group" else {}))
    set_grad(rank, param, run.grads(0)[0], layout)
    optimizer.step()


@pytest.mark.parametrize("sizes", [((4, 1, 1), (2, 2, 2)), ((16, 4, 4), (8, 8, 8)), ((4, 1, 1), (16, 4, 4))])
@pytest.mark.parametrize("where", ["attribute", "group"])
def test_ranks_with_other_descriptions_are_named(sizes, where):
    expected = "the ranks planned different steps" if where == "attribute" else "the ranks have different parameter"
    with pytest.raises(RankFailedError, match=expected) as caught:
        on_threads(4, disagree, LAYOUTS["fsdp0"], sizes, where)
    assert all(f"rank {rank}:" in str(caught.value) for rank in range(4))
