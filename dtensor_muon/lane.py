"""A side stream on which the next bucket moves while the present one computes."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Lane(Protocol):
    """Where the data of a bucket moves."""

    def beside(self, inputs: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Returns a context in which work runs beside what is enqueued later, after `inputs` are ready."""

    def join(self, result: Tensor) -> None:
        """Makes later work wait for what ran beside it and produced `result`."""


class StreamLane:
    """A stream of an accelerator, with the event on which the main stream waits."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device=device)
        self._moved: list[torch.Event] = []

    @contextmanager
    def beside(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """See `Lane`."""
        self._stream.wait_stream(torch.accelerator.current_stream())
        for tensor in inputs:
            # the memory must not be reused while the side stream still reads it
            tensor.record_stream(self._stream)
        with self._stream:
            yield
            self._moved.append(self._stream.record_event())

    def join(self, result: Tensor) -> None:
        """See `Lane`."""
        current = torch.accelerator.current_stream()
        current.wait_event(self._moved.pop(0))
        result.record_stream(current)


def make_lane(device: torch.device) -> Lane | None:
    """Returns a side stream on accelerators; None on the CPU and on meta, where there is nothing to overlap."""
    return None if device.type in ("cpu", "meta") else StreamLane(device)
