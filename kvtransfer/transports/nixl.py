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
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtransfer.errors import PathError, PeerGoneError
from kvtransfer.transfer_orders import TransferSettings

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
        """Return the spans of `lengths[i]` bytes at offset `starts[i]` of the region; `PathError` when one
        leaves it."""
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
    """Return UCX's names of the devices to use: those of the settings, else the active ports of InfiniBand
    devices. `PathError` when there is none or one does not exist."""
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
        """Return what another agent needs to write here."""
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
        """Do the work on this side that peers' writes and connections need."""
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
