"""How flops and bytes per rank fall with the number of ranks, from the step itself on stub process groups."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dtensor_muon.bench.count import WorkCounter
from dtensor_muon.bench.params import TWO_AXES, build_mesh, make_tensors
from dtensor_muon.bench.report import markdown
from dtensor_muon.optimizer import Muon

WORLDS = (2, 4, 8, 16, 32, 64)
# of a model of about 1B parameters; every count and every dim divides by 64
SCALING_SHAPES = "2048x2048*128,5632x2048*64,2048x5632*64"


def count_step(shapes: Sequence[Sequence[int]], layout: str, world: int, precision: str) -> tuple[float, float]:
    """Returns flops and sent bytes of rank 0 in one step of a world of `world` ranks.

    The step runs on meta tensors: every operation is dispatched, with its real shapes, and none computes.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        mesh = build_mesh(layout, world, "meta")
        device = torch.device("meta")
        params = [torch.nn.Parameter(x) for x in make_tensors(shapes, layout, mesh, device, 0, 1.0)]
        optimizer = Muon(params, lr=0.02, fp32_matmul_prec=precision, tp_mode="owner")
        for param in params:
            param.grad = torch.zeros_like(param)
        with WorkCounter() as counter:
            optimizer.step()
        return counter.flops, counter.sent_bytes
    finally:
        dist.destroy_process_group()


def scaling_table(shapes: Sequence[Sequence[int]], layout: str, precision: str) -> str:
    """Returns a Markdown table of flops and bytes per rank; the products with the ranks stay constant."""
    rows = []
    for world in WORLDS[layout in TWO_AXES :]:
        flops, sent = count_step(shapes, layout, world, precision)
        gflop, megabytes = flops / 1e9, sent / 1e6
        rows.append(
            (str(world), f"{gflop:.3f}", f"{gflop * world:.1f}", f"{megabytes:.3f}", f"{megabytes * world:.2f}")
        )
    return markdown(("ranks", "GFLOP a rank", "x ranks", "MB sent a rank", "x ranks"), rows)
