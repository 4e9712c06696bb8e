"""What torchtitan 0.2.2 needs in order to run on a machine without an accelerator.

Nothing here happens when an accelerator is present. Otherwise :func:`prepare_import` runs once, before torchtitan
is first imported, and :func:`cure_train_spec` wraps each model's train spec. The cures, by what fails without them:

* importing torchtitan needs triton, for one file of kernels that also holds a CPU path;
* the device type falls back to "cuda", and ``torch.cpu`` lacks device names and memory statistics;
* gloo has no ``PREMUL_SUM``, which FSDP asks for once a gradient divisor is set;
* ``torch.histc``, with which MoE routers count tokens, has no integer kernel on CPU;
* flex attention has no backward on CPU, and compiling its masks needs a C++ compiler and longer than a small job;
* sharded random initialization differs with the layout, see [Note: equal weights on every layout].
"""

import dataclasses
import functools
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

KERNELS_MODULE = "torchtitan.models.moe.kernels"


def has_accelerator() -> bool:
    """Whether torch sees any accelerator on this machine."""
    return torch.accelerator.is_available()


class CpuDeviceModule(types.ModuleType):
    """``torch.cpu`` plus the functions that torchtitan calls on a device module and ``torch.cpu`` lacks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        """Index of the only device; ``torch.cpu`` answers with a string, which ``dist.barrier`` refuses."""
        return 0

    def get_device_name(self, device: object = None) -> str:
        """Name shown in torchtitan's log."""
        return "CPU"

    def get_device_properties(self, device: object = None) -> types.SimpleNamespace:
        """Properties with ``total_memory``, the machine's memory in bytes."""
        return types.SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: object = None) -> dict[str, int]:
        """No statistics: torchtitan shows -1 for what is missing."""
        return {}

    def reset_peak_memory_stats(self, device: object = None) -> None:
        """There are no statistics to reset."""

    def empty_cache(self) -> None:
        """There is no cache to empty."""


def prepare_import() -> None:
    """Make torchtitan importable, and its device type "cpu", on a machine without an accelerator.

    Raises:
        RuntimeError: if torchtitan was imported before, and so believes that the device type is "cuda".
    """
    if has_accelerator() or KERNELS_MODULE in sys.modules:
        return
    if "torchtitan.tools.utils" in sys.modules:
        raise RuntimeError(
            "torchtitan was imported before dtensor_muon.titan on a machine without an accelerator. "
            "Start the job with `python -m dtensor_muon train FILE.toml`, or import dtensor_muon.titan first."
        )
    sys.modules[KERNELS_MODULE] = _load_kernels()
    device_module = CpuDeviceModule("dtensor_muon_cpu_device")
    with (
        mock.patch.object(torch._utils, "_get_available_device_type", return_value="cpu"),
        mock.patch.object(torch._utils, "_get_device_module", return_value=device_module),
    ):
        import torchtitan.tools.utils  # noqa: F401
    torch.histc = _integer_histc(torch.histc)
    from torchtitan.models import attention

    attention.FlexAttentionWrapper._compiled_flex_attn = dense_flex_attention
    attention._compiled_create_block_mask = attention.create_block_mask


def _load_kernels() -> types.ModuleType:
    """Torchtitan's token permutation kernels, loaded without triton and bound to their CPU path."""
    package = importlib.util.find_spec("torchtitan")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("torchtitan is not installed: pip install torchtitan==0.2.2", name="torchtitan")
    path = Path(package.submodule_search_locations[0], "models", "moe", "kernels.py")
    spec = importlib.util.spec_from_file_location(KERNELS_MODULE, path)
    if spec is None or spec.loader is None:
        raise AssertionError(f"no loader for {path}")
    module = importlib.util.module_from_spec(spec)
    with _stand_in_triton():
        spec.loader.exec_module(module)
    module.generate_permute_indices = functools.partial(  # type: ignore[attr-defined]
        module.generate_permute_indices, use_cpu=True
    )
    return module


@contextmanager
def _stand_in_triton() -> Iterator[None]:
    """Let one file that only decorates functions with triton be imported; nothing of it stays in ``sys.modules``."""
    language = types.ModuleType("triton.language")
    language.constexpr = int  # type: ignore[attr-defined]
    triton = types.ModuleType("triton")
    triton.jit = lambda function: function  # type: ignore[attr-defined]
    triton.language = language  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"triton": triton, "triton.language": language}):
        yield


