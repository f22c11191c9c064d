"""How a rank joins its replica: refuse what cannot be, measure the device, open or find the ranks' store.

Called by `workers.engine.rank` before anything is loaded.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # the type stubs leave it out

from kvtransfer.clock import Clock
from workers.engine.executor import read_dtype
from workers.engine.probe import Probe, ProbeResult
from workers.errors import WorkerError
from workers.messages import RankJoined, RankSpec, StageCost
from workers.model.config import ModelConfig, read_model_config
from workers.model.split import refuse_empty_parts


def join(spec: RankSpec, clock: Clock) -> tuple[RankJoined, TCPStore | None]:
    """What the rank tells its brain first, and at rank 0 of several the ranks' store. `WorkerError`, naming
    the field, for what cannot be served."""
    config = read_model_config(Path(spec.model_dir))
    dtype = read_dtype(spec.dtype)
    device = torch.device(spec.device)
    _check(spec, config, device)
    measured = ProbeResult(StageCost(), 0.0)
    if spec.probe_rows > 0:
        probe = Probe(
            config,
            tp=spec.tp,
            tp_rank=spec.tp_rank,
            dtype=dtype,
            device=device,
            block_tokens=spec.block_tokens,
            clock=clock,
        )
        measured = probe.measure(spec.probe_rows, spec.probe_sampled_rows or spec.probe_rows)
    store: TCPStore | None = None
    address = ""
    if spec.rank == 0 and spec.num_ranks > 1:
        store, address = open_store(spec.transfer.data_host)
    return RankJoined(spec.rank, os.getpid(), address, measured.cost, measured.attention_ratio), store


def _check(spec: RankSpec, config: ModelConfig, device: torch.device) -> None:
    refuse_empty_parts(config.num_heads, config.intermediate_size, config.vocab_size, spec.tp)
    if spec.pp > config.num_layers:
        raise WorkerError(
            f"pp {spec.pp} is more than num_hidden_layers {config.num_layers}: a stage would be empty"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise WorkerError(f"device {spec.device!r} is wanted, but torch finds {found} CUDA devices")


def open_store(host: str) -> tuple[TCPStore, str]:
    """A store on a free port of this interface alone, and its address. It lives as long as the object."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    # The store owns the descriptor from here on.
    store = TCPStore(
        host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    return store, f"{host}:{port}"


def find_store(address: str) -> TCPStore:
    """The store that rank 0 has opened there."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), None, False)
