"""What every rank of ``test_titan_jobs.py`` does: several torchtitan jobs in one process, to start it only once.

Writes the results as JSON, for the tests to look at.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

import dtensor_muon.titan as titan
from dtensor_muon import Muon

CONFIG_FOLDER = Path(__file__).parent.parent / "titan_configs"


def digest(trainer):
    """A hash of each whole parameter and each whole state tensor, by name."""
    whole = {}
    for part, muon in zip(trainer.model_parts, trainer.optimizers.optimizers, strict=True):
        for name, param in part.named_parameters():
            for key, value in {"param": param, **muon.state[param]}.items():
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                whole[f"{name}.{key}"] = hashlib.sha256(
                    value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
                ).hexdigest()
    return whole


def train(file, flags):
    """Run a job; the loss of every step it trains, its digests by step of each save and after loading, its trainer."""
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer

    config = ConfigManager().parse_args([f"--job.config-file={CONFIG_FOLDER / file}", "--metrics.log-freq=1", *flags])
    trainer = Trainer(config)
    losses, digests = {}, {}
    save, load = trainer.checkpointer.save, trainer.checkpointer.load

    def noted_save(step, last_step=False):
        digests[step] = digest(trainer)
        save(step, last_step)

    def noted_load(step=-1):
        loaded = load(step)
        digests["loaded"] = digest(trainer)
        return loaded

    trainer.checkpointer.save, trainer.checkpointer.load = noted_save, noted_load
    trainer.metrics_processor.log = lambda step, loss, *args, **kwargs: losses.__setitem__(step, loss)
    # rank 0 would sleep at the end of a job, for ranks that then exit
    with mock.patch("torchtitan.train.time", SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})):
        trainer.train()
    trainer.close()
    return losses, digests, trainer


def layouts(world_size):
    """Layouts of this many ranks, by the fields of ``ParallelDims``; a "single" one leaves the others idle."""
    one = {"dp_shard": 1, "dp_replicate": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1, "world_size": world_size}
    yield "single", {**one, "world_size": 1}
    yield "fsdp", {**one, "dp_shard": world_size}
    yield "tp", {**one, "tp": world_size}
    yield "ep", {**one, "dp_shard": world_size, "ep": world_size}
    if world_size == 4:
        yield "fsdp_tp", {**one, "dp_shard": 2, "tp": 2}
        yield "hsdp", {**one, "dp_replicate": 2, "dp_shard": 2}
        yield "fsdp_ep", {**one, "dp_shard": 4, "ep": 2}


def initial_weights(name, flavor, dims, cured=True):
    """Whole initial weights of a small model under a layout, by name."""
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_determinism

    flags = ["--debug.seed=1", f"--model.name={name}", f"--model.flavor={flavor}", "--training.seq-len=64"]
    config = ConfigManager().parse_args(["--job.custom-config-module=dtensor_muon.titan", *flags])
    parallel_dims = ParallelDims(**dims)
    set_determinism(parallel_dims, torch.device("cpu"), config.debug, distinct_seed_mesh_dims=["pp"])
    spec = titan.TRAIN_SPECS[name]
    args = spec.model_args[flavor]
    args.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(args)
    parallelize = spec.parallelize_fn if cured else spec.parallelize_fn.__wrapped__
    model = parallelize(model, parallel_dims, config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    whole = {}
    for fqn, param in model.named_parameters():
        fqn = fqn.replace("_checkpoint_wrapped_module.", "")
        whole[fqn] = param.full_tensor() if hasattr(param, "full_tensor") else param.detach()
    return whole


def compare_initial_weights(world_size):
    """Names of the weights that differ from one process's, by model and layout; "stock fsdp" is the control."""
    differences = {}
    for name, flavor, wanted in (
        ("llama3", "tiny", "fsdp tp fsdp_tp hsdp"),
        ("deepseek_v3", "debugmodel", "ep fsdp_ep"),
    ):
        all_dims = dict(layouts(world_size))
        single = initial_weights(name, flavor, all_dims["single"])
        differences[f"{name} single"] = [fqn for fqn, weight in single.items() if not weight.isfinite().all()]
        for layout in filter(all_dims.get, wanted.split()):
            differences[f"{name} {layout}"] = _differ(initial_weights(name, flavor, all_dims[layout]), single)
        if name == "llama3":
            stock = initial_weights(name, flavor, all_dims["fsdp"], cured=False)
            differences[f"{name} stock fsdp"] = _differ(stock, single)
    return differences


def _differ(weights, reference):
    names = [name for name in reference if not torch.equal(weights[name], reference[name])]
    return names + sorted(set(weights) ^ set(reference))


def count_fused(muon):
    """Weights by the sizes of their parts."""
    sizes = [str(group["fused"]["sizes"]) for group in muon.param_groups if group["fused"] for _ in group["params"]]
    return {each: sizes.count(each) for each in sizes}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--jobs", nargs="*", default=[], help="FILE.toml,flag,flag,...")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    results = {"initial_weights": compare_initial_weights(dist.get_world_size()), "jobs": []}
    for job in args.jobs:
        file, *flags = job.split(",")
        losses, digests, trainer = train(file, flags)
        muon = trainer.optimizers.optimizers[0]
        biases = [value for name, value in trainer.model_parts[0].named_buffers() if name.endswith("expert_bias")]
        results["jobs"].append(
            {
                "losses": losses,
                "digests": digests,
                "is_muon": type(muon) is Muon,
                "fused": count_fused(muon),
                "groups": {group["optimizer"]: len(group["params"]) for group in muon.param_groups},
                "moved_expert_biases": sum(bool(bias.abs().max() > 0) for bias in biases),
            }
        )
    if dist.get_rank() == 0:
        args.results.write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
