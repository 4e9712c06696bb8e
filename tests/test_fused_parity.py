"""Fused weights equal separate parameters on every layout, whether the shards fall on groups or cut through them."""

from dataclasses import replace

import pytest
import torch
from parity import (
    EXACT,
    TOLERANCE,
    Case,
    Fused,
    fused_weight,
    parity_error,
    rows_of_parts,
    set_grad,
    sharded_params,
    train,
    trajectory,
    worst_error,
)
from ranks import on_threads
from simulated import LAYOUTS, Layout, R, ReferenceMuon, S, strided

from dtensor_muon import FusedDim, Muon

# name: description by hand, rows or columns that it covers
FORMS = {
    "contiguous": (fused_weight((8, 2, 2), 1), (12, 10)),
    "q, k, v per query group": (fused_weight((2, 1, 1), 4), (16, 10)),
    "gated: q, gate, k, v": (fused_weight((2, 2, 1, 1), 4, given=4), (24, 10)),
    "gate and up row by row": (fused_weight((1, 1), 8), (16, 6)),
    "contiguous gate and up": (fused_weight((8, 8), 1), (16, 6)),
    "flux linear1: q, k, v, mlp": (fused_weight((3, 3, 3, 12), 1), (21, 5)),
    "flux linear2, columns": (fused_weight((4, 8), 1, dim=1), (5, 12)),
    "columns per group": (fused_weight((2, 1), 4, dim=1), (10, 12)),
    "latent attention wkv_b: two matrices": (fused_weight((3, 2), 4), (20, 6)),
    "heads": (fused_weight((4,), 4, heads=True), (16, 10)),
    "heads of an output projection": (fused_weight((4,), 4, dim=1, heads=True), (10, 16)),
    "heads of q, k, v": (fused_weight((2, 1, 1), 4, heads=True), (16, 10)),
    "five heads": (fused_weight((3,), 5, heads=True), (15, 7)),
    "three groups": (fused_weight((4, 2, 2), 3), (24, 9)),
}


ALL = tuple(FORMS.values())


