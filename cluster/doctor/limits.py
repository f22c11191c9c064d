"""Limits of this user's processes, and this machine's memory against the configured amounts."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.config import LOOPBACK, ClusterConfig
from cluster.doctor.check_context import Check, CheckContext
from cluster.doctor.checks import CheckResult, Figures, error, note, ok, warning
from cluster.serve.container_memory import huge_pages_suffice
from cluster.serve.machine import read
from cluster.serve.resource_needs import RAY_BYTES, ClusterNeed, PoolNeed, gb
from cluster.served_model import described_model
from kvtransfer.store.dram.arena import HUGE_PAGE_BYTES
from workers.model.model_config import read_model_config
from workers.model.rank_memory import least_kv_tokens

GROUP = "limits and memory"
# Ray raises the soft limit of open files as far as this and the hard limit allow.
_RAY_RAISES_TO = 65536
_MIN_PROCESSES = 4096
# The size of Ray's object store, as `tandem serve` starts it.
_RAY_SHM_BYTES = 128 << 20
# The share of a GPU's memory for weights and KV; the rest is for memory that is not counted.
_DEVICE_SHARE = 0.9


def open_files(context: CheckContext) -> Iterator[CheckResult]:
    limits = context.machine.limit("Max open files")
    if context.needs is None or limits is None:
        return
    soft, hard = limits
    usable, needed = max(soft, min(hard, _RAY_RAISES_TO)), context.needs.open_files
    seen = f"{_count(usable)} open files allowed to a process (soft {_count(soft)}, hard {_count(hard)})"
    figures: Figures = {"allowed": -1 if usable == float("inf") else int(usable), "needed": needed}
    if usable < needed:
        yield error(
            f"{seen}; the busiest process may need {needed}",
            "connections of clients and replicas are refused when a process has no descriptor left",
            f"raise the hard limit: `ulimit -Hn {max(needed, _RAY_RAISES_TO)}`, LimitNOFILE= of the service, "
            "or the container's; or lower gateway.max_requests",
            **figures,
        )
    else:
        yield ok(f"{seen}; the busiest process may need {needed}", **figures)


def processes(context: CheckContext) -> Iterator[CheckResult]:
    limits = context.machine.limit("Max processes")
    allowed = min(limits[0] if limits else float("inf"), context.machine.group_limit("pids", "pids.max"))
    if allowed < _MIN_PROCESSES:
        yield warning(
            f"{_count(allowed)} processes and threads allowed",
            "Ray alone starts some hundred threads a node; it fails with `Resource temporarily unavailable`",
            f"allow {_MIN_PROCESSES} or more: `ulimit -u`, or the container's limit of process ids",
            allowed=int(allowed),
        )
    else:
        yield ok(f"{_count(allowed)} processes and threads allowed")


def shared_memory(context: CheckContext) -> Iterator[CheckResult]:
    path = context.machine.root / "dev/shm"
    space = context.machine.space(path) if path.exists() else None
    if space is None:
        yield error(
            "there is no /dev/shm",
            "Ray's object store lies there; Ray does not start without it",
            "mount a tmpfs at /dev/shm",
        )
        return
    seen = f"/dev/shm has {gb(space.free_bytes)} free of {gb(space.total_bytes)}"
    figures: Figures = {"free_bytes": space.free_bytes, "total_bytes": space.total_bytes}
    if space.free_bytes < _RAY_SHM_BYTES:
        yield warning(
            f"{seen}; Ray's object store takes {gb(_RAY_SHM_BYTES)}",
            "Ray then keeps its object store on disk; KV is not concerned: its memory has no name there",
            "a larger /dev/shm for the container (--shm-size, or an emptyDir of medium Memory)",
            **figures,
        )
    else:
        yield ok(f"{seen}; only Ray's object store lies there, KV does not", **figures)


def memory(context: CheckContext) -> Iterator[CheckResult]:
    """Compare the needs with free memory, or with all memory while the cluster runs."""
    total, free = context.machine.memory("MemTotal"), context.machine.memory("MemAvailable")
    if context.needs is None or total is None or free is None:
        return
    usable, source = (total, "memory") if context.is_running else (free, "free memory")
    group = context.machine.memory_limit()
    if group is not None and group[0] - (0 if context.is_running else group[1]) < usable:
        usable = group[0] - (0 if context.is_running else group[1])
        source = f"the control group's limit of {gb(group[0])}"
    has_huge_pages = huge_pages_suffice(context.config, context.needs, context.machine)
    store_bytes = 0 if has_huge_pages else context.needs.store_bytes
    largest = RAY_BYTES + store_bytes + max(pool.stage_bytes for pool in context.needs.pools)
    needed = context.needs.host_bytes - context.needs.store_bytes + store_bytes
    seen = f"{gb(usable)} of {source}; all that is configured takes about {gb(needed)}"
    detail = _breakdown(context.needs)
    figures: Figures = {"usable_bytes": usable, "needed_bytes": needed}
    why = f"with too little the kernel ends a process, at the start or when the store fills: {detail}"
    remedy = "lower kv_tokens, replicas, store.dram_gb or engine.offload_tokens, or use more machines"
    if fitting := _fitting_kv_tokens(context.needs, context.config, usable - needed):
        remedy = f"set kv_tokens to at most {fitting}, or auto; or {remedy}"
    alone = context.config.transfer.data_host in LOOPBACK
    if usable < (needed if alone else largest):
        what = "" if alone else f", and the largest part that must be on one node {gb(largest)}"
        yield error(seen + what, why, remedy, **figures)
    elif usable < needed:
        yield note(f"{seen}: more than this node has", f"it needs several nodes: {detail}", **figures)
    else:
        yield ok(f"{seen} ({detail})", **figures)


def _fitting_kv_tokens(needs: ClusterNeed, config: ClusterConfig, left_bytes: int) -> int:
    """Return the largest `kv_tokens` with which everything fits, the same for all pools that set it; 0 where
    there is none. `left_bytes` of the memory are left now: less than none."""
    counted = [
        need
        for pool, need in zip(config.pools, needs.pools, strict=True)
        if pool.engine.kv_tokens != "auto" and need.has_host_kv
    ]
    if not counted:
        return 0

    def taken_bytes(pools: list[PoolNeed]) -> int:
        return sum(pool.num_replicas * pool.replica_bytes for pool in pools)

    block_tokens = max(pool.block_tokens for pool in counted)
    most_bytes = taken_bytes(counted) + left_bytes
    fewest, most = 0, max(most_bytes, 0) // block_tokens
    while fewest < most:
        middle = (fewest + most + 1) // 2
        fits = taken_bytes([pool.with_kv(middle * block_tokens) for pool in counted]) <= most_bytes
        fewest, most = (middle, most) if fits else (fewest, middle - 1)
    fitting = fewest * block_tokens
    least = least_kv_tokens(read_model_config(described_model(config)), block_tokens)
    return fitting if fitting >= least else 0


def kv_capacity(context: CheckContext) -> Iterator[CheckResult]:
    """Report the KV of a replica where `kv_tokens` is `auto`, and why it is so much."""
    if context.needs is None:
        return
    model = read_model_config(described_model(context.config))
    context_tokens = model.max_context_tokens
    for pool, need in zip(context.config.pools, context.needs.pools, strict=True):
        if pool.engine.kv_tokens != "auto":
            continue
        if not need.has_host_kv:
            yield ok(f"pool {pool.name}: kv_tokens is {need.kv_reason}")
            continue
        kv_bytes = need.host_kv_bytes(need.kv_tokens)
        seen = f"pool {pool.name}: kv_tokens auto is {need.kv_tokens} a replica, {gb(kv_bytes)}"
        if model.latent is not None:
            seen += (
                f" (keys and values of each head take {model.latent.saving(model.num_heads):.1f} times that)"
            )
        if saved_bytes := need.saved_kv_bytes(need.kv_tokens):
            seen += f" ({gb(saved_bytes)} more if layers with a window kept all tokens)"
        if state_bytes := need.state_bytes(need.kv_tokens):
            seen += f" ({gb(state_bytes)} of it for states and their snapshots)"
        figures: Figures = {"pool": pool.name, "kv_tokens": need.kv_tokens, "kv_bytes": kv_bytes}
        least = least_kv_tokens(model, pool.engine.block_tokens)
        remedy = "lower store.dram_gb, replicas or max_sequences, set surge: false, or use more machines"
        if context.config.transfer.data_host not in LOOPBACK:
            why = f"{need.kv_reason}: more where fewer of them are placed here"
            yield note(seen, why, "", **figures)
        elif need.kv_tokens < least:
            yield error(f"{seen}; {least} are needed at least", need.kv_reason, remedy, **figures)
        elif need.kv_tokens < context_tokens:
            why = f"{need.kv_reason}; the model's context is {context_tokens}, and a request may be no longer"
            yield note(seen, why, remedy, **figures)
        else:
            yield ok(f"{seen}: {need.kv_reason}", **figures)


def huge_pages(context: CheckContext) -> Iterator[CheckResult]:
    """Check the reserved huge pages for the store, and the transparent ones that serve instead."""
    if not context.needs or not context.needs.store_bytes or not context.config.store.huge_pages:
        return
    if context.machine.memory("Hugepagesize") is None:
        return
    num_free = context.machine.memory("HugePages_Free") or 0
    needed = -(-context.needs.store_bytes // HUGE_PAGE_BYTES)
    figures: Figures = {"free_pages": num_free, "needed_pages": needed}
    advised = read(context.machine.sys / "kernel/mm/transparent_hugepage/shmem_enabled")
    if huge_pages_suffice(context.config, context.needs, context.machine):
        yield ok(f"{num_free} huge pages of 2 MiB are free; the store takes {needed}", **figures)
        return
    has_advice = any(f"[{mode}]" in advised for mode in ("always", "advise", "within_size", "force"))
    small = "transparent huge pages serve instead" if has_advice else "pages of 4 KiB serve instead"
    remedy = f"`sysctl vm.nr_hugepages={needed}` before anything else takes the memory"
    if not has_advice:
        remedy += "; or `echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled`"
    yield note(
        f"{num_free} huge pages of 2 MiB are reserved and free, the store would take {needed}: {small}",
        "with large pages copies of KV miss fewer addresses; the store works without",
        f"{remedy}; or store.huge_pages: false to leave it so",
        **figures,
    )


def locked_memory(context: CheckContext) -> Iterator[CheckResult]:
    """Check the limit of locked memory: RDMA and pinned device copies lock the pool."""
    limits = context.machine.limit("Max locked memory")
    uses_rdma = "rdma" in context.config.transfer.transports and any(
        (context.machine.sys / "class/infiniband").glob("*")
    )
    if limits is None or context.needs is None or not uses_rdma:
        return
    needed = max(rank.kv_bytes for pool in context.needs.pools for rank in pool.ranks)
    if limits[0] < needed:
        yield error(
            f"{gb(limits[0])} may be locked in memory; the largest rank registers {gb(needed)} for RDMA",
            "the registration fails, and KV goes another, slower way",
            "`ulimit -l unlimited`, LimitMEMLOCK=infinity of the service, or the container's memlock limit",
            allowed_bytes=int(limits[0]),
            needed_bytes=needed,
        )
    else:
        yield ok("enough memory may be locked for RDMA", needed_bytes=needed)


def device_memory(context: CheckContext) -> Iterator[CheckResult]:
    """Compare a rank's weights, activations and KV with the memory of the smallest GPU. NCCL's buffers are
    not counted."""
    pools = (
        []
        if context.needs is None
        else [pool for pool in context.needs.pools if "cuda" in {rank.device for rank in pool.ranks}]
    )
    shown = context.machine.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"])
    sizes = [int(line) << 20 for line in (shown or "").split() if line.isdecimal()]
    for pool in pools:
        needed = max(rank.device_bytes for rank in pool.ranks if rank.device == "cuda")
        if sizes and needed > min(sizes):
            yield error(
                f"pool {pool.name}: a rank takes {gb(needed)}; a GPU has {gb(min(sizes))}",
                "the rank cannot load",
                f"raise tp or pp, or lower kv_tokens of the pool{_offload_remedy(context)}",
                needed_bytes=needed,
                device_bytes=min(sizes),
            )
        elif sizes and needed > _DEVICE_SHARE * min(sizes):
            yield warning(
                f"pool {pool.name}: a rank takes {gb(needed)}; a GPU has {gb(min(sizes))}",
                "NCCL's buffers and what the allocator leaves unused need memory too: the rank may fail to "
                "start, or run out of memory in long steps",
                f"raise tp or pp, or lower kv_tokens of the pool: keep {1 - _DEVICE_SHARE:.0%} free",
                needed_bytes=needed,
                device_bytes=min(sizes),
            )
        elif sizes:
            yield ok(
                f"pool {pool.name}: weights, activations and KV of a rank take {gb(needed)} of a GPU's "
                f"{gb(min(sizes))}; NCCL's buffers come on top",
                needed_bytes=needed,
                device_bytes=min(sizes),
            )


CHECKS = (
    Check(
        "open-files",
        GROUP,
        "The limit of open files against the connections of clients and replicas",
        open_files,
    ),
    Check("processes", GROUP, "The limit of processes and threads", processes),
    Check("shared-memory", GROUP, "Space in /dev/shm for Ray's object store", shared_memory),
    Check(
        "memory",
        GROUP,
        "Free memory, or the container's limit, against everything that is configured",
        memory,
    ),
    Check(
        "kv-capacity", GROUP, "How much KV a replica gets where `kv_tokens` is `auto`, and why", kv_capacity
    ),
    Check("huge-pages", GROUP, "Huge pages for the store's host tier", huge_pages),
    Check("locked-memory", GROUP, "How much memory RDMA may register", locked_memory),
    Check(
        "device-memory",
        GROUP,
        "Weights, activations and KV of a rank against 90 % of a GPU's memory",
        device_memory,
    ),
)


def _breakdown(needs: ClusterNeed) -> str:
    parts = []
    for pool in needs.pools:
        weights, kv = (
            sum(getattr(rank, name) for rank in pool.ranks) for name in ("weight_bytes", "kv_bytes")
        )
        inside = f"weights {gb(weights)}, KV {gb(kv)}"
        if experts := sum(rank.expert_bytes for rank in pool.ranks):
            inside += f", experts in host memory {gb(experts)}"
        parts.append(f"{pool.num_replicas} x {gb(pool.replica_bytes)} of pool {pool.name} ({inside})")
    return "; ".join([*parts, f"store {gb(needs.store_bytes)}", "Ray and gateways"])


def _offload_remedy(context: CheckContext) -> str:
    has_experts = read_model_config(described_model(context.config)).mixture is not None
    return ", or raise engine.expert_offload, which leaves experts to the CPU" if has_experts else ""


def _count(value: float) -> str:
    return "any number of" if value == float("inf") else f"{value:.0f}"
