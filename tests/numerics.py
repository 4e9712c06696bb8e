"""References and instruments of the numerics tests; shares no code with the package."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def reference(x: Tensor, triples) -> Tensor:
    """The iteration in fp64, on the matrix as it is."""
    X = x.double()
    X = X / X.norm() if X.norm() > 0 else X
    for a, b, c in triples:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def relative_error(value: Tensor, expected: Tensor) -> float:
    return ((value.double() - expected).norm() / expected.norm()).item()


def with_spectrum(singular_values: Tensor, cols: int, generator: torch.Generator) -> Tensor:
    rows = singular_values.numel()
    left, right = (
        torch.linalg.qr(torch.randn(size, rows, dtype=torch.float64, generator=generator))[0] for size in (rows, cols)
    )
    return (left * singular_values) @ right.mT


def zoo(rows: int, cols: int, seed: int = 0) -> dict[str, Tensor]:
    """Matrices `[rows, cols]`, `rows <= cols`, in fp64, one per spectrum."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.arange(rows)
    fraction = torch.linspace(0, 1, rows, dtype=torch.float64)
    spectra = {
        "geometric_1e-4": 1e-4**fraction,
        "geometric_1e-7": 1e-7**fraction,
        "low_rank": (index < max(1, rows // 8)).double(),
        "one_large": torch.where(index == 0, 1.0, 1e-2).double(),
        "one_very_large": torch.where(index == 0, 1.0, 1e-3).double(),
        "repeated": torch.where(index % 2 == 0, 1.0, 0.1).double(),
        "all_equal": torch.ones(rows, dtype=torch.float64),
    }
    matrices = {name: with_spectrum(values, cols, generator) for name, values in spectra.items()}
    gaussian = torch.randn(rows, cols, dtype=torch.float64, generator=generator)
    return {"gaussian": gaussian, "tiny_norm": gaussian * 1e-30, **matrices}


class CountFlops(TorchDispatchMode):
    """Counts the flops of mm, addmm, bmm and baddbmm."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in _PRODUCTS:
            a, b = args[-2:]
            self.flops += 2 * a.numel() * b.shape[-1]
        return func(*args, **(kwargs or {}))


class TensorCoreProducts(TorchDispatchMode):
    """Runs bf16 products as an accelerator does: sums in fp32, one rounding at the end.

    A CPU without bf16 instructions is 80 times slower at them, and would not round at the same places.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = kwargs.get("out")
        if func.overloadpacket.__name__ not in _PRODUCTS or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        product = getattr(torch, func.overloadpacket.__name__)
        wide = product(*(arg.float() for arg in args), **{k: v for k, v in kwargs.items() if k != "out"})
        return wide.bfloat16() if out is None else out.copy_(wide)
