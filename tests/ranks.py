"""Ranks as threads of this process, and ranks as processes that talk over gloo: the same bodies run on both."""

import importlib
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

# ranks share the cores, more threads would only wait for each other
torch.set_num_threads(1)

Body = Callable[..., Any]


class RankFailedError(AssertionError):
    """A rank raised or did not come back in time."""


def on_threads(world: int, body: Body, *args: Any, timeout: float = 100.0) -> list[Any]:
    """Runs `body(rank, *args)` on every rank of a world of threads; returns the results by rank."""
    results: list[Any] = [None] * world
    failures: list[str] = []
    store = dist.HashStore()

    def main(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            results[rank] = body(rank, *args)
        except BaseException as error:
            failures.append(f"rank {rank}:\n{traceback.format_exc()}")
            ProcessLocalGroup.exception_handle(error)  # wakes the ranks that wait for this one
        finally:
            dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(world)]
    try:
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if late:
            failures.append(f"ranks {late} hang")
            ProcessLocalGroup.exception_handle(None)
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if failures:
        raise RankFailedError("\n".join(failures))
    return results


class GlooRanks:
    """Processes of one gloo world that run bodies one after another; started once, killed when one fails or hangs."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, body: Body, *args: Any, timeout: float = 100.0) -> list[Any]:
        """Runs `body(rank, *args)` on every rank; `body` is a module-level function. Returns the results by rank."""
        if not self._processes:
            self._start()
        task = pickle.dumps((body.__module__, body.__qualname__, args))
        for pipe in self._pipes:
            pipe.send_bytes(task)
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        failures: list[str] = []
        while len(answers) < self.world:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            # when a rank has failed, the others may wait for it for long
            ready = connection.wait(waiting, 0.5 if failures else max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.append(f"no answer from ranks {[rank for rank in range(self.world) if rank not in answers]}")
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)
                success, answer = _receive(pipe)
                answers[rank] = answer
                if not success:
                    failures.append(f"rank {rank}:\n{answer}")
        if failures:
            self.stop()
            raise RankFailedError("\n".join(failures))
        return [answers[rank] for rank in range(self.world)]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        # one process imports torch, the ranks are forked from it
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["simulated", "dtensor_muon", "torch.distributed.fsdp"])
        descriptor, path = tempfile.mkstemp()
        os.close(descriptor)
        os.unlink(path)
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, path, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)


def _receive(pipe: Any) -> tuple[bool, Any]:
    try:
        success, answer = pickle.loads(pipe.recv_bytes())
        return success, answer
    except EOFError:
        return False, "died"


def _serve(rank: int, world: int, path: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=timedelta(seconds=30))
    while True:
        try:
            module, name, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = (True, getattr(importlib.import_module(module), name)(rank, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
