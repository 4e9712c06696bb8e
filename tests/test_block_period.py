"""`block_period=k`: blocks on all but every k-th step, each kind with its own multiple of the learning rate."""

import math
from dataclasses import replace

import pytest
import torch
from parity import EXACT, TOLERANCE, case, parity_error, set_grad, sharded_params
from ranks import on_threads
from simulated import LAYOUTS, SIMPLE, Layout, S, reference_orthogonalize, relative_error, strided

from dtensor_muon import FusedDim, Muon
from dtensor_muon.members import is_block_step

SHAPES = [(12, 20), (20, 12), (12, 20)]


def test_period_one_is_exact():
    assert parity_error(replace(case(LAYOUTS["fsdp_tp_col"], SHAPES, block_period=1), steps=3)) <= TOLERANCE


def test_without_a_tensor_parallel_axis_every_step_is_exact():
    run = replace(case(LAYOUTS["fsdp0"], SHAPES, block_period=3, block_lr_multiplier=0.5), steps=4)
    assert parity_error(run) <= TOLERANCE


def test_blocks_alone_are_not_exact():
    assert parity_error(replace(case(LAYOUTS["tp_row"], SHAPES, block_period=2), steps=2)) > 0.01


def trained(rank, layout, steps, grads, options, reload_before=None):
    params = sharded_params(rank, [(torch.zeros(shape), layout) for shape in SHAPES])
    optimizer = Muon(params, **EXACT | options)
    results = []
    for step in range(steps):
        if step == reload_before:
            state = optimizer.state_dict()
            optimizer = Muon(params, **EXACT | options)
            optimizer.load_state_dict(state)
        for param, grad in zip(params, grads[step], strict=True):
            param.detach().to_local().zero_()
            set_grad(rank, param, grad, layout)
        optimizer.step()
        results.append([param.detach().to_local().clone() for param in params])
    return results


def expected(layout, block_axis, grads, rank, period, factors):
    """Written by hand: momentum of the whole matrix; on block steps cut by the block axis, then orthogonalized."""
    blocks = Layout(layout.mesh, (), tuple(cut for cut in layout.cuts if cut[0] == block_axis))
    rest = Layout(layout.mesh, (), tuple(cut for cut in layout.cuts if cut[0] != block_axis))
    buffers = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    results = []
    for step, of_step in enumerate(grads):
        whole = step % period == 0
        shards = []
        for index, grad in enumerate(of_step):
            buffers[index] = 0.95 * buffers[index] + 0.05 * grad.double()
            x = 0.95 * buffers[index] + 0.05 * grad.double()
            x = x if whole else blocks.cut(x, rank)
            update = reference_orthogonalize(x, SIMPLE) * math.sqrt(max(x.shape)) * factors[whole] * EXACT["lr"]
            shards.append(-(layout.cut(update, rank) if whole else rest.cut(update, rank)))
        results.append(shards)
    return results


@pytest.mark.parametrize(("name", "block_axis"), [("tp_row", 0), ("fsdp_tp_col", 1), ("fsdp_tp_row", 1)])
@pytest.mark.parametrize("reload_before", [None, 2])
def test_alternates_between_blocks_and_whole_matrices(name, block_axis, reload_before):
    """With a reload in the middle of a period, which goes on where it was."""
    layout = LAYOUTS[name]
    grads = [case(layout, SHAPES).grads(step) for step in range(5)]
    options = {"block_period": 3, "block_lr_multiplier": 0.25, "full_lr_multiplier": 2.0}
    results = on_threads(layout.world, trained, layout, 5, grads, options, reload_before)
    for rank, of_rank in enumerate(results):
        for step, shards in enumerate(expected(layout, block_axis, grads, rank, 3, {True: 2.0, False: 0.25})):
            for got, wanted in zip(of_rank[step], shards, strict=True):
                assert relative_error(got, torch.zeros_like(wanted), wanted) <= TOLERANCE, (rank, step)


