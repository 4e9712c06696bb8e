"""Every built-in torchtitan model with Muon, and the full-size examples at their real world size, without data.

A fake process group stands for any number of ranks, and the models stay on the meta device.
"""

import dataclasses
import types
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

titan = pytest.importorskip("dtensor_muon.titan", reason="torchtitan is not installed")

from torchtitan.components import lr_scheduler, optimizer  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec  # noqa: E402

from dtensor_muon import Muon  # noqa: E402
from dtensor_muon.titan import launch  # noqa: E402
from dtensor_muon.titan.optimizers import MuonLRSchedulersContainer, MuonOptimizersContainer  # noqa: E402

CONFIG_FOLDER = Path(__file__).parent.parent / "titan_configs"
MOE_MODELS = ("deepseek_v3", "llama4", "gpt_oss")
FLAVORS = {"flux": "flux-debug"}


@contextmanager
def fake_world(world_size):
    dist.init_process_group("fake", rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def job(name, *flags):
    flavor = FLAVORS.get(name, "debugmodel")
    common = ["--job.custom-config-module=dtensor_muon.titan", "--optimizer.name=Muon", "--training.seq-len=64"]
    return ConfigManager().parse_args([*common, f"--model.name={name}", f"--model.flavor={flavor}", *flags])


def build_dims(config, world_size):
    parallelism = config.parallelism
    return ParallelDims(
        dp_shard=parallelism.data_parallel_shard_degree,
        dp_replicate=parallelism.data_parallel_replicate_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=1,
        ep=parallelism.expert_parallel_degree,
        etp=parallelism.expert_tensor_parallel_degree,
        world_size=world_size,
    )


def build(config, world_size):
    """The model as torchtitan parallelizes it, its optimizers and schedulers, all on meta."""
    spec = get_train_spec(config.model.name)
    model_args = spec.model_args[config.model.flavor]
    model_args.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(model_args)
    dims = build_dims(config, world_size)
    model = spec.parallelize_fn(model, dims, config)
    optimizers = spec.build_optimizers_fn([model], config.optimizer, dims)
    return model, optimizers, spec.build_lr_schedulers_fn(optimizers, config.lr_scheduler, config.training.steps)


def matrices(optimizers):
    return [
        (name, param)
        for muon in optimizers
        for group in muon.param_groups
        if group["optimizer"] == "muon"
        for name, param in zip(group["param_names"], group["params"], strict=True)
    ]


@pytest.mark.parametrize("name", sorted(titan.TRAIN_SPECS))
def test_every_model_gets_muon_on_two_fsdp_ranks(name):
    with fake_world(2):
        model, optimizers, schedulers = build(job(name), 2)
    assert isinstance(optimizers, MuonOptimizersContainer)
    assert isinstance(schedulers, MuonLRSchedulersContainer)
    assert [type(each) for each in optimizers] == [Muon]
    owned = [param for group in optimizers.optimizers[0].param_groups for param in group["params"]]
    assert len(owned) == len(set(owned)) == len([p for p in model.parameters() if p.requires_grad])
    chosen = matrices(optimizers)
    assert len(chosen) > 8
    assert all(isinstance(param, DTensor) and param.ndim in (2, 3) for _, param in chosen)
    # the model's own hooks: MoE load balancing
    assert len(optimizers._optimizer_step_pre_hooks) == (name in MOE_MODELS)


def test_built_in_models_are_all_there():
    missing = {"llama3", "llama3_ft", "qwen3", "deepseek_v3", "llama4", "gpt_oss"} - set(titan.TRAIN_SPECS)
    assert not missing
    assert hasattr(titan.TRAIN_SPECS["llama3_ft"], "fragment_fn")  # a subclass of TrainSpec stays one
    with pytest.raises(ValueError, match="already registered"):
        register_train_spec("llama3", titan.TRAIN_SPECS["llama3"])


@pytest.mark.parametrize("file", ["llama3_8b_fsdp_tp", "qwen3_30b_a3b_ep"])
def test_full_size_example_at_its_real_world_size(file):
    path = CONFIG_FOLDER / f"{file}.toml"
    config = launch.check_job(path, launch.job_arguments(path, ["--compile.no-enable"]))
    with fake_world(64):
        model, optimizers, _ = build(config, 64)
    total = sum(param.numel() for param in model.parameters())
    in_matrices = sum(param.numel() for _, param in matrices(optimizers))
    expected = {"llama3_8b_fsdp_tp": (8.0e9, 0.85), "qwen3_30b_a3b_ep": (30.5e9, 0.95)}[file]
    assert total == pytest.approx(expected[0], rel=0.02)
    assert in_matrices > expected[1] * total
    layouts = {
        name.rsplit(".", 2)[-2] if name.endswith("weight") else name.rsplit(".", 1)[-1]: param
        for name, param in matrices(optimizers)
    }
    if file == "llama3_8b_fsdp_tp":
        assert layouts["wq"].device_mesh.mesh_dim_names == ("fsdp", "tp")
        assert {key: str(layouts[key].placements) for key in ("wq", "wo")} == {
            "wq": "(_StridedShard(dim=0, sf=8), Shard(dim=0))", "wo": "(Shard(dim=0), Shard(dim=1))",
        }  # fmt: skip
    else:
        assert layouts["w1"].device_mesh.mesh_dim_names == ("efsdp", "ep")
        assert layouts["w1"].shape[0] == 128


# ---- other optimizers and refusals -----------------------------------------------------------------------------------


def tiny():
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.RMSNorm(8), nn.Linear(8, 4, bias=False))


