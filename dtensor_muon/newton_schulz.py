"""Newton-Schulz orthogonalization of plain matrices, alone or in batches.

`X <- X / ||X||_F`, then once per coefficient triple `(a, b, c)`: `A = X X^T`, `X <- a X + (b A + c A^2) X`, on the
short side of the matrix; or the same steps as polynomials in the Gram matrix (`dtensor_muon.gram`).
"""

import functools
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dtensor_muon.coefficients import CoefficientTriple, get_coefficients
from dtensor_muon.gram import MIN_ROWS_LOW_PRECISION, choose_iteration, iterate, segments
from dtensor_muon.symmetric import buffer_like

ITERATIONS = ("plain", "gram", "auto")

# On one core a loop of mm takes 3.0 ms where bmm takes 3.8 ms a matrix at 512x512 (fp32), they tie at 256x256, and bmm
# wins below, where the calls cost more than the products.
_MIN_ROWS_ONE_BY_ONE = 256


def newton_schulz(
    x: Tensor,
    num_ns_steps: int = 5,
    coefficient_type: str = "quintic",
    *,
    custom_coefficient_sets: Sequence[CoefficientTriple] | None = None,
    iteration: str = "plain",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Orthogonalizes one matrix or a batch of matrices: moves every singular value close to 1.

    The result does not depend on the scale of `x`, zero gives zero, and a matrix with an infinite or NaN element gives
    NaN (the other matrices of its batch are not touched by that).

    Args:
        x: `[..., m, n]`, real floating point; never modified.
        num_ns_steps: Number of steps, at least 1.
        coefficient_type: One of `get_supported_coefficient_types()`.
        custom_coefficient_sets: The triples of `coefficient_type="custom"`.
        iteration: `"plain"`; `"gram"`, which iterates on the small Gram matrix (cheaper from about 1.5 times as long as
            wide; in bf16 its error stays below 3e-2 or four times the plain one's, in fp32 below about 1e-4); or
            `"auto"`, which chooses gram where it is cheaper and that bound holds, never in fp32.
        dtype: The dtype to compute in; that of `x` by default. On a CPU without instructions for it bf16 and fp16 are
            multiplied in fp32.

    Returns:
        A new tensor with the shape and dtype of `x`.

    Raises:
        ValueError: `x` has fewer than two dims, `x` or `dtype` is not real floating point, or another argument is not
            among its choices.
    """
    coefficients = get_coefficients(coefficient_type, num_ns_steps, custom_coefficient_sets)
    if x.ndim < 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be a matrix or a batch of matrices [..., m, n]")
    for name, value in (("x.dtype", x.dtype), ("dtype", dtype)):
        if value is not None and not value.is_floating_point:
            raise ValueError(f"{name} is {value}; it must be a real floating point dtype")
    if x.numel() == 0:
        return torch.empty_like(x)
    batch = x.reshape(-1, *x.shape[-2:])
    result = _orthogonalize(batch, coefficients, iteration, dtype or x.dtype)
    return result.to(x.dtype).reshape(x.shape)


def orthogonalize(x: Tensor, coefficients: Sequence[CoefficientTriple], *, iteration: str = "plain") -> Tensor:
    """Orthogonalizes a batch in its own dtype with one triple per step.

    Args:
        x: `[n, rows, cols]`; never modified. `n` may be 0 and, under LocalTensorMode, may differ by rank.
        coefficients: The triples of the steps, from `get_coefficients`.
        iteration: `"plain"`, `"gram"` or `"auto"`, as in `newton_schulz`.

    Returns:
        A new tensor with the shape and dtype of `x`.

    Raises:
        ValueError: An unknown iteration.
    """
    return _orthogonalize(x, coefficients, iteration, x.dtype)


@functools.cache
def compiled_orthogonalize() -> Callable[..., Tensor]:
    """Returns `orthogonalize` through `torch.compile`, compiled once per shape."""
    compiled: Callable[..., Tensor] = torch.compile(orthogonalize, dynamic=False)
    return compiled


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Sets how fp32 matmuls run, and restores the former setting.

    Args:
        precision: `"high"` (TF32 where the device has it) or `"highest"` (fp32).

    Raises:
        ValueError: Another precision.
    """
    if precision not in ("high", "highest"):
        raise ValueError(f"precision is {precision!r}; it must be one of 'high', 'highest'")
    # the older torch.set_float32_matmul_precision cannot restore settings that were made per backend
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    former = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "tf32" if precision == "high" else "ieee"
        yield
    finally:
        for backend, setting in zip(backends, former, strict=True):
            backend.fp32_precision = setting


@torch.no_grad()
def _orthogonalize(
    x: Tensor, coefficients: Sequence[CoefficientTriple], iteration: str, compute_dtype: torch.dtype
) -> Tensor:
    if iteration not in ITERATIONS:
        choices = ", ".join(repr(choice) for choice in ITERATIONS)
        raise ValueError(f"iteration is {iteration!r}; it must be one of {choices}")
    rows, cols = x.shape[-2:]
    if rows == 0 or cols == 0:
        return torch.empty_like(x)
    short = min(rows, cols)
    if iteration == "auto":
        iteration = choose_iteration(rows, cols, coefficients, compute_dtype, x.device.type)
    multiply_in = work_dtype(compute_dtype, x.device.type, iteration, short)
    if iteration == "gram":
        coefficient_segments = segments(coefficients, multiply_in)
    else:
        coefficient_segments = tuple((triple,) for triple in coefficients)

    X = x.mT if rows > cols else x
    num_matrices = x.shape[0]
    # under LocalTensorMode the number of matrices may differ by rank: then it is no int, and the batch stays whole
    if x.device.type == "cpu" and short >= _MIN_ROWS_ONE_BY_ONE and isinstance(num_matrices, int) and num_matrices:
        result = torch.empty_like(X)
        first, other = buffer_like(X[0], multiply_in), buffer_like(X[0], multiply_in)
        spare: list[Tensor] = []
        for index in range(num_matrices):
            _normalize(X[index], out=first)
            result[index] = iterate(first, coefficient_segments, other=other, spare=spare)
    else:
        first = _normalize(X, out=buffer_like(X, multiply_in))
        result = iterate(first, coefficient_segments, other=buffer_like(first), spare=[]).to(x.dtype)
    return result.mT if rows > cols else result


def work_dtype(dtype: torch.dtype, device_type: str, iteration: str, short: int) -> torch.dtype:
    """Returns the dtype to multiply in: `dtype`, or fp32 where `dtype` would be slower or too coarse."""
    if torch.finfo(dtype).bits > 16:
        return dtype
    slow = device_type == "cpu" and not (dtype == torch.bfloat16 and _cpu_multiplies_bf16())
    coarse = iteration == "gram" and short < MIN_ROWS_LOW_PRECISION
    return torch.float32 if slow or coarse else dtype


@functools.cache
def _cpu_multiplies_bf16() -> bool:
    """Whether this CPU has bf16 matmul instructions; without them fp32 is 10 to 80 times as fast (and more exact)."""
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return platform.machine() not in ("x86_64", "AMD64") or torch.cpu._is_avx512_bf16_supported()


def _normalize(x: Tensor, *, out: Tensor) -> Tensor:
    """Writes `x / ||x||_F` per matrix into `out`.

    The division by the largest magnitude comes first: the square of 1e30 overflows fp32, that of 1e-30 vanishes.
    """
    dtype = torch.promote_types(torch.promote_types(x.dtype, out.dtype), torch.float32)
    wide = out.copy_(x) if out.dtype == dtype else x.to(dtype, copy=True)
    largest = torch.maximum(wide.amax(dim=(-2, -1), keepdim=True), -wide.amin(dim=(-2, -1), keepdim=True))
    wide.div_(torch.where(largest == 0, 1, largest))
    # the norm is at least 1 unless the matrix is zero, so this minimum only avoids 0 / 0
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp_min(1)
    return torch.div(wide, norm, out=out)
