"""Muon in torchtitan's optimizer and learning-rate scheduler containers."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger

from dtensor_muon.fused import FusedDim
from dtensor_muon.param_groups import ParamOverride, build_param_groups, describe_param_groups
from dtensor_muon.registry import OptimizerSpec, get_optimizer, qkv_split_shapes_from_config
from dtensor_muon.titan.fused_weights import arguments_of, find_fused_weights
from dtensor_muon.titan.options import (
    MUON,
    OPTIMIZER_WIDE,
    OVERRIDES,
    adamw_options,
    keys_without_effect,
    read_options,
)

Builder = Callable[..., OptimizersContainer]


class MuonOptimizersContainer(OptimizersContainer):
    """One :class:`dtensor_muon.Muon` per model part.

    Args:
        model_parts: the parallelized model, or this rank's pipeline stages.
        spec: the registry's entry for Muon.
        options: Muon's constructor arguments, and options of the AdamW groups as ``adamw_<argument>``. ``split_qkv``
            without ``is_qkv_fn`` splits all fused weights that are known from the model's arguments.
        overrides: the user's.
        is_pipeline: whether the parts are stages, so that what the options speak of may be elsewhere.
    """

    def __init__(
        self,
        model_parts: list[nn.Module],
        spec: OptimizerSpec,
        options: dict[str, Any],
        overrides: Sequence[ParamOverride] = (),
        is_pipeline: bool = False,
    ) -> None:
        self.model_parts = model_parts
        options = dict(options)
        self.optimizers: list[Optimizer] = []
        wide = {name: options.pop(name) for name in OPTIMIZER_WIDE if name in options}
        overrides = (*overrides, *spec.default_overrides)
        speaks_of_all_stages = is_pipeline and bool(overrides or options.get("split_qkv"))
        whole = _whole_model(model_parts[0]) if speaks_of_all_stages else model_parts[0]
        names = [name for name, _ in whole.named_parameters()] if speaks_of_all_stages else None
        fused = _take_fused(whole, options)
        for part in model_parts:
            groups = build_param_groups(part, overrides=overrides, all_names=names, fused=fused, **options)
            logger.info(f"Muon's parameter groups:\n{describe_param_groups(groups)}")
            self.optimizers.append(spec.cls(groups, **wide))
            # torchtitan loads a checkpoint into state that exists
            spec.init_state(self.optimizers[-1])
        self._validate_length(len(model_parts))
        params = [param for part in model_parts for param in part.parameters() if param.requires_grad]
        self._post_init(params, {})


def _whole_model(stage: nn.Module) -> nn.Module:
    """The model that a pipeline stage is a part of, on meta."""
    args = arguments_of(stage)
    with torch.device("meta"):
        whole: nn.Module = type(stage)(args)
    return whole


def _take_fused(model: nn.Module, options: dict[str, Any]) -> dict[str, FusedDim] | None:
    """Replaces ``split_qkv`` among the options by descriptions of the model's fused weights.

    With ``is_qkv_fn`` it stays, and its sizes are filled in from the model's arguments.
    """
    if not options.get("split_qkv"):
        return None
    if "is_qkv_fn" in options:
        if "qkv_split_shapes" not in options:
            options["qkv_split_shapes"] = qkv_split_shapes_from_config(arguments_of(model))
        return None
    del options["split_qkv"]
    return find_fused_weights(model, options.pop("qkv_split_shapes", None))


def muon_builder(builder: Builder) -> Builder:
    """A model's ``build_optimizers_fn`` that knows Muon.

    Args:
        builder: the model's own one; it still builds every optimizer that is not named "Muon".
    """

    @functools.wraps(builder)
    def build(
        model_parts: list[nn.Module], optimizer_config: Any, parallel_dims: Any, ft_manager: Any = None
    ) -> OptimizersContainer:
        if optimizer_config.name != MUON:
            if ignored := keys_without_effect(optimizer_config):
                logger.warning(
                    f"[optimizer] {', '.join(ignored)}: set, but ignored because name = {optimizer_config.name!r}; "
                    f"they belong to name = {MUON!r}"
                )
            return builder(model_parts, optimizer_config, parallel_dims, ft_manager)
        if ft_manager is not None and ft_manager.enabled:
            raise ValueError(
                f"[fault_tolerance] enable = true does not work with [optimizer] name = {MUON!r}; set it to false"
            )
        options = read_options(optimizer_config)
        spec = get_optimizer(MUON.lower())
        container = MuonOptimizersContainer(
            model_parts,
            spec,
            {**spec.config_to_options(options), **adamw_options(options)},
            overrides=getattr(options, OVERRIDES),
            is_pipeline=parallel_dims is not None and parallel_dims.pp_enabled,
        )
        _copy_step_hooks(builder, container, optimizer_config, parallel_dims)
        return container

    return build


def _copy_step_hooks(
    builder: Builder, container: OptimizersContainer, optimizer_config: Any, parallel_dims: Any
) -> None:
    """Register the hooks that the model's own builder hangs on its optimizers, such as MoE load balancing.

    The hooks are closures inside torchtitan's builders, so one such container is built with AdamW, which holds no
    state before its first step, and dropped.
    """
    adamw = dataclasses.replace(optimizer_config, name="AdamW", implementation="for-loop")
    donor = builder(container.model_parts, adamw, parallel_dims)
    for hook in donor._optimizer_step_pre_hooks.values():
        container.register_step_pre_hook(hook)
    for hook in donor._optimizer_step_post_hooks.values():
        container.register_step_post_hook(hook)


class MuonLRSchedulersContainer(LRSchedulersContainer):
    """Learning-rate schedulers whose checkpoint does not depend on the parameter groups.

    torchtitan saves the first scheduler's list of base rates, one per group, and loads it into every scheduler. Muon's
    groups differ between pipeline stages (one without a single matrix has no Muon group), so only the position in the
    schedule is saved; the base rates are the groups' ``initial_lr``, which the optimizer's checkpoint holds by
    parameter name.
    """

    def __init__(self, schedulers: list[LambdaLR]) -> None:
        self.schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        """The position in the schedule; the same on every rank and stage."""
        return {"last_epoch": self.schedulers[0].last_epoch, "_step_count": self.schedulers[0]._step_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position; the groups' rates come with the optimizer's state."""
        for scheduler in self.schedulers:
            scheduler.last_epoch = state_dict["last_epoch"]
            scheduler._step_count = state_dict["_step_count"]
            factors = (factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas)
            scheduler._last_lr = [lr * factor for lr, factor in zip(scheduler.base_lrs, factors, strict=True)]

    def step(self) -> None:
        """Set the rates of the next step."""
        for scheduler in self.schedulers:
            # the optimizer's state may have been loaded since the last step, and is loaded after the scheduler's
            scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]
            scheduler.step()


def muon_lr_schedulers_builder(builder: Callable[..., LRSchedulersContainer]) -> Callable[..., LRSchedulersContainer]:
    """A model's ``build_lr_schedulers_fn`` that keeps Muon's schedulers independent of the parameter groups."""

    @functools.wraps(builder)
    def build(optimizers: OptimizersContainer, *args: Any, **kwargs: Any) -> LRSchedulersContainer:
        container = builder(optimizers, *args, **kwargs)
        if isinstance(optimizers, MuonOptimizersContainer):
            return MuonLRSchedulersContainer(container.schedulers)
        return container

    return build
