"""Newton-Schulz on unusual inputs: batches, strides, dtypes, nothing at all, ranks that hold different numbers."""

import pytest
import torch
from numerics import reference, relative_error
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from dtensor_muon.coefficients import get_coefficients
from dtensor_muon.newton_schulz import newton_schulz, orthogonalize


def gaussian(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


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


def test_gradients_are_not_tracked():
    x = gaussian(4, 6).requires_grad_()
    assert not newton_schulz(x).requires_grad


@pytest.mark.parametrize("iteration", ["plain", "gram"])
@pytest.mark.parametrize("shape", [(8, 13), (260, 300)])
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
