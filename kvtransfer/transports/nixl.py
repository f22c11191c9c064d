"""A NIXL agent over UCX: registered memory, one-sided writes of lists of spans, completion by polling.

NIXL 1.5.1 shapes it. Its progress thread keeps a core busy for as long as the agent lives, so there is none
here: who waits for something calls `progress` or `is_done`. The backend's own device option does not fit
TCP devices, so UCX is configured by its environment. A library in the wheel crashes in the normal exit of a
process that had an agent: such a process leaves with `os._exit`.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.blocks.device_pool import DevicePool, StagingArea
from kvtransfer.blocks.layout import Run
from kvtransfer.blocks.pool import HostPool, KvPool
from kvtransfer.errors import PathError, PeerGoneError
from kvtransfer.messages import TransferSettings

_PACKAGES = ("nixl_cu13", "nixl_cu12")
_NETWORK_ONLY = "^sm,cuda_ipc"
_INFINIBAND = Path("/sys/class/infiniband")
_NETWORK = Path("/sys/class/net")

_log = logging.getLogger(__name__)

# [n, 3]: address, number of bytes, device index.
Spans = npt.NDArray[np.uint64]


class Region(NamedTuple):
    """Contiguous memory. `kind` is NIXL's: "DRAM", or "VRAM" of CUDA device `device_index`."""

    address: int
    num_bytes: int
    kind: str
    device_index: int

    def spans(self, starts: Spans, lengths: Spans) -> Spans:
        """`lengths[i]` bytes at offset `starts[i]` of the region; `PathError` when one leaves it."""
        if starts.size and int((starts + lengths).max()) > self.num_bytes:
            raise PathError(f"a span leaves a region of {self.num_bytes} bytes")
        spans = np.empty((starts.size, 3), dtype=np.uint64)
        spans[:, 0] = starts + np.uint64(self.address)
        spans[:, 1] = lengths
        spans[:, 2] = self.device_index
        return spans


class Nixl(NamedTuple):
    """The package in use."""

    api: ModuleType
    errors: tuple[type[Exception], ...]


