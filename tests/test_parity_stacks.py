"""Stacks of matrices `[..., m, n]`: sharded on whole experts, on rows or columns, and on both."""

from dataclasses import replace

import pytest
from parity import EXACT, TOLERANCE, case, parity_error, set_grad, sharded_params
from ranks import on_threads
from simulated import LAYOUTS, Layout, R, S, strided
from torch.distributed.tensor.debug import CommDebugMode

from dtensor_muon import Muon

EXPERTS = {
    "fsdp": Layout((4,), (S(0),), ((0, 0),), ("fsdp",)),
    "tp_w1": Layout((4,), (S(1),), ((0, 1),), ("tp",)),
    "tp_w2": Layout((4,), (S(2),), ((0, 2),), ("tp",)),
    "efsdp_ep": Layout((2, 2), (strided(0, 2), S(0)), ((1, 0), (0, 0)), ("efsdp", "ep")),
    "efsdp_of_1": Layout((1, 4), (strided(0, 4), S(0)), ((1, 0),), ("efsdp", "ep")),
    "many_ranks": Layout((2, 2), (S(1), S(0)), ((1, 0), (0, 1)), ("efsdp", "ep")),
    "hsdp_ep": Layout((2, 1, 2), (R(), strided(0, 2), S(0)), ((2, 0),), ("dp_replicate", "efsdp", "ep")),
    "etp_w1": Layout((2, 2, 2), (strided(0, 2), S(0), S(1)), ((1, 0), (2, 1), (0, 0)), ("efsdp", "ep", "etp")),
    "etp_w2": Layout((2, 2, 2), (S(1), S(0), S(2)), ((1, 0), (2, 2), (0, 1)), ("efsdp", "ep", "etp")),
    "etp_w1_many_ranks": Layout(
        (2, 2, 2), (strided(1, 2), S(0), S(1)), ((1, 0), (2, 1), (0, 1)), ("efsdp", "ep", "etp")
    ),
}
WHOLE_EXPERTS = ("fsdp", "efsdp_ep", "efsdp_of_1")

# experts that divide, that do not, fewer than ranks, one; a second parameter of the first shape shares its bucket
STACKS = [(8, 6, 10), (8, 6, 10), (5, 10, 6), (3, 7, 9), (1, 6, 6)]


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("mode", ["auto", "owner", "duplicated", "distributed"])
def test_expert_layouts_match_unsharded(name, mode):
    assert parity_error(replace(case(EXPERTS[name], STACKS, tp_mode=mode), steps=1)) <= TOLERANCE


@pytest.mark.parametrize("name", ["fsdp0", "fsdp1", "fsdp_tp_col", "fsdp_tp_row", "hsdp"])
@pytest.mark.parametrize("mode", ["owner", "distributed"])
def test_stacks_sharded_inside_the_matrices_match_unsharded(name, mode):
    run = case(LAYOUTS[name].lift(1), [(3, 10, 9), (3, 10, 9), (2, 6, 20), (5, 3, 4)], tp_mode=mode)
    assert parity_error(run) <= TOLERANCE


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_two_leading_dims_match_unsharded(dim):
    layout = Layout((4,), (S(dim),), ((0, dim),), ("fsdp",))
    run = case(layout, [(2, 5, 6, 10), (2, 5, 6, 10), (3, 1, 7, 9), (1, 2, 9, 7)], tp_mode="auto")
    assert parity_error(run) <= TOLERANCE


def test_both_leading_dims_sharded():
    layout = Layout((2, 2), (S(1), S(0)), ((1, 0), (0, 1)), ("efsdp", "ep"))
    assert parity_error(case(layout, [(3, 5, 6, 10), (2, 2, 7, 9)])) <= TOLERANCE


@pytest.mark.parametrize("mode", ["owner", "duplicated", "distributed"])
def test_leading_dims_and_rows_sharded(mode):
    layout = Layout((2, 2, 2), (S(0), S(1), S(2)), ((0, 0), (1, 1), (2, 2)), ("efsdp", "ep", "etp"))
    assert parity_error(replace(case(layout, [(3, 5, 6, 10), (1, 1, 7, 9)], tp_mode=mode), steps=1)) <= TOLERANCE


def counted_steps(rank, layout, shapes):
    """Collectives of a step, without those of the first one, which agrees on the plan."""
    run = case(layout, shapes)
    params = sharded_params(rank, list(zip(run.weights(), [layout] * len(shapes), strict=True)))
    optimizer = Muon(params, **EXACT)
    for step in range(2):
        for param, grad in zip(params, run.grads(step), strict=True):
            set_grad(rank, param, grad, layout)
        with CommDebugMode() as counted:
            optimizer.step()
    return {str(op): count for op, count in counted.get_comm_counts().items()}


@pytest.mark.parametrize("name", WHOLE_EXPERTS)
def test_whole_experts_need_no_data_from_other_ranks(name):
    layout = EXPERTS[name]
    # one all-reduce per mesh axis asks whether a rank misses a gradient
    flags = {"c10d_functional.all_reduce": sum(size > 1 for size in layout.mesh)}
    assert on_threads(layout.world, counted_steps, layout, STACKS) == [flags] * layout.world
