"""``python -m dtensor_muon``: the command line."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dtensor_muon.bench import command

_TRAIN_HELP = """\
Trains a torchtitan job on this node, with or without an accelerator.

All further flags are passed on: those with a dot (--training.steps 100) to torchtitan, the rest to torchrun
(--nnodes, --node-rank, --rdzv-backend, --rdzv-endpoint, --rdzv-id, --max-restarts, --log-dir, ...).
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser; each subcommand sets ``run``, which takes the parsed and the remaining arguments."""
    parser = argparse.ArgumentParser(prog="python -m dtensor_muon", description="Muon for DTensor parameters.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_train(commands)
    _add_bench(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments; None means the process's own.

    Returns:
        The exit status: 0, or 1 after an error message on stderr.
    """
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    try:
        args.run(args, rest)
    except ValueError as error:
        print(f"{parser.prog} {args.command}: error: {error}", file=sys.stderr)
        return 1
    return 0


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    train = commands.add_parser(
        "train",
        help="train a torchtitan job from a TOML file",
        usage="python -m dtensor_muon train FILE.toml [--nproc N] [torchrun flags] [torchtitan flags]",
        description=_TRAIN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    train.add_argument("file", type=Path, metavar="FILE.toml", help="the job; it comes before all other flags")
    train.add_argument(
        "--nproc",
        "--nproc-per-node",
        "--nproc_per_node",
        type=int,
        metavar="N",
        help="processes on this node (default: one per accelerator; without any, what the job's parallelism needs)",
    )
    train.set_defaults(run=_train)


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    bench = commands.add_parser(
        "bench",
        help="time optimizer steps on this machine",
        description="Times Muon's step beside torch.optim.Muon and AdamW; prints flops, bytes, collectives and errors.",
        allow_abbrev=False,
    )
    command.add_arguments(bench)
    bench.set_defaults(run=_bench)


def _bench(args: argparse.Namespace, rest: Sequence[str]) -> None:
    if rest:
        raise ValueError(f"unknown arguments: {' '.join(rest)}")
    command.run(args)


def _train(args: argparse.Namespace, rest: Sequence[str]) -> None:
    if not args.file.is_file():
        raise ValueError(f"{args.file} does not exist; name the job's TOML file")
    if args.nproc is not None and args.nproc < 1:
        raise ValueError(f"--nproc {args.nproc} must be at least 1")
    try:
        from dtensor_muon.titan import launch
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "dtensor_muon":
            raise
        raise ValueError(
            f"{error.name} is not installed, which torchtitan jobs need: pip install 'dtensor-native-muon[titan]'"
        ) from error
    launch.launch(args.file, args.nproc, rest)
