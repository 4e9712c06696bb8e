"""torch's elastic launcher, and a job whose ranks can be killed at a chosen place."""

import json
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import Net, load_checkpoint, make_optimizer, optimizer_content, snapshot, train_step
from torch.distributed.checkpoint import filesystem
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

JOB, WORLD = "fsdp2", 2
STEPS, SAVE_EVERY = 9, 2


@dataclass(frozen=True)
class Kill:
    """The first start of a rank dies at `step` (a save follows its step): in "step", "write", "finish" or "async"."""

    rank: int
    step: int
    place: str


def launch(folder: Path, kill: Kill | None, max_restarts: int = 0) -> bool:
    """Runs the job on `WORLD` ranks until all have ended; whether it went well.

    Runs in the main thread: there, the timeout of a test stops the launcher, which stops its ranks.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["launcher", "torch.distributed.fsdp"])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=WORLD,
        max_restarts=max_restarts,
        start_method="forkserver",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=folder.name,
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        # ranks that start again must not find the addresses of the dead ones
        with mock.patch.dict(os.environ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"):
            elastic_launch(config, train)(folder, kill)
    except ChildFailedError:
        return False
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return True


def train(folder: Path, kill: Kill | None) -> None:
    """The body: goes on from the last good checkpoint; leaves losses, values at the end and its pid in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    with (folder / "pids").open("a") as file:
        file.write(f"{os.getpid()}\n")
    with (folder / "starts").open("a") as file:
        file.write(f"{rank} {last_good(folder)}\n")
    # a group of its own: the collectives of an asynchronous save run beside those of training
    saving = dist.new_group(backend="gloo") if kill is not None and kill.place == "async" else None
    if kill is not None and (kill.rank != rank or starts(folder, rank) > 1):
        kill = None
    net = Net(rank, JOB)
    optimizer = make_optimizer(net)
    first = last_good(folder)
    if first:
        load_checkpoint(net, optimizer, str(folder / f"step-{first}"), "flat")
    pending = None
    for step in range(first, STEPS):
        dying = kill if kill is not None and kill.step == step else None
        if dying is not None and dying.place == "step":
            optimizer._momentum = _die
        loss = train_step(rank, JOB, net, optimizer, step)
        with (folder / f"losses-{rank}").open("a") as file:
            file.write(json.dumps([step, loss.hex()]) + "\n")
        if (step + 1) % SAVE_EVERY == 0:
            if pending is not None:
                pending.result()
            pending = save(net, optimizer, folder / f"step-{step + 1}", saving, dying)
    if pending is not None:
        pending.result()
    torch.save(snapshot(net, optimizer), folder / f"values-{rank}.pt")
    dist.destroy_process_group()


def save(net: Net, optimizer: Any, path: Path, group: dist.ProcessGroup | None, dying: Kill | None) -> Any:
    """Saves, asynchronously when there is a group for it; returns what is still being written."""
    content = {"model": net.state_dict(), "optimizer": optimizer_content(net, optimizer, "flat")}
    if dying is not None and dying.place in ("write", "async"):
        # one item is in the file, the next is not
        write, written = filesystem._write_item, []

        def write_or_die(*args: Any, **kwargs: Any) -> Any:
            if written:
                _die()
            written.append(write(*args, **kwargs))
            return written[-1]

        mock.patch.object(filesystem, "_write_item", write_or_die).start()
    if dying is not None and dying.place == "finish":
        mock.patch.object(filesystem.FileSystemWriter, "finish", _die).start()
    if group is not None:
        return dcp.async_save(content, checkpoint_id=path, process_group=group)
    dcp.save(content, checkpoint_id=path)
    return None


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def last_good(folder: Path) -> int:
    """The step of the last complete checkpoint, 0 without one: torch writes `.metadata` after all ranks' data."""
    return max((int(path.parent.name[5:]) for path in folder.glob("step-*/.metadata")), default=0)


def starts(folder: Path, rank: int) -> int:
    """How often a rank has started."""
    return sum(line.split()[0] == str(rank) for line in (folder / "starts").read_text().splitlines())


def losses(folder: Path) -> list[dict[int, float]]:
    """The losses by rank and step; a step that was trained again counts once, with its last loss."""
    lines = [(folder / f"losses-{rank}").read_text().splitlines() for rank in range(WORLD)]
    return [{step: float.fromhex(loss) for step, loss in map(json.loads, of_rank)} for of_rank in lines]


def alive(folder: Path) -> list[int]:
    """Which of the job's processes are still there."""
    pids = map(int, (folder / "pids").read_text().split())
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]
