"""A small training job on any layout that saves and loads through torch.distributed.checkpoint."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from parity import full_tensors
from simulated import LAYOUTS, Layout, R, S, build_mesh, from_local, strided
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from dtensor_muon import Muon

SHAPES = {"wide": (10, 12), "same": (10, 12), "frozen": (6, 4), "experts": (4, 6, 5), "head": (7, 4), "norm": (9,)}
NO_GRADIENT = ("same",)
STAGES = (("wide", "same", "frozen"), ("experts", "head", "norm"))

_EP2 = Layout((2, 2), (strided(0, 2), S(0)), ((1, 0), (0, 0)), ("efsdp", "ep"))
_EP4 = Layout((1, 4), (strided(0, 4), S(0)), ((1, 0),), ("efsdp", "ep"))
_TP2 = Layout((2, 2), (R(), S(0)), ((1, 0),), ("dp_replicate", "tp"))
_FSDP2 = Layout((2,), (S(0),), ((0, 0),), ("fsdp",))
# the placements are those of a stage's own mesh, the cut is that of the mesh of both stages
_STAGE = Layout((2, 2), (S(0),), ((1, 0),), ("pp", "fsdp"))
_PLAIN = Layout((1,), (), ())


def _job(dense: Layout, experts: Layout, norm: Layout) -> dict[str, Layout]:
    return {name: {"experts": experts, "norm": norm}.get(name, dense) for name in SHAPES}


JOBS = {
    "fsdp4": _job(LAYOUTS["fsdp0"], LAYOUTS["fsdp0"], LAYOUTS["fsdp0"]),
    "fsdp2": _job(_FSDP2, _FSDP2, _FSDP2),
    "fsdp3": _job(LAYOUTS["fsdp0_of_3"], LAYOUTS["fsdp0_of_3"], LAYOUTS["fsdp0_of_3"]),
    "tp2": _job(_TP2, _TP2.lift(1), Layout((2, 2), (R(), R()), (), ("dp_replicate", "tp"))),
    "fsdp2_tp2": _job(LAYOUTS["fsdp_tp_col"], LAYOUTS["fsdp_tp_row"].lift(1), LAYOUTS["fsdp_tp_norm"]),
    "hsdp": _job(LAYOUTS["hsdp"], LAYOUTS["hsdp"], LAYOUTS["hsdp"]),
    "ep2": _job(LAYOUTS["fsdp0"], _EP2, LAYOUTS["fsdp0"]),
    "ep4": _job(LAYOUTS["fsdp0"], _EP4, LAYOUTS["fsdp0"]),
    "pp2_fsdp2": _job(_STAGE, _STAGE, _STAGE),
    "plain": _job(_PLAIN, _PLAIN, _PLAIN),
}


def world_of(job: str) -> int:
    return JOBS[job]["wide"].world


def names_of(rank: int, job: str) -> tuple[str, ...]:
    """The parameters of a rank: all, or those of its pipeline stage."""
    return STAGES[rank // 2] if job.startswith("pp2") else tuple(SHAPES)


class Net(nn.Module):
    """Nothing but named parameters."""

    def __init__(self, rank: int, job: str) -> None:
        super().__init__()
        meshes: dict[Any, Any] = {}
        for name, full in zip(SHAPES, full_tensors(list(SHAPES.values()), 0, 0.1), strict=True):
            if name in names_of(rank, job):
                param = nn.Parameter(place(rank, full, JOBS[job][name], meshes))
                self.register_parameter(name, param.requires_grad_(name != "frozen"))


def place(rank: int, full: Tensor, layout: Layout, meshes: dict[Any, Any]) -> Tensor:
    """This rank's part of a tensor: a DTensor, or the tensor itself."""
    if not layout.placements:
        return full.clone()
    key = (layout.mesh, layout.names)
    if key not in meshes:
        mesh = build_mesh(layout)
        meshes[key] = mesh["fsdp"] if layout is _STAGE else mesh
    return from_local(layout.cut(full, rank).clone(), full, meshes[key], layout)


