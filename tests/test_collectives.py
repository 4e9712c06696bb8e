"""Which collectives a step runs, and how often: it depends on buckets, never on the number of matrices."""

import torch
import torch.distributed as dist
from parity import EXACT, case, set_grad, sharded_params
from simulated import LAYOUTS, Layout, S, strided
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_muon import FusedDim, Muon

LARGE = {
    "fsdp_tp_col": Layout((32, 8), (strided(0, 8), S(0)), ((1, 0), (0, 0)), ("fsdp", "tp")),
    "ep": Layout((2, 2), (strided(0, 2), S(0)), ((1, 0), (0, 0)), ("efsdp", "ep")),
}


def collectives(layout, shapes, mode="owner", first=False, fused=None, step=2, **options):
    """Counts by op of rank 0's last step, the second unless said otherwise (`first` agrees on the plan as well)."""
    dist.init_process_group("fake", rank=0, world_size=layout.world, store=FakeStore())
    try:
        run = case(layout, shapes)
        params = sharded_params(0, [(weight, layout) for weight in run.weights()])
        optimizer = Muon(params, **EXACT, tp_mode=mode, fused=fused, **options)
        for _ in range(1 if first else step):
            for param, grad in zip(params, run.grads(0), strict=True):
                set_grad(0, param, grad, layout)
            with CommDebugMode() as counted:
                optimizer.step()
    finally:
        dist.destroy_process_group()
    counts = sorted((str(op).split(".")[-1], count) for op, count in counted.get_comm_counts().items())
    return "\n".join(f"{count} {op}" for op, count in counts)


ONE = [(12, 20)] * 4
TWO = [(12, 20)] * 4 + [(8, 24)] * 4


