"""One rank of a benchmark."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dtensor_muon.bench.count import WorkCounter
from dtensor_muon.bench.params import build_mesh, make_tensors
from dtensor_muon.bench.peers import OPTIMIZERS, products_of
from dtensor_muon.bench.settings import Settings
from dtensor_muon.coefficients import get_coefficients

# square matrices whose product measures the matmul rate: rows and repeats
_RATE_CPU = (512, 10)
_RATE_ACCELERATOR = (8192, 20)


@dataclass(slots=True)
class _Competitor:
    name: str
    optimizer: torch.optim.Optimizer
    params: list[torch.nn.Parameter]
    error: float | None
    work: WorkCounter
    seconds: list[float] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype | None:
        """What it multiplies in; None when it multiplies nothing."""
        counted = self.work.flops_by_dtype.most_common(1)
        return counted[0][0] if counted else None


def run_rank(rank: int, port: int, settings: Settings, queue: Any) -> None:
    """Measures on one rank; rank 0 puts progress and results on the queue, a failing rank its error."""
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ["WORLD_SIZE"] = str(settings.world)
        if settings.device_type == "cpu":
            torch.set_num_threads(1)
        else:
            torch.accelerator.set_device_index(rank)
        backend = dist.get_default_backend_for_device(settings.device_type)
        dist.init_process_group(backend, rank=rank, world_size=settings.world)
        results = measure(settings, lambda text: queue.put({"progress": text}) if rank == 0 else None)
        if rank == 0:
            queue.put({"results": results})
        dist.destroy_process_group()
    except Exception as error:
        queue.put({"error": f"rank {rank}: {type(error).__name__}: {error}"})


def measure(settings: Settings, progress: Callable[[str], object]) -> list[dict[str, Any]]:
    """Times the steps of all optimizers in turns; every rank of the default process group calls it.

    Args:
        settings: What to measure.
        progress: Gets a line of text now and then.

    Returns:
        One dict per optimizer, as the JSON file holds it.
    """
    device = torch.device("cpu" if settings.device_type == "cpu" else f"{settings.device_type}:{dist.get_rank()}")
    mesh = build_mesh(settings.layout, settings.world, settings.device_type)
    grads = make_tensors(settings.shapes, settings.layout, mesh, device, seed=1, scale=1e-3)
    competitors = []
    for name in settings.optimizers:
        progress(f"{name}: first steps")
        params = [
            torch.nn.Parameter(weight)
            for weight in make_tensors(settings.shapes, settings.layout, mesh, device, seed=0, scale=0.02)
        ]
        competitors.append(_first_steps(name, params, grads, settings, device))
    dtypes = sorted({competitor.dtype for competitor in competitors if competitor.dtype}, key=str)
    rates: dict[torch.dtype, list[float]] = {dtype: [] for dtype in dtypes}
    for iteration in range(settings.iterations):
        progress(f"step {iteration + 1} of {settings.iterations}")
        for competitor in competitors:
            with products_of(competitor.name, settings.device_type):
                competitor.seconds.append(_step(competitor.optimizer, competitor.params, grads, device))
        for dtype in dtypes:
            rates[dtype].append(_matmul_rate(device, dtype))
    medians = {dtype: statistics.median(values) for dtype, values in rates.items()}
    return [_result(competitor, medians, device) for competitor in competitors]


def _first_steps(
    name: str,
    params: list[torch.nn.Parameter],
    grads: Sequence[torch.Tensor],
    settings: Settings,
    device: torch.device,
) -> _Competitor:
    """Builds an optimizer, checks its first step and counts its second, which builds no plan any more."""
    before = [param.detach().clone() for param in params]
    optimizer = OPTIMIZERS[name](params, settings)
    with products_of(name, settings.device_type):
        _step(optimizer, params, grads, device)
    error = None if name == "torch_adamw" else _direction_error(before, params, grads, device)
    # what torch.compile fuses could not be counted
    with torch.compiler.set_stance("force_eager"), WorkCounter() as work, products_of(name, settings.device_type):
        _step(optimizer, params, grads, device, barrier=False)
    return _Competitor(name, optimizer, params, error, work)


def _result(competitor: _Competitor, rates: dict[torch.dtype, float], device: torch.device) -> dict[str, Any]:
    work, dtype = competitor.work, competitor.dtype
    median = statistics.median(competitor.seconds)
    total_flops = _reduce(work.flops, device, dist.ReduceOp.SUM)
    return {
        "optimizer": competitor.name,
        "ms": 1e3 * median,
        "ms_all": [1e3 * seconds for seconds in competitor.seconds],
        "gflop": _reduce(work.flops, device, dist.ReduceOp.MAX) / 1e9,
        "mb_sent": _reduce(work.sent_bytes, device, dist.ReduceOp.MAX) / 1e6,
        "collectives": dict(work.collectives),
        "matmul_dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        "matmul_gflops_per_second": None if dtype is None else rates[dtype] / 1e9,
        "matmul_rate_fraction": None if dtype is None else total_flops / median / rates[dtype],
        "error_to_fp64": competitor.error,
    }


def _step(
    optimizer: torch.optim.Optimizer,
    params: Sequence[torch.nn.Parameter],
    grads: Sequence[torch.Tensor],
    device: torch.device,
    *,
    barrier: bool = True,
) -> float:
    """Returns the seconds that the slowest rank needs for a step, 0 when they do not start together."""
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    if not barrier:
        optimizer.step()
        return 0.0
    seconds = _time(optimizer.step, device)
    return _reduce(seconds, device, dist.ReduceOp.MAX)


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the flops per second of all ranks together while all of them multiply.

    Counted until the slowest rank is done, as a step is: where ranks share cores, one that is scheduled first would
    count what it did while the others waited.
    """
    rows, repeats = _RATE_CPU if device.type == "cpu" else _RATE_ACCELERATOR
    x = torch.ones(rows, rows, device=device, dtype=dtype)
    out = torch.empty_like(x)

    def multiply() -> None:
        for _ in range(repeats):
            torch.mm(x, x, out=out)

    slowest = _reduce(_time(multiply, device), device, dist.ReduceOp.MAX)
    return 2 * rows**3 * repeats * dist.get_world_size() / slowest


