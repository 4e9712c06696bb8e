"""What a step costs: Newton-Schulz flops, bytes on the wire, and the time that a device needs for them."""

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The rates that turn flops and bytes into seconds.

    Attributes:
        flops_per_second: Matrix product rate in the dtype of the computation.
        bytes_per_second: What one rank sends over one mesh axis.
        launch_seconds: The fixed price of one collective.
    """

    flops_per_second: float
    bytes_per_second: float
    launch_seconds: float

    def seconds(self, flops: float, sent_bytes: float, num_collectives: int) -> float:
        """Returns the predicted time of work that one rank does, in seconds."""
        return (
            flops / self.flops_per_second + sent_bytes / self.bytes_per_second + num_collectives * self.launch_seconds
        )


# Round numbers of one core with gloo, and of one H100 with NVLink: only their ratios decide.
CPU_PROFILE = DeviceProfile(flops_per_second=1e11, bytes_per_second=1e9, launch_seconds=2e-4)
GPU_PROFILE = DeviceProfile(flops_per_second=4e14, bytes_per_second=1e11, launch_seconds=2e-5)


def default_profile(device_type: str) -> DeviceProfile:
    """Returns the profile that stands for a kind of device."""
    return CPU_PROFILE if device_type == "cpu" else GPU_PROFILE


def newton_schulz_flops(short: int, long: float, num_steps: int) -> float:
    """Returns `k (4 m^2 n + 2 m^3)`: two Gram-sized products with `X` and one square, two flops a multiply-add."""
    return num_steps * (4.0 * short * short * long + 2.0 * short**3)


@cache
def matmul_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a device multiplies matrices that travel in `dtype`.

    A CPU without 512-bit vectors has no bf16 kernels: torch emulates them, 9 to 65 times slower than fp32 (512 x 512,
    torch 2.13). There the products run in fp32, on the same bf16 values.
    """
    emulated = device_type == "cpu" and torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX", "AVX2")
    return torch.float32 if emulated and dtype is torch.bfloat16 else dtype
