"""Counts what a rank really does in a step: matrix product flops, collectives, bytes that it sends."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_COMMUNICATION = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")
_NO_DATA = ("wait", "wrap", "barrier")


class WorkCounter(TorchDispatchMode):
    """Counts the work of the operations inside its context.

    Attributes:
        flops_by_dtype: Of mm, addmm, bmm, baddbmm on local tensors, 2 per multiply-add, by the dtype multiplied.
        sent_bytes: Of ring all-gathers and all-reduces and pairwise all-to-alls.
        collectives: How often each collective ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops_by_dtype: Counter[torch.dtype] = Counter()
        self.sent_bytes = 0.0
        self.collectives: Counter[str] = Counter()

    @property
    def flops(self) -> int:
        """Flops in all dtypes."""
        return self.flops_by_dtype.total()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        namespace, _, name = func.name().partition("::")
        name = name.split(".")[0]
        if namespace == "aten" and name in ("mm", "bmm"):
            self.flops_by_dtype[args[0].dtype] += 2 * args[0].numel() * args[1].shape[-1]
        elif namespace == "aten" and name in ("addmm", "baddbmm"):
            self.flops_by_dtype[args[1].dtype] += 2 * args[1].numel() * args[2].shape[-1]
        elif namespace in _COMMUNICATION and not any(word in name for word in _NO_DATA):
            self._count_collective(name.strip("_"), namespace == "c10d", args)
        return func(*args, **(kwargs or {}))

    def _count_collective(self, name: str, in_place: bool, args: tuple[Any, ...]) -> None:
        size = _group_of(args).size()
        # the in-place operations take their outputs first, where those are not the inputs
        payload = (_num_bytes(args[1]) if in_place else 0) or _num_bytes(args[0])
        self.collectives[name] += 1
        self.sent_bytes += _sent_share(name.replace("_", ""), size) * payload


def _sent_share(name: str, size: int) -> float:
    """Returns what a rank sends, as a multiple of its input."""
    if "allgather" in name:
        return size - 1
    if "allreduce" in name:
        return 2 * (size - 1) / size
    if any(word in name for word in ("alltoall", "reducescatter", "scatter")):
        return (size - 1) / size
    return 1.0


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup:
    for value in reversed(args):
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject) and value._type().qualified_name().endswith("ProcessGroup"):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str):
            return dist.distributed_c10d._resolve_process_group(value)  # type: ignore[attr-defined, arg-type]
    raise AssertionError(f"a collective without a group: {args}")


def _num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_num_bytes, value)) if isinstance(value, list | tuple) else 0


def plain_flops(shapes: Sequence[Sequence[int]], num_steps: int = 5) -> int:
    """Returns the flops of the Newton-Schulz of every matrix with full products: `k (4 m^2 n + 2 m^3)`, m <= n."""
    total = 0
    for shape in shapes:
        short, long = sorted(shape[-2:])
        total += math.prod(shape[:-2]) * num_steps * (4 * short * short * long + 2 * short**3)
    return total
