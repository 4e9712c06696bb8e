"""Stacks of matrices `[..., m, n]`: sharded on whole experts, on rows or columns, and on both."""

from dataclasses import replace

import pytest
from parity import EXACT, TOLERANCE, Case, case, parity_error, set_grad, sharded_params, train, trajectory
from ranks import on_threads
from simulated import LAYOUTS, Layout, R, ReferenceMuon, S, strided
from torch.distributed.tensor.debug import CommDebugMode

from dtensor_muon import Muon, optimizer
from dtensor_muon.newton_schulz import orthogonalize

EXPERTS = {
    "fsdp": Layout((4,), (S(0),), ((0, 0),), ("fsdp",)),
    "tp_w1": Layout((4,), (S(1),), ((0, 1),), ("tp",)),
    "tp_w2": Layout((4,), (S(2),), ((0, 2),), ("tp",)),
    "efsdp_ep": Layout((2, 2), (strided(0, 2), S(0)), ((1, 0), (0, 0)), ("efsdp", "ep")),
    "efsdp_of_1": Layout((1, 4), (strided(0, 4), S(0)), ((1, 0),), ("efsdp", "ep")),
    "fsdp_more_ranks_than_experts": Layout((4,), (S(1),), ((0, 1),), ("fsdp",)),
    "fsdp_tp_w1": Layout((2, 2), (S(0), S(1)), ((1, 1), (0, 0)), ("fsdp", "tp")),
    "fsdp_tp_w2": Layout((2, 2), (S(0), S(2)), ((1, 2), (0, 0)), ("fsdp", "tp")),
    "many_ranks": Layout((2, 2), (S(1), S(0)), ((1, 0), (0, 1)), ("efsdp", "ep")),
    "hsdp_ep": Layout((2, 1, 2), (R(), strided(0, 2), S(0)), ((2, 0),), ("dp_replicate", "efsdp", "ep")),
    "etp_w1": Layout((2, 2, 2), (strided(0, 2), S(0), S(1)), ((1, 0), (2, 1), (0, 0)), ("efsdp", "ep", "etp")),
    "etp_w2": Layout((2, 2, 2), (S(1), S(0), S(2)), ((1, 0), (2, 2), (0, 1)), ("efsdp", "ep", "etp")),
    "etp_w1_many_ranks": Layout(
        (2, 2, 2), (strided(1, 2), S(0), S(1)), ((1, 0), (2, 1), (0, 1)), ("efsdp", "ep", "etp")
    ),
}

# experts that divide, that do not, fewer than ranks, one; a second parameter of the first shape shares its bucket
STACKS = [(8, 6, 10), (8, 6, 10), (3, 7, 5), (1, 6, 6)]


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
    muon = Muon(params, **EXACT)
    for step in range(2):
        for param, grad in zip(params, run.grads(step), strict=True):
            set_grad(rank, param, grad, layout)
        with CommDebugMode() as counted:
            muon.step()
    return {str(op): count for op, count in counted.get_comm_counts().items()}


COLLECTIVES = {
    # one all-reduce per mesh axis asks for missing gradients, two all-to-alls per axis that cuts the matrices, one
    # all-gather per axis that replicates
    "fsdp": (1, 0, 0),
    "tp_w1": (1, 2, 0),
    "tp_w2": (1, 2, 0),
    "efsdp_ep": (2, 0, 0),
    "efsdp_of_1": (1, 0, 0),
    "fsdp_more_ranks_than_experts": (1, 2, 0),
    "fsdp_tp_w1": (2, 2, 0),
    "fsdp_tp_w2": (2, 2, 0),
    "many_ranks": (2, 2, 0),
    "hsdp_ep": (2, 0, 1),
    "etp_w1": (3, 2, 0),
    "etp_w2": (3, 4, 0),
    "etp_w1_many_ranks": (3, 4, 0),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_collectives_of_expert_layouts(name):
    layout = EXPERTS[name]
    names = ("c10d_functional.all_reduce", "_dtensor.shard_dim_alltoall", "c10d_functional.all_gather_into_tensor")
    expected = {op: count for op, count in zip(names, COLLECTIVES[name], strict=True) if count}
    assert on_threads(layout.world, counted_steps, layout, [(8, 6, 10)] * 2) == [expected] * layout.world


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize(("num_experts", "mode"), [(8, "auto"), (3, "owner"), (1, "owner")])
def test_every_expert_is_computed_once_and_no_padding(name, num_experts, mode, monkeypatch):
    computed = []
    monkeypatch.setattr(
        optimizer, "orthogonalize", lambda x, *args, **options: computed.append(x) or orthogonalize(x, *args, **options)
    )
    layout = EXPERTS[name]
    on_threads(layout.world, train_once, layout, [(num_experts, 6, 10)] * 3, mode)
    assert sum(len(x) for x in computed) == 3 * num_experts * 2
    assert all(matrix.any() for x in computed for matrix in x)


@pytest.mark.parametrize("name", ["many_ranks", "fsdp_more_ranks_than_experts"])
def test_more_ranks_than_experts_compute_no_padding_by_default(name, monkeypatch):
    """`auto` may let ranks repeat an expert rather than idle, but multiplies no zeros."""
    computed = []
    monkeypatch.setattr(
        optimizer, "orthogonalize", lambda x, *args, **options: computed.append(x) or orthogonalize(x, *args, **options)
    )
    on_threads(4, train_once, EXPERTS[name], [(2, 6, 10)], "auto")
    assert all(matrix.any() for x in computed for matrix in x)


def train_once(rank, layout, shapes, mode):
    run = case(layout, shapes, tp_mode=mode)
    return train(rank, run, trajectory(run, ReferenceMuon()))


def test_dense_and_expert_parameters_in_one_optimizer():
    dense = Layout((2, 2), (strided(0, 2), S(0)), ((1, 0), (0, 0)), ("fsdp", "tp"))
    tensors = [
        ((12, 20), dense),
        ((8, 6, 10), EXPERTS["efsdp_ep"]),
        ((12, 20), dense),
        ((5, 6, 10), EXPERTS["many_ranks"]),
    ]
    assert parity_error(Case(tuple(tensors))) <= TOLERANCE
