"""Muon in torchtitan's optimizer and learning-rate scheduler containers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger

from dtensor_muon.param_groups import build_param_groups, describe_param_groups
from dtensor_muon.registry import OptimizerSpec, get_optimizer
from dtensor_muon.titan.options import MUON, OPTIMIZER_WIDE, adamw_options, keys_without_effect, read_options

Builder = Callable[..., OptimizersContainer]


class MuonOptimizersContainer(OptimizersContainer):
    """One :class:`dtensor_muon.Muon` per model part.

    Args:
        model_parts: the parallelized model, or this rank's pipeline stages.
        spec: the registry's entry for Muon.
        options: Muon's constructor arguments, and options of the AdamW groups as ``adamw_<argument>``.
    """

    def __init__(self, model_parts: list[nn.Module], spec: OptimizerSpec, options: dict[str, Any]) -> None:
        self.model_parts = model_parts
        options = dict(options)
        self.optimizers: list[Optimizer] = []
        wide = {name: options.pop(name) for name in OPTIMIZER_WIDE if name in options}
        for part in model_parts:
            groups = build_param_groups(part, overrides=spec.default_overrides, **options)
            logger.info(f"Muon's parameter groups:\n{describe_param_groups(groups)}")
            self.optimizers.append(spec.cls(groups, **wide))
            # torchtitan loads a checkpoint into state that exists
            spec.init_state(self.optimizers[-1])
        self._validate_length(len(model_parts))
        params = [param for part in model_parts for param in part.parameters() if param.requires_grad]
        self._post_init(params, {})


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
            model_parts, spec, {**spec.config_to_options(options), **adamw_options(options)}
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
