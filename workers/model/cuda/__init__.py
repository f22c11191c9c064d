"""Triton kernels of a step on CUDA, and where they are used. Without a device, tests run them in Triton's
interpreter, on CPU tensors.

Triton comes with torch for CUDA and is missing elsewhere, so the modules of this package are imported by
whoever has seen that they serve a device."""

from __future__ import annotations

import torch

# The types of devices with kernels. Tests add "cpu", whose tensors Triton's interpreter takes. A process that
# compiles kernels alone adds "meta", for tensors without memory (`workers.rank.kernel_rehearsal`).
DEVICE_TYPES = {"cuda"}


def serves(device: torch.device) -> bool:
    """Whether there are kernels for tensors on this device, of every dtype of a model."""
    return device.type in DEVICE_TYPES
