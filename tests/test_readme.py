"""The README's Python loop runs as printed, on four ranks, and its loss falls."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_loop_runs_and_learns(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    block = block.replace(
        "    loss.backward()\n", '    loss.backward()\n    print(f"loss {loss.item()}", flush=True)\n'
    )
    (tmp_path / "loop.py").write_text(block)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone"]
    job = subprocess.run(
        [*launcher, str(tmp_path / "loop.py")], capture_output=True, text=True, timeout=100, cwd=ROOT, check=False
    )
    assert job.returncode == 0, job.stderr[-3000:]
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", job.stdout)]
    assert len(losses) == 4 * 20
    assert sum(losses[-8:]) / 8 < 0.7 * sum(losses[:8]) / 8