@functools.cache
def load_nixl() -> Nixl:
    """Import whichever package is installed; `PathError` when none is."""
    reasons: list[str] = []
    for package in _PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
            bindings = importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            reasons.append(str(error))
            continue
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
        names = [name for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
        return Nixl(api, (RuntimeError, *(getattr(bindings, name) for name in names)))
    raise PathError(f"NIXL is not installed (pip install '.[rdma]'): {'; '.join(reasons)}")


def network_devices(settings: TransferSettings) -> tuple[str, ...]:
    """UCX's names of the devices to use: those of the settings, else the active ports of InfiniBand devices.
    `PathError` when there is none or one does not exist."""
    if not settings.rdma_devices:
        active = [
            f"{state.parts[-4]}:{state.parts[-2]}"
            for state in sorted(_INFINIBAND.glob("*/ports/*/state"))
            if "ACTIVE" in state.read_text()
        ]
        if not active:
            raise PathError("this host has no active InfiniBand device and transfer.rdma_devices names none")
        return tuple(active)
    for name in settings.rdma_devices:
        if not (_NETWORK / name).exists() and not (_INFINIBAND / name.partition(":")[0]).exists():
            raise PathError(f"this host has no network device {name!r} (transfer.rdma_devices)")
    return settings.rdma_devices


def is_infiniband(devices: tuple[str, ...]) -> bool:
    """Whether the devices move bytes by themselves; else the target's processor has to take them."""
    return all((_INFINIBAND / name.partition(":")[0]).exists() for name in devices)


class Posting:
    """Writes that are under way."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class NixlAgent:
    """One agent with one backend, on `devices` only. Used by one thread at a time.

    Its endpoints and registrations are gone when `close` returns: the memory cannot be reached through it any
    more, and nothing of its own is under way.
    """

    def __init__(self, devices: tuple[str, ...]) -> None:
        """`PathError` when NIXL is not installed or cannot use the devices."""
        nixl = load_nixl()
        self.devices = devices
        self._errors: tuple[type[Exception], ...] = nixl.errors
        # Paths within a host (process_vm_writev, CUDA IPC) would outlive the target's agent.
        os.environ["UCX_TLS"] = _NETWORK_ONLY
        os.environ["UCX_NET_DEVICES"] = ",".join(devices)
        os.environ.setdefault("UCX_LOG_LEVEL", "error")
        try:
            config = nixl.api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent = nixl.api.nixl_agent(f"tandem-{secrets.token_hex(16)}", config)
            self._agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        except self._errors as error:
            raise PathError(f"NIXL has no backend on {','.join(devices)}: {error}") from error
        self._peer = ""
        self._under_way: set[Posting] = set()

    def register(self, region: Region) -> None:
        """Let spans of the region be written from, and be written to by any agent that has the metadata."""
        try:
            self._agent.register_memory(
                [(region.address, region.num_bytes, region.device_index, "")], mem_type=region.kind
            )
        except self._errors as error:
            raise PathError(f"NIXL cannot register {region.num_bytes} bytes: {error}") from error

    def metadata(self) -> bytes:
        """What another agent needs to write here."""
        return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes) -> None:
        """Make the agent with this metadata the one that `post` writes to."""
        try:
            self._peer = self._agent.add_remote_agent(metadata)
            self._agent.make_connection(self._peer)
        except self._errors as error:
            raise PathError(f"NIXL cannot reach the target: {error}") from error

    def post(self, source: Spans, source_kind: str, target: Spans, target_kind: str) -> Posting:
        """Start writing each span of `source` to the same one of `target`; `PeerGoneError` when it cannot."""
        try:
            posting = Posting(
                self._agent.initialize_xfer(
                    "WRITE",
                    self._agent.get_xfer_descs(source, source_kind),
                    self._agent.get_xfer_descs(target, target_kind),
                    self._peer,
                )
            )
            state = self._agent.transfer(posting.handle)
        except self._errors as error:
            raise PeerGoneError(f"write refused: {error}") from error
        self._under_way.add(posting)
        if state == "ERR":
            raise PeerGoneError("write failed")
        return posting

    def is_done(self, posting: Posting) -> bool:
        """Whether everything of it is visible in the target's memory; `PeerGoneError` when it failed."""
        try:
            state = self._agent.check_xfer_state(posting.handle)
            if state == "PROC":
                return False
            if state == "DONE":
                self._under_way.discard(posting)
                posting.handle.release()
                return True
        except self._errors as error:
            raise PeerGoneError(f"write failed: {error}") from error
        raise PeerGoneError("write failed")

    def progress(self) -> None:
        """Do what peers' writes and connections need of this side."""
        try:
            self._agent.get_new_notifs()
        except self._errors as error:
            raise PeerGoneError(f"the agent failed: {error}") from error

    def close(self) -> None:
        """Deregister all and close all; may be called again."""
        for posting in self._under_way:
            try:
                posting.handle.release()
            except self._errors as error:  # it goes with the agent
                _log.debug("an unfinished write was given up: %s", error)
        self._under_way.clear()
        # The agent proper ends here: this is its last reference.
        self._agent.agent = None


# ----------------------------------------------------------------------------------------------
# Memory that a NIXL agent may register: a rank's pool and buffers beside it; runs of blocks as spans of it.


class Runs:
    """Runs of one block, from a region of blocks of `src_bytes` to one of blocks of `dst_bytes`."""

    def __init__(self, runs: Sequence[Run], src_bytes: int, dst_bytes: int) -> None:
        columns = np.array(runs, dtype=np.uint64).reshape(-1, 3)
        self._src, self._dst, self._lengths = columns[:, 0], columns[:, 1], columns[:, 2]
        self._src_bytes, self._dst_bytes = src_bytes, dst_bytes

    def spans(
        self, source: Region, src_blocks: Sequence[int], target: Region, dst_blocks: Sequence[int]
    ) -> tuple[Spans, Spans]:
        """Of every pair of blocks, each run: where it lies and where it goes."""
        lengths = np.tile(self._lengths, len(src_blocks))
        starts = (_starts(src_blocks, self._src_bytes) + self._src).ravel()
        ends = (_starts(dst_blocks, self._dst_bytes) + self._dst).ravel()
        return source.spans(starts, lengths), target.spans(ends, lengths)


class RegisteredBuffer(StagingArea):
    """A staging area that an agent may register: its `region`."""

    def __init__(self, pool: KvPool, num_bytes: int) -> None:
        super().__init__(pool, num_bytes)
        self.region = Region(self.data.data_ptr(), num_bytes, *_kind(self.data))


def pool_region(pool: KvPool) -> Region:
    """Where the pool's blocks lie; `PathError` for memory that cannot be registered."""
    if isinstance(pool, HostPool):
        address = int(np.frombuffer(pool.memory.buffer, dtype=np.uint8).ctypes.data)
        return Region(address, len(pool.memory.buffer), "DRAM", 0)
    if isinstance(pool, DevicePool):
        return Region(pool.tensor.data_ptr(), pool.tensor.numel(), *_kind(pool.tensor))
    raise PathError(f"the pool on {pool.device} cannot be registered")


def _kind(memory: torch.Tensor) -> tuple[str, int]:
    device = memory.device
    return ("VRAM", device.index or 0) if device.type == "cuda" else ("DRAM", 0)


def _starts(blocks: Sequence[int], block_bytes: int) -> npt.NDArray[np.uint64]:
    return np.array(blocks, dtype=np.uint64)[:, None] * np.uint64(block_bytes)
