"""What a bucket costs: flops, bytes on the wire, launches, and the time that a device needs for them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dtensor_muon.coefficients import CoefficientTriple
from dtensor_muon.gram import segments
from dtensor_muon.newton_schulz import work_dtype
from dtensor_muon.symmetric import symmetric_flops

_MEASURE_SIZE = 512
_MEASURE_REPEATS = 5


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The rates that turn flops, bytes and launches into seconds. Only their ratios decide a plan.

    Attributes:
        name: For `explain()`.
        matmul_rates: Matrix product rate by dtype, in flops per second (2 per multiply-add); bf16 and fp32 at least.
        bandwidth: What one rank sends along a mesh axis, in bytes per second.
        latency: The fixed price of one collective, in seconds.
        kernel_seconds: The fixed price of one matrix product, in seconds.
        axis_bandwidth: Bandwidth of single mesh axes by name, where it differs (an axis between nodes).
        axis_latency: Latency of single mesh axes by name.
    """

    name: str
    matmul_rates: Mapping[torch.dtype, float]
    bandwidth: float
    latency: float
    kernel_seconds: float
    axis_bandwidth: Mapping[str, float] = field(default_factory=dict)
    axis_latency: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for dtype in (torch.bfloat16, torch.float32):
            if dtype not in self.matmul_rates:
                raise ValueError(f"profile {self.name!r}: matmul_rates has no {dtype}; give it in flops per second")
        rates: dict[str, float] = {
            "bandwidth": self.bandwidth,
            "latency": self.latency,
            "kernel_seconds": self.kernel_seconds,
        }
        for table in ("matmul_rates", "axis_bandwidth", "axis_latency"):
            rates |= {f"{table}[{key}]": value for key, value in getattr(self, table).items()}
        for name, value in rates.items():
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"profile {self.name!r}: {name} is {value!r}; it must be a finite number above 0")

    def compute_seconds(self, flops: float, num_kernels: float, dtype: torch.dtype) -> float:
        """Returns the time of matrix products in `dtype`."""
        rate = self.matmul_rates.get(dtype, self.matmul_rates[torch.float32])
        return flops / rate + num_kernels * self.kernel_seconds

    def move_seconds(self, sent_bytes: float, num_collectives: int, axis: str) -> float:
        """Returns the time in which a rank sends `sent_bytes` along a mesh axis."""
        bandwidth = self.axis_bandwidth.get(axis, self.bandwidth)
        return sent_bytes / bandwidth + num_collectives * self.axis_latency.get(axis, self.latency)

    @classmethod
    def measure(cls, device_type: str = "cpu", base: "DeviceProfile | None" = None) -> "DeviceProfile":
        """Measures the matrix product rates and the kernel price of the machine that it runs on, in a few seconds.

        Bandwidth and latency need a second rank, so they stay those of `base`.

        Args:
            device_type: For example `"cpu"` or `"cuda"`.
            base: The profile that the network's numbers come from; by default that of the device type.
        """
        base = base or default_profile(device_type)
        rates = {}
        for dtype in (torch.bfloat16, torch.float32):
            # a CPU without bf16 instructions never multiplies in bf16
            actual = work_dtype(dtype, device_type, "plain", _MEASURE_SIZE)
            size = _MEASURE_SIZE if device_type == "cpu" else 16 * _MEASURE_SIZE
            rates[dtype] = 2 * size**3 / _best_seconds(size, actual, device_type)
        return cls(
            f"measured {device_type}",
            rates,
            base.bandwidth,
            base.latency,
            _best_seconds(8, torch.float32, device_type),
            base.axis_bandwidth,
            base.axis_latency,
        )


def _best_seconds(size: int, dtype: torch.dtype, device_type: str) -> float:
    x = torch.ones(size, size, dtype=dtype, device=device_type)
    best = float("inf")
    for _ in range(_MEASURE_REPEATS):
        _synchronize(device_type)
        start = time.perf_counter()
        for _ in range(4):
            torch.mm(x, x)
        _synchronize(device_type)
        best = min(best, (time.perf_counter() - start) / 4)
    return best


def _synchronize(device_type: str) -> None:
    if device_type != "cpu":
        torch.accelerator.synchronize()


# Data sheets: dense bf16 and TF32 rates at 70 percent, NVLink per direction at 70 percent. The CPU's are those of one
# core of a server without bf16 instructions, with gloo on the loopback device.
PROFILES: dict[str, DeviceProfile] = {
    profile.name: profile
    for profile in (
        DeviceProfile("cpu", {torch.bfloat16: 8e10, torch.float32: 8e10}, 8e8, 4e-4, 4e-6),
        DeviceProfile("a100", {torch.bfloat16: 2.2e14, torch.float32: 1.1e14}, 2.1e11, 2e-5, 5e-6),
        DeviceProfile("h100", {torch.bfloat16: 6.9e14, torch.float32: 3.4e14}, 3.1e11, 2e-5, 5e-6),
        DeviceProfile("h200", {torch.bfloat16: 6.9e14, torch.float32: 3.4e14}, 3.1e11, 2e-5, 5e-6),
        DeviceProfile("b200", {torch.bfloat16: 1.6e15, torch.float32: 7.8e14}, 6.3e11, 2e-5, 5e-6),
    )
}


def default_profile(device_type: str) -> DeviceProfile:
    """Returns the profile that stands for a kind of device when the user gives none."""
    return PROFILES["cpu" if device_type == "cpu" else "h100"]


def sharded_flops(
    short: int,
    piece: int,
    num_small: int,
    count: int,
    coefficients: Sequence[CoefficientTriple],
    iteration: str,
    dtype: torch.dtype,
    device_type: str,
) -> tuple[int, int, int]:
    """Returns what Newton-Schulz costs a rank that holds a piece of each matrix; see `distributed_ns`.

    Args:
        short: Rows of the matrix on its short side.
        piece: Columns that the rank holds.
        num_small: Matrices whose `[short, short]` work is done on this rank.
        count: Matrices that it holds a piece of.
        coefficients: The triples of the steps.
        iteration: `"plain"` or `"gram"`.
        dtype: Of the products.
        device_type: Where it runs.

    Returns:
        Flops, number of matrix products, number of Gram sums over the ranks.
    """
    parts = segments(coefficients, dtype) if iteration == "gram" else tuple((triple,) for triple in coefficients)
    large = symmetric_flops(short, piece, device_type) + 2 * short * short * piece
    small = symmetric_flops(short, short, device_type)
    flops, kernels = 0, 0
    for part in parts:
        products = sum(1 for _, _, c in part if c) + 3 * (len(part) - 1)
        flops += count * large + num_small * small * products
        kernels += 2 + products
    return flops, kernels, len(parts)