def section(**values):
    return dataclasses.replace(job("llama3").optimizer, **values)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "NoSuchOptimizer"])
def test_other_names_reach_torchtitan_untouched(name):
    spec = get_train_spec("llama3")
    build_optimizers = spec.build_optimizers_fn
    original = build_optimizers.__wrapped__
    assert original is optimizer.build_optimizers
    config = section(name=name, implementation="for-loop")
    if name == "NoSuchOptimizer":
        with pytest.raises(NotImplementedError, match="Optimizer NoSuchOptimizer not added"):
            build_optimizers([tiny()], config, None)
        return
    container = build_optimizers([tiny()], config, None)
    assert type(container) is optimizer.OptimizersContainer
    assert type(container.optimizers[0]) is getattr(torch.optim, name)
    schedulers = spec.build_lr_schedulers_fn(container, job("llama3").lr_scheduler, 10)
    assert type(schedulers) is lr_scheduler.LRSchedulersContainer


def test_muon_keys_of_another_optimizer_are_reported(caplog):
    with caplog.at_level("WARNING"):
        get_train_spec("llama3").build_optimizers_fn(
            [tiny()], section(name="AdamW", implementation="for-loop", muon_lr=0.1), None
        )
    assert "[optimizer] muon_lr: set, but ignored because name = 'AdamW'" in caplog.text


def test_arguments_of_the_whole_optimizer_do_not_go_to_its_groups():
    config = section(device_profile="h100", muon_max_bucket_bytes=4096)
    muon = get_train_spec("llama3").build_optimizers_fn([tiny()], config, None).optimizers[0]
    assert (muon._settings.profile.name, muon._settings.max_bucket_bytes) == ("h100", 4096)
    assert not any("device_profile" in group for group in muon.param_groups)


def test_fault_tolerance_is_refused():
    manager = types.SimpleNamespace(enabled=True)
    with pytest.raises(
        ValueError, match=r"\[fault_tolerance\] enable = true does not work with .*'Muon'; set it to false"
    ):
        get_train_spec("llama3_ft").build_optimizers_fn([tiny()], section(), None, manager)


# ---- pipeline stages and schedules -----------------------------------------------------------------------------------


def stages_with_schedulers():
    """A stage with matrices and one without: they have different parameter groups."""
    spec = get_train_spec("llama3")
    parts = [tiny(), nn.Sequential(nn.RMSNorm(4))]
    config = job("llama3", "--optimizer.muon-lr=0.5", "--optimizer.adamw-lr=0.25", "--lr-scheduler.warmup-steps=4")
    optimizers = spec.build_optimizers_fn(parts, config.optimizer, None)
    return optimizers, spec.build_lr_schedulers_fn(optimizers, config.lr_scheduler, 8)


