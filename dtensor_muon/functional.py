"""Local update math on lists of plain tensors: momentum, weight decay, scale factor, application, AdamW."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

_SCALE_MODES = ("spectral", "shape_scaling", "unit_rms_norm")


def get_muon_scale_factor(size_out: int, size_in: int, mode: str = "spectral") -> float:
    """Returns the factor of an orthogonalized update with `size_out` rows and `size_in` columns.

    Args:
        size_out: Rows of the global logical matrix that was orthogonalized.
        size_in: Its columns.
        mode: `"spectral"` is `sqrt(max(size_out, size_in))` (with `extra_scale_factor=0.2` the update has AdamW's RMS,
            arXiv 2502.16982); `"shape_scaling"` is `sqrt(max(1, size_out / size_in))` (K. Jordan's Muon post);
            `"unit_rms_norm"` is `sqrt(size_out / size_in)` (arXiv 2310.17813).

    Returns:
        The factor; 0 for a matrix without elements.

    Raises:
        ValueError: An unknown mode.
    """
    if mode not in _SCALE_MODES:
        choices = ", ".join(repr(choice) for choice in _SCALE_MODES)
        raise ValueError(f"scale mode is {mode!r}; it must be one of {choices}")
    if size_out == 0 or size_in == 0:
        return 0.0
    if mode == "spectral":
        return math.sqrt(max(size_out, size_in))
    if mode == "shape_scaling":
        return math.sqrt(max(1.0, size_out / size_in))
    return math.sqrt(size_out / size_in)


def muon_inputs(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    lr: float | Tensor,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    use_decoupled_weight_decay: bool,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Decays weights, updates the momentum, and returns what is to be orthogonalized.

    Args:
        params: Decayed in place by `1 - lr * weight_decay` when the decay is decoupled.
        grads: Not modified.
        momentum_buffers: Updated in place: `lerp(buffer, grad, 1 - momentum)`.
        lr: Learning rate.
        momentum: Coefficient of the exponential average.
        nesterov: Whether the input is `lerp(grad, buffer, momentum)` rather than the buffer.
        weight_decay: Coefficient of the decay.
        use_decoupled_weight_decay: Whether it acts on the parameter rather than on the gradient.
        dtype: Of the result.

    Returns:
        One tensor per parameter; may be the buffer itself, so it must not be modified.
    """
    gradients = [grad.to(buffer.dtype) for grad, buffer in zip(grads, momentum_buffers, strict=True)]
    if weight_decay and use_decoupled_weight_decay:
        torch._foreach_mul_(list(params), 1 - lr * weight_decay)
    elif weight_decay:
        decays = [param.to(buffer.dtype) for param, buffer in zip(params, momentum_buffers, strict=True)]
        gradients = list(torch._foreach_add(gradients, decays, alpha=weight_decay))
    buffers = list(momentum_buffers)
    torch._foreach_lerp_(buffers, gradients, 1 - momentum)
    inputs = torch._foreach_lerp(gradients, buffers, momentum) if nesterov else buffers
    return [tensor.to(dtype) for tensor in inputs]


def apply_updates(params: Sequence[Tensor], updates: Sequence[Tensor], lr: float | Tensor, factor: float) -> None:
    """Subtracts `lr * factor * update` from each parameter, in place.

    Args:
        params: The parameters.
        updates: One orthogonalized tensor per parameter.
        lr: Learning rate.
        factor: Scale factor of the updates.
    """
    if isinstance(lr, Tensor):
        steps = torch._foreach_mul([update.to(lr.dtype) for update in updates], lr * -factor)
        torch._foreach_add_(list(params), list(steps))
    else:
        torch._foreach_add_(list(params), list(updates), alpha=-lr * factor)


def adamw_update(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Runs one AdamW step of `torch.optim` in place on plain tensors.

    Args:
        params: The parameters.
        grads: Not modified.
        states: One dict per parameter with `step` (0-d), `exp_avg` and `exp_avg_sq`.
        lr: Learning rate.
        betas: Coefficients of the two averages.
        eps: Added to the denominator.
        weight_decay: Coefficient of the decoupled decay.
    """
    adamw(
        list(params),
        [grad.to(param.dtype) for grad, param in zip(grads, params, strict=True)],
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        foreach=not isinstance(lr, Tensor),  # torch refuses the combination outside of CUDA graphs
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
