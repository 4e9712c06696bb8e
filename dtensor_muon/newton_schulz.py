"""Newton-Schulz orthogonalization of plain matrices, alone or in batches.

`X <- X / ||X||_F`, then once per coefficient triple `(a, b, c)`: `A = X X^T`, `X <- a X + (b A + c A^2) X`, on the
short side of the matrix.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dtensor_muon.coefficients import CoefficientTriple, get_coefficients

_ITERATIONS = ("plain",)


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
        iteration: `"plain"`.
        dtype: The dtype to compute in; that of `x` by default.

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
        iteration: `"plain"`.

    Returns:
        A new tensor with the shape and dtype of `x`.

    Raises:
        ValueError: An unknown iteration.
    """
    return _orthogonalize(x, coefficients, iteration, x.dtype)


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
    if iteration not in _ITERATIONS:
        choices = ", ".join(repr(choice) for choice in _ITERATIONS)
        raise ValueError(f"iteration is {iteration!r}; it must be one of {choices}")
    rows, cols = x.shape[-2:]
    if rows == 0 or cols == 0:
        return torch.empty_like(x)
    short = x.mT if rows > cols else x
    result = _plain(_normalize(short, compute_dtype), coefficients)
    return result.mT if rows > cols else result


def _normalize(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x / ||x||_F` per matrix in `dtype`.

    The division by the largest magnitude comes first: the square of 1e30 overflows fp32, that of 1e-30 vanishes.
    """
    wide = torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)
    largest = torch.linalg.vector_norm(x, float("inf"), dim=(-2, -1), keepdim=True, dtype=wide)
    scaled = x.to(wide) / torch.where(largest == 0, 1, largest)
    # the norm is at least 1 unless the matrix is zero, so this minimum only avoids 0 / 0
    norm: Tensor = torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True).clamp_min(1)
    return scaled.div_(norm).to(dtype)


def _plain(x: Tensor, coefficients: Sequence[CoefficientTriple]) -> Tensor:
    """Runs all steps on `x` `[n, m, k]` with `m <= k`, overwriting `x`."""
    gram, poly, other = x.new_empty(0), x.new_empty(0), torch.empty_like(x)
    for step, (a, b, c) in enumerate(coefficients):
        if step == 0:
            gram = torch.bmm(x, x.mT)
        else:
            torch.bmm(x, x.mT, out=gram)
        if c == 0:
            torch.baddbmm(x, gram, x, beta=a, alpha=b, out=other)
        else:
            if step == 0:
                poly = torch.empty_like(gram)
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=poly)
            torch.baddbmm(x, poly, x, beta=a, out=other)
        x, other = other, x
    return x
