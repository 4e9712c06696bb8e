"""Convolution weights `[out, in, *kernel]` as matrices, grouped and depthwise ones as stacks of matrices."""

from dataclasses import replace

import pytest
import torch
from parity import EXACT, TOLERANCE, Case, Fused, case, parity_error, sharded_params
from ranks import on_threads
from simulated import LAYOUTS, Layout, ReferenceMuon, S, relative_error

from dtensor_muon import FusedDim, Muon


class FlatReference(ReferenceMuon):
    """The reference on `[out, in * kernel]`."""

    def step(self, param, grad, state):
        return super().step(param.flatten(1), grad.flatten(1), state).reshape(param.shape)


# two of a shape share a bucket; one wide, one tall, one with a single output channel, one of a 1-D convolution
SHAPES = [(8, 4, 3, 3), (8, 4, 3, 3), (40, 4, 1, 1), (1, 4, 3, 3), (10, 8, 5), (6, 4, 2, 2, 2)]
FLAT_LAYOUTS = ["fsdp0", "fsdp1", "fsdp0_of_3", "fsdp_tp_col", "fsdp_tp_row", "hsdp", "tp_row", "one_rank"]


@pytest.mark.parametrize("name", FLAT_LAYOUTS)
@pytest.mark.parametrize("mode", ["auto", "distributed"])
def test_flattened_convolutions_match_unsharded(name, mode):
    run = case(LAYOUTS[name], SHAPES, flatten=True, tp_mode=mode, weight_decay=0.1)
    assert parity_error(run, FlatReference(weight_decay=0.1)) <= TOLERANCE


def test_a_stack_of_kernels_is_not_a_matrix():
    """Without `flatten` the last two dims are the matrices."""
    run = replace(case(LAYOUTS["fsdp0"], SHAPES[:2]), steps=1)
    assert parity_error(run) <= TOLERANCE
    assert parity_error(run, FlatReference()) > 0.1


def test_two_convolutions_do_not_mix():
    alone = parity_error(case(LAYOUTS["fsdp0"], SHAPES[:1], flatten=True), FlatReference())
    together = parity_error(case(LAYOUTS["fsdp0"], SHAPES[:1] * 2, flatten=True), FlatReference())
    assert max(alone, together) <= TOLERANCE


GROUPED = {
    "grouped": (FusedDim((4,), num_groups=2, heads=True), (8, 3, 3, 3), 4),
    "depthwise": (FusedDim((1,), heads=True), (8, 1, 3, 3), 1),
    "depthwise, two a channel": (FusedDim((2,), heads=True), (8, 1, 3, 3), 2),
}


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("name", ["fsdp0", "fsdp0_of_3", "hsdp"])
def test_grouped_convolutions_are_stacks(kind, name):
    description, shape, rows = GROUPED[kind]
    matrices = tuple((torch.arange(first, first + rows),) for first in range(0, shape[0], rows))
    run = Case(((shape, LAYOUTS[name]),) * 2, {"flatten": True}, (Fused(description, matrices),) * 2)
    assert parity_error(run, FlatReference()) <= TOLERANCE


def test_channels_last_memory():
    """A gradient in another memory format has the same elements."""
    full, grad = torch.randn(2, 8, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Parameter(full.to(memory_format=torch.channels_last))
    weight.grad = grad.clone()
    Muon([weight], **EXACT, flatten=True).step()
    wanted = FlatReference().step(full, grad, {})
    assert relative_error(weight.detach(), full, wanted) <= TOLERANCE


def flat_error(rank, layout, shape):
    (param,) = sharded_params(rank, [(torch.ones(shape), layout)])
    try:
        Muon([("conv", param)], flatten=True)
    except NotImplementedError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("shape", "dim", "message"),
    [
        ((8, 3, 3, 3), 1, "axis fsdp of 2 ranks cuts dim 1 of 3; shard dim 0"),
        ((8, 4, 3, 3), 2, "axis fsdp of 2 ranks cuts dim 2 of 3; shard dim 0"),
    ],
)
def test_cuts_that_no_matrix_has(shape, dim, message):
    messages = on_threads(2, flat_error, Layout((2,), (S(dim),), ((0, dim),), ("fsdp",)), shape)
    assert messages[0].startswith(f"conv (shape {shape}, placements (Shard(dim={dim}),)): flatten=True needs shards")
    assert messages[0].endswith(message)
    assert messages == messages[:1] * 2


def test_input_channels_on_two_axes():
    layout = Layout((2, 2), (S(1), S(1)), ((0, 1), (1, 1)), ("a", "b"))
    assert on_threads(4, flat_error, layout, (8, 4, 3, 3))[0].endswith(
        "flatten=True allows one mesh axis to shard the input channels; shard dim 0"
    )