def test_state_has_a_step_counter_only_where_it_is_needed():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    assert set(Muon([weight]).state[weight]) == {"momentum_buffer"}
    assert set(Muon([weight], block_period=2).state[weight]) == {"momentum_buffer", "step"}


def test_a_checkpoint_without_a_counter_starts_a_period():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    saved = Muon([weight]).state_dict()
    saved["param_groups"][0]["block_period"] = 2
    optimizer = Muon([weight], block_period=2)
    optimizer.load_state_dict(saved)
    assert optimizer.state[weight]["step"] == 0


def test_a_counter_is_dropped_with_the_option():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    saved = Muon([weight], block_period=2).state_dict()
    saved["param_groups"][0]["block_period"] = 1
    optimizer = Muon([weight])
    optimizer.load_state_dict(saved)
    assert set(optimizer.state[weight]) == {"momentum_buffer"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_period": 0}, "block_period is 0; it must be a whole number of at least 1"),
        ({"block_period": 2.5}, "block_period is 2.5; it must be a whole number of at least 1"),
        ({"block_period": True}, "block_period is True; it must be a whole number of at least 1"),
        ({"block_period": 2, "tp_mode": "blockwise"}, "block_period=2 alternates between blocks and whole matrices"),
        ({"block_lr_multiplier": -1.0}, "block_lr_multiplier is -1.0; it must be a finite number of at least 0"),
        ({"full_lr_multiplier": float("nan")}, "full_lr_multiplier is nan; it must be a finite number of at least 0"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        Muon([torch.nn.Parameter(torch.ones(2, 2))], **options)


def multiplied_heads(rank, layout):
    """The norms of three updates of whole heads from the same gradient, without momentum."""
    (param,) = sharded_params(rank, [(torch.zeros(16, 10), layout)])
    options = {"block_period": 3, "block_lr_multiplier": 0.5, "momentum": 0.0, "nesterov": False}
    optimizer = Muon([param], **EXACT | options, fused=FusedDim((8,), heads=True))
    norms = []
    for _ in range(3):
        param.detach().to_local().zero_()
        set_grad(rank, param, case(layout, [(16, 10)]).grads(0)[0], layout)
        optimizer.step()
        norms.append(float(param.detach().to_local().norm()))
    return norms


@pytest.mark.parametrize("fsdp", [1, 2])
def test_blocks_of_whole_heads_are_whole_matrices(fsdp):
    """FSDP cuts a head of 8 rows or does not; the update and its learning rate are the same."""
    cuts = ((1, 0), (0, 0)) if fsdp > 1 else ((1, 0),)
    layout = Layout((fsdp, 2), (strided(0, 2), S(0)), cuts, ("fsdp", "tp"))
    for norms in on_threads(2 * fsdp, multiplied_heads, layout):
        assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
        assert norms[0] > 0


def test_groups_that_blocks_would_cut_raise_at_construction():
    layout = Layout((2,), (S(0),), ((0, 0),), ("tp",))
    messages = on_threads(2, refused, layout)
    assert "the shards cut through groups" in messages[0]
    assert "no block_period" in messages[0]
    assert messages[1] == messages[0]


def refused(rank, layout):
    (param,) = sharded_params(rank, [(torch.zeros(16, 10), layout)])
    with pytest.raises(NotImplementedError) as caught:
        Muon([("wqkv", param)], block_period=2, fused=FusedDim((8, 4, 4)))
    return str(caught.value)


def test_the_position_is_that_of_trainable_parameters():
    """`torch.distributed.checkpoint` leaves the state of frozen parameters out."""
    frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Muon([frozen, weight], block_period=3)
    saved = optimizer.state_dict()
    saved["state"] = {1: {**saved["state"][1], "step": torch.tensor(2.0)}}
    optimizer.load_state_dict(saved)
    assert is_block_step(optimizer.param_groups[0], optimizer.state)
