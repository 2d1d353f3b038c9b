"""The only place that knows npu, cuda and cpu apart. torch is imported late: planning needs none of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

DeviceKind = Literal["cpu", "cuda", "npu"]
VISIBLE_DEVICES: dict[DeviceKind, str] = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
COLLECTIVE_BACKEND: dict[DeviceKind, str] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def load_npu() -> bool:
    """Import torch_npu where it is installed and usable; returns whether device npu exists afterwards."""
    try:
        import torch_npu  # noqa: F401
    except (ImportError, RuntimeError, OSError):
        return False
    return True


def detect() -> DeviceKind:
    """The best kind of device on this machine; imports torch only where the kernel shows an accelerator."""
    if any(Path("/dev").glob("davinci[0-9]*")) and load_npu():
        return "npu"
    if Path("/dev/nvidiactl").exists():
        import torch

        if torch.cuda.is_available():
            return "cuda"
    return "cpu"


def torch_device(kind: DeviceKind, index: int = 0) -> torch.device:
    """The torch device, made current for the calling thread (device context is per thread on npu and cuda)."""
    import torch

    if kind == "cpu":
        return torch.device("cpu")
    if kind == "npu" and not load_npu():
        raise RuntimeError(
            "device npu asked for, but torch_npu cannot be imported; install the extra 'ascend' and CANN"
        )
    device = torch.device(kind, index)
    getattr(torch, kind).set_device(device)
    return device


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on the device is done; nothing on cpu."""
    import torch

    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def cpu_cores() -> tuple[int, ...]:
    """Ids of the CPU cores this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))
