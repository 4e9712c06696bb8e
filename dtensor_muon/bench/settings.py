"""What one benchmark measures, as its ranks get it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of one benchmark.

    Attributes:
        shapes: One per matrix or stack of matrices.
        layout: One of `params.LAYOUTS`.
        world: Ranks.
        device_type: `"cpu"` or `"cuda"`.
        optimizers: Names from `peers.OPTIMIZERS`.
        iterations: Timed steps of each optimizer.
        precision: `fp32_matmul_prec` of dtensor_muon.
        max_bucket_bytes: Of dtensor_muon.
    """

    shapes: tuple[tuple[int, ...], ...]
    layout: str
    world: int
    device_type: str
    optimizers: tuple[str, ...]
    iterations: int
    precision: str = "medium"
    max_bucket_bytes: int | None = None
