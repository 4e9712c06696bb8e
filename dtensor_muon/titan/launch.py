"""Starts a torchtitan job: checks it, prepares its corpus, hands it to torch's elastic launcher."""

import dataclasses
import difflib
import math
import os
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import run as elastic

from dtensor_muon.titan import corpus
from dtensor_muon.titan.cpu import has_accelerator
from dtensor_muon.titan.options import MUON, read_options

CONFIG_MODULE = "dtensor_muon.titan"
# Launcher flags that say where the other nodes are; without any of them a job is a single node's.
_RENDEZVOUS_FLAGS = ("--nnodes", "--rdzv", "--master", "--node-rank", "--standalone")
_DATA_PARALLEL_RANKS_ON_CPU = 2


def launch(file: Path, nproc: int | None, flags: Sequence[str]) -> None:
    """Run a job and return when all its processes on this node have ended.

    Args:
        file: the job's TOML.
        nproc: processes on this node; None means one per accelerator, or what the job's parallelism needs.
        flags: torchtitan's flags (``--section.key``) and torchrun's (all other).

    Raises:
        ValueError: for a job that cannot run, before any process is started.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: if a process fails.
    """
    launcher_flags, job_flags = split_flags(flags)
    job_args = job_arguments(file, job_flags)
    config = check_job(file, job_args)
    if config.training.dataset == corpus.DATASET:
        corpus.prepare(config.training.dataset_path)
    nproc = nproc or default_nproc(config.parallelism)
    # with the launcher's own store, processes that start again (--max-restarts) find the addresses of the dead ones
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    parser = elastic.get_args_parser()
    parser.prog = "python -m dtensor_muon train FILE.toml"
    elastic.run(parser.parse_args(elastic_arguments(nproc, launcher_flags) + job_args))


def split_flags(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate torchrun's flags from torchtitan's, which have a dot in their name; values follow their flag."""
    launcher: list[str] = []
    job: list[str] = []
    owner = launcher
    for flag in flags:
        if flag.startswith("-") and not _is_number(flag):
            owner = job if "." in flag.partition("=")[0] else launcher
        owner.append(flag)
    return launcher, job


def job_arguments(file: Path, job_flags: Sequence[str]) -> list[str]:
    """The command line of every process: torchtitan's, with this package's config module unless the job has one."""
    try:
        toml = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid TOML: {error}") from error
    arguments = [f"--job.config-file={file}"]
    if not toml.get("job", {}).get("custom_config_module"):
        arguments.append(f"--job.custom-config-module={CONFIG_MODULE}")
    return [*arguments, *job_flags]


def check_job(file: Path, job_args: Sequence[str]) -> Any:
    """Read a job as its processes will, and check the names of all keys and the values that Muon uses.

    Returns:
        torchtitan's configuration.

    Raises:
        ValueError: naming what is wrong.
    """
    from torchtitan.config import ConfigManager
    from torchtitan.config.manager import logger as manager_logger

    toml = tomllib.loads(file.read_text(encoding="utf-8"))
    module = toml.get("job", {}).get("custom_config_module") or CONFIG_MODULE
    manager_logger.disabled = True  # a missing assets folder is reported by the processes, or about to be prepared
    try:
        defaults = ConfigManager().parse_args([f"--job.custom-config-module={module}"])
        if problems := list(_unknown_keys(toml, defaults)):
            raise ValueError(f"{file}: " + "; ".join(problems))
        config = ConfigManager().parse_args(list(job_args))
    finally:
        manager_logger.disabled = False
    if config.optimizer.name == MUON:
        read_options(config.optimizer)
    return config


def default_nproc(parallelism: Any) -> int:
    """Processes on this node: one per accelerator; without any, what the job's parallelism multiplies to."""
    if has_accelerator():
        return torch.accelerator.device_count()
    shard = parallelism.data_parallel_shard_degree
    return math.prod(
        (
            parallelism.data_parallel_replicate_degree,
            shard if shard > 0 else _DATA_PARALLEL_RANKS_ON_CPU,
            parallelism.context_parallel_degree,
            parallelism.tensor_parallel_degree,
            parallelism.pipeline_parallel_degree,
        )
    )


def elastic_arguments(nproc: int, launcher_flags: Sequence[str]) -> list[str]:
    """torchrun's arguments up to the module it runs: one node, and rank 0's output, unless the flags say otherwise."""
    given = [flag.replace("_", "-") for flag in launcher_flags]
    arguments = [f"--nproc-per-node={nproc}"]
    if not any(flag.startswith(_RENDEZVOUS_FLAGS) for flag in given):
        arguments.append("--standalone")
    if not any(flag.startswith(("--tee", "--redirects", "--local-ranks-filter")) for flag in given):
        arguments += ["--role=rank", "--tee=3", "--local-ranks-filter=0"]
    return [*arguments, *launcher_flags, "-m", f"{CONFIG_MODULE}.worker"]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _unknown_keys(toml: dict[str, Any], config: Any, section: str = "") -> Iterator[str]:
    names = [field.name for field in dataclasses.fields(config)]
    for key, value in toml.items():
        if key not in names:
            similar = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {section}{similar[0]}?" if similar else f"known here: {', '.join(names)}"
            yield f"unknown key {section}{key}; {hint}"
        elif dataclasses.is_dataclass(getattr(config, key)):
            if isinstance(value, dict):
                yield from _unknown_keys(value, getattr(config, key), f"{section}{key}.")
            else:
                yield f"{section}{key} = {value!r} must be a section, [{section}{key}]"
