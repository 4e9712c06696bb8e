"""The Gram iteration: error bounds on the spectra that break it, its rules, its flops."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_muon import newton_schulz
from dtensor_muon.coefficients import get_coefficients
from dtensor_muon.gram import MIN_ROWS_LOW_PRECISION, choose_iteration, iterate, iteration_flops, segments
from dtensor_muon.symmetric import gram_matrix, symmetric_flops, symmetric_multiply_add

SPECTRA = ("gaussian", "geometric to 1e-4", "geometric to 1e-7", "low rank", "one large", "repeated", "tiny")
SETS = ["simple", "quintic", "polar_express", "aol", "cubic5"]
CASES = [*(((128, 192), name) for name in SETS), ((160, 480), "quintic"), ((256, 384), "polar_express")]


def matrix(spectrum, rows, cols):
    generator = torch.Generator().manual_seed(1)
    gaussian = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    if spectrum == "gaussian":
        return gaussian
    if spectrum == "tiny":
        return gaussian * 1e-25
    u, _, vh = torch.linalg.svd(gaussian, full_matrices=False)
    values = {
        "geometric to 1e-4": torch.logspace(0, -4, rows, dtype=torch.float64),
        "geometric to 1e-7": torch.logspace(0, -7, rows, dtype=torch.float64),
        "low rank": (torch.arange(rows) < rows // 8).double(),
        "one large": torch.where(torch.arange(rows) == 0, 1.0, 1e-3).double(),
        "repeated": torch.where(torch.arange(rows) % 2 == 0, 1.0, 0.1).double(),
    }[spectrum]
    return u @ torch.diag(values) @ vh


def reference(x, triples):
    y = x.double() / x.double().norm()
    for a, b, c in triples:
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y


class Bf16Products(TorchDispatchMode):
    """Rounds every product to bf16, as hardware does that multiplies bf16 with fp32 sums."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.name().split("::")[1].split(".")[0] not in ("mm", "addmm", "bmm", "baddbmm"):
            return func(*args, **kwargs)
        out = kwargs.get("out")
        wide = [arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args]
        rest = {key: value for key, value in kwargs.items() if key != "out"}
        packet = getattr(torch.ops.aten, func.name().split("::")[1].split(".")[0])
        result = packet(*wide, **rest).to(args[0].dtype)
        return result if out is None else out.copy_(result)


def in_bf16(x, coefficient_segments):
    """The iteration as a device with bf16 products runs it; this machine may multiply in fp32 instead."""
    with Bf16Products():
        x = (x / x.norm()).to(torch.bfloat16)
        return iterate(x, coefficient_segments, other=torch.empty_like(x), spare=[])


def error(got, wanted):
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("shape", "name"), CASES, ids=str)
def test_bf16_error_stays_within_its_bound_on_every_spectrum(shape, name):
    triples = get_coefficients(name, 5)
    assert choose_iteration(*shape, triples, torch.bfloat16, "meta") in ("plain", "gram")
    for spectrum in SPECTRA:
        x = matrix(spectrum, *shape)
        wanted = reference(x, triples)
        plain = error(in_bf16(x, [(triple,) for triple in triples]), wanted)
        gram = error(in_bf16(x, segments(triples, torch.bfloat16)), wanted)
        assert gram <= max(3e-2, 4 * plain), (spectrum, plain, gram)


@pytest.mark.parametrize("name", SETS)
def test_fp32_error_stays_below_1e_4(name):
    triples = get_coefficients(name, 5)
    for spectrum in SPECTRA:
        x = matrix(spectrum, 128, 256)
        got = newton_schulz(x.float(), 5, name, iteration="gram")
        assert error(got, reference(x, triples)) <= 1e-4, spectrum


def test_without_restarts_bf16_explodes():
    """The negative control of the bound above."""
    triples = get_coefficients("quintic", 5)
    x = matrix("geometric to 1e-7", 128, 256)
    assert not error(in_bf16(x, [triples]), reference(x, triples)) < 1


@pytest.mark.parametrize(("name", "fits"), [("quintic", True), ("simple", True), ("cans", False)])
def test_auto_takes_gram_only_where_its_bound_holds(name, fits):
    triples = get_coefficients(name, 5)
    assert (choose_iteration(512, 2048, triples, torch.bfloat16) == "gram") == fits
    assert choose_iteration(2048, 512, triples, torch.bfloat16) == choose_iteration(512, 2048, triples, torch.bfloat16)
    assert choose_iteration(512, 2048, triples, torch.float32) == "plain"
    assert choose_iteration(512, 512, triples, torch.bfloat16) == "plain"
    assert choose_iteration(MIN_ROWS_LOW_PRECISION - 1, 4096, triples, torch.bfloat16) == "plain"


def test_gram_of_a_batch_equals_each_alone():
    x = torch.stack([matrix(spectrum, 16, 40) for spectrum in SPECTRA]).float()
    together = newton_schulz(x, iteration="gram")
    for index in range(len(x)):
        assert torch.allclose(together[index], newton_schulz(x[index], iteration="gram"), atol=1e-5)


class Flops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        if name in ("mm", "bmm"):
            self.total += 2 * args[0].numel() * args[1].shape[-1]
        elif name in ("addmm", "baddbmm"):
            self.total += 2 * args[1].numel() * args[2].shape[-1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("iteration", ["plain", "gram", "auto"])
@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (64, 64), (130, 300), (300, 256), (512, 1376)], ids=str)
@pytest.mark.parametrize("name", ["simple", "cubic5"])
def test_predicted_flops_are_those_that_run(shape, iteration, name):
    x = torch.randn(3, *shape, dtype=torch.bfloat16)
    with Flops() as counted:
        newton_schulz(x, 5, name, iteration=iteration)
    assert counted.total == 3 * iteration_flops(*shape, get_coefficients(name, 5), iteration)


@pytest.mark.parametrize("rows", [5, 128, 256, 300, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_symmetric_products(rows, dtype):
    x = torch.randn(2, rows, 40, dtype=dtype)
    out = torch.empty(2, rows, rows, dtype=dtype)
    gram = gram_matrix(x, out=out)
    # one ulp of a sum of 40 or of `rows` products in another order
    tolerance = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-10}
    assert torch.allclose(gram, x @ x.mT, **tolerance)
    square = symmetric_multiply_add(gram, gram, gram, beta=0.5, alpha=1e-3, out=torch.empty_like(gram))
    assert torch.allclose(square, 0.5 * gram + 1e-3 * gram @ gram, **tolerance)


def test_mirrored_blocks_are_not_multiplied():
    x = torch.randn(512, 64)
    with Flops() as counted:
        gram_matrix(x, out=torch.empty(512, 512))
    assert counted.total == symmetric_flops(512, 64, "cpu")
    assert counted.total < 0.7 * 2 * 512 * 512 * 64
