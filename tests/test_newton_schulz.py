import pytest
import torch
from numerics import reference, relative_error
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.optim._muon import _zeropower_via_newtonschulz

from dtensor_muon.coefficients import get_coefficients
from dtensor_muon.functional import get_muon_scale_factor
from dtensor_muon.newton_schulz import matmul_precision, newton_schulz, orthogonalize

SETS = [("simple", 5), ("quintic", 5), ("polar_express", 8), ("cans", 5), ("aol", 4), ("deepseekv4", 10), ("cubic5", 5)]
SHAPES = [(24, 40), (40, 24), (32, 32), (1, 9), (9, 1), (1, 1), (300, 280), (270, 520)]


def gaussian(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize(("name", "steps"), SETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_fp64_loop(name, steps, shape):
    x = gaussian(*shape)
    expected = reference(x, get_coefficients(name, steps))
    # fp32 rounding, multiplied by the slope of the whole iteration; that of cans at 1, all that one row has, is 1e5
    tolerance = 1e-2 if name == "cans" and min(shape) == 1 else 3e-5
    assert relative_error(newton_schulz(x, steps, name), expected) < tolerance


def test_negative_control_one_step_less_is_seen():
    x = gaussian(24, 40)
    assert relative_error(newton_schulz(x, 4, "quintic"), reference(x, get_coefficients("quintic", 5))) > 1e-2


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (300, 400)])
def test_equals_torch_muon(shape):
    x = gaussian(*shape)
    expected = _zeropower_via_newtonschulz(x, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    # torch computes in bf16: eps 4e-3, a few products deep
    assert relative_error(newton_schulz(x, 5, "simple"), expected.double()) < 5e-2


def test_long_iterations_reach_the_polar_factor():
    x = gaussian(24, 60, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    assert relative_error(newton_schulz(x, 20, "polar_express"), u @ vh) < 1e-9


@pytest.mark.parametrize("shape", [(3, 24, 40), (2, 3, 40, 24), (3, 260, 280)])
def test_batches_equal_their_matrices(shape):
    x = gaussian(*shape)
    result = newton_schulz(x)
    assert result.shape == x.shape
    for matrix, expected in zip(result.flatten(0, -3), x.flatten(0, -3), strict=True):
        torch.testing.assert_close(matrix, newton_schulz(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (280, 260)])
def test_returns_the_dtype_of_the_input_and_leaves_it_alone(dtype, shape):
    x = gaussian(*shape, dtype=dtype)
    before = x.clone()
    for compute_dtype in (None, torch.bfloat16, torch.float32):
        result = newton_schulz(x, dtype=compute_dtype)
        assert result.dtype == dtype
        assert relative_error(result, reference(before, get_coefficients("quintic", 5))) < 2e-2
    assert torch.equal(x, before)


def test_non_contiguous_input():
    x = gaussian(80, 3, 60)[::2].transpose(0, 1)[..., ::2]
    torch.testing.assert_close(newton_schulz(x), newton_schulz(x.contiguous()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [1e-30, 1e-38, 1e30, 3e36])
@pytest.mark.parametrize("shape", [(24, 40), (2, 40, 24)])
def test_scale_does_not_matter(dtype, scale, shape):
    x = gaussian(*shape, dtype=dtype)
    scaled = x * scale
    assert torch.isfinite(scaled).all()
    # scaling itself rounds the entries: to eps, or to whole subnormals at 1e-38
    tolerance = {torch.bfloat16: 3e-2, torch.float32: 1e-5 if scale != 1e-38 else 1e-4}[dtype]
    assert relative_error(newton_schulz(scaled), newton_schulz(x).double()) < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("exponent", [-100, 100])
def test_powers_of_two_change_no_bit(dtype, exponent):
    x = gaussian(24, 40, dtype=dtype)
    assert torch.equal(newton_schulz(x * 2.0**exponent), newton_schulz(x))


@pytest.mark.parametrize("iteration", ["plain", "gram"])
@pytest.mark.parametrize("shape", [(3, 5), (2, 5, 3), (260, 400)])
def test_zero_gives_zero(iteration, shape):
    assert torch.equal(newton_schulz(torch.zeros(shape), iteration=iteration), torch.zeros(shape))


@pytest.mark.parametrize("iteration", ["plain", "gram", "auto"])
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (0, 3, 4), (2, 0, 4), (0, 300, 400)])
def test_empty(iteration, shape):
    assert newton_schulz(torch.empty(shape), iteration=iteration).shape == shape
    if len(shape) == 3:
        assert orthogonalize(torch.empty(shape), ((2.0, -1.5, 0.5),), iteration=iteration).shape == shape


@pytest.mark.parametrize("iteration", ["plain", "gram"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("shape", [(3, 6, 10), (3, 260, 400)])
def test_non_finite_stays_in_its_matrix(iteration, bad, shape):
    x = gaussian(*shape)
    x[1, 0, 0] = bad
    result = newton_schulz(x, iteration=iteration)
    assert not torch.isfinite(result[1]).all()
    assert torch.isfinite(result[0]).all()
    assert torch.isfinite(result[2]).all()


def test_bad_input():
    matrix = torch.ones(2, 3)
    for x, options, message in [
        (torch.ones(3), {}, r"x has shape \(3,\); it must be a matrix or a batch of matrices"),
        (torch.tensor(1.0), {}, r"x has shape \(\); it must be a matrix"),
        (matrix.int(), {}, r"x.dtype is torch.int32; it must be a real floating point dtype"),
        (matrix.to(torch.complex64), {}, r"x.dtype is torch.complex64; it must be a real floating point dtype"),
        (matrix, {"dtype": torch.int8}, r"dtype is torch.int8; it must be a real floating point dtype"),
        (matrix, {"iteration": "grams"}, r"iteration is 'grams'; it must be one of 'plain', 'gram', 'auto'"),
        (matrix, {"num_ns_steps": 0}, r"num_ns_steps is 0"),
        (matrix, {"coefficient_type": "x"}, r"coefficient_type is 'x'"),
    ]:
        with pytest.raises(ValueError, match=message):
            newton_schulz(x, **options)


def test_gradients_are_not_tracked():
    x = gaussian(4, 6).requires_grad_()
    assert not newton_schulz(x).requires_grad


@pytest.mark.parametrize("iteration", ["plain", "gram"])
@pytest.mark.parametrize("shape", [(8, 13), (300, 450)])
def test_simulated_ranks_may_hold_different_numbers_of_matrices(iteration, shape):
    triples = get_coefficients("quintic", 5)
    with LocalTensorMode(3):
        stacks = {rank: gaussian(rank, *shape) for rank in range(3)}
        result = orthogonalize(LocalTensor(stacks), triples, iteration=iteration)
        locals_ = [result._local_tensors[rank] for rank in range(3)]
    assert [local.shape[0] for local in locals_] == [0, 1, 2]
    for rank in (1, 2):
        expected = orthogonalize(stacks[rank], triples, iteration=iteration)
        torch.testing.assert_close(locals_[rank], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("precision", "setting"), [("high", "tf32"), ("highest", "ieee")])
def test_matmul_precision_is_restored(precision, setting):
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    former = [backend.fp32_precision for backend in backends]

    def fail_inside() -> None:
        with matmul_precision(precision):
            assert [backend.fp32_precision for backend in backends] == [setting] * 2
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert [backend.fp32_precision for backend in backends] == former
    assert torch.get_float32_matmul_precision() == "highest"


def test_unknown_matmul_precision():
    with (
        pytest.raises(ValueError, match="precision is 'medium'; it must be one of 'high', 'highest'"),
        matmul_precision("medium"),
    ):
        pass


@pytest.mark.parametrize(
    ("mode", "size_out", "size_in", "expected"),
    [("spectral", 4, 9, 3.0), ("spectral", 16, 9, 4.0), ("shape_scaling", 4, 9, 1.0), ("shape_scaling", 36, 9, 2.0),
     ("unit_rms_norm", 36, 9, 2.0), ("unit_rms_norm", 9, 36, 0.5)],
)  # fmt: skip
def test_scale_factor(mode, size_out, size_in, expected):
    assert get_muon_scale_factor(size_out, size_in, mode) == expected


@pytest.mark.parametrize("mode", ["spectral", "shape_scaling", "unit_rms_norm"])
def test_scale_factor_of_nothing(mode):
    assert get_muon_scale_factor(0, 5, mode) == get_muon_scale_factor(5, 0, mode) == 0.0


def test_unknown_scale_mode():
    message = "scale mode is 'rms'; it must be one of 'spectral', 'shape_scaling', 'unit_rms_norm'"
    with pytest.raises(ValueError, match=message):
        get_muon_scale_factor(2, 3, "rms")