class TestCollectives(TestCase):
    """`all_reduce`: one per mesh axis asks which gradients are missing; in distributed mode, also the Gram sums."""

    def test_fsdp(self):
        self.assertExpectedInline(
            collectives(LAYOUTS["fsdp0"], ONE),
            """\
1 all_reduce
2 shard_dim_alltoall""",
        )
        self.assertExpectedInline(
            collectives(LAYOUTS["fsdp0"], TWO),
            """\
1 all_reduce
4 shard_dim_alltoall""",
        )
        self.assertExpectedInline(
            collectives(LAYOUTS["fsdp1"], ONE),
            """\
1 all_reduce
2 shard_dim_alltoall""",
        )

    def test_tp(self):
        self.assertExpectedInline(
            collectives(LAYOUTS["tp_row"], ONE),
            """\
1 all_reduce
2 shard_dim_alltoall""",
        )

    def test_fsdp_tp(self):
        self.assertExpectedInline(
            collectives(LAYOUTS["fsdp_tp_row"], ONE),
            """\
2 all_reduce
4 shard_dim_alltoall""",
        )
        self.assertExpectedInline(
            collectives(LAYOUTS["fsdp_tp_col"], ONE),
            """\
2 all_reduce
4 shard_dim_alltoall""",
        )

    def test_hsdp(self):
        self.assertExpectedInline(
            collectives(LAYOUTS["hsdp"], ONE),
            """\
1 all_gather_into_tensor
2 all_reduce
2 shard_dim_alltoall""",
        )
        self.assertExpectedInline(
            collectives(LAYOUTS["hsdp_tp_col"], ONE),
            """\
1 all_gather_into_tensor
3 all_reduce
4 shard_dim_alltoall""",
        )

    def test_replicate(self):
        self.assertExpectedInline(
            collectives(LAYOUTS["replicate"], ONE),
            """\
1 all_gather_into_tensor
1 all_reduce""",
        )

    def test_whole_experts(self):
        self.assertExpectedInline(collectives(LARGE["ep"], [(8, 6, 10)] * 2), """2 all_reduce""")

    def test_one_rank(self):
        self.assertExpectedInline(collectives(LAYOUTS["one_rank"], ONE), """""")

    def test_duplicated(self):
        self.assertExpectedInline(
            collectives(LAYOUTS["fsdp0"], ONE, "duplicated"),
            """\
1 all_gather_into_tensor
1 all_reduce""",
        )
        self.assertExpectedInline(
            collectives(LAYOUTS["hsdp"], ONE, "duplicated"),
            """\
1 all_gather_into_tensor
2 all_reduce""",
        )

    def test_distributed(self):
        self.assertExpectedInline(
            collectives(LAYOUTS["fsdp1"], ONE, "distributed"),
            """\
5 all_gather_into_tensor
3 all_reduce
5 reduce_scatter_tensor""",
        )
        self.assertExpectedInline(
            collectives(LAYOUTS["fsdp0"], ONE, "distributed"),
            """\
5 all_gather_into_tensor
3 all_reduce
5 reduce_scatter_tensor
2 shard_dim_alltoall""",
        )

    def test_blockwise(self):
        self.assertExpectedInline(collectives(LAYOUTS["tp_row"], ONE, "blockwise"), """1 all_reduce""")
        self.assertExpectedInline(
            collectives(LAYOUTS["fsdp_tp_col"], ONE, "blockwise"),
            """\
2 all_reduce
2 shard_dim_alltoall""",
        )

    def test_fused_dims_whose_groups_are_local(self):
        """Q, K and V travel as matrices of their own: one bucket of Q, one of K and V."""
        per_group = FusedDim((4, 1, 1))
        for layout in ("fsdp0", "fsdp1", "tp_row"):
            self.assertExpectedInline(
                collectives(LAYOUTS[layout], [(24, 20)] * 4, fused=per_group),
                """\
1 all_reduce
4 shard_dim_alltoall""",
            )

    def test_fused_dims_on_two_axes_and_in_experts(self):
        self.assertExpectedInline(
            collectives(LAYOUTS["fsdp_tp_col"], [(24, 20)] * 4, fused=FusedDim((4, 1, 1))),
            """\
2 all_reduce
8 shard_dim_alltoall""",
        )
        self.assertExpectedInline(
            collectives(LAYOUTS["hsdp"], [(24, 20)] * 4, fused=FusedDim((4, 1, 1))),
            """\
2 all_gather_into_tensor
2 all_reduce
4 shard_dim_alltoall""",
        )
        self.assertExpectedInline(
            collectives(LARGE["ep"], [(8, 6, 10)] * 2, fused=FusedDim((1, 1))), """2 all_reduce"""
        )

    def test_fused_dims_whose_groups_are_cut(self):
        """The weight travels as a whole, as often as one that is not fused."""
        self.assertExpectedInline(
            collectives(LAYOUTS["fsdp0"], [(24, 20)] * 4, fused=FusedDim((16, 4, 4))),
            """\
1 all_reduce
2 shard_dim_alltoall""",
        )

    def test_heads_of_this_rank_need_no_data_from_others(self):
        heads = FusedDim((3,), heads=True)
        columns = FusedDim((3,), dim=1, heads=True)
        self.assertExpectedInline(collectives(LAYOUTS["fsdp0"], [(24, 20)] * 4, fused=heads), """1 all_reduce""")
        self.assertExpectedInline(collectives(LAYOUTS["tp_row"], [(20, 24)] * 4, fused=columns), """1 all_reduce""")
        self.assertExpectedInline(collectives(LAYOUTS["fsdp_tp_col"], [(24, 20)] * 4, fused=heads), """2 all_reduce""")
        self.assertExpectedInline(collectives(LARGE["ep"], [(8, 6, 10)] * 2, fused=heads), """2 all_reduce""")

    def test_block_period(self):
        """Steps 1 and 4 are of whole matrices, 2 and 3 of blocks, which tensor parallelism need not move."""
        whole = """\
1 all_reduce
2 shard_dim_alltoall"""
        for step, expected in ((3, """1 all_reduce"""), (5, """1 all_reduce"""), (7, whole)):
            found = collectives(LAYOUTS["tp_row"], ONE, "auto", step=step, block_period=3)
            assert found == expected, step
        # what is left is FSDP's
        self.assertExpectedInline(
            collectives(LAYOUTS["fsdp_tp_col"], ONE, "auto", step=3, block_period=3),
            """\
2 all_reduce
2 shard_dim_alltoall""",
        )

    def test_first_step_agrees_on_the_plan(self):
        self.assertExpectedInline(
            collectives(LAYOUTS["fsdp0"], ONE, first=True),
            """\
3 all_reduce
2 shard_dim_alltoall""",
        )

    def test_large_world(self):
        self.assertExpectedInline(
            collectives(LARGE["fsdp_tp_col"], [(512, 16)] * 3),
            """\
2 all_reduce
4 shard_dim_alltoall""",
        )

    def test_count_depends_on_buckets_not_on_matrices(self):
        for name in ("fsdp0", "tp_row", "fsdp_tp_row", "fsdp_tp_col", "hsdp"):
            for mode in ("owner", "duplicated", "distributed"):
                few, many = (collectives(LAYOUTS[name], [(12, 20)] * count, mode) for count in (4, 24))
                assert few == many, (name, mode)

    def test_meta_mesh_plans_without_data(self):
        """The real all-to-all of an accelerator, on a device without data."""
        dist.init_process_group("fake", rank=0, world_size=1024, store=FakeStore())
        try:
            mesh = dist.device_mesh.init_device_mesh("meta", (128, 8), mesh_dim_names=("fsdp", "tp"))
            locals_ = [torch.empty(4096 // 1024, 1024, device="meta") for _ in range(4)]
            params = [
                torch.nn.Parameter(
                    dist.tensor.DTensor.from_local(
                        x, mesh, LARGE["fsdp_tp_col"].placements, run_check=False, shape=(4096, 1024), stride=(1024, 1)
                    )
                )
                for x in locals_
            ]
            optimizer = Muon(params)
            for param in params:
                param.grad = param.detach()
            with CommDebugMode() as counted:
                optimizer.step()
        finally:
            dist.destroy_process_group()
        counts = sorted((str(op).split(".")[-1], count) for op, count in counted.get_comm_counts().items())
        self.assertExpectedInline(
            "\n".join(f"{count} {op}" for op, count in counts),
            """\
1 all_gather_into_tensor
2 shard_dim_alltoall""",
        )
