"""Real torchtitan jobs on two gloo ranks: training, a restarted rank, expert parallel, equal initial weights."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("dtensor_muon.titan", reason="torchtitan is not installed")

from dtensor_muon.titan import corpus

pytestmark = [
    pytest.mark.skipif(torch.accelerator.is_available(), reason="these jobs are sized for CPU ranks"),
    # whichever runs first waits for the jobs, at most as long as `run` lets them
    pytest.mark.timeout(300),
]

ROOT = Path(__file__).parent.parent
STEPS, SAVED_AT = 12, 6
EXPERT_STEPS = 4
# job -> sizes of the parts and number of the weights that have them; `.ci/run` trains those of other models, too
EXPERT_JOBS = {"deepseek_v3": {"(32, 8)": 3, "(16, 16)": 3}}
LOSS = re.compile(r"step: *(\d+) +loss: +([\d.]+)")
COLORS = re.compile(r"\x1b\[[0-9;]*m")


def run(*command, timeout=240, kill_at=None):
    """Run in a process group that dies with the timeout; the output, after a check of the exit status.

    Args:
        command: module and arguments.
        timeout: in seconds.
        kill_at: the first line with this text has the last child of the process killed.
    """
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
    timer = threading.Timer(timeout, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    output = ""
    for line in process.stdout:
        line = COLORS.sub("", line)
        output += line
        if kill_at is not None and kill_at in line:
            kill_at = None
            os.kill(children(process.pid)[-1], signal.SIGKILL)
    timer.cancel()
    assert process.wait() == 0, output[-6000:]
    return output


def children(pid):
    """The processes that a process has started, in that order."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


@pytest.fixture(scope="module")
def job_flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("titan")
    data = folder / "python_sources"
    corpus.prepare(data)
    paths = [f"--training.dataset_path={data}", f"--model.hf_assets_path={data}"]
    return [*paths, f"--job.dump_folder={folder}", f"--training.steps={STEPS}", "--training.local-batch-size=4"]


@pytest.fixture(scope="module")
def main_job(job_flags):
    """The main job's first steps from the command line; one rank is killed after a checkpoint."""
    config = "titan_configs/llama3_tiny_cpu.toml"
    save = ["--checkpoint.enable", f"--checkpoint.interval={SAVED_AT}", "--metrics.log-freq=1"]
    kill_at = f"step: {SAVED_AT + 1:2} "
    return run("dtensor_muon", "train", config, "--max-restarts=1", *save, *job_flags, kill_at=kill_at)


@pytest.fixture(scope="module")
def main_job_losses(main_job):
    return {int(step): float(loss) for step, loss in LOSS.findall(main_job)}


@pytest.fixture(scope="module")
def results(job_flags, tmp_path_factory):
    """One process group of two ranks: initial weights, the main job undisturbed, replicas, expert-parallel jobs."""
    file = tmp_path_factory.mktemp("results") / "results.json"
    saving = ["--checkpoint.enable", f"--checkpoint.interval={SAVED_AT}", "--checkpoint.folder=async"]
    main = ["llama3_tiny_cpu.toml", *job_flags, *saving, "--checkpoint.async-mode=async"]
    replicas = ["--parallelism.data-parallel-replicate-degree=2", "--parallelism.data-parallel-shard-degree=1"]
    # of the further steps, torchtitan's replicas average gradients that are averages already
    until = [f"--checkpoint.load-step={SAVED_AT}", f"--training.steps={SAVED_AT + 1}"]
    resumed = ["llama3_tiny_cpu.toml", *job_flags, *saving, *replicas, *until]
    experts = [[f"{name}_ep_debug.toml", *job_flags[:2], f"--training.steps={EXPERT_STEPS}"] for name in EXPERT_JOBS]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run(*launcher, "tests/titan_ranks.py", str(file), "--jobs", *map(",".join, [main, resumed, *experts]))
    return json.loads(file.read_text())


def test_loss_of_the_main_job_falls(main_job, main_job_losses):
    assert "layers.*.attention.wq.weight" in main_job
    assert list(main_job_losses) == list(range(1, STEPS + 1))
    assert main_job_losses[1] == pytest.approx(torch.tensor(corpus.VOCAB_SIZE).log().item(), abs=0.6)
    assert main_job_losses[STEPS] < 0.8 * main_job_losses[1]


def test_killed_rank_is_restarted_and_continues_the_undisturbed_curve(main_job, main_job_losses, results):
    steps = [int(step) for step, _ in LOSS.findall(main_job)]
    restarted = steps.index(SAVED_AT + 1, steps.index(SAVED_AT + 1) + 1)
    assert steps[restarted:] == list(range(SAVED_AT + 1, STEPS + 1))
    assert steps[:restarted] == list(range(1, len(steps[:restarted]) + 1))
    job = results["jobs"][0]
    # the log rounds to five digits behind the point
    assert main_job_losses == pytest.approx({int(step): loss for step, loss in job["losses"].items()}, abs=1e-4)
    assert job["is_muon"]
    assert job["groups"] == {"muon": 14, "adamw": 7}


@pytest.mark.parametrize("name", EXPERT_JOBS)
def test_expert_parallel_job_trains_with_fused_weights_taken_apart(results, name):
    job = results["jobs"][2 + list(EXPERT_JOBS).index(name)]
    assert job["is_muon"]
    assert job["losses"][str(EXPERT_STEPS)] < job["losses"]["1"] - 0.5
    assert job["fused"] == EXPERT_JOBS[name]


def test_load_balancing_moves_the_experts_of_every_moe_layer(results):
    assert [job["moved_expert_biases"] for job in results["jobs"][2:]] == [2]


def test_asynchronous_checkpoint_loads_on_another_layout(results):
    saved, loaded = results["jobs"][0]["digests"], results["jobs"][1]["digests"]
    assert len(saved[str(SAVED_AT)]) == 14 * 2 + 7 * 4
    assert loaded["loaded"] == saved[str(SAVED_AT)]
    assert saved[str(STEPS)] != saved[str(SAVED_AT)]
    straight, resumed = (results["jobs"][job]["losses"] for job in (0, 1))
    step = str(SAVED_AT + 1)
    # sums in another order
    assert resumed == {step: pytest.approx(straight[step], abs=1e-4)}


def test_initial_weights_are_the_same_on_every_layout(results):
    differing = {case: names for case, names in results["initial_weights"].items() if "stock" not in case}
    assert set(differing) == {"llama3 single", "llama3 fsdp", "llama3 tp", "deepseek_v3 single", "deepseek_v3 ep"}
    assert not any(differing.values()), differing


def test_torchtitan_alone_starts_from_other_weights_on_cpu(results):
    """The negative control: if this fails, torch draws per shard on CPU and the cure can go."""
    assert "layers.0.attention.wq.weight" in results["initial_weights"]["llama3 stock fsdp"]