def rates(optimizers):
    return [[(group["optimizer"], group["lr"]) for group in each.param_groups] for each in optimizers]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_schedule_of_stages_with_different_groups_saves_and_resumes():
    optimizers, schedulers = stages_with_schedulers()
    assert rates(optimizers) == [[("muon", 0.125), ("adamw", 0.0625)], [("adamw", 0.0625)]]
    for _ in range(2):
        schedulers.step()
    saved, before = schedulers.state_dict(), rates(optimizers)
    assert before == [[("muon", 0.375), ("adamw", 0.1875)], [("adamw", 0.1875)]]
    assert saved == {"last_epoch": 2, "_step_count": 3}  # nothing in it depends on groups

    resumed, resumed_schedulers = stages_with_schedulers()
    resumed_schedulers.load_state_dict(saved)
    assert resumed_schedulers.schedulers[0].get_last_lr() == [0.375, 0.1875]
    schedulers.step()
    resumed_schedulers.step()
    assert rates(resumed) == rates(optimizers) == [[("muon", 0.5), ("adamw", 0.25)], [("adamw", 0.25)]]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_base_rate_of_a_loaded_optimizer_wins_over_the_config():
    optimizers, schedulers = stages_with_schedulers()
    for each in optimizers:
        for group in each.param_groups:
            group["initial_lr"] = 1.0  # as loading the optimizer's state leaves it
    schedulers.step()
    assert rates(optimizers) == [[("muon", 0.5), ("adamw", 0.5)], [("adamw", 0.5)]]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def partly_trained_job(folder):
    """A model with a frozen matrix, and a matrix and a bias that never get a gradient; torchtitan's checkpointer."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4), "spare": nn.Linear(4, 4)})
    model["down"].weight.requires_grad_(False)
    config = job("llama3", "--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.keep-latest-k=0")
    spec = get_train_spec("llama3")
    optimizers = spec.build_optimizers_fn([model], config.optimizer, None)
    checkpointer = CheckpointManager(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=spec.build_lr_schedulers_fn(optimizers, config.lr_scheduler, 8),
        states={},
        checkpoint_config=config.checkpoint,
        sd_adapter=None,
        base_folder=str(folder),
    )
    return model, optimizers, checkpointer


def train(model, optimizers, steps):
    for seed in range(steps):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        model["down"](model["up"](x)).square().sum().backward()
        optimizers.step()
        optimizers.zero_grad()


def bits_of(model, optimizers):
    """Copies of all parameters and of the whole state, by parameter name."""
    muon = optimizers.optimizers[0]
    found = {name: {"param": param, **muon.state.get(param, {})} for name, param in model.named_parameters()}
    return {
        name: {key: torch.as_tensor(value).tolist() for key, value in values.items()} for name, values in found.items()
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("steps", [0, 2])
def test_checkpoint_with_frozen_and_never_trained_parameters(tmp_path, steps):
    model, optimizers, checkpointer = partly_trained_job(tmp_path)
    train(model, optimizers, steps)
    saved = bits_of(model, optimizers)
    checkpointer.save(steps + 1)
    assert bits_of(model, optimizers) == saved  # saving counts no step

    other_model, other_optimizers, other_checkpointer = partly_trained_job(tmp_path)
    with torch.no_grad():
        for param in other_model.parameters():
            param.zero_()
    assert bits_of(other_model, other_optimizers) != saved
    assert other_checkpointer.load()
    assert bits_of(other_model, other_optimizers) == saved
    assert set(saved["down.weight"]) == {"param"}
    assert set(saved["spare.weight"]) == {"param", "momentum_buffer"}
    assert saved["spare.bias"]["step"] == 0
    assert saved["up.bias"]["step"] == steps

    train(model, optimizers, 2)
    train(other_model, other_optimizers, 2)
    assert bits_of(other_model, other_optimizers) == bits_of(model, optimizers) != saved
