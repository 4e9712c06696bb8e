"""Counts what a rank really does in a step: matrix product flops, collectives, bytes that it sends."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_GATHERS = ("all_gather_into_tensor", "_allgather_base_", "allgather_")
_REDUCES = ("all_reduce", "allreduce_")


class WorkCounter(TorchDispatchMode):
    """Counts the work of the operations inside its context.

    Attributes:
        flops: Of mm, addmm, bmm, baddbmm on local tensors, 2 per multiply-add.
        sent_bytes: Of ring all-gathers and all-reduces and pairwise all-to-alls.
        collectives: How often each collective ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.sent_bytes = 0.0
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        namespace, _, name = func.name().partition("::")
        name = name.split(".")[0]
        if namespace == "aten" and name in ("mm", "bmm"):
            self.flops += 2 * args[0].numel() * args[1].shape[-1]
        elif namespace == "aten" and name in ("addmm", "baddbmm"):
            self.flops += 2 * args[1].numel() * args[2].shape[-1]
        elif namespace in ("_c10d_functional", "c10d_functional", "_dtensor") and isinstance(args[0], torch.Tensor):
            self._count_collective(name, args)
        return func(*args, **(kwargs or {}))

    def _count_collective(self, name: str, args: tuple[Any, ...]) -> None:
        if "wait" in name or "wrap" in name:
            return
        group = args[-1]
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
        elif not isinstance(group, dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(group)
        size = group.size()
        payload = args[0].numel() * args[0].element_size()
        factor = {**dict.fromkeys(_GATHERS, size - 1), **dict.fromkeys(_REDUCES, 2 * (size - 1) / size)}
        self.collectives[name] += 1
        self.sent_bytes += factor.get(name, (size - 1) / size) * payload
