"""Matrix products whose result is symmetric, without multiplying the mirrored half.

[Note: panels] The columns of the result are cut into panels. A panel is multiplied from its diagonal block downwards,
and what lies below that block is copied to the mirrored place: `p` panels cost `(p + 1) / (2 p)` of the full product.
More panels save more flops but make the products smaller, hence a least panel width per device type, below which a
matrix is multiplied as a whole. Measured on one core with fp32 MKL, milliseconds for 1, 2, 4, 8 panels:
256x256 0.37, 0.34, 0.35, 0.42; 512x512 2.97, 2.36, 2.15, 2.19; 512x1376 10.2, 6.1, 5.6, 5.3; 1024x1024 24.3, 18.9,
16.9, 16.2. The width for accelerators is a guess that keeps the products large enough to fill them.

[Note: row pitch] Rows that lie a multiple of 2 KiB apart share few sets of a CPU's cache. With 64 bytes more the copies
to the mirrored place take half as long, and a symmetric product of 512x512 or 1024x1024 a tenth less.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_muon.kernels import symmetric_kernel

_MAX_PANELS = 8
_MIN_PANEL_CPU = 128
_MIN_PANEL_ACCELERATOR = 1024
# bytes; see [Note: row pitch]
_CACHE_PERIOD = 2048
_PADDING = 64


def panels(rows: int, device_type: str) -> tuple[tuple[int, int], ...]:
    """Returns `(start, end)` of the panels in which a symmetric `[rows, rows]` product is computed."""
    least = _MIN_PANEL_CPU if device_type == "cpu" else _MIN_PANEL_ACCELERATOR
    num_panels = 1
    while num_panels < _MAX_PANELS and rows >= 2 * num_panels * least:
        num_panels *= 2
    cuts = [rows * panel // num_panels for panel in range(num_panels + 1)]
    return tuple(itertools.pairwise(cuts))


def symmetric_flops(rows: int, inner: int, device_type: str) -> int:
    """Returns the flops of one symmetric product `[rows, inner] @ [inner, rows]`, 2 per multiply-add."""
    return sum(2 * (rows - start) * inner * (end - start) for start, end in panels(rows, device_type))


def buffer_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns uninitialized matrices like `x` `[..., m, k]`, in `dtype`, stored by columns where those of `x` are."""
    if x.stride(-2) == 1 and x.stride(-1) != 1:
        return _buffer(x, x.mT.shape, dtype or x.dtype).mT
    return _buffer(x, x.shape, dtype or x.dtype)


def take(spare: list[Tensor], x: Tensor) -> Tensor:
    """Takes one of the spare `[..., m, m]` tensors for `x` `[..., m, k]`, or a new one when there is none."""
    return spare.pop() if spare else _buffer(x, (*x.shape[:-1], x.shape[-2]), x.dtype)


def _buffer(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    *outer, cols = shape
    # under LocalTensorMode the columns may be symbolic
    if x.device.type == "cpu" and isinstance(cols, int) and cols and cols * dtype.itemsize % _CACHE_PERIOD == 0:
        return x.new_empty((*outer, cols + _PADDING // dtype.itemsize), dtype=dtype).narrow(-1, 0, cols)
    return x.new_empty(tuple(shape), dtype=dtype)


def multiply(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """Writes `a @ b` into `out`, for matrices or batches of them."""
    return torch.mm(a, b, out=out) if a.ndim == 2 else torch.bmm(a, b, out=out)


def multiply_add(addend: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0, out: Tensor) -> Tensor:
    """Writes `beta * addend + alpha * a @ b` into `out`, for matrices or batches of them."""
    if a.ndim == 2:
        return torch.addmm(addend, a, b, beta=beta, alpha=alpha, out=out)
    return torch.baddbmm(addend, a, b, beta=beta, alpha=alpha, out=out)


def gram_matrix(x: Tensor, *, out: Tensor) -> Tensor:
    """Writes `x @ x.mT` into `out`.

    Args:
        x: `[..., m, k]` with at most one batch dim.
        out: `[..., m, m]`; the blocks above and below the diagonal ones come out exactly mirrored.
    """
    kernel = symmetric_kernel(x)
    if kernel is not None:
        kernel(x, x.mT, out=out)
        return out
    rows = x.shape[-2]
    for start, end in panels(rows, x.device.type):
        # narrow, not slices: under LocalTensorMode the columns may be symbolic
        panel, below = x.narrow(-2, start, end - start), x.narrow(-2, start, rows - start)
        multiply(below, panel.mT, out=out[..., start:, start:end])
        _mirror(out, start, end)
    return out


def symmetric_multiply_add(
    addend: Tensor, a: Tensor, b: Tensor, *, beta: float, alpha: float = 1.0, out: Tensor
) -> Tensor:
    """Writes `beta * addend + alpha * a @ b` into `out`, for symmetric `addend`, `a`, `b` of which `a`, `b` commute.

    Args:
        addend: `[..., m, m]` with at most one batch dim, as `a`, `b` and `out`.
        a: For example a polynomial in a Gram matrix.
        b: Another one in the same matrix.
        beta: Factor of `addend`.
        alpha: Factor of the product.
        out: None of the inputs; the blocks above and below the diagonal ones come out exactly mirrored.
    """
    kernel = symmetric_kernel(a)
    if kernel is not None:
        kernel(a, b, addend, out=out, alpha=alpha, beta=beta)
        return out
    for start, end in panels(a.shape[-2], a.device.type):
        rows, columns = slice(start, None), slice(start, end)
        multiply_add(
            addend[..., rows, columns], a[..., rows, :], b[..., columns], beta=beta, alpha=alpha,
            out=out[..., rows, columns],
        )  # fmt: skip
        _mirror(out, start, end)
    return out


def _mirror(out: Tensor, start: int, end: int) -> None:
    if end < out.shape[-1]:
        out[..., start:end, end:].copy_(out[..., end:, start:end].mT)