def _time(function: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    dist.barrier()
    start = time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _reduce(value: float, device: torch.device, operation: dist.ReduceOp.RedOpType) -> float:
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=operation)
    return float(tensor)


def _direction_error(
    before: Sequence[torch.Tensor],
    params: Sequence[torch.nn.Parameter],
    grads: Sequence[torch.Tensor],
    device: torch.device,
) -> float:
    """Returns the largest relative error of a first update, over one tensor of each shape.

    The shapes are shared out to the ranks. Peers scale updates in their own ways, so the update is compared up to a
    factor.
    """
    firsts = {tuple(param.shape): index for index, param in reversed(list(enumerate(params)))}
    worst = 0.0
    for turn, index in enumerate(firsts.values()):
        old, new, grad = (_whole(tensor) for tensor in (before[index], params[index].detach(), grads[index]))
        if turn % dist.get_world_size() == dist.get_rank():
            update = old.double() - new.double()
            wanted = _newton_schulz_fp64(grad)
            wanted *= (update * wanted).sum() / wanted.square().sum()
            worst = max(worst, float((update - wanted).norm() / wanted.norm()))
    return _reduce(worst, device, dist.ReduceOp.MAX)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _newton_schulz_fp64(matrices: torch.Tensor) -> torch.Tensor:
    """Returns the iteration of every matrix of a stack, from its formula."""
    x: torch.Tensor = matrices.double()
    x = x / torch.linalg.matrix_norm(x, keepdim=True)
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-2, -1) if tall else x
    for a, b, c in get_coefficients("simple", 5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-2, -1) if tall else x
