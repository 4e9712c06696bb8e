"""Every coefficient set on the whole zoo of spectra, through the public entry, and the flops of every choice."""

import importlib

import pytest
import torch
from numerics import CountFlops, TensorCoreProducts, reference, relative_error, zoo

from dtensor_muon.coefficients import get_coefficients
from dtensor_muon.gram import choose_iteration, gram_polynomial, iteration_flops, segments
from dtensor_muon.newton_schulz import newton_schulz, orthogonalize

# the package exports a function of that name, which hides the module from a plain import
module = importlib.import_module("dtensor_muon.newton_schulz")

# cans ends its interval at 1 without a margin: in bf16 even its plain iteration explodes on some spectra
SETS = [("quintic", 5), ("simple", 5), ("polar_express", 5), ("polar_express", 8), ("aol", 4), ("deepseekv4", 10),
        ("cubic5", 5), ("simple", 2), ("simple", 3), ("quintic", 4)]  # fmt: skip
LARGE = [("quintic", 5), ("simple", 5), ("polar_express", 5), ("aol", 4)]
CASES = [(*one, shape) for one in SETS for shape in ((16, 24), (64, 512))] + [(*one, (256, 384)) for one in LARGE]
QUINTIC = get_coefficients("quintic", 5)
DEFAULT_SHAPES = ((512, 512, 8), (1376, 512, 4), (512, 1376, 4))


@pytest.fixture
def native_bf16(monkeypatch):
    monkeypatch.setattr(module, "_cpu_multiplies_bf16", lambda: True)
    with TensorCoreProducts():
        yield


def bf16_errors(x: torch.Tensor, name: str, steps: int) -> tuple[float, float]:
    """The errors of plain and Gram against the fp64 iteration, both from the same bf16 matrix."""
    low = (x / x.abs().max()).bfloat16()
    expected = reference(low, get_coefficients(name, steps))
    plain, gram = (
        relative_error(newton_schulz(low, steps, name, iteration=iteration), expected)
        for iteration in ("plain", "gram")
    )
    return plain, gram


@pytest.mark.usefixtures("native_bf16")
@pytest.mark.parametrize(("name", "steps", "shape"), CASES)
def test_bf16_bound(name, steps, shape):
    for spectrum, x in zoo(*shape).items():
        plain, gram = bf16_errors(x, name, steps)
        assert gram <= max(3e-2, 4 * plain), (spectrum, plain, gram)


@pytest.mark.usefixtures("native_bf16")
def test_bf16_bound_at_the_default_shapes():
    matrices = zoo(512, 1376)
    for spectrum in ("gaussian", "geometric_1e-4", "geometric_1e-7", "all_equal"):
        x = matrices[spectrum]
        plain, gram = bf16_errors(x, "quintic", 5)
        assert gram <= max(3e-2, 4 * plain), (spectrum, plain, gram)


@pytest.mark.parametrize(("name", "steps", "shape"), CASES)
def test_fp32_bound(name, steps, shape):
    for spectrum, x in zoo(*shape).items():
        single = (x / x.norm()).float() if spectrum != "tiny_norm" else x.float()
        triples = get_coefficients(name, steps)
        gram = relative_error(newton_schulz(single, steps, name, iteration="gram"), reference(single, triples))
        plain = relative_error(newton_schulz(single, steps, name), reference(single, triples))
        # the plain iteration itself passes 1e-4 for singular values that are zero to fp32, mostly in many steps
        assert gram <= max(1e-4, 4 * plain), (spectrum, plain, gram)
        if (name, spectrum) == ("quintic", "gaussian"):
            assert gram <= 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [(3, 40, 64), (64, 40), (2, 260, 390), (40, 40), (1, 9)])
@pytest.mark.parametrize(("name", "steps"), SETS)
def test_equals_the_loop_at_every_shape(dtype, tolerance, shape, name, steps):
    if dtype == torch.bfloat16 and module._cpu_multiplies_bf16():
        pytest.skip("the tolerance holds where bf16 is multiplied in fp32")
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(dtype)
    result = newton_schulz(x, steps, name, iteration="gram")
    for value, matrix in zip(result.reshape(-1, *shape[-2:]), x.reshape(-1, *shape[-2:]), strict=True):
        assert relative_error(value, reference(matrix, get_coefficients(name, steps))) < tolerance


