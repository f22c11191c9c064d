"""The memory of a device that transfers take in addition to its KV pools. No torch."""

from __future__ import annotations

# Bytes moved at a time where that takes as much of the device's memory in addition to the pool.
BATCH_BYTES = 32 << 20
# Threads that move a batch at a time: the store's, and those of connections, most of which move less.
NUM_BATCHES = 8
# Memory into which a writer on the host measures its path, more than the caches of a device hold.
DEVICE_SCRATCH_BYTES = 32 << 20


def transfer_buffer_bytes(block_bytes: int) -> int:
    """Return what transfers of a pool with blocks of this size take."""
    return NUM_BATCHES * max(BATCH_BYTES, block_bytes) + 2 * DEVICE_SCRATCH_BYTES
