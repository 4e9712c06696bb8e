"""`compile=True`: the same updates through torch.compile."""

import os
import shutil
import subprocess
import sys

import pytest

SCRIPT = """
import torch
from dtensor_muon import Muon

def updated(compile):
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 64), (40, 64), (130, 300)]
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = Muon(params, lr=1.0, weight_decay=0.0, fp32_matmul_prec="highest", compile=compile)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in params])

eager, compiled = updated(False), updated(True)
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
print(float((eager - compiled).norm() / eager.norm()))
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs a C++ compiler")
def test_compiled_step_equals_eager():
    # in a process of its own: other tests turn dynamo off for theirs
    environment = {key: value for key, value in os.environ.items() if key != "TORCHDYNAMO_DISABLE"}
    job = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=110, env=environment, check=False
    )
    assert job.returncode == 0, job.stderr[-3000:]
    assert float(job.stdout) < 1e-5  # fused kernels round in another order
