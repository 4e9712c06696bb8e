"""Real torchtitan jobs on two gloo ranks: training, resuming, expert parallel, equal initial weights."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("dtensor_muon.titan", reason="torchtitan is not installed")

from dtensor_muon.titan import corpus

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="these jobs are sized for CPU ranks")

ROOT = Path(__file__).parent.parent
STEPS, SAVED_AT = 16, 8
# job -> sizes of the parts and number of the weights that have them
EXPERT_JOBS = {
    "deepseek_v3": {"(32, 8)": 3, "(16, 16)": 3},
    "gpt_oss": {"(1, 1)": 2},
    "qwen3_moe": {"(16,)": 8},
}
LOSS = re.compile(r"step: *(\d+) +loss: +([\d.]+)")
COLORS = re.compile(r"\x1b\[[0-9;]*m")


def run(*command, timeout=100):
    """Run in a process group that dies with the timeout; the output, after a check of the exit status."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        pytest.fail(f"{' '.join(command)} took more than {timeout} s:\n{process.communicate()[0][-4000:]}")
    output = COLORS.sub("", output)
    assert process.returncode == 0, output[-6000:]
    return output


@pytest.fixture(scope="module")
def job_flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("titan")
    data = folder / "python_sources"
    corpus.prepare(data)
    paths = [f"--training.dataset_path={data}", f"--model.hf_assets_path={data}", f"--job.dump_folder={folder}"]
    return [*paths, f"--training.steps={STEPS}", "--checkpoint.enable", f"--checkpoint.interval={SAVED_AT}"]


@pytest.fixture(scope="module")
def main_job_losses(job_flags):
    """The main job's first steps, from the command line."""
    output = run("dtensor_muon", "train", "titan_configs/llama3_tiny_cpu.toml", "--metrics.log-freq=1", *job_flags)
    assert "layers.*.attention.wq.weight" in output
    return {int(step): float(loss) for step, loss in LOSS.findall(output)}


@pytest.fixture(scope="module")
def results(main_job_losses, job_flags, tmp_path_factory):
    """One process group of two ranks: initial weights, then the main job resumed, then the expert-parallel jobs."""
    file = tmp_path_factory.mktemp("results") / "results.json"
    resume = ["llama3_tiny_cpu.toml", *job_flags, f"--checkpoint.load-step={SAVED_AT}"]
    experts = [[f"{name}_ep_debug.toml", *job_flags[:2], "--training.steps=5"] for name in EXPERT_JOBS]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run(*launcher, "tests/titan_ranks.py", str(file), "--jobs", *map(",".join, [resume, *experts]))
    return json.loads(file.read_text())


def test_loss_of_the_main_job_falls(main_job_losses):
    assert list(main_job_losses) == list(range(1, STEPS + 1))
    assert main_job_losses[1] == pytest.approx(torch.tensor(corpus.VOCAB_SIZE).log().item(), abs=0.6)
    assert main_job_losses[STEPS] < 0.8 * main_job_losses[1]


def test_resumed_job_continues_as_the_uninterrupted_one(main_job_losses, results):
    job = results["jobs"][0]
    resumed = {int(step): loss for step, loss in job["losses"].items()}
    assert list(resumed) == list(range(SAVED_AT + 1, STEPS + 1))
    # the log rounds to five digits behind the point
    assert resumed == pytest.approx({step: main_job_losses[step] for step in resumed}, abs=1e-4)
    assert job["is_muon"]
    assert job["groups"] == {"muon": 14, "adamw": 7}


@pytest.mark.parametrize("name", EXPERT_JOBS)
def test_expert_parallel_job_trains_with_fused_weights_taken_apart(results, name):
    job = results["jobs"][1 + list(EXPERT_JOBS).index(name)]
    assert job["is_muon"]
    assert job["losses"]["5"] < job["losses"]["1"] - 0.5
    assert job["fused"] == EXPERT_JOBS[name]


def test_load_balancing_moves_the_experts_of_every_moe_layer(results):
    moved = {name: job["moved_expert_biases"] for name, job in zip(EXPERT_JOBS, results["jobs"][1:], strict=True)}
    # torchtitan balances qwen3's experts by no hook
    assert moved == {"deepseek_v3": 2, "gpt_oss": 2, "qwen3_moe": 0}


def test_initial_weights_are_the_same_on_every_layout(results):
    differing = {case: names for case, names in results["initial_weights"].items() if "stock" not in case}
    assert set(differing) == {"llama3 single", "llama3 fsdp", "llama3 tp", "deepseek_v3 single", "deepseek_v3 ep"}
    assert not any(differing.values()), differing


def test_torchtitan_alone_starts_from_other_weights_on_cpu(results):
    """The negative control: if this fails, torch draws per shard on CPU and the cure can go."""
    assert "layers.0.attention.wq.weight" in results["initial_weights"]["llama3 stock fsdp"]