def local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def make_optimizer(net: Net, **options: Any) -> Muon:
    named = dict(net.named_parameters())
    groups = [
        {"params": ("wide", "frozen", "experts")},
        {"params": NO_GRADIENT, "lr": 0.01},
        {"params": ("head", "norm"), "optimizer": "adamw", "lr": 0.003},
    ]
    groups = [{**group, "params": [(n, named[n]) for n in group["params"] if n in named]} for group in groups]
    groups = [group for group in groups if group["params"]]
    return Muon(groups, **{"lr": 0.02, "fp32_matmul_prec": "highest", "momentum_dtype": torch.float64} | options)


def train_step(rank: int, job: str, net: Net, optimizer: Muon, step: int) -> float:
    """One step towards random targets; returns this rank's part of the loss."""
    loss = 0.0
    targets = dict(zip(SHAPES, full_tensors(list(SHAPES.values()), 50 + step), strict=True))
    for name, param in net.named_parameters():
        if name in NO_GRADIENT or not param.requires_grad:
            continue
        layout = JOBS[job][name]
        error = local(param) - (layout.cut(targets[name], rank) if layout.placements else targets[name])
        loss += float(error.square().sum())
        param.grad = torch.zeros_like(param)
        local(param.grad).copy_(error)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@dataclass(frozen=True)
class Plan:
    """What a job does: load (if `load`), train `steps`, save (if `save`), report."""

    job: str
    steps: range = range(0)
    load: str | None = None
    save: str | None = None
    form: str = "flat"
    options: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(net: Net, optimizer: Muon, path: str, form: str) -> None:
    content = {"model": net.state_dict(), "optimizer": optimizer_content(net, optimizer, form)}
    if form == "async":
        dcp.async_save(content, checkpoint_id=path).result()
    else:
        dcp.save(content, checkpoint_id=path)


def load_checkpoint(net: Net, optimizer: Muon, path: str, form: str) -> None:
    # a copy, because dcp.load writes into the tensors that it is given, up to where a damaged file ends
    content = copy.deepcopy({"model": net.state_dict(), "optimizer": optimizer_content(net, optimizer, form)})
    dcp.load(content, checkpoint_id=path)
    net.load_state_dict(content["model"])
    if form == "raw":
        optimizer.load_state_dict(content["optimizer"])
    else:
        set_optimizer_state_dict(net, optimizer, content["optimizer"], options=_state_options(form))


def optimizer_content(net: Net, optimizer: Muon, form: str) -> dict[str, Any]:
    if form == "raw":
        return optimizer.state_dict()
    return get_optimizer_state_dict(net, optimizer, options=_state_options(form))


def _state_options(form: str) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=form != "nested")


def run_job(rank: int, plan: Plan) -> dict[str, Any]:
    """The body: returns losses, local parameters, and local state by parameter and key."""
    net = Net(rank, plan.job)
    optimizer = make_optimizer(net, **plan.options)
    if plan.load is not None:
        load_checkpoint(net, optimizer, plan.load, plan.form)
    losses = [train_step(rank, plan.job, net, optimizer, step) for step in plan.steps]
    if plan.save is not None:
        before = snapshot(net, optimizer)
        save_checkpoint(net, optimizer, plan.save, plan.form)
        after = snapshot(net, optimizer)
        assert all(torch.equal(before[key], after[key]) for key in before | after)
    return {"losses": losses, "values": snapshot(net, optimizer), "lr": [g["lr"] for g in optimizer.param_groups]}


def snapshot(net: Net, optimizer: Muon) -> dict[str, Tensor]:
    values = {}
    for name, param in net.named_parameters():
        values[name] = local(param).clone()
        for key, value in optimizer.state[param].items():
            values[f"{name}.{key}"] = local(value).clone()
    return values


def whole(job: str, results: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Puts the shards of all ranks together without DTensor, by an index tensor that is cut the same way."""
    full: dict[str, Tensor] = {}
    for rank, result in enumerate(results):
        for key, value in result["values"].items():
            name = key.split(".")[0]
            if key.endswith(".step"):
                full[key] = value
                continue
            shape, layout = SHAPES[name], JOBS[job][name]
            index = torch.arange(torch.Size(shape).numel()).reshape(shape)
            place_of = layout.cut(index, rank).flatten()
            target = full.setdefault(key, torch.full((index.numel(),), torch.nan, dtype=value.dtype))
            target[place_of] = value.flatten()
    return full
