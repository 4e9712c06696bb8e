"""Newton-Schulz on matrices that stay sharded on their long dim.

With the long dim cut into pieces `X = [X_1 ... X_P]`, `X X^T` is the sum of the pieces' own Gram matrices, and a step
`X_p <- a X_p + (b A + c A^2) X_p` needs nothing else from the other ranks. Which columns a rank holds, in which order,
and how many zeros pad them, makes no difference to the sum. The Gram iteration needs the sum once per segment only.

[Note: sharing the small work] Every rank needs the `[m, m]` polynomial of every matrix. With at least as many matrices
as ranks, each rank receives the sums of its share of the matrices only, computes those polynomials, and all ranks
gather them: the bytes of an all-reduce, and no product done twice.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_muon.coefficients import CoefficientTriple
from dtensor_muon.gram import gram_polynomial, segments
from dtensor_muon.newton_schulz import work_dtype
from dtensor_muon.redistribute import BucketMover
from dtensor_muon.symmetric import buffer_like, gram_matrix, multiply, multiply_add, take

# below this size the bytes that a triangle saves cost less than packing it
_MIN_TRIANGLE_ROWS = 128


def orthogonalize_sharded(
    x: Tensor, coefficients: Sequence[CoefficientTriple], mover: BucketMover, *, iteration: str, long_dim: int
) -> Tensor:
    """Orthogonalizes a batch of matrices of which each rank holds a piece. Collective over the ranks with the pieces.

    Args:
        x: `[n, rows, cols]`, a piece of each matrix along its long dim; not modified.
        coefficients: One triple per step.
        mover: Reduces over the ranks that hold the pieces.
        iteration: `"plain"` or `"gram"`.
        long_dim: 0 when the pieces are rows, 1 when they are columns.

    Returns:
        This rank's piece of the result, in the dtype of `x`.
    """
    short = x.mT if long_dim == 0 else x
    dtype = work_dtype(x.dtype, x.device.type, iteration, short.shape[-2])
    parts = segments(coefficients, dtype) if iteration == "gram" else tuple((triple,) for triple in coefficients)
    result = _normalize(short, mover, dtype)
    for part in parts:
        gram = gram_matrix(result, out=take([], result))
        if len(part) > 1:
            poly = _polynomial(gram, part, mover)
            result = multiply(poly, result, out=buffer_like(result))
        else:
            # without `a` in the polynomial: its rounding would be as large as that of the result
            ((a, b, c),) = part
            poly = _polynomial(gram, ((0.0, b, c),), mover)
            result = multiply_add(result, poly, result, beta=a, out=buffer_like(result))
    result = result.to(x.dtype)
    return result.mT if long_dim == 0 else result


def _polynomial(gram: Tensor, part: Sequence[CoefficientTriple], mover: BucketMover) -> Tensor:
    """Sums the Gram matrices `[n, m, m]` over the ranks and returns the polynomial of a segment; see the note above."""
    rows = gram.shape[-1]
    packed = _pack(gram)
    if not mover.plan.shares_small_work:
        return gram_polynomial(_unpack(mover.reduce_sum(packed), rows), part, [])
    mine = gram_polynomial(_unpack(mover.scatter_sum(packed), rows), part, [])
    return _unpack(mover.gather_shared(_pack(mine), gram.shape[0]), rows)


def _pack(symmetric: Tensor) -> Tensor:
    """`[n, m, m]` -> `[n, m (m + 1) / 2]`, the upper triangles, where that pays."""
    rows = symmetric.shape[-1]
    if rows < _MIN_TRIANGLE_ROWS:
        return symmetric
    upper, _ = _triangle(rows, symmetric.device)
    return symmetric.flatten(1).index_select(1, upper)


def _unpack(packed: Tensor, rows: int) -> Tensor:
    """The inverse of `_pack`."""
    if rows < _MIN_TRIANGLE_ROWS:
        return packed
    upper, lower = _triangle(rows, packed.device)
    full: Tensor = packed.new_empty((packed.shape[0], rows * rows))
    full.index_copy_(1, upper, packed).index_copy_(1, lower, packed)
    return full.reshape(packed.shape[0], rows, rows)


def _triangle(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the places of the upper triangle in a flattened matrix, and those of its mirror."""
    row, col = torch.triu_indices(rows, rows, device=device)
    return row * rows + col, col * rows + row


def _normalize(x: Tensor, mover: BucketMover, dtype: torch.dtype) -> Tensor:
    """Returns `x / ||x||_F` in `dtype`; divides by the largest magnitude first, since squares over- and underflow."""
    wide = x.to(torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32))
    # an empty piece has no largest element: a zero column changes nothing
    padded = torch.nn.functional.pad(wide, (0, 1))
    largest = mover.reduce_max(padded.abs().amax(dim=(-2, -1), keepdim=True))
    scaled = wide / torch.where(largest == 0, 1, largest)
    squared = mover.reduce_sum(scaled.square().sum(dim=(-2, -1), keepdim=True))
    return scaled.div_(squared.sqrt().clamp_min(1)).to(dtype)
