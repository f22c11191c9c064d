"""The processors: how many against the configured ranks, what they can do, how they are clocked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cluster.config import DtypeName
from cluster.doctor.checks import Check, CheckContext, Figures, Verdict, note, ok, warning
from cluster.dtypes import has_native_bf16, resolve_dtype, vector_unit
from cluster.serve.capacity import ENGINE_CORE_CPUS, GATEWAY_CPUS
from cluster.serve.machine import Machine, read

GROUP = "processors"
_VECTOR_FLAGS = ("avx2", "asimd")


def cores(case: CheckContext) -> Iterator[Verdict]:
    """All ranks compute at once; what brains, gateways and Ray need beside them is little."""
    num_cpus = case.machine.cpus()
    if case.needs is None or num_cpus <= 0:
        return
    num_threads = case.needs.num_threads
    num_brains = sum(pool.num_replicas for pool in case.needs.pools)
    seen = f"{num_cpus:g} processors for {num_threads} threads of ranks"
    figures: Figures = {"cpus": num_cpus, "rank_threads": num_threads}
    others = num_brains * ENGINE_CORE_CPUS + case.needs.num_gateways * GATEWAY_CPUS
    if num_threads > num_cpus:
        yield warning(
            f"{seen} (replicas x ranks x engine.num_threads)",
            "steps of all replicas get slower together, and a rank that waits for a processor looks like one "
            "that hangs",
            "lower engine.num_threads, tp or replicas, or use more nodes",
            **figures,
        )
    elif num_threads + others > num_cpus:
        yield note(f"{seen}, {num_brains} brains and {case.needs.num_gateways} gateways", **figures)
    else:
        yield ok(seen, **figures)


def features(case: CheckContext) -> Iterator[Verdict]:
    """What the kernels of CPU pools use, by their dtype."""
    flags = case.machine.cpu_flags()
    names = [pool.name for pool in case.config.pools if "cpu" in pool.stage_devices]
    if not names or not flags or case.needs is None:
        return
    pools, model = case.config.pools, case.config.model
    dtype = resolve_dtype(pools, model, [flags])
    unit = vector_unit(flags) or "no vector unit that is known"
    seen = f"pool{'s' * (len(names) > 1)} {', '.join(names)}: {dtype} on a CPU with {unit}"
    if flags.isdisjoint(_VECTOR_FLAGS):
        yield warning(
            seen,
            "the kernels are written for AVX2 and wider; without it every step is several times slower",
            "use another machine, or let the virtual machine pass the host's CPU through",
        )
    elif dtype == "fp32" or (dtype == "bf16" and has_native_bf16(flags)):
        yield ok(seen)
    else:
        yield _slow_dtype(case.machine, dtype, "bf16" if has_native_bf16(flags) else "fp32", seen)


def _slow_dtype(machine: Machine, dtype: DtypeName, better: DtypeName, seen: str) -> Verdict:
    """How much slower this machine multiplies in `dtype` than in the one that it is made for."""
    rates = machine.product_rates((dtype, better))
    factor = rates[better] / rates[dtype]
    why = (
        "the compiled kernels serve fp32 and bf16 only"
        if dtype == "fp16"
        else "it has no bf16 instructions, and emulates them"
    )
    return warning(
        f"{seen}, where products of {dtype} take {factor:.1f} times as long as those of {better} (measured)",
        f"{why}: prefill and batched decoding are slower by about as much",
        f"leave dtype at auto, or set {better} in all pools, which exchange KV",
        factor=round(factor, 2),
    )


def compiler(case: CheckContext) -> Iterator[Verdict]:
    if all("cpu" not in pool.stage_devices for pool in case.config.pools):
        return
    found = case.machine.find_program("c++") or case.machine.find_program("g++")
    if found:
        yield ok(f"kernels are compiled with {found} when they are first used")
    else:
        yield warning(
            "no C++ compiler was found (c++, g++)",
            "the kernels for CPUs and transfers are compiled at first use; without them slower code runs",
            "install g++ on every node or in the image",
        )


def governor(case: CheckContext) -> Iterator[Verdict]:
    files = (case.machine.sys / "devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    found = Counter(read(file).strip() for file in files)
    slow = [name for name in found if name in ("powersave", "conservative", "ondemand")]
    if slow and not _is_hardware_managed(case.machine):
        yield warning(
            f"CPU governor {', '.join(slow)} on {sum(found[name] for name in slow)} processors",
            "short steps end before the clock has risen: latency varies and is higher than it need be",
            "`cpupower frequency-set -g performance`",
        )
    elif found:
        yield ok(f"CPU governor {', '.join(sorted(found))}")


def _is_hardware_managed(machine: Machine) -> bool:
    """With intel_pstate or amd_pstate in active mode `powersave` leaves the clock to the processor."""
    return any(
        read(machine.sys / "devices/system/cpu" / name / "status").strip() == "active"
        for name in ("intel_pstate", "amd_pstate")
    )


def numa(case: CheckContext) -> Iterator[Verdict]:
    """Ranks are not pinned: where there are several nodes, a rank may compute far from its memory."""
    nodes = sorted((case.machine.sys / "devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        if nodes:
            yield ok("one NUMA node")
        return
    shares = "; ".join(f"{node.name}: CPUs {read(node / 'cpulist').strip()}" for node in nodes)
    replicas = sum(pool.replicas for pool in case.config.pools if "cpu" in pool.stage_devices)
    yield note(
        f"{len(nodes)} NUMA nodes ({shares})",
        "a rank that computes on one node and has its KV on another reads it at a fraction of the rate",
        "run one Ray node a NUMA node (`numactl --cpunodebind=N --membind=N ray start ...`)"
        if replicas
        else "",
        nodes=len(nodes),
    )


CHECKS = (
    Check("cores", GROUP, "Processors against replicas x ranks x threads", cores),
    Check(
        "cpu-features",
        GROUP,
        "AVX2, bf16 and AMX against the pools' dtype, and how much slower an emulated one is",
        features,
    ),
    Check("compiler", GROUP, "A C++ compiler for kernels that are compiled at first use", compiler),
    Check("governor", GROUP, "CPU frequency governor", governor),
    Check("numa", GROUP, "NUMA nodes against replicas on CPUs", numa),
)
