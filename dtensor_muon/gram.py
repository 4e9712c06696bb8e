"""Gram Newton-Schulz: the iteration on the small Gram matrix.

With `R = X X^T` a step multiplies `X` by `P = a I + b R + c R^2`, and `R` becomes `P R P`. So a segment of steps runs
on `[m, m]` matrices alone, `Q` collecting the product of the `P`, and touches the `[m, k]` matrix only at its end:
`X <- Q X`.

[Note: restarts] `R` squares the condition number. Its rounding noise, relative to the largest singular value, grows by
`a^2` a step as a true squared singular value does, until it turns `R` indefinite and the result explodes. A new segment
starts from a fresh `R = X X^T`. With bf16 products emulated (fp32 sums, one rounding) over the test zoo, from 128 to
512 rows, the worst error relative to its bound (3e-2, or four times the plain iteration's) was

    segments of 5 steps     quintic        simple         polar_express
    3, 2                    diverges       0.75           diverges
    2, 3                    0.99           1.25           2.9
    2, 2, 1                 0.65           1.42           1.7
    1, 2, 2                 0.37           0.73           0.56

so in bf16 the first step (the largest `a`) stands alone and pairs follow; below `MIN_ROWS_LOW_PRECISION` rows, where
the noise does not average out, the work is done in fp32. In fp32 the pairs come first: 2, 2, 1 stays under 5e-5 with
every set but cans (1.3e-4), 1, 2, 2 reaches 1.0e-4, and 5 reaches 1e-2. Both orders cost the same. A matrix whose
singular values are all equal rounds the same way in every direction: there quintic, aol and deepseekv4 stay at 0.7 of
the bound at every size, but simple, polar_express and cubic5 pass it at one or two sizes in a hundred (error 0.05).
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_muon.coefficients import CoefficientTriple
from dtensor_muon.symmetric import (
    gram_matrix,
    multiply,
    multiply_add,
    symmetric_flops,
    symmetric_multiply_add,
    take,
)

MIN_ROWS_LOW_PRECISION = 256
_MIN_ASPECT_RATIO = 1.5
_STABILITY_GRID = 512
_STABILITY_NOISE = 2.0**-7
_STABILITY_LIMIT = 10.0


def choose_iteration(
    rows: int, cols: int, coefficients: Sequence[CoefficientTriple], dtype: torch.dtype, device_type: str = "cpu"
) -> str:
    """Returns what `iteration="auto"` runs for a `[rows, cols]` matrix: `"plain"` or `"gram"`.

    Gram is chosen only where it costs fewer flops and its error bound holds: in bf16 (in fp32 it loses up to a digit
    against the plain iteration), from 1.5 times as long as wide, from `MIN_ROWS_LOW_PRECISION` rows, and for
    coefficients whose steps do not blow up singular values that rounding has pushed above 1.

    Args:
        rows: Rows of the matrix.
        cols: Its columns.
        coefficients: The triples of the steps.
        dtype: The dtype that the matrix is to be orthogonalized in.
        device_type: Where it runs, for the flops of the symmetric products.
    """
    short, long = min(rows, cols), max(rows, cols)
    bounded = (
        dtype == torch.bfloat16
        and short >= MIN_ROWS_LOW_PRECISION
        and long >= _MIN_ASPECT_RATIO * short
        and _tolerates_noise(tuple(coefficients))
    )
    if not bounded:
        return "plain"
    plain, gram = (
        iteration_flops(rows, cols, coefficients, which, device_type=device_type) for which in ("plain", "gram")
    )
    return "gram" if gram < plain else "plain"


def iteration_flops(
    rows: int,
    cols: int,
    coefficients: Sequence[CoefficientTriple],
    iteration: str = "plain",
    *,
    dtype: torch.dtype = torch.bfloat16,
    device_type: str = "cpu",
) -> int:
    """Returns the matmul flops (2 per multiply-add) of orthogonalizing one `[rows, cols]` matrix.

    Args:
        rows: Rows of the matrix.
        cols: Its columns.
        coefficients: The triples of the steps.
        iteration: `"plain"`, `"gram"` or `"auto"`.
        dtype: The dtype it is orthogonalized in, on which the choice of `"auto"` depends.
        device_type: Where it runs.
    """
    if iteration == "auto":
        iteration = choose_iteration(rows, cols, coefficients, dtype, device_type)
    short, long = min(rows, cols), max(rows, cols)
    gram, small = symmetric_flops(short, long, device_type), symmetric_flops(short, short, device_type)
    apply = 2 * short * short * long
    if iteration == "plain":
        return sum(gram + apply + (small if c else 0) for _, _, c in coefficients)
    flops = 0
    for segment in segments(coefficients, dtype):
        num_squares = sum(1 for _, _, c in segment if c)
        flops += gram + apply + small * (num_squares + 3 * (len(segment) - 1))
    return flops


def segments(
    coefficients: Sequence[CoefficientTriple], dtype: torch.dtype
) -> tuple[tuple[CoefficientTriple, ...], ...]:
    """Cuts the steps into the segments of the Gram iteration; see [Note: restarts].

    Args:
        coefficients: The triples of all steps.
        dtype: The dtype of the products: its precision decides where the pairs stand.
    """
    num_pairs, num_singles = (len(coefficients) - 1) // 2, 2 - len(coefficients) % 2
    lengths = [2] * num_pairs + [1] * num_singles
    if torch.finfo(dtype).eps > torch.finfo(torch.float32).eps:
        lengths = [1, *lengths[:-1]]
    result, start = [], 0
    for length in lengths:
        result.append(tuple(coefficients[start : start + length]))
        start += length
    return tuple(result)


def gram_polynomial(gram: Tensor, segment: Sequence[CoefficientTriple], spare: list[Tensor]) -> Tensor:
    """Returns `Q`, the product of the steps of one segment: `X <- Q X` takes them all.

    Args:
        gram: `[..., m, m]` with at most one batch dim, the Gram matrix `X X^T` (summed over the ranks where `X` is
            sharded); overwritten.
        segment: The triples of the segment.
        spare: Tensors like `gram` to write to. The result is taken from them, and what is free afterwards joins them.

    Returns:
        `[..., m, m]`, symmetric.
    """
    poly: Tensor | None = None
    for step, (a, b, c) in enumerate(segment, 1):
        factor = _step_polynomial(gram, b, c, out=take(spare, gram))
        if step < len(segment):
            product = symmetric_multiply_add(gram, gram, factor, beta=a, out=take(spare, gram))
            symmetric_multiply_add(product, product, factor, beta=a, out=gram)
            spare.append(product)
        else:
            spare.append(gram)
        if poly is None:
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            poly = factor
        else:
            result = symmetric_multiply_add(poly, poly, factor, beta=a, out=take(spare, gram))
            spare += [poly, factor]
            poly = result
    if poly is None:
        raise ValueError("segment is empty; it must hold at least one (a, b, c) triple")
    return poly


def iterate(
    x: Tensor, coefficient_segments: Sequence[Sequence[CoefficientTriple]], *, other: Tensor, spare: list[Tensor]
) -> Tensor:
    """Runs the segments on `x` `[..., m, k]` with `m <= k` and at most one batch dim.

    Segments of one step are steps of the plain iteration: `X <- a X + (b R + c R^2) X`, without rounding `a` into `Q`.

    Args:
        x: Overwritten.
        coefficient_segments: Of triples.
        other: Like `x`; overwritten.
        spare: `[..., m, m]` tensors to write to; those that this call allocates join them.

    Returns:
        `x` or `other`, with the result.
    """
    for segment in coefficient_segments:
        gram = gram_matrix(x, out=take(spare, x))
        if len(segment) > 1:
            factor = gram_polynomial(gram, segment, spare)
            multiply(factor, x, out=other)
        else:
            ((a, b, c),) = segment
            factor = _step_polynomial(gram, b, c, out=take(spare, gram))
            spare.append(gram)
            multiply_add(x, factor, x, beta=a, out=other)
        spare.append(factor)
        x, other = other, x
    return x


def _step_polynomial(gram: Tensor, b: float, c: float, *, out: Tensor) -> Tensor:
    """Writes `b R + c R^2` of the Gram matrix `R`, `[..., m, m]`, into `out`."""
    if c == 0:
        return torch.mul(gram, b, out=out)
    return symmetric_multiply_add(gram, gram, gram, beta=b, alpha=c, out=out)


@functools.cache
def _tolerates_noise(coefficients: tuple[CoefficientTriple, ...]) -> bool:
    """Whether singular values in [0, 1] stay small when every step errs upwards by `_STABILITY_NOISE`.

    Sets that end their interval at 1 without a safety margin (cans) fail: a value just above it is driven to infinity.
    """
    for point in range(1, _STABILITY_GRID + 1):
        value = point / _STABILITY_GRID * (1 + _STABILITY_NOISE)
        for a, b, c in coefficients:
            square = value * value
            value *= (a + b * square + c * square * square) * (1 + _STABILITY_NOISE)
            if abs(value) > _STABILITY_LIMIT:
                return False
    return True
