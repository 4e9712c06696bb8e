"""Starts the ranks of a benchmark and waits for their results, never for ever."""

import queue as queues
import socket
import sys
import time
from typing import Any

import torch.multiprocessing as mp

from dtensor_muon.bench.settings import Settings
from dtensor_muon.bench.worker import run_rank


def run_ranks(settings: Settings, timeout: float) -> list[dict[str, Any]]:
    """Runs one process per rank and returns what rank 0 measured; progress goes to stderr.

    Args:
        settings: What to measure.
        timeout: Seconds after which the ranks are killed.

    Raises:
        ValueError: A rank failed, or there was no result in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=run_rank, args=(rank, port, settings, queue), daemon=True)
        for rank in range(settings.world)
    ]
    for worker in workers:
        worker.start()
    try:
        results = _collect(queue, workers, timeout)
        for worker in workers:
            worker.join(5)
        return results
    finally:
        print(file=sys.stderr)
        for worker in workers:
            worker.kill()


def _collect(queue: Any, workers: list[Any], timeout: float) -> list[dict[str, Any]]:
    deadline, last = time.monotonic() + timeout, "starting the ranks"
    while time.monotonic() < deadline:
        try:
            message = queue.get(timeout=0.5)
        except queues.Empty:
            if any(worker.exitcode not in (None, 0) for worker in workers):
                raise ValueError("a rank died without a message; see its output above") from None
            continue
        if "error" in message:
            raise ValueError(message["error"])
        if "results" in message:
            results: list[dict[str, Any]] = message["results"]
            return results
        last = message["progress"]
        print(f"\r{last:<60}", end="", file=sys.stderr, flush=True)
    raise ValueError(
        f"no result within --timeout {timeout:g} s, the last word was {last!r}: a rank hangs, or the shapes are too "
        "large for this machine; give more seconds, smaller --shapes or fewer --layers"
    )
