"""Checksums of KV on the device against those of the host, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvtransfer.blocks.checksum import checksum
from kvtransfer.blocks.device_pool import checksum_torch


@pytest.mark.parametrize("num_bytes", [8, 4096, (1 << 20) + 8, 13])
def test_sums_on_the_device_are_those_of_the_host(device: torch.device, num_bytes: int) -> None:
    data = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    assert checksum_torch(torch.from_numpy(data).to(device)) == checksum(data.tobytes())
