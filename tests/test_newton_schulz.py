"""Newton-Schulz on plain matrices against an SVD and against torch.optim.Muon's own iteration."""

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from dtensor_muon import get_supported_coefficient_types, newton_schulz
from dtensor_muon.coefficients import get_coefficients
from dtensor_muon.newton_schulz import matmul_precision

SHAPES = [(8, 8), (6, 20), (20, 6), (1, 9), (9, 1), (3, 6, 10), (2, 2, 10, 6), (130, 200)]


def random(shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def through_svd(x, triples):
    """The iteration acts on singular values alone: apply its polynomials to them, in fp64."""
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag_embed(s) @ vh


def relative(got, wanted):
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [name for name in get_supported_coefficient_types() if name != "custom"])
def test_equals_the_polynomial_of_the_singular_values(name, shape):
    x = random(shape)
    before = x.clone()
    got = newton_schulz(x, 5, name)
    assert got.shape == x.shape
    assert got.dtype == x.dtype
    assert torch.equal(x, before)
    # fp32 rounding, which steps with a ~ 8 amplify; the interval of cans ends at 1, where its polynomial is steepest
    assert relative(got, through_svd(x, get_coefficients(name, 5))) < (1e-2 if name == "cans" else 2e-5)


def test_a_wrong_coefficient_is_seen():
    x = random((6, 20))
    wrong = [(a, b, c * 1.01) for a, b, c in get_coefficients("simple", 5)]
    assert relative(newton_schulz(x, 5, "simple"), through_svd(x, wrong)) > 1e-3


def test_close_to_torchs_own_bf16_iteration():
    x = random((64, 96), dtype=torch.bfloat16)
    theirs = _zeropower_via_newtonschulz(x, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    # two bf16 iterations in different orders
    assert relative(newton_schulz(x, 5, "simple"), theirs) < 3e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e30])
def test_scale_of_the_input_does_not_matter(dtype, scale):
    x = random((12, 20), dtype=dtype)
    # the scaled input itself is rounded, to 2^-8 in bf16
    assert relative(newton_schulz(x * scale), newton_schulz(x)) < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_gives_zero(dtype):
    x = torch.zeros(3, 5, 7, dtype=dtype)
    x[1] = random((5, 7)).to(dtype)
    result = newton_schulz(x)
    assert torch.equal(result[0], x[0])
    assert torch.equal(result[2], x[2])
    assert result[1].norm() > 1


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4), (2, 0, 4)], ids=str)
def test_empty(shape):
    assert newton_schulz(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_element_spoils_its_own_matrix_only(bad):
    x = random((3, 6, 8))
    clean = newton_schulz(x)
    x[1, 2, 3] = bad
    result = newton_schulz(x)
    assert result[1].isnan().all()
    assert torch.allclose(result[[0, 2]], clean[[0, 2]])


def test_dtype_of_the_computation():
    x = random((40, 64), dtype=torch.bfloat16)
    coarse, fine = newton_schulz(x), newton_schulz(x, dtype=torch.float64)
    assert coarse.dtype == fine.dtype == torch.bfloat16
    wanted = through_svd(x, get_coefficients("quintic", 5))
    assert relative(fine, wanted) <= relative(coarse, wanted)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(3), {}, r"x has shape \(3,\); it must be a matrix or a batch of matrices"),
        (torch.zeros(2, 2, dtype=torch.int64), {}, "x.dtype is torch.int64; it must be a real floating point dtype"),
        (torch.zeros(2, 2, dtype=torch.complex64), {}, "x.dtype is torch.complex64"),
        (torch.zeros(2, 2), {"dtype": torch.int32}, "dtype is torch.int32"),
        (torch.zeros(2, 2), {"num_ns_steps": 0}, "num_ns_steps is 0"),
        (torch.zeros(2, 2), {"coefficient_type": "fast"}, "coefficient_type is 'fast'"),
        (
            torch.zeros(2, 2),
            {"iteration": "jordan"},
            "iteration is 'jordan'; it must be one of 'plain', 'gram', 'auto'",
        ),
    ],
)
def test_bad_input(x, options, message):
    with pytest.raises(ValueError, match=message):
        newton_schulz(x, **options)


@pytest.mark.parametrize(("precision", "setting"), [("high", "tf32"), ("highest", "ieee")])
def test_matmul_precision_is_restored(precision, setting):
    backend = torch.backends.cuda.matmul
    former = backend.fp32_precision
    with matmul_precision(precision):
        assert backend.fp32_precision == setting
    assert backend.fp32_precision == former
    with pytest.raises(ValueError, match="precision is 'medium'"), matmul_precision("medium"):
        pass
