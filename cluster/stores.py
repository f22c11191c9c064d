"""The stores of an application: the settings and the NVMe folder of each node's store process, and the index
server. No Ray.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from cluster.config import ClusterConfig, PoolConfig
from cluster.dtypes import resolve_dtype
from cluster.errors import ConfigError
from cluster.secret_files import read_redis_url
from cluster.served_model import described_model
from kvtransfer.common.file_lock import try_lock
from kvtransfer.common.os_errors import os_reason
from kvtransfer.config import StoreConfig, StoreSettings
from kvtransfer.messages import ITEM_BYTES
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.dram.arena import HUGE_PAGE_BYTES
from kvtransfer.store.index.redis_server import with_password
from kvtransfer.store.messages.records import HEADER_BYTES
from kvtransfer.transports import TRANSPORTS
from workers.model.kv_form import KvForm, ScaledParts
from workers.model.kv_layout import kv_layout, record_layout
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.sizes import equal_stages

NODE_ID_CHARS = 12
MIN_GRANULE_BYTES = 4 << 10
MAX_GRANULE_BYTES = 1 << 20
# Without such devices a store does not offer `rdma`, and need not load what it takes (torch among it).
_INFINIBAND = Path("/sys/class/infiniband")
# The least number of granules that a record takes, so that little of the last one is wasted.
_GRANULES_A_RECORD = 8
_REDIS_SCHEMES = ("redis", "rediss", "unix")
_GB = 1e9

_log = logging.getLogger("tandem.store")


class NodeAddress(NamedTuple):
    """Represents the node of a store: its id in the cluster, and the address at which others reach it."""

    node_id: str
    host: str


def draw_life() -> str:
    """Draw the name of one life of an application, so that processes of an earlier one are not mistaken for
    its own."""
    return draw_id().hex()[:NODE_ID_CHARS]


def store_name(app: str, life: str, node_id: str) -> str:
    """Return the abstract unix socket on which engine cores and ranks of the node find their store."""
    return f"tandem-store-{app}-{life}-{node_id[:NODE_ID_CHARS]}"


def store_settings(
    config: ClusterConfig, trust: Trust, node: NodeAddress, life: str, epoch: int, nvme_path: Path | None
) -> StoreSettings:
    """Return the settings of the node's store process; `nvme_path` is its own folder (None: no such tier)."""
    store = config.store
    transports = [
        name
        for name in config.transfer.transports
        if not TRANSPORTS[name].unsuited("cpu", True) and (name != "rdma" or _INFINIBAND.exists())
    ]
    return StoreSettings(
        node_id=node.node_id[:NODE_ID_CHARS],
        epoch=epoch,
        name=store_name(config.app, life, node.node_id),
        host=node.host,
        dram_bytes=max(int(store.dram_gb * _GB) // HUGE_PAGE_BYTES, 1) * HUGE_PAGE_BYTES,
        granule_bytes=granule_bytes(
            smallest_record_bytes(config.pools, described_model(config), store.kv_dtype)
        ),
        huge_pages=store.huge_pages,
        nvme_path=str(nvme_path or ""),
        nvme_bytes=round(store.nvme_gb * _GB) if nvme_path else 0,
        segment_bytes=store.segment_mb << 20,
        io_threads=store.io_threads,
        admission=store.admission,
        write_queue=store.write_queue,
        flush_s=store.flush_s,
        dram_shares=config.auth.shares("dram_share"),
        nvme_shares=config.auth.shares("nvme_share"),
        prefetch_pin_s=store.prefetch_pin_s,
        redis_url=index_url(config, trust) if store.index else "",
        redis_ca_file=str(store.redis_ca_file or ""),
        redis_namespace=store.redis_namespace,
        lookup_budget_s=store.lookup_budget_ms * 1e-3,
        node_lease_s=store.node_lease_s,
        transports=tuple(transports),
        prefetch_gb_s=config.transfer.prefetch_gb_s,
        remote_min_gb_s=store.remote_min_gb_s,
    )


def granule_bytes(record_bytes: int) -> int:
    """Return the unit of arena space for records of this size: a power of two that wastes little and keeps
    few."""
    wanted = max(record_bytes // _GRANULES_A_RECORD, 1)
    return min(max(1 << (wanted.bit_length() - 1), MIN_GRANULE_BYTES), MAX_GRANULE_BYTES)


def smallest_record_bytes(pools: Sequence[PoolConfig], model_dir: Path, store_kv_dtype: str = "auto") -> int:
    """Return the size of the header and of the KV that the smallest rank of any pool holds of a block."""
    model = read_model_config(model_dir)
    item_bytes = ITEM_BYTES[resolve_dtype(pools, model_dir)]
    return HEADER_BYTES + min(_rank_block_bytes(pool, model, item_bytes, store_kv_dtype) for pool in pools)


def check_redis_url(store: StoreConfig) -> None:
    """Raise `ConfigError` where no client could use the URL. The text never shows it: it may hold a
    password."""
    url = read_redis_url(store)
    scheme = urlsplit(url).scheme
    if url and scheme not in _REDIS_SCHEMES:
        field = "redis_url_file" if store.redis_url_file else "redis_url (or REDIS_URL of the environment)"
        schemes = ", ".join(f"{scheme}://" for scheme in _REDIS_SCHEMES)
        raise ConfigError(f"store.{field}: must begin with one of {schemes}")
    if store.redis_ca_file is not None and scheme != "rediss":
        raise ConfigError("store.redis_ca_file: is for a server with TLS, whose URL begins with rediss://")


def has_password(url: str) -> bool:
    """Whether a Redis URL holds a password, which must not pass through Ray."""
    parts = urlsplit(url)
    return bool(parts.password) or any(name.endswith("password") for name in parse_qs(parts.query))


def index_url(config: ClusterConfig, trust: Trust) -> str:
    """Return the URL of the store's index, with user and password: not for logs; "" where there is none."""
    return with_password(read_redis_url(config.store), trust)


def check_store(store: StoreConfig, *, memory_bytes: int) -> None:
    """Raise `ConfigError` where a host with that much memory cannot run the store. Makes the NVMe folder."""
    if store.dram_gb * _GB > memory_bytes:
        raise ConfigError(
            f"store.dram_gb: {store.dram_gb:g} is more than the memory of this host, "
            f"{memory_bytes / _GB:.1f}; use less, or 0 for no store"
        )
    if store.nvme_path is None:
        return
    try:
        store.nvme_path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"store.nvme_path: {os_reason(error)}; name a folder on a local disk") from error
    if not os.access(store.nvme_path, os.W_OK | os.X_OK):
        raise ConfigError(f"store.nvme_path: {store.nvme_path} cannot be written to by this user")


class NvmeFolder:
    """Represents a store's own folder below the configured one: the first free of `<host>-<app>-0`, `-1`,
    ..., so that a restarted cluster, whose nodes have other ids, finds the earlier records. A lock next to
    the folder, which ends with the process, keeps other stores of the host out."""

    def __init__(self, parent: Path, host: str, app: str) -> None:
        """Take the first folder where none can be locked (the disk is gone, or read-only before the first
        use)."""
        self.path = parent / f"{host}-{app}-0"
        self._lock: int | None = None
        try:
            for number in itertools.count():
                path = parent / f"{host}-{app}-{number}"
                self._lock = try_lock(path.with_name(f"{path.name}.lock"))
                if self._lock is not None:
                    self.path = path
                    return
        except OSError as error:
            _log.error("no folder can be locked below store.nvme_path %s: %s", parent, error)

    def close(self) -> None:
        """Release the folder for another store."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _rank_block_bytes(pool: PoolConfig, model: ModelConfig, item_bytes: int, store_kv_dtype: str) -> int:
    cells, ends = model.kv_cells, list(itertools.accumulate(pool.layers or equal_stages(model, pool.pp)))
    starts = [0, *ends[:-1]]
    stages = [range(start, min(end, cells.num_layers)) for start, end in zip(starts, ends, strict=True)]
    num_layers = min(sum(map(model.has_attention, stage)) for stage in stages)
    layers, engine = range(max(num_layers, 1)), pool.engine
    form = KvForm.of(engine.kv_dtype, item_bytes, len(cells.parts))
    layouts = [
        kv_layout(
            model,
            layers,
            rank,
            pool.tp,
            engine.block_tokens,
            form,
            is_split=engine.latent_kv == "split",
        )
        for rank in range(pool.tp)
    ]
    if (records := ScaledParts.in_store(model, store_kv_dtype, engine.kv_dtype)) is not None:
        layouts = [record_layout(layout, records) for layout in layouts]
    return min(layout.block_bytes for layout in layouts)
