"""The optimizer: groups, state, checks before a step, the step."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from dtensor_muon.agreement import check_groups, options_text
from dtensor_muon.coefficients import CoefficientTriple
from dtensor_muon.cost import DeviceProfile
from dtensor_muon.explain import explain
from dtensor_muon.functional import adamw_update
from dtensor_muon.fused import FusedDim, parts_of
from dtensor_muon.lane import Lane, make_lane
from dtensor_muon.layout import describe_tensor, infer_layout, local_tensor, mesh_of
from dtensor_muon.members import (
    Planned,
    check_qkv_found,
    count_steps,
    description_of,
    is_block_step,
    is_qkv_weight,
    make_plan,
    segments_of,
    signature_of,
)
from dtensor_muon.newton_schulz import compiled_orthogonalize, orthogonalize
from dtensor_muon.nonfinite import check_nonfinite, skips_step
from dtensor_muon.options import (
    ADAMW,
    GROUP_OPTIONS,
    MUON,
    check_dtype,
    check_matrix,
    check_values,
    normalize_group,
    parameter_names,
)
from dtensor_muon.planner import PlanSettings
from dtensor_muon.preflight import check_agreement, check_local_shape, checked_gradient
from dtensor_muon.presence import Presence
from dtensor_muon.redistribute import BucketMover
from dtensor_muon.schedule import Bucket, run, waves_of
from dtensor_muon.state import accept_state_dict, momentum_dtype, new_state

# what a copy of an optimizer keeps beside its groups and state
_KEPT = ("_settings", "_compile", "_nonfinite", "skipped_steps", "_steps", "_loads", "_qkv")


class Muon(torch.optim.Optimizer):
    """Muon for matrices that are DTensors or plain tensors, and AdamW for the rest.

    The update of a matrix is the Newton-Schulz orthogonalization of its momentum (K. Jordan et al., "Muon: An optimizer
    for hidden layers in neural networks"). For a DTensor it equals the update of the unsharded matrix, whatever its
    placements; the exception is `tp_mode="blockwise"`. All state exists after construction, but for parameters on the
    meta device, whose state is created by the first step after they are materialized.

    Args:
        params: Tensors, `(name, tensor)` pairs, or dicts with `params` and any argument below, and
            `optimizer`: `"muon"` (the default) or `"adamw"`.
        lr: Learning rate.
        momentum: Coefficient of the exponential average of the gradients, in [0, 1).
        nesterov: Whether to orthogonalize `lerp(grad, momentum_buffer, momentum)` rather than the buffer.
        weight_decay: Coefficient of the weight decay.
        use_decoupled_weight_decay: True multiplies the parameter by `1 - lr * weight_decay`; False adds
            `weight_decay * param` to a copy of the gradient.
        split_qkv: Whether to orthogonalize Q, K and V of fused QKV weights separately.
        is_qkv_fn: Tells, once per parameter, whether it is a fused QKV weight; None asks for its attribute `is_qkv`.
        qkv_split_shapes: Rows `(q, k, v)` or `(q, gate, k, v)` per query group; a parameter's own such attribute wins.
        fp32_matmul_prec: `"medium"` computes and communicates in bf16, `"high"` uses TF32 where the device has it,
            `"highest"` fp32.
        coefficient_type: One of `get_supported_coefficient_types()`.
        num_ns_steps: Newton-Schulz steps, at least 1.
        scale_mode: `"spectral"`, `"shape_scaling"` or `"unit_rms_norm"`; see `get_muon_scale_factor`.
        extra_scale_factor: Multiplies every update; 0.2 with `"spectral"` gives updates the RMS of AdamW's.
        tp_mode: `"owner"`, `"distributed"`, `"duplicated"`: exact, different in work and traffic; `"auto"`: the
            cheapest of these per bucket of same-shape matrices; `"blockwise"`: each tensor-parallel block on its own.
        fused: How the matrices of a group are fused; a parameter's own attribute `fused_dim` and the QKV arguments win.
        flatten: Whether to see convolution weights `[out, in, *kernel]` as matrices `[out, in * kernel]`.
        block_period: Orthogonalizes tensor-parallel blocks apart on all but every k-th step (MuonBP, arXiv 2510.16981);
            1 never does.
        block_lr_multiplier: Multiplies `lr` in the updates of blocks.
        full_lr_multiplier: Multiplies `lr` in the updates of whole matrices.
        custom_coefficient_sets: The `(a, b, c)` triples of `coefficient_type="custom"`.
        momentum_dtype: Of the momentum buffers; None is the parameter's.
        betas: Of AdamW groups.
        eps: Of AdamW groups.
        device_profile: Rates by which `"auto"` chooses; None takes the preset of the device type.
        max_bucket_bytes: Bound on a rank's extra memory for the buckets that move together, in bytes. None is 1 GiB, or
            what one matrix on every rank needs where that is more.
        compile: Whether to run the Newton-Schulz of whole matrices through `torch.compile`.
        nonfinite: When a gradient is infinite or NaN on any rank: `"propagate"` goes on; `"skip"` leaves all parameters
            and state as they are, warns with the names and counts in `skipped_steps`; `"raise"` leaves them, and raises
            FloatingPointError. The last two wait for the device at every step.

    Attributes:
        skipped_steps: Steps that `nonfinite="skip"` left out since construction; not part of a checkpoint.

    Raises:
        ValueError: A bad argument, group option or parameter.
        NotImplementedError: A layout that cannot be computed exactly.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        lr: float | Tensor = 3e-4,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.01,
        use_decoupled_weight_decay: bool = True,
        split_qkv: bool = False,
        is_qkv_fn: Callable[[Tensor], bool] | None = None,
        qkv_split_shapes: tuple[int, ...] | None = None,
        fp32_matmul_prec: str = "medium",
        coefficient_type: str = "quintic",
        num_ns_steps: int = 5,
        scale_mode: str = "spectral",
        extra_scale_factor: float = 1.0,
        tp_mode: str = "auto",
        *,
        fused: FusedDim | Mapping[str, Any] | None = None,
        flatten: bool = False,
        block_period: int = 1,
        block_lr_multiplier: float = 1.0,
        full_lr_multiplier: float = 1.0,
        custom_coefficient_sets: Sequence[CoefficientTriple] | None = None,
        momentum_dtype: torch.dtype | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        device_profile: DeviceProfile | None = None,
        max_bucket_bytes: int | None = None,
        compile: bool = False,
        nonfinite: str = "propagate",
    ) -> None:
        arguments = locals()
        defaults = {key: arguments[key] for key in GROUP_OPTIONS} | {"optimizer": MUON}
        for name in (MUON, ADAMW):
            check_values({**defaults, "optimizer": name}, "param_groups[0]")
        if not isinstance(compile, bool):
            raise ValueError(f"compile is {compile!r}; it must be True or False")
        self._settings = PlanSettings(device_profile, max_bucket_bytes)
        self._compile = compile
        check_nonfinite(nonfinite)
        self._nonfinite = nonfinite
        self.skipped_steps, self._steps, self._loads = 0, 0, 0
        self._plans: dict[tuple[bool, ...], Planned] = {}
        self._qkv: set[Tensor] = set()
        self._lane: Lane | None = None
        self._presence = Presence()
        super().__init__(params, defaults)
        check_qkv_found(self.param_groups, self._qkv)
        self._planned(whole=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # torch calls this for every state dict that it loads, too
        self._plans = {}
        self._presence = Presence()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{key: self.__dict__[key] for key in _KEPT}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group and creates its state; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: A bad option or parameter. Nothing is changed then.
            NotImplementedError: A layout that cannot be computed exactly. Nothing is changed then.
        """
        index = len(self.param_groups)
        if not isinstance(param_group, dict) or isinstance(param_group.get("params"), set):
            super().add_param_group(param_group)  # raises torch's own error
            return
        group = normalize_group(param_group, self.defaults, index)
        qkv = self._check_params(group, index)
        # a checkpoint holds the options of a group, and no function
        super().add_param_group({**group, "is_qkv_fn": None})
        group = self.param_groups[-1]
        self._qkv |= qkv
        self._plans = {}
        for param in group["params"]:
            self._init_state(group, param)

    def state_dict(self) -> dict[str, Any]:
        """Returns state and options; see `torch.optim.Optimizer.state_dict`. Raises what `step` would of replicas."""
        self._presence.check_replicas()
        self._init_all()
        saved = super().state_dict()
        for group in saved["param_groups"]:
            if isinstance(group["fused"], FusedDim):
                group["fused"] = group["fused"].to_option()
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict; see `torch.optim.Optimizer.load_state_dict`. Momentum buffers keep their own dtype.

        State of `torch.optim.Muon` and `torch.optim.AdamW` fits as it is; `convert_heavy_ball` converts others.

        Raises:
            ValueError: It does not fit; names the parameter or group. Nothing is changed then.
        """
        self._init_all()
        loaded: dict[str, Any] = {}
        before = dict(self.state)

        def accept(_: torch.optim.Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            loaded.update(accept_state_dict(self.param_groups, final))
            return loaded

        # the last pre-hook sees what the user's hooks made of the state dict, the first post-hook comes before theirs
        hooks = [
            self.register_load_state_dict_pre_hook(accept),
            self.register_load_state_dict_post_hook(lambda _: self._complete_state(loaded, before), prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()
        self._loads += 1

    def _complete_state(self, loaded: dict[str, Any], before: dict[Tensor, dict[str, Any]]) -> None:
        """Takes back torch's cast of all state to the parameter's dtype, and creates the state that was not saved."""
        for group, saved in zip(self.param_groups, loaded["param_groups"], strict=True):
            for param, key in zip(group["params"], saved["params"], strict=True):
                if key not in loaded["state"]:
                    if loaded["state"]:
                        self.state[param] = before[param]
                elif group["optimizer"] == MUON:
                    buffer = loaded["state"][key]["momentum_buffer"]
                    self.state[param]["momentum_buffer"] = buffer.to(
                        dtype=momentum_dtype(group, param), device=param.device
                    )
        self._init_all()

    def _init_all(self, *, allow_meta: bool = False) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self._init_state(group, param, allow_meta=allow_meta)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates all parameters that have a gradient on any rank; a rank without one counts as zero.

        Args:
            closure: Evaluates the model again and returns the loss.

        Raises:
            ValueError: A gradient does not fit its parameter, or an option of a group has become invalid. No parameter
                has changed and no collective run then.
            RuntimeError: The ranks differ in groups, options, counters or number of steps, or replicas of a parameter
                had no gradient in the step before. Raised on all ranks; no parameter has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            # an lr is the scheduler's: its rounding may fall just below zero
            check_values({**group, "lr": 0.0}, f"param_groups[{index}]")
        self._presence.check()
        self._init_all(allow_meta=True)
        present = self._checked_gradients()
        waves = self._planned_waves()
        self._steps += 1
        gradients = self._with_absent(present)
        if skips_step(self._nonfinite, list(self._named_params()), gradients):
            self.skipped_steps += 1
            return loss
        run(waves, gradients, self._momentum, self._lane)
        count_steps(self.param_groups, self.state)
        for group in self.param_groups:
            if group["optimizer"] == ADAMW:
                self._step_adamw(group, gradients)
        return loss

    def _named_params(self) -> Iterator[tuple[str, Tensor]]:
        for index, group in enumerate(self.param_groups):
            yield from zip(parameter_names(group, index), group["params"], strict=True)

    def _momentum(self, param: Tensor) -> Tensor:
        return local_tensor(self.state[param]["momentum_buffer"])

    def _check_params(self, group: dict[str, Any], index: int) -> set[Tensor]:
        """Checks the parameters of a new group; returns the fused QKV weights among them."""
        qkv: set[Tensor] = set()
        seen = {param: name for name, param in self._named_params()}
        for name, param in _split_names(group, index):
            if not isinstance(param, Tensor):
                raise TypeError(f"{name} is a {type(param).__name__}; a parameter must be a torch.Tensor")
            if param in seen:
                raise ValueError(
                    f"{describe_tensor(name, param)} is in the optimizer already, as {seen[param]}; list it once"
                )
            seen[param] = name
            check_dtype(name, param)
            layout = infer_layout(param, name)
            qkv |= {param} if is_qkv_weight(group, param) else set()
            fused = description_of(group, name, param, is_qkv=param in qkv)
            if fused is not None and param.ndim < 2:
                fused.resolve(layout.shape, name)
            if group["optimizer"] == MUON:
                check_matrix(name, param)
                check_local_shape(name, param, layout)
                parts_of(layout, name, fused, group["flatten"])
        return qkv

    def _init_state(self, group: dict[str, Any], param: Tensor, *, allow_meta: bool = False) -> None:
        state = self.state[param]
        if not state and (param.device.type != "meta" or allow_meta):
            state.update(new_state(group, param))
        elif state and group["block_period"] > 1 and "step" not in state:
            # the option was set after construction
            state["step"] = torch.zeros(())

    def _checked_gradients(self) -> dict[Tensor, Tensor]:
        """Returns the local gradients of this rank, after checking all of them."""
        present: dict[Tensor, Tensor] = {}
        for name, param in self._named_params():
            if param.grad is not None:
                present[param] = checked_gradient(name, param, param.grad)
        return present

    def _with_absent(self, present: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Adds zeros for parameters that have a gradient on another rank only. Collective."""
        named = [(name, param) for name, param in self._named_params() if mesh_of(param) is not None]
        options = options_text(self.param_groups, self._loads)
        absent = self._presence.absent_here_only(named, present, self._steps, options, self.state)
        return present | {param: torch.zeros_like(local_tensor(param)) for param in absent}

    def explain(self) -> str:
        """Returns a table of the buckets: what is in them, how they are computed, at what cost. Not collective.

        With `block_period`, of the steps that orthogonalize whole matrices.
        """
        planned = self._planned(whole=True)
        return explain(planned.plans, planned.entries)

    def _planned(self, *, whole: bool = False) -> Planned:
        """Returns the plan of the next step, made anew when its signature has changed."""
        groups = [(index, group) for index, group in enumerate(self.param_groups) if group["optimizer"] == MUON]
        blockwise = tuple(not whole and is_block_step(group, self.state) for _, group in groups)
        planned = self._plans.get(blockwise)
        if planned is None or planned.signature != signature_of(groups, blockwise):
            planned = self._plans[blockwise] = make_plan(groups, blockwise, self._qkv, self._settings)
            blocks = tuple(group["block_period"] > 1 for _, group in groups)
            if any(blocks) and not any(blockwise):
                # a layout without blocks to work on raises at the first step, not at the first of blocks
                make_plan(groups, blocks, self._qkv, self._settings)
        return planned

    def _planned_waves(self) -> tuple[tuple[Bucket, ...], ...]:
        """Returns the plan in waves. Collective when it is new: all ranks check that they agree on it."""
        planned = self._planned()
        if planned.waves is None:
            owners = planned.owners
            check_groups(self.param_groups)
            check_agreement(planned.plans, planned.entries, [member.param for _, member in owners])
            math = compiled_orthogonalize() if self._compile else orthogonalize
            buckets = [
                Bucket(plan, BucketMover(plan), segments_of([owners[member] for member in plan.members]), math)
                for plan in planned.plans
            ]
            planned.waves = waves_of(buckets, self._settings.max_bucket_bytes)
            self._lane = make_lane(owners[0][1].param.device) if owners else None
        return planned.waves

    def _step_adamw(self, group: dict[str, Any], gradients: dict[Tensor, Tensor]) -> None:
        params = [param for param in group["params"] if param in gradients]
        if params:
            states = [{key: local_tensor(value) for key, value in self.state[param].items()} for param in params]
            adamw_update(
                [local_tensor(param) for param in params],
                [gradients[param] for param in params],
                states,
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )


def _split_names(group: dict[str, Any], index: int) -> Iterator[tuple[str, Any]]:
    """Yields a name and a parameter for each item of a group that torch has not taken apart yet."""
    for item, name in zip(group["params"], parameter_names(group, index), strict=True):
        yield (item[0], item[1]) if isinstance(item, tuple) else (name, item)
