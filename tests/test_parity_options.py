"""Options, dtypes and scales: the sharded optimizer follows the formulas of the reference on every rank."""

import math
from dataclasses import replace

import pytest
import torch
from parity import EXACT, TOLERANCE, Case, case, parity_error, reference_of, set_grad, sharded_params, train, trajectory
from ranks import on_threads
from simulated import LAYOUTS, Layout, ReferenceMuon

from dtensor_muon import Muon

SHAPES = [(12, 20), (20, 12), (10, 9), (12, 20)]
LAYOUT = LAYOUTS["fsdp_tp_col"]
MODES = ("auto", "owner", "duplicated", "distributed")

OPTIONS = {
    "decoupled_decay": {"weight_decay": 0.3},
    "l2_decay": {"weight_decay": 0.3, "use_decoupled_weight_decay": False},
    "nesterov_off": {"nesterov": False},
    "momentum_zero": {"momentum": 0.0},
    "momentum_zero_nesterov_off": {"momentum": 0.0, "nesterov": False},
    "momentum_small": {"momentum": 0.5},
    "large_lr": {"lr": 0.5, "weight_decay": 0.1},
    "zero_lr": {"lr": 0.0, "weight_decay": 0.3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_follow_the_formula(options):
    run = replace(case(LAYOUT, SHAPES, **options), steps=3)
    assert parity_error(run) <= TOLERANCE


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_changes_the_reference(options):
    """Else the test above could not fail."""
    default = trajectory(case(LAYOUT, SHAPES), reference_of(EXACT))
    changed = trajectory(case(LAYOUT, SHAPES), reference_of(EXACT | options))
    assert not torch.allclose(default[-1][0][1], changed[-1][0][1])


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"scale_mode": "spectral"}, lambda out, inp: math.sqrt(max(out, inp))),
        ({"scale_mode": "shape_scaling"}, lambda out, inp: math.sqrt(max(1, out / inp))),
        ({"scale_mode": "unit_rms_norm"}, lambda out, inp: math.sqrt(out / inp)),
        ({"extra_scale_factor": 0.2}, lambda out, inp: 0.2 * math.sqrt(max(out, inp))),
    ],
)
@pytest.mark.parametrize("mode", ["owner", "distributed"])
def test_scale_is_that_of_the_global_matrix(options, scale, mode):
    run = case(LAYOUT, SHAPES, tp_mode=mode, **options)
    assert parity_error(run, ReferenceMuon(scale=scale)) <= TOLERANCE


@pytest.mark.parametrize("mode", ["owner", "distributed"])
def test_custom_coefficients(mode):
    triples = [(3.0, -3.2, 1.2), (2.0, -1.5, 0.5), (1.5, -0.5, 0.0)]
    options = {"coefficient_type": "custom", "custom_coefficient_sets": triples, "num_ns_steps": 3, "tp_mode": mode}
    assert parity_error(case(LAYOUT, SHAPES, **options), ReferenceMuon(triples=triples)) <= TOLERANCE


def test_tensor_learning_rate():
    assert parity_error(case(LAYOUT, SHAPES, lr=torch.tensor(0.02), weight_decay=0.3)) <= TOLERANCE


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("mode", ["owner", "duplicated", "distributed"])
def test_scale_of_the_gradients_does_not_matter(scale, mode):
    run = replace(case(LAYOUT, SHAPES, tp_mode=mode), grad_scale=scale)
    ordinary = replace(case(LAYOUT, SHAPES, tp_mode=mode))
    assert parity_error(run) <= TOLERANCE
    for (_, got), (_, wanted) in zip(
        trajectory(run, ReferenceMuon())[-1], trajectory(ordinary, ReferenceMuon())[-1], strict=True
    ):
        torch.testing.assert_close(got, wanted)


def weights_after_zero_gradients(rank, layout, options):
    shapes = [(12, 20), (10, 9), (3, 10), (12, 20)]
    run = case(layout, shapes)
    params = sharded_params(rank, [(weight, layout) for weight in run.weights()])
    before = [param.to_local().clone() for param in params]
    optimizer = Muon(params, lr=0.1, weight_decay=0.0, **options)
    for param, weight in zip(params, run.weights(), strict=True):
        set_grad(rank, param, torch.zeros_like(weight), layout)
    optimizer.step()
    return all(torch.equal(param.to_local(), old) for param, old in zip(params, before, strict=True))


@pytest.mark.parametrize("precision", ["medium", "highest"])
@pytest.mark.parametrize("mode", MODES)
def test_zero_gradients_give_zero_updates(mode, precision):
    options = {"tp_mode": mode, "fp32_matmul_prec": precision}
    assert all(on_threads(LAYOUT.world, weights_after_zero_gradients, LAYOUT, options))


BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16


@pytest.mark.parametrize(
    ("param", "grad", "momentum"),
    [
        (BF16, FP32, None),
        (BF16, FP32, FP32),
        (FP32, BF16, None),
        (FP32, FP32, BF16),
        (BF16, BF16, None),
        (FP16, FP32, FP32),
        (torch.float64, FP32, None),
    ],
)
@pytest.mark.parametrize("mode", ["owner", "distributed"])
def test_mixed_dtypes(param, grad, momentum, mode):
    # small integers and momentum 1/2: every buffer is exact in every dtype, so the reference needs no rounding
    options = {"momentum": 0.5, "momentum_dtype": momentum, "tp_mode": mode}
    run = replace(case(LAYOUT, SHAPES, **options), param_dtype=param, grad_dtype=grad, integer_grads=True)
    assert parity_error(run) <= TOLERANCE


def replicas_of(layout: Layout):
    """Ranks that hold the same shard, by the coordinates that cut it."""
    groups: dict[tuple[int, ...], list[int]] = {}
    axes = sorted({axis for axis, _ in layout.cuts})
    for rank in range(layout.world):
        groups.setdefault(tuple(layout.coordinates(rank)[axis] for axis in axes), []).append(rank)
    return list(groups.values())


@pytest.mark.parametrize("precision", ["medium", "highest"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["replicate", "hsdp", "fsdp_tp_norm"])
def test_replicas_stay_bit_identical(name, mode, precision):
    layout = LAYOUTS[name]
    run = replace(case(layout, [*SHAPES, (3, 10)], tp_mode=mode, fp32_matmul_prec=precision), steps=2)
    path = trajectory(run, ReferenceMuon())
    results = on_threads(run.world, train, run, path)
    assert len(replicas_of(layout)) < layout.world
    for first, *others in replicas_of(layout):
        for other in others:
            for got, wanted in zip(results[other], results[first], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_bf16_precision_is_near_the_reference():
    """The default: five steps of bf16 rounding, so only the size of the error is bounded."""
    run = Case(tuple((shape, LAYOUT) for shape in SHAPES), {"fp32_matmul_prec": "medium"}, steps=1)
    assert 1e-4 < parity_error(run) < 0.1
