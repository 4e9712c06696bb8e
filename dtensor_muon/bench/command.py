"""The `bench` subcommand: its arguments and its output."""

import argparse
import dataclasses
import os
import platform
from pathlib import Path
from typing import Any

import torch

from dtensor_muon.bench import report
from dtensor_muon.bench.count import plain_flops
from dtensor_muon.bench.launch import run_ranks
from dtensor_muon.bench.local import newton_schulz_table
from dtensor_muon.bench.params import DEFAULT_SHAPES, LAYOUTS, check_layout, parse_shapes
from dtensor_muon.bench.peers import OPTIMIZERS, default_optimizers, missing_packages
from dtensor_muon.bench.scaling import SCALING_SHAPES, scaling_table
from dtensor_muon.bench.settings import Settings
from dtensor_muon.bench.suite import run_suite
from dtensor_muon.models import MODELS, model_shapes, owner_share
from dtensor_muon.options import MATMUL_PRECISIONS

# flags that mean nothing beside one of these
_UNUSED = {
    "scaling": ("owner_of", "world", "optimizers", "max_bucket_bytes"),
    "suite": ("shapes", "model", "layers", "owner_of", "layout", "world", "optimizers", "max_bucket_bytes"),
    "newton_schulz": ("layout", "world", "optimizers", "max_bucket_bytes"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `python -m dtensor_muon bench`."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shapes", help=f"ROWSxCOLS*COUNT,... (default {DEFAULT_SHAPES})")
    what.add_argument("--model", choices=list(MODELS), help="the matrices of a model instead of --shapes")
    parser.add_argument("--layers", type=int, help="with --model: only so many layers")
    parser.add_argument(
        "--owner-of",
        type=int,
        metavar="RANKS",
        help="only what one of so many ranks would own, as plain tensors on one device",
    )
    parser.add_argument("--layout", choices=LAYOUTS, help="default fsdp0")
    parser.add_argument("--world", type=int, help="ranks (default 2, or the accelerators of this machine)")
    parser.add_argument("--device", default="cpu", help='"cpu" (gloo) or "cuda" (NCCL)')
    parser.add_argument("--optimizers", help=f"comma-separated, timed in turns: {', '.join(OPTIMIZERS)}")
    parser.add_argument("--iterations", type=int, default=5, help="timed steps of each (default 5)")
    parser.add_argument(
        "--precision", default="medium", choices=MATMUL_PRECISIONS, help="fp32_matmul_prec of dtensor_muon"
    )
    parser.add_argument("--max-bucket-bytes", type=int, help="of dtensor_muon")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="folder of the JSON and PNG files")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which a hang is reported")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--scaling", action="store_true", help="flops and bytes per rank from 2 to 64 ranks, no timing")
    other.add_argument("--suite", action="store_true", help="the cases of docs/performance.md")
    other.add_argument("--newton-schulz", action="store_true", help="the iterations alone, on one device")


def run(args: argparse.Namespace) -> None:
    """Runs a benchmark.

    Raises:
        ValueError: Bad arguments, a rank that failed, or a hang.
    """
    if args.iterations < 1:
        raise ValueError(f"--iterations is {args.iterations}; it must be at least 1")
    for mode, unused in _UNUSED.items():
        for flag in unused:
            if getattr(args, mode) and getattr(args, flag) is not None:
                raise ValueError(f"--{mode} does not use --{flag}; leave one of them out".replace("_", "-"))
    if args.scaling:
        print(scaling_table(_shapes(args, SCALING_SHAPES), args.layout or "fsdp0", args.precision))
    elif args.newton_schulz:
        _check_devices(args.device, 1)
        dtype = torch.bfloat16 if args.precision == "medium" else torch.float32
        print(newton_schulz_table(_shapes(args, DEFAULT_SHAPES), args.device, dtype, args.iterations))
    elif args.suite:
        _check_devices(args.device, 4)
        table, cases = run_suite(
            lambda case: run_ranks(case, args.timeout), args.device, args.iterations, args.precision
        )
        print(table)
        _write(args.out / "suite.json", {"machine": _machine(args.device), "cases": cases})
    else:
        _run_one(args)


def _run_one(args: argparse.Namespace) -> None:
    settings = _settings(args)
    results = run_ranks(settings, args.timeout)
    what = args.model or args.shapes or DEFAULT_SHAPES
    title = f"{what}, {settings.layout}, {settings.world} ranks, {args.device}"
    plain_gflop = plain_flops(settings.shapes) / settings.world / 1e9
    print(f"{title}\n{report.table(results)}")
    print(f"the plain iteration with full products, shared out to all ranks: {plain_gflop:.3f} GFLOP a rank")
    _write(
        args.out / "bench.json",
        {
            "settings": dataclasses.asdict(settings),
            "machine": _machine(args.device),
            "plain_gflop_per_rank": plain_gflop,
            "results": results,
        },
    )
    if report.write_chart(args.out / "bench.png", title, results):
        print(f"wrote {args.out / 'bench.png'}")
    else:
        print("no chart: matplotlib is not installed (pip install 'dtensor-native-muon[bench]')")


def _write(path: Path, content: dict[str, Any]) -> None:
    report.write_json(path, content)
    print(f"wrote {path}")


def _shapes(args: argparse.Namespace, default: str) -> list[tuple[int, ...]]:
    if args.model is None and args.layers is not None:
        raise ValueError(f"--layers is {args.layers}, but there is no --model; add one, or leave it out")
    shapes = model_shapes(args.model, args.layers) if args.model else parse_shapes(args.shapes or default)
    return shapes if args.owner_of is None else owner_share(shapes, args.owner_of)


def _settings(args: argparse.Namespace) -> Settings:
    shapes = _shapes(args, DEFAULT_SHAPES)
    names = _optimizers(args.optimizers)
    if args.owner_of is not None and (args.world not in (None, 1) or args.layout not in (None, "plain")):
        raise ValueError(
            f"--owner-of {args.owner_of} is one rank with plain tensors; leave out --world {args.world} and "
            f"--layout {args.layout}"
        )
    layout = args.layout or ("fsdp0" if args.owner_of is None else "plain")
    world = args.world
    if world is None:
        world = 1 if args.owner_of is not None else 2 if args.device == "cpu" else max(1, _device_count(args.device))
    if world < 1:
        raise ValueError(f"--world is {world}; it must be at least 1")
    _check_devices(args.device, world)
    check_layout(shapes, layout, world)
    return Settings(
        tuple(shapes), layout, world, args.device, names, args.iterations, args.precision, args.max_bucket_bytes
    )


def _optimizers(text: str | None) -> tuple[str, ...]:
    if text is None:
        return default_optimizers()
    names = tuple(text.split(","))
    for name in names:
        if name not in OPTIMIZERS:
            raise ValueError(f"--optimizers has {name!r}; the choices are {', '.join(OPTIMIZERS)}")
        missing = missing_packages(name)
        if missing:
            raise ValueError(f"--optimizers has {name!r}, which needs: pip install {' '.join(missing)}")
    return names


def _check_devices(device_type: str, world: int) -> None:
    if device_type != "cpu" and world > _device_count(device_type):
        raise ValueError(
            f"--device {device_type}: {world} ranks need one device each, this machine has {_device_count(device_type)}"
        )


def _device_count(device_type: str) -> int:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if accelerator is not None and accelerator.type == device_type else 0


def _machine(device_type: str) -> dict[str, Any]:
    """What a reader needs to judge the numbers by; no names of machines."""
    name = torch.cuda.get_device_name() if device_type == "cuda" else platform.machine()
    return {"device": name, "cpu_cores": os.cpu_count(), "torch": torch.__version__}
