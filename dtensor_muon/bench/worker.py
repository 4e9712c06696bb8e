"""One rank of a benchmark."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dtensor_muon.bench.count import WorkCounter
from dtensor_muon.bench.params import build_mesh, make_tensors
from dtensor_muon.coefficients import get_coefficients
from dtensor_muon.cost import DeviceProfile
from dtensor_muon.functional import get_muon_scale_factor
from dtensor_muon.newton_schulz import work_dtype
from dtensor_muon.optimizer import Muon

LR = 0.02


@dataclass(frozen=True, slots=True)
class Settings:
    """What to measure."""

    shapes: tuple[tuple[int, ...], ...]
    layout: str
    world: int
    device_type: str
    optimizers: tuple[str, ...]
    iterations: int
    precision: str
    max_bucket_bytes: int | None


def build_optimizer(name: str, params: list[torch.nn.Parameter], settings: Settings) -> torch.optim.Optimizer:
    """Returns a competitor, without weight decay."""
    if name == "dtensor_muon":
        return Muon(
            params,
            lr=LR,
            weight_decay=0.0,
            coefficient_type="simple",
            scale_mode="shape_scaling",
            fp32_matmul_prec=settings.precision,
            max_bucket_bytes=settings.max_bucket_bytes,
        )
    if name == "torch_muon":
        return torch.optim.Muon(params, lr=LR, weight_decay=0.0)
    return torch.optim.AdamW(params, lr=LR, weight_decay=0.0)


OPTIMIZERS = ("dtensor_muon", "torch_muon", "torch_adamw")


def run_rank(rank: int, port: int, settings: Settings, queue: Any) -> None:
    """Measures on one rank; rank 0 puts progress and results on the queue, a failing rank its error."""
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ["WORLD_SIZE"] = str(settings.world)
        if settings.device_type == "cpu":
            torch.set_num_threads(1)
        else:
            torch.accelerator.set_device_index(rank)
        dist.init_process_group(
            "gloo" if settings.device_type == "cpu" else "nccl", rank=rank, world_size=settings.world
        )
        results = _measure(settings, lambda text: queue.put({"progress": text}) if rank == 0 else None)
        if rank == 0:
            queue.put({"results": results})
        dist.destroy_process_group()
    except Exception as error:
        queue.put({"error": f"rank {rank}: {type(error).__name__}: {error}"})


def _measure(settings: Settings, progress: Callable[[str], object]) -> list[dict[str, Any]]:
    device = torch.device("cpu" if settings.device_type == "cpu" else f"{settings.device_type}:{dist.get_rank()}")
    mesh = build_mesh(settings.layout, settings.world, settings.device_type)
    shapes = settings.shapes
    grads = make_tensors(shapes, settings.layout, mesh, device, seed=1 + dist.get_rank(), scale=1e-3)
    competitors: dict[str, tuple[torch.optim.Optimizer, list[torch.nn.Parameter], list[float]]] = {}
    errors: dict[str, float | None] = {}
    for name in settings.optimizers:
        progress(f"{name}: first step")
        weights = make_tensors(shapes, settings.layout, mesh, device, seed=0, scale=0.02)
        params = [torch.nn.Parameter(weight.clone()) for weight in weights]
        optimizer = build_optimizer(name, params, settings)
        _step(optimizer, params, grads, device)
        errors[name] = None if name == "torch_adamw" else _update_error(weights[0], params[0], grads[0])
        competitors[name] = optimizer, params, []
    for iteration in range(settings.iterations):
        progress(f"step {iteration + 1} of {settings.iterations}")
        for optimizer, params, seconds in competitors.values():
            seconds.append(_step(optimizer, params, grads, device))
    rate_dtype = work_dtype(
        torch.bfloat16 if settings.precision == "medium" else torch.float32, settings.device_type, "plain", 512
    )
    rate = DeviceProfile.measure(settings.device_type).matmul_rates[rate_dtype]
    results = []
    for name, (optimizer, params, seconds) in competitors.items():
        with WorkCounter() as counter:
            _step(optimizer, params, grads, device)
        flops, sent = _maximum(counter.flops, device), _maximum(counter.sent_bytes, device)
        median = statistics.median(seconds)
        results.append(
            {
                "optimizer": name,
                "ms": 1e3 * median,
                "gflop": flops / 1e9,
                "mb_sent": sent / 1e6,
                "collectives": dict(counter.collectives),
                "matmul_rate_fraction": flops / median / rate,
                "matmul_dtype": str(rate_dtype).removeprefix("torch."),
                "error_to_fp64": errors[name],
            }
        )
    return results


def _step(
    optimizer: torch.optim.Optimizer,
    params: Sequence[torch.nn.Parameter],
    grads: Sequence[torch.Tensor],
    device: torch.device,
) -> float:
    """Returns the seconds that the slowest rank needs for a step."""
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    _synchronize(device)
    dist.barrier()
    start = time.perf_counter()
    optimizer.step()
    _synchronize(device)
    return _maximum(time.perf_counter() - start, device)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _maximum(value: float, device: torch.device) -> float:
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def _update_error(weight: torch.Tensor, param: torch.Tensor, grad: torch.Tensor) -> float:
    """Relative error of the first update of one matrix against the iteration in fp64, from its formula."""
    before, after, full = (x.full_tensor() if isinstance(x, DTensor) else x for x in (weight, param.detach(), grad))
    rows, cols = full.shape[-2:]
    x = full.double().reshape(-1, rows, cols)
    x = x / x.norm(dim=(-2, -1), keepdim=True)
    for a, b, c in get_coefficients("simple", 5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    wanted = LR * get_muon_scale_factor(rows, cols, "shape_scaling") * x.reshape(full.shape)
    got = before.double() - after.double()
    return float((got - wanted).norm() / wanted.norm())
