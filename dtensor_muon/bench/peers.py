"""The optimizers that are timed beside each other."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_muon.bench.settings import Settings
from dtensor_muon.newton_schulz import work_dtype
from dtensor_muon.optimizer import Muon

LR = 0.02
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")

Params = list[torch.nn.Parameter]


def _dtensor_muon(params: Params, settings: Settings) -> torch.optim.Optimizer:
    return _build_ours(params, settings, settings.max_bucket_bytes)


def _dtensor_muon_per_matrix(params: Params, settings: Settings) -> torch.optim.Optimizer:
    return _build_ours(params, settings, 1)


def _build_ours(params: Params, settings: Settings, max_bucket_bytes: int | None) -> torch.optim.Optimizer:
    return Muon(
        params,
        lr=LR,
        weight_decay=0.0,
        coefficient_type="simple",
        scale_mode="shape_scaling",
        fp32_matmul_prec=settings.precision,
        max_bucket_bytes=max_bucket_bytes,
    )


def _torch_muon(params: Params, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=LR, weight_decay=0.0)


def _torch_adamw(params: Params, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, weight_decay=0.0)


def _muonium(params: Params, settings: Settings) -> torch.optim.Optimizer:
    if settings.device_type == "cpu":
        # it would call Triton kernels and move every batch to a GPU
        math = importlib.import_module("muonium.orthogonalize.orthogonalize")
        step = importlib.import_module("muonium.optim.optim")
        setattr(math, "_get_orthogonalization_fn", lambda strategy, use_triton: math.ns_loop)  # noqa: B010
        setattr(step, "move_tensors_to_device", lambda tensors, source, target: tensors)  # noqa: B010
    optimizer: torch.optim.Optimizer = importlib.import_module("muonium").Muon(
        [{"params": params}], lr=LR, wd=0.0, orthogonalization_strategy="newton_schulz", foreach=True
    )
    return optimizer


OPTIMIZERS: dict[str, Callable[[Params, Settings], torch.optim.Optimizer]] = {
    "dtensor_muon": _dtensor_muon,
    "dtensor_muon_per_matrix": _dtensor_muon_per_matrix,
    "torch_muon": _torch_muon,
    "torch_adamw": _torch_adamw,
    "muonium": _muonium,
}
# what a peer outside torch needs to be installed
_REQUIREMENTS = {"muonium": ("muonium", "triton")}


def missing_packages(name: str) -> list[str]:
    """Returns the packages that an optimizer of `OPTIMIZERS` needs and that are not installed."""
    return [package for package in _REQUIREMENTS.get(name, ()) if find_spec(package) is None]


def default_optimizers() -> tuple[str, ...]:
    """Returns what is compared by default: this package, torch's optimizers, and the peers that are installed."""
    return tuple(name for name in OPTIMIZERS if name != "dtensor_muon_per_matrix" and not missing_packages(name))


@contextmanager
def products_of(name: str, device_type: str) -> Iterator[None]:
    """The context in which an optimizer steps: peers multiply in the dtype that dtensor_muon would choose.

    torch only emulates bf16 products on a CPU without instructions for them, at a hundredth of the speed: then the
    peers would lose by their choice of dtype, whatever else they do. What they compile runs eagerly there.
    """
    emulated = work_dtype(torch.bfloat16, device_type, "plain", 512) is not torch.bfloat16
    if name.startswith("dtensor_muon") or not emulated:
        yield
        return
    with torch.compiler.set_stance("force_eager"), Fp32Products():
        yield


class Fp32Products(TorchDispatchMode):
    """Multiplies bf16 matrices in fp32 and rounds the result to bf16."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        products = {getattr(torch.ops.aten, name).default for name in PRODUCTS}
        if func in products and args[-1].dtype is torch.bfloat16:
            return func(*(matrix.float() for matrix in args), **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))
