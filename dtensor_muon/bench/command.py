"""The `bench` subcommand: its arguments, its processes, its output."""

import argparse
import dataclasses
import queue as queues
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from dtensor_muon.bench import report
from dtensor_muon.bench.params import DEFAULT_SHAPES, LAYOUTS, parse_shapes
from dtensor_muon.bench.scaling import scaling_table
from dtensor_muon.bench.worker import OPTIMIZERS, Settings, run_rank
from dtensor_muon.models import MODELS, model_shapes
from dtensor_muon.options import MATMUL_PRECISIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `python -m dtensor_muon bench`."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shapes", default=DEFAULT_SHAPES, help=f"ROWSxCOLS*COUNT,... (default {DEFAULT_SHAPES})")
    what.add_argument("--model", choices=list(MODELS), help="the matrices of a model instead of --shapes")
    parser.add_argument("--layers", type=int, help="with --model: only so many layers")
    parser.add_argument("--layout", default="fsdp0", choices=LAYOUTS)
    parser.add_argument("--world", type=int, default=2, help="ranks (default 2)")
    parser.add_argument(
        "--device", default="cpu", help='"cpu" (gloo) or "cuda" (NCCL); one GPU: --world 1 --layout plain'
    )
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help="comma-separated, timed in turns")
    parser.add_argument("--iterations", type=int, default=5, help="timed steps of each (default 5)")
    parser.add_argument(
        "--precision", default="medium", choices=MATMUL_PRECISIONS, help="fp32_matmul_prec of dtensor_muon"
    )
    parser.add_argument("--max-bucket-bytes", type=int)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="folder of bench.json and bench.png")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a hang is reported")
    parser.add_argument("--scaling", action="store_true", help="flops and bytes per rank from 2 to 64 ranks, no timing")


def run(args: argparse.Namespace) -> None:
    """Runs a benchmark.

    Raises:
        ValueError: Bad arguments, a rank that failed, or a hang.
    """
    shapes = model_shapes(args.model, args.layers) if args.model else parse_shapes(args.shapes)
    if args.scaling:
        print(scaling_table(shapes, args.layout, args.precision))
        return
    settings = _settings(args, shapes)
    results = _spawn(settings, args.timeout)
    title = f"{args.model or args.shapes}, {args.layout}, {args.world} ranks, {args.device}"
    print(f"{title}\n{report.table(results)}")
    report.write_json(args.out / "bench.json", dataclasses.asdict(settings), results)
    print(f"wrote {args.out / 'bench.json'}")
    if report.write_chart(args.out / "bench.png", title, results):
        print(f"wrote {args.out / 'bench.png'}")
    else:
        print("no chart: matplotlib is not installed (pip install 'dtensor-native-muon[bench]')")


def _settings(args: argparse.Namespace, shapes: list[tuple[int, ...]]) -> Settings:
    names = tuple(args.optimizers.split(","))
    for name in names:
        if name not in OPTIMIZERS:
            raise ValueError(f"--optimizers has {name!r}; the choices are {', '.join(OPTIMIZERS)}")
    for flag in ("world", "iterations"):
        if getattr(args, flag) < 1:
            raise ValueError(f"--{flag} is {getattr(args, flag)}; it must be at least 1")
    found = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    if args.device != "cpu" and args.world > found:
        raise ValueError(f"--device {args.device} --world {args.world}: this machine has {found} accelerators")
    return Settings(
        tuple(shapes),
        args.layout,
        args.world,
        args.device,
        names,
        args.iterations,
        args.precision,
        args.max_bucket_bytes,
    )


def _spawn(settings: Settings, timeout: float) -> list[dict[str, Any]]:
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
        return _collect(queue, workers, time.monotonic() + timeout)
    finally:
        print(file=sys.stderr)
        for worker in workers:
            worker.join(2)
            worker.kill()


def _collect(queue: Any, workers: list[Any], deadline: float) -> list[dict[str, Any]]:
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
        print(f"\r{message['progress']:<60}", end="", file=sys.stderr, flush=True)
    raise ValueError("no result within --timeout: a rank hangs, or the shapes are too large for this machine")
