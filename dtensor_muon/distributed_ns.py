"""Newton-Schulz on matrices that stay sharded on their long dim.

With the long dim cut into pieces `X = [X_1 ... X_P]`, `X X^T` is the sum of the pieces' own Gram matrices, and a step
`X_p <- a X_p + (b A + c A^2) X_p` needs nothing else from the other ranks. Which columns a rank holds, in which order,
and how many zeros pad them, makes no difference to the sum.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dtensor_muon.coefficients import CoefficientTriple

Reduce = Callable[[Tensor], Tensor]


def orthogonalize_sharded(
    x: Tensor,
    coefficients: Sequence[CoefficientTriple],
    *,
    long_dim: int,
    reduce_sum: Reduce,
    reduce_max: Reduce,
) -> Tensor:
    """Orthogonalizes a batch of matrices of which each rank holds a piece.

    Args:
        x: `[n, rows, cols]`, a piece of each matrix along its long dim; not modified.
        coefficients: One triple per step.
        long_dim: 0 when the pieces are rows, 1 when they are columns.
        reduce_sum: Sums a tensor over the ranks that hold the pieces of a matrix.
        reduce_max: Takes its maximum over them.

    Returns:
        This rank's piece of the result, in the dtype of `x`.
    """
    short = x.mT if long_dim == 0 else x
    result = _normalize(short, reduce_sum, reduce_max)
    for a, b, c in coefficients:
        gram = reduce_sum(torch.bmm(result, result.mT))
        poly = torch.baddbmm(gram, gram, gram, beta=b, alpha=c) if c else gram * b
        result = torch.baddbmm(result, poly, result, beta=a)
    return result.mT if long_dim == 0 else result


def _normalize(x: Tensor, reduce_sum: Reduce, reduce_max: Reduce) -> Tensor:
    """Returns `x / ||x||_F`; the largest magnitude is divided out first, since squares over- and underflow."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # an empty piece has no largest element: a zero column changes nothing
    padded = torch.nn.functional.pad(wide, (0, 1))
    largest = reduce_max(padded.abs().amax(dim=(-2, -1), keepdim=True))
    scaled = wide / torch.where(largest == 0, 1, largest)
    squared = reduce_sum(scaled.square().sum(dim=(-2, -1), keepdim=True))
    return (scaled / squared.sqrt().clamp_min(1)).to(x.dtype)
