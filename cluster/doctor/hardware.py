"""Checks of processors: their number, capabilities, clocks and NUMA nodes; and of a compiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from cluster.config import DtypeName
from cluster.doctor.check_context import Check, CheckContext
from cluster.doctor.checks import CheckResult, Figures, note, ok, warning
from cluster.dtypes import computes_bf16, resolve_dtype, vector_unit
from cluster.serve.capacity import ENGINE_CORE_CPUS, GATEWAY_CPUS
from cluster.serve.machine import Machine, read
from cluster.served_model import described_model

_PROCESSORS = "processors"
_VECTOR_FLAGS = ("avx2", "asimd")


def cores(context: CheckContext) -> Iterator[CheckResult]:
    """Compare processors with threads of ranks, which all compute at once; engine cores, gateways and Ray
    need little."""
    num_cpus = context.machine.cpus()
    if context.needs is None or num_cpus <= 0:
        return
    num_threads = context.needs.num_threads
    num_engine_cores = sum(pool.num_replicas for pool in context.needs.pools)
    seen = f"{num_cpus:g} processors for {num_threads} threads of ranks"
    figures: Figures = {"cpus": num_cpus, "rank_threads": num_threads}
    others = num_engine_cores * ENGINE_CORE_CPUS + context.needs.num_gateways * GATEWAY_CPUS
    if num_threads > num_cpus:
        yield warning(
            f"{seen} (replicas x ranks x engine.num_threads)",
            "steps of all replicas get slower together, and a rank that waits for a processor looks like one "
            "that hangs",
            "lower engine.num_threads, tp or replicas, or use more nodes",
            **figures,
        )
    elif num_threads + others > num_cpus:
        yield note(
            f"{seen}, {num_engine_cores} engine cores and {context.needs.num_gateways} gateways", **figures
        )
    else:
        yield ok(seen, **figures)


def features(context: CheckContext) -> Iterator[CheckResult]:
    """Check the CPU features that the kernels of CPU pools use, by their dtype."""
    flags = context.machine.cpu_flags()
    names = [pool.name for pool in context.config.pools if "cpu" in pool.stage_devices]
    if not names or not flags or context.needs is None:
        return
    pools, model = context.config.pools, described_model(context.config)
    dtype = resolve_dtype(pools, model, [flags])
    unit = vector_unit(flags) or "no vector unit that is known"
    seen = f"pool{'s' * (len(names) > 1)} {', '.join(names)}: {dtype} on a CPU with {unit}"
    if flags.isdisjoint(_VECTOR_FLAGS):
        yield warning(
            seen,
            "the kernels are written for AVX2 and wider; without it every step is several times slower",
            "use another machine, or let the virtual machine pass the host's CPU through",
        )
    elif dtype == "fp32" or (dtype == "bf16" and computes_bf16(flags)):
        yield ok(seen)
    else:
        yield _slow_dtype(context.machine, dtype, "bf16" if computes_bf16(flags) else "fp32", seen)


def _slow_dtype(machine: Machine, dtype: DtypeName, better: DtypeName, seen: str) -> CheckResult:
    """Return by how much this machine multiplies slower in `dtype` than in the one that it has instructions
    for."""
    rates = machine.product_rates((dtype, better))
    factor = rates[better] / rates[dtype]
    why = (
        "the compiled kernels serve fp32 and bf16 only"
        if dtype == "fp16"
        else "it has no bf16 instructions and no kernels that widen bf16, and emulates them"
    )
    return warning(
        f"{seen}, where products of {dtype} take {factor:.1f} times as long as those of {better} (measured)",
        f"{why}: prefill and batched decoding are slower by about as much",
        f"leave dtype at auto, or set {better} in all pools, which exchange KV",
        factor=round(factor, 2),
    )


def compiler(context: CheckContext) -> Iterator[CheckResult]:
    if all("cpu" not in pool.stage_devices for pool in context.config.pools):
        return
    found = context.machine.find_program("c++") or context.machine.find_program("g++")
    if found:
        yield ok(f"kernels are compiled with {found} when they are first used")
    else:
        yield warning(
            "no C++ compiler was found (c++, g++)",
            "the kernels for CPUs and transfers are compiled at first use; without them slower code runs, "
            "and quantized weights take as much memory as others",
            "install g++ on every node or in the image",
        )


def governor(context: CheckContext) -> Iterator[CheckResult]:
    files = (context.machine.sys / "devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    found = Counter(read(file).strip() for file in files)
    slow = [name for name in found if name in ("powersave", "conservative", "ondemand")]
    # In active mode of these drivers the processor sets its clock itself, `powersave` or not.
    drivers = (context.machine.sys / "devices/system/cpu" / name for name in ("intel_pstate", "amd_pstate"))
    is_hardware_managed = any(read(driver / "status").strip() == "active" for driver in drivers)
    if slow and not is_hardware_managed:
        yield warning(
            f"CPU governor {', '.join(slow)} on {sum(found[name] for name in slow)} processors",
            "short steps end before the clock has risen: latency varies and is higher than it need be",
            "`cpupower frequency-set -g performance`",
        )
    elif found:
        yield ok(f"CPU governor {', '.join(sorted(found))}")


def numa(context: CheckContext) -> Iterator[CheckResult]:
    """Report NUMA nodes: ranks are not pinned, so with several nodes a rank may compute far from its
    memory."""
    nodes = sorted((context.machine.sys / "devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        if nodes:
            yield ok("one NUMA node")
        return
    shares = "; ".join(f"{node.name}: CPUs {read(node / 'cpulist').strip()}" for node in nodes)
    replicas = sum(pool.replicas for pool in context.config.pools if "cpu" in pool.stage_devices)
    yield note(
        f"{len(nodes)} NUMA nodes ({shares})",
        "a rank that computes on one node and has its KV on another reads it at a fraction of the rate",
        "run one Ray node a NUMA node (`numactl --cpunodebind=N --membind=N ray start ...`)"
        if replicas
        else "",
        nodes=len(nodes),
    )


CHECKS = (
    Check("cores", _PROCESSORS, "Processors against replicas x ranks x threads", cores),
    Check(
        "cpu-features",
        _PROCESSORS,
        "Whether AVX2, bf16 and AMX suit the pools' dtype, and how much slower an emulated dtype is",
        features,
    ),
    Check(
        "compiler",
        _PROCESSORS,
        "Whether there is a C++ compiler for kernels, which are compiled at first use",
        compiler,
    ),
    Check("governor", _PROCESSORS, "CPU frequency governor", governor),
    Check("numa", _PROCESSORS, "NUMA nodes against replicas on CPUs", numa),
)
