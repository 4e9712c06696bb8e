"""An optional kernel for symmetric products: `gemm_symmetric` of quack-kernels, on Hopper and Blackwell.

It multiplies only the tiles on one side of the diagonal and writes each of them twice. Used when that package is
installed (`pip install 'dtensor-native-muon[kernels]'`); nothing here needs it.
"""

import functools
import importlib
import importlib.util
import warnings
from typing import Protocol

import torch
from torch import Tensor

_CAPABILITIES = (9, 10)
_MIN_ROWS = 256
_TEST_ROWS = 512
# two bf16 products of 512 terms with fp32 sums differ by their rounding
_TEST_TOLERANCE = 2.0**-6


class SymmetricKernel(Protocol):
    """`out = alpha * A @ B + beta * C` for matrices or batches of them whose product is symmetric."""

    def __call__(
        self, A: Tensor, B: Tensor, C: Tensor | None = None, *, out: Tensor, alpha: float = 1.0, beta: float = 1.0
    ) -> object: ...


def symmetric_kernel(x: Tensor) -> SymmetricKernel | None:
    """Returns the kernel for products that are symmetric and as large as `x` `[..., m, k]`, None for torch's own."""
    if x.dtype is not torch.bfloat16 or x.shape[-2] < _MIN_ROWS or not is_supported_device(x.device):
        return None
    return _load(x.device)


def is_supported_device(device: torch.device) -> bool:
    """Returns whether the kernel library has code for a device."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in _CAPABILITIES


@functools.cache
def _load(device: torch.device) -> SymmetricKernel | None:
    """Imports the kernel and tries it once; warns and returns None when it is installed but does not work."""
    if importlib.util.find_spec("quack") is None:
        return None
    try:
        kernel: SymmetricKernel = importlib.import_module("quack.gemm_interface").gemm_symmetric
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(_TEST_ROWS, _TEST_ROWS, device=device, generator=generator).to(torch.bfloat16)
        out = torch.empty_like(x)
        kernel(x, x.mT, x + x.mT, out=out, alpha=0.5, beta=2.0)
        wanted = torch.addmm((x + x.mT).float(), x.float(), x.float().mT, beta=2.0, alpha=0.5)
        error = float((out.float() - wanted).norm() / wanted.norm())
        if not error < _TEST_TOLERANCE:
            raise RuntimeError(f"its result differs from torch's by {error:.1e}")
    except Exception as error:
        warnings.warn(
            f"quack-kernels is installed but its gemm_symmetric cannot be used on {device} "
            f"({type(error).__name__}: {error}); symmetric products use torch's matmul",
            stacklevel=2,
        )
        return None
    return kernel