@pytest.mark.parametrize("num_steps", range(1, 11))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_segments_cover_the_steps_in_order(num_steps, dtype):
    triples = tuple((float(step), 0.0, 1.0) for step in range(num_steps))
    cut = segments(triples, dtype)
    assert sum(cut, ()) == triples
    assert all(1 <= len(segment) <= 2 for segment in cut)
    assert sorted(map(len, cut)) == sorted(map(len, segments(triples, torch.float64)))


def test_segments_of_five():
    assert [len(segment) for segment in segments(QUINTIC, torch.bfloat16)] == [1, 2, 2]
    assert [len(segment) for segment in segments(QUINTIC, torch.float32)] == [2, 2, 1]


@pytest.mark.parametrize("length", [1, 2, 3, 5])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_gram_polynomial_takes_the_steps_of_a_segment(length, batch):
    x = torch.randn(*batch, 30, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    gram = x @ x.mT
    result = gram_polynomial(gram, QUINTIC[:length], []) @ x
    for value, matrix in zip(result.reshape(-1, 30, 50), x.reshape(-1, 30, 50), strict=True):
        assert relative_error(value, reference(matrix, QUINTIC[:length])) < 1e-12


def test_gram_polynomial_of_nothing():
    with pytest.raises(ValueError, match="segment is empty"):
        gram_polynomial(torch.eye(2), (), [])


@pytest.mark.parametrize("iteration", ["plain", "gram", "auto"])
@pytest.mark.parametrize(("name", "steps"), [*SETS, ("cans", 5), ("simple", 1)])
@pytest.mark.parametrize("shape", [(2, 512, 700), (700, 512), (3, 130, 260), (260, 130), (64, 64), (1, 5)])
def test_predicted_flops_are_the_executed_ones(iteration, name, steps, shape):
    triples, x = get_coefficients(name, steps), torch.empty(shape, dtype=torch.bfloat16, device="meta")
    with CountFlops() as count:
        orthogonalize(x if x.ndim == 3 else x[None], triples, iteration=iteration)
    per_matrix = iteration_flops(*shape[-2:], triples, iteration, device_type="meta")
    assert count.flops == per_matrix * (shape[0] if len(shape) == 3 else 1)


@pytest.mark.parametrize("iteration", ["plain", "gram", "auto"])
@pytest.mark.parametrize("shape", [(1, 512, 800), (800, 512), (2, 130, 260), (8, 8)])
def test_predicted_flops_are_the_executed_ones_on_this_cpu(iteration, shape):
    x = torch.ones(shape, dtype=torch.bfloat16)
    with CountFlops() as count:
        newton_schulz(x, iteration=iteration)
    assert count.flops == iteration_flops(*shape[-2:], QUINTIC, iteration) * (shape[0] if len(shape) == 3 else 1)


def test_the_default_shapes_need_at_most_0_70_of_the_full_flops():
    full = sum(n * 5 * (4 * min(r, c) ** 2 * max(r, c) + 2 * min(r, c) ** 3) for r, c, n in DEFAULT_SHAPES)
    assert sum(n * iteration_flops(r, c, QUINTIC, "auto") for r, c, n in DEFAULT_SHAPES) <= 0.70 * full


@pytest.mark.parametrize(("name", "steps"), [pair for pair in SETS if pair[1] >= 3])
def test_auto_takes_every_set_that_tolerates_noise(name, steps):
    assert choose_iteration(512, 4096, get_coefficients(name, steps), torch.bfloat16) == "gram"


def test_auto_is_the_chosen_iteration():
    x = torch.randn(1, 260, 520, generator=torch.Generator().manual_seed(0))
    for dtype, chosen in ((torch.bfloat16, "gram"), (torch.float32, "plain")):
        runs = {which: newton_schulz(x, iteration=which, dtype=dtype) for which in ("plain", "gram", "auto")}
        assert torch.equal(runs["auto"], runs[chosen])
        assert not torch.equal(runs["plain"], runs["gram"])