def _integer_histc(histc: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.histc`` that also counts integers on CPU, exactly, as the accelerators' kernels do."""

    @functools.wraps(histc)
    def wrapped(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if input.is_floating_point():
            return histc(input, *args, **kwargs)
        return histc(input.double(), *args, **kwargs).to(input.dtype)

    return wrapped


def dense_flex_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Flex attention as plain matrix products, which have a backward on CPU.

    Args:
        q: queries ``[batch, heads, q_len, dim]``.
        k: keys ``[batch, kv_heads, kv_len, dim]``.
        v: values ``[batch, kv_heads, kv_len, dim]``.
        block_mask: the ``BlockMask`` whose ``mask_mod`` says which query sees which key; None lets all see all.
        scale: factor on the scores; None means ``dim ** -0.5``.
        enable_gqa: whether several query heads share one key and value head.
        return_lse: whether to return the log-sum-exp of the scores ``[batch, heads, q_len]`` too.
    """
    if enable_gqa:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q @ k.transpose(-2, -1)).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if block_mask is not None:
        scores = scores.masked_fill(~_dense_mask(block_mask, scores), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    output = torch.exp(scores - lse.unsqueeze(-1)).to(v.dtype) @ v
    return (output, lse) if return_lse else output


def _dense_mask(block_mask: Any, scores: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.flex_attention import create_mask

    batch, heads, q_len, kv_len = scores.shape
    return create_mask(block_mask.mask_mod, batch, heads, q_len, kv_len, device=str(scores.device))


def cure_train_spec(spec: Any) -> Any:
    """Make a model that has been parallelized for CPU ranks trainable on them.

    Args:
        spec: torchtitan's ``TrainSpec``.

    Returns:
        ``spec`` with a ``parallelize_fn`` that rejects what cannot run on CPU, turns off gloo's missing reduction
        and makes ``init_weights`` independent of the layout. The same ``spec`` when there is an accelerator.
    """
    if has_accelerator():
        return spec
    parallelize_fn = spec.parallelize_fn

    @functools.wraps(parallelize_fn)
    def parallelize(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
        _reject_unsupported(job_config)
        model = parallelize_fn(model, parallel_dims, job_config)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        _initialize_from_whole_model(model, spec, job_config)
        return model

    return dataclasses.replace(spec, parallelize_fn=parallelize)


def _reject_unsupported(job_config: Any) -> None:
    if job_config.parallelism.context_parallel_degree > 1:
        raise ValueError(
            f"parallelism.context_parallel_degree = {job_config.parallelism.context_parallel_degree}: context "
            "parallelism does not run without an accelerator; set it to 1"
        )
    if job_config.checkpoint.async_mode == "async_with_pinned_mem":
        raise ValueError(
            'checkpoint.async_mode = "async_with_pinned_mem": there is no pinned memory without an accelerator; '
            'set it to "disabled" or "async"'
        )


# [Note: equal weights on every layout]
# On an accelerator DTensor offsets the random stream by each shard's place in the global tensor. On a CPU mesh it does
# not: every rank draws the same numbers for its shard, so a sharded matrix starts as copies of one block, with a
# fraction of its rank. The cure is the seed checkpoint without the file: every rank initializes the whole model from
# the job's seed and keeps its own part of each tensor. It costs a whole model in memory, once, on machines whose
# models are small.


def _initialize_from_whole_model(model: nn.Module, spec: Any, job_config: Any) -> None:
    """Replace ``model.init_weights`` by one that gives the same weights on every layout."""
    init_weights: Callable[..., None] = model.init_weights  # type: ignore[assignment]

    def init_weights_from_whole_model(buffer_device: torch.device | None = None) -> None:
        init_weights(buffer_device=buffer_device)  # for the buffers
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_common_seed(job_config.debug.seed))
            whole = dict(_build_whole_model(spec, job_config).named_parameters())
        for name, param in model.named_parameters():
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            _copy_own_part(whole[name].detach(), param.detach())

    model.init_weights = init_weights_from_whole_model  # type: ignore[assignment]


# What activation checkpointing and torch.compile put into parameter names.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def _copy_own_part(whole: torch.Tensor, param: torch.Tensor) -> None:
    """Copy this rank's part of a whole tensor.

    ``distribute_tensor`` does the same with communication, but refuses uneven shards under FSDP x TP.
    """
    if not isinstance(param, DTensor):
        param.copy_(whole)
        return

    def order(axis: int) -> tuple[bool, int]:
        # a strided shard was cut after the axes to its right, see torch's _StridedShard
        strided = hasattr(param.placements[axis], "split_factor")
        return strided, -axis if strided else axis

    for axis in sorted(range(param.device_mesh.ndim), key=order):
        dim = getattr(param.placements[axis], "dim", None)
        if dim is not None:
            parts = whole.chunk(param.device_mesh.size(axis), dim)
            rank = param.device_mesh.get_local_rank(axis)
            whole = parts[rank] if rank < len(parts) else whole.narrow(dim, 0, 0)
    param.to_local().copy_(whole)


def _build_whole_model(spec: Any, job_config: Any) -> nn.Module:
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.tools.utils import set_default_dtype

    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
        whole: nn.Module = spec.model_cls(spec.model_args[job_config.model.flavor])
    whole.to_empty(device="cpu")
    with torch.no_grad():
        for param in whole.parameters():
            param.zero_()  # gpt_oss leaves its router's bias as it finds it
        whole.init_weights(buffer_device=None)  # type: ignore[operator]
    return whole


def _common_seed(seed: int | None) -> int:
    """The job's seed, or rank 0's when the job has none."""
    seeds = [torch.initial_seed() if seed is None else seed]
    if seed is None and dist.is_initialized():
        dist.broadcast_object_list(seeds, src=0)
    return seeds[0]