def fused_case(layout, forms=ALL, **options):
    """Two of every other form, so that parts are batched across parameters, and a plain matrix of a part's shape."""
    plain = (*forms[0][1][:-2], 8, 10)
    several = [form for index, form in enumerate(forms) for _ in range(2 - index % 2)]
    tensors = [(shape, layout) for _, shape in several] + [(plain, layout)]
    descriptions = [description for description, _ in several] + [None]
    return replace(Case(tuple(tensors), options, tuple(descriptions)), steps=1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_separate_parameters(name):
    assert parity_error(fused_case(LAYOUTS[name], weight_decay=0.1)) <= TOLERANCE


@pytest.mark.parametrize("name", ["fsdp_tp_col", "hsdp_tp_row", "fsdp0_of_3"])
def test_equals_separate_parameters_over_two_steps_and_duplicated(name):
    assert parity_error(replace(fused_case(LAYOUTS[name], tp_mode="duplicated"), steps=2)) <= TOLERANCE


@pytest.mark.parametrize("name", ["fsdp0", "fsdp_tp_col"])
def test_aligned_parts_stay_sharded_in_distributed_mode(name):
    forms = [FORMS[form] for form in ("q, k, v per query group", "gate and up row by row", "flux linear2, columns")]
    assert parity_error(fused_case(LAYOUTS[name], forms, tp_mode="distributed")) <= TOLERANCE


@pytest.mark.parametrize("scale_mode", ["shape_scaling", "unit_rms_norm"])
@pytest.mark.parametrize("name", ["fsdp0", "fsdp_tp_row"])
def test_each_part_has_the_scale_of_its_own_global_shape(name, scale_mode):
    scales = {"shape_scaling": lambda m, n: max(1.0, m / n) ** 0.5, "unit_rms_norm": lambda m, n: (m / n) ** 0.5}
    run = fused_case(LAYOUTS[name], scale_mode=scale_mode)
    assert parity_error(run, ReferenceMuon(scale=scales[scale_mode])) <= TOLERANCE


EXPERTS = {
    "fsdp": Layout((4,), (S(0),), ((0, 0),), ("fsdp",)),
    "efsdp_ep": Layout((2, 2), (strided(0, 2), S(0)), ((1, 0), (0, 0)), ("efsdp", "ep")),
    "many_ranks": Layout((2, 2), (S(1), S(0)), ((1, 0), (0, 1)), ("efsdp", "ep")),
    "tp_rows": Layout((4,), (S(1),), ((0, 1),), ("tp",)),
    "tp_cols": Layout((4,), (S(2),), ((0, 2),), ("tp",)),
    "etp_rows": Layout((2, 2, 2), (strided(1, 2), S(0), S(1)), ((1, 0), (2, 1), (0, 1)), ("efsdp", "ep", "etp")),
    "hsdp_ep": Layout((2, 1, 2), (R(), strided(0, 2), S(0)), ((2, 0),), ("dp_replicate", "efsdp", "ep")),
}


@pytest.mark.parametrize("name", EXPERTS)
def test_stacks_of_fused_experts(name):
    stacks = [(description, (3 + index % 2, *shape)) for index, (description, shape) in enumerate(ALL)]
    run = Case(tuple((shape, EXPERTS[name]) for _, shape in stacks), {}, tuple(form for form, _ in stacks), steps=1)
    assert parity_error(run) <= TOLERANCE


@pytest.mark.parametrize("name", ["fsdp0", "replicate"])
def test_a_fused_weight_as_one_matrix_fails_parity(name):
    """The mistake that parity must notice."""
    run = fused_case(LAYOUTS[name])
    path = trajectory(run, ReferenceMuon(weight_decay=0.0))
    whole = replace(run, fused=())
    results = on_threads(run.world, train, whole, path)
    assert worst_error(run, path, results) > 0.1


@pytest.mark.parametrize("name", ["fsdp0", "fsdp_tp_col"])
def test_a_neighbouring_group_size_fails_parity(name):
    """Rows given to the wrong part are noticed."""
    description, shape = FORMS["q, k, v per query group"]
    wrong = Fused(FusedDim((1, 2, 1)), description.matrices)
    assert parity_error(fused_case(LAYOUTS[name], [(wrong, shape)])) > 0.1


def refusal(rank, layout, description, shape, mode):
    """The message of what a step raised."""
    full, grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)), torch.eye(*shape)
    (param,) = sharded_params(rank, [(full, layout)])
    param.fused_dim = description
    try:
        optimizer = Muon([("wqkv", param)], **EXACT, tp_mode=mode)
        set_grad(rank, param, grad, layout)
        optimizer.step()
    except NotImplementedError as error:
        return str(error)
    return None


def test_a_block_between_groups_is_split_alone():
    """Two query groups a rank: each rank's block holds a q of 4 rows, a k and a v of 2."""
    layout, shape = LAYOUTS["fsdp_tp_col"], (16, 10)
    run = replace(fused_case(layout, [(FORMS["q, k, v per query group"][0], shape)], tp_mode="blockwise"), steps=1)
    blocks = []
    for first in (0, 8):
        rows = [[first + row for row in part] for part in rows_of_parts((2, 1, 1), 2)]
        blocks += [(..., torch.tensor(part), slice(None)) for part in rows]
    block = Fused(run.fused[0].attribute, tuple(blocks))
    plain = Fused(None, tuple((..., torch.arange(first, first + 4), slice(None)) for first in (0, 4)))
    expected = replace(run, fused=(block, block, plain))
    path = trajectory(expected, ReferenceMuon())
    assert worst_error(run, path, on_threads(run.world, train, run, path)) <= TOLERANCE


@pytest.mark.parametrize("mode", ["distributed", "blockwise"])
def test_modes_that_cannot_split_say_so(mode):
    layout = Layout((4,), (S(0),), ((0, 0),), ("tp",))
    messages = on_threads(4, refusal, layout, FusedDim((8, 4, 4)), (16, 10), mode)
    assert messages[0] == (
        "wqkv (shape (16, 10), placements (Shard(dim=0),), fused sizes (8, 4, 4) in 1 groups): the shards cut through "
        f'groups, so tp_mode={mode!r} cannot split it; choose tp_mode="auto" or "owner" and no block_period, or shard '
        "it between groups"
    )
    assert messages == messages[:1] * 4
