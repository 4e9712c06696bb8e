"""`tp_mode="blockwise"`: each tensor-parallel block on its own with its own scale, FSDP undone."""

import math
from dataclasses import replace

import pytest
import torch
from parity import EXACT, TOLERANCE, case, full_tensors, parity_error, sharded_params, train, trajectory
from ranks import on_threads
from simulated import LAYOUTS, SIMPLE, Layout, R, ReferenceMuon, S, reference_orthogonalize, relative_error, strided

from dtensor_muon import Muon

# the mesh axis whose blocks stay apart, by layout
BLOCK_AXIS = {
    "tp_row": 0,
    "unnamed0": 0,
    "fsdp_tp_row": 1,
    "fsdp1_tp_col": 1,
    "fsdp_tp_col": 1,
    "fsdp_tp_col_3x2": 1,
    "hsdp_tp_col": 2,
    "size_one_axes": 1,
}
SHAPES = [(12, 20), (20, 12), (10, 9), (12, 20), (3, 10)]


def expected_shard(layout: Layout, block_axis: int, before, grad, rank):
    """The ten-line reference: cut the block, orthogonalize, scale by the block's shape, cut the rest."""
    blocks = Layout(layout.mesh, (), tuple(cut for cut in layout.cuts if cut[0] == block_axis))
    rest = Layout(layout.mesh, (), tuple(cut for cut in layout.cuts if cut[0] != block_axis))
    block = blocks.cut(grad.double() * (1 - 0.95**2), rank)
    if not block.numel():
        return layout.cut(before.double(), rank)
    update = reference_orthogonalize(block, SIMPLE) * math.sqrt(max(block.shape))
    return layout.cut(before.double(), rank) - EXACT["lr"] * rest.cut(update, rank)


def blockwise_error(layout, shapes, block_axis):
    run = replace(case(layout, shapes, tp_mode="blockwise"), steps=1)
    path = trajectory(run, ReferenceMuon())
    results = on_threads(run.world, train, run, path)
    worst = 0.0
    for rank, ((*shards,),) in enumerate(results):
        for local, (before, _), grad in zip(shards, path[0], run.grads(0), strict=True):
            wanted = expected_shard(layout, block_axis, before, grad, rank)
            worst = max(worst, relative_error(local, layout.cut(before, rank), wanted))
    return worst


@pytest.mark.parametrize("name", BLOCK_AXIS)
def test_matches_the_reference(name):
    assert blockwise_error(LAYOUTS[name], SHAPES, BLOCK_AXIS[name]) <= TOLERANCE


def test_differs_from_the_exact_modes():
    run = replace(case(LAYOUTS["fsdp_tp_col"], [(12, 20)], tp_mode="blockwise"), steps=1)
    assert parity_error(run) > 0.01


@pytest.mark.parametrize("name", ["fsdp0", "hsdp", "fsdp_tp_norm"])
def test_without_a_tensor_parallel_axis_it_is_exact(name):
    assert parity_error(case(LAYOUTS[name], SHAPES, tp_mode="blockwise")) <= TOLERANCE


@pytest.mark.parametrize("axis_name", ["etp", "tensor", "tensor_parallel", "model_parallel"])
def test_names_of_tensor_parallel_axes(axis_name):
    layout = Layout((2, 2), (S(0), S(1)), ((1, 1), (0, 0)), ("fsdp", axis_name))
    assert blockwise_error(layout, [(12, 20)], 1) <= TOLERANCE


def error_of(rank, layout):
    params = sharded_params(rank, [(full_tensors([(12, 20)], 0)[0], layout)])
    try:
        optimizer = Muon([("w", params[0])], tp_mode="blockwise")
        params[0].grad = params[0].detach().clone()
        optimizer.step()
    except NotImplementedError as error:
        return str(error)
    return None


def test_two_unnamed_axes_say_what_to_do():
    (message, *others) = on_threads(4, error_of, LAYOUTS["unnamed_tp_col"])
    assert message.startswith("w (shape (12, 20), placements (_StridedShard(dim=0, sf=2), Shard(dim=0))")
    assert 'tp_mode="blockwise" cannot tell the tensor-parallel axis from the others' in message
    assert others == [message] * 3


def test_tensor_parallel_axis_cut_last_says_what_to_do():
    layout = Layout((2, 2), (S(0), S(0)), ((0, 0), (1, 0)), ("fsdp", "tp"))
    message = on_threads(4, error_of, layout)[0]
    assert "needs the axis 'tp' to be cut before the other axes" in message
    assert "parallelize_module first and fully_shard second" in message


def test_stacks_of_blocks():
    layout = Layout((2, 2), (strided(1, 2), S(1)), ((1, 1), (0, 1)), ("fsdp", "tp"))
    plain = Layout((2, 2), (strided(0, 2), S(0)), ((1, 0), (0, 0)), ("fsdp", "tp"))
    run = replace(case(layout, [(3, 12, 20)], tp_mode="blockwise"), steps=1)
    path = trajectory(run, ReferenceMuon())
    for rank, ((local,),) in enumerate(on_threads(4, train, run, path)):
        for index in range(3):
            before, grad = path[0][0][0][index], run.grads(0)[0][index]
            wanted = expected_shard(plain, 1, before, grad, rank)
            assert relative_error(local[index], plain.cut(before, rank), wanted) <= TOLERANCE


def test_replicated_parameters_are_exact():
    layout = Layout((2, 2), (R(), R()), (), ("fsdp", "tp"))
    assert parity_error(case(layout, SHAPES, tp_mode="blockwise")) <= TOLERANCE
