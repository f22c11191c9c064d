"""The checks of limits, memory and hardware, on prepared machines: each says well and not well."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from doctor_harness import FakeMachine, config_of, context_of, only, said

from cluster.doctor import devices, hardware, limits
from cluster.doctor.checks import Severity
from cluster.serve.machine import Machine, numbers, run_command
from cluster.serve.resource_needs import ENGINE_CORE_BYTES, RAY_BYTES, needs_of
from workers.model.rank_memory import PROCESS_BYTES

OK, NOTE, WARNING, ERROR = Severity
GIB = 1 << 30


def limits_text(name: str, soft: str, hard: str) -> str:
    return f"Limit  Soft Limit  Hard Limit  Units\n{name:<26}{soft:<21}{hard:<21}x\n"


@pytest.mark.parametrize(
    ("soft", "hard", "severity"),
    [
        ("1024", "1048576", OK),
        ("1024", "1024", ERROR),
        ("unlimited", "unlimited", OK),
        ("900", "2400", OK),
        ("900", "2000", ERROR),
    ],
)
def test_open_files_count_the_hard_limit_that_ray_raises_to(
    tmp_path: Path, soft: str, hard: str, severity: Severity
) -> None:
    machine = FakeMachine(tmp_path, {"proc/self/limits": limits_text("Max open files", soft, hard)})
    result = only(limits.open_files, context_of(machine.view()))
    assert result.severity is severity
    # 256 of any process, a connection for each of the 1024 requests and of as many that are resumed, and two
    # for each replica.
    assert result.figures["needed"] == 256 + 2 * 1024 + 2 * 2


def test_more_requests_need_more_files(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, {"proc/self/limits": limits_text("Max open files", "4096", "4096")})
    many = config_of(gateway={"max_requests": 8192})
    assert only(limits.open_files, context_of(machine.view())).severity is OK
    assert only(limits.open_files, context_of(machine.view(), many)).severity is ERROR


@pytest.mark.parametrize(
    ("files", "severity"),
    [
        ({}, OK),
        ({"proc/self/limits": limits_text("Max processes", "1000", "1000")}, WARNING),
        ({"sys/fs/cgroup/pids.max": "512\n"}, WARNING),
        ({"sys/fs/cgroup/pids.max": "max\n"}, OK),
        ({"proc/self/cgroup": "0::/pod/a\n", "sys/fs/cgroup/pod/pids.max": "512\n"}, WARNING),
    ],
)
def test_processes_are_limited_by_the_user_and_by_the_group(
    tmp_path: Path, files: dict[str, str], severity: Severity
) -> None:
    assert only(limits.processes, context_of(FakeMachine(tmp_path, files).view())).severity is severity


def test_without_shm_ray_does_not_start(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, {"dev/shm/nothing": None}).view()
    assert only(limits.shared_memory, context_of(machine)).severity is ERROR
    (tmp_path / "dev/shm").mkdir(parents=True)
    result = only(limits.shared_memory, context_of(machine))
    assert result.severity is OK
    assert "KV does not" in result.seen


def test_what_is_needed_is_counted_rank_by_rank() -> None:
    """The bundled model: 6 layers, 4 KV heads; by hand, from its files and the definition of a block."""
    config = config_of(
        pools=[
            {"name": "p", "role": "prefill", "tp": 2, "engine": {"kv_tokens": 4096}},
            {
                "name": "d",
                "role": "decode",
                "replicas": 3,
                "pp": 2,
                "engine": {"kv_tokens": 8192, "offload_tokens": 640},
            },
        ],
        store={"dram_gb": 2},
    )
    needs = needs_of(config)
    prefill, decode = needs.pools
    weights = sum(file.stat().st_size for file in config.model_path.glob("*.safetensors"))
    token = 2 * 6 * 4 * 32 * 2  # k and v, layers, heads, head size, bf16
    assert sum(rank.weight_bytes for rank in prefill.ranks) == pytest.approx(weights, rel=0.02)
    assert len(prefill.ranks) == 2
    for pool, kv_tokens in ((prefill, 4096), (decode, 8192)):
        held = sum(rank.kv_bytes for rank in pool.ranks)
        assert token * kv_tokens <= held <= token * kv_tokens + 2 * (8 << 20)
    assert sum(rank.offload_bytes for rank in decode.ranks) == 640 * token
    of_decode = (
        ENGINE_CORE_BYTES + 2 * PROCESS_BYTES + sum(r.device_bytes + r.offload_bytes for r in decode.ranks)
    )
    of_prefill = ENGINE_CORE_BYTES + 2 * PROCESS_BYTES + sum(r.device_bytes for r in prefill.ranks)
    assert needs.host_bytes == RAY_BYTES + 2_000_000_000 + ENGINE_CORE_BYTES + of_prefill + 3 * of_decode
    assert needs.num_threads == 2 + 3 * 2


def test_memory_is_compared_with_what_is_free_or_with_the_groups_limit(tmp_path: Path) -> None:
    config = config_of(store={"dram_gb": 40})
    needed = needs_of(config).host_bytes
    enough = FakeMachine(tmp_path / "a").view()
    assert only(limits.memory, context_of(enough, config)).severity is OK
    small = f"MemTotal: 67108864 kB\nMemAvailable: {needed // 1024 - 1000} kB\n"
    little = FakeMachine(tmp_path / "b", {"proc/meminfo": small}).view()
    result = only(limits.memory, context_of(little, config))
    assert result.severity is ERROR
    assert result.figures["needed_bytes"] == needed
    # While it runs, what is free is what it left.
    assert only(limits.memory, context_of(little, config, is_running=True)).severity is OK
    limited = FakeMachine(
        tmp_path / "c",
        {"sys/fs/cgroup/memory.max": f"{needed - 1}\n", "sys/fs/cgroup/memory.current": "0\n"},
    ).view()
    assert only(limits.memory, context_of(limited, config)).severity is ERROR
    assert "control group" in only(limits.memory, context_of(limited, config)).seen


def test_what_a_group_can_take_back_counts_as_free(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/kube/pod\n",
        "sys/fs/cgroup/kube/pod/memory.max": "max\n",
        "sys/fs/cgroup/kube/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/kube/memory.current": f"{6 * GIB}\n",
        "sys/fs/cgroup/kube/memory.stat": f"anon 1\ninactive_file {5 * GIB}\n",
    }
    assert FakeMachine(tmp_path / "two", files).view().memory_limit() == (8 * GIB, GIB)
    old = {
        "proc/self/cgroup": "4:memory:/box\n1:name=systemd:/box\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert FakeMachine(tmp_path / "one", old).view().memory_limit() == (2 * GIB, GIB)
    assert FakeMachine(tmp_path / "none").view().memory_limit() is None


def test_several_nodes_may_hold_what_one_cannot(tmp_path: Path) -> None:
    pool = {"name": "d", "role": "decode", "replicas": 8, "engine": {"kv_tokens": 1 << 20}}
    config = config_of(pools=[pool], transfer={"data_host": "auto"})
    one, all_of_it = needs_of(config).pools[0].stage_bytes, needs_of(config).host_bytes
    assert one + RAY_BYTES + 1_000_000_000 < all_of_it // 2
    half = f"MemTotal: 67108864 kB\nMemAvailable: {all_of_it // 2048} kB\n"
    machine = FakeMachine(tmp_path / "half", {"proc/meminfo": half}).view()
    assert only(limits.memory, context_of(machine, config)).severity is NOTE
    alone = config_of(pools=[pool])
    assert only(limits.memory, context_of(machine, alone)).severity is ERROR
    tiny = FakeMachine(tmp_path / "tiny", {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 9 kB\n"}).view()
    assert only(limits.memory, context_of(tiny, config)).severity is ERROR


def test_huge_pages_are_asked_for_where_the_store_uses_them(tmp_path: Path) -> None:
    def meminfo(num_free: int) -> dict[str, str | None]:
        return {"proc/meminfo": f"HugePages_Free: {num_free}\nHugepagesize: 2048 kB\n"}

    needed = -(-1_000_000_000 // (2 << 20))
    some = FakeMachine(tmp_path / "some", meminfo(needed - 1)).view()
    result = only(limits.huge_pages, context_of(some))
    assert result.severity is NOTE
    assert f"vm.nr_hugepages={needed}" in result.remedy
    assert (
        only(limits.huge_pages, context_of(FakeMachine(tmp_path / "all", meminfo(needed)).view())).severity
        is OK
    )
    assert not said(limits.huge_pages, context_of(some, config_of(store={"huge_pages": False})))
    assert not said(limits.huge_pages, context_of(some, config_of(store={"dram_gb": 0})))


def test_a_store_in_reserved_huge_pages_takes_none_of_the_free_memory(tmp_path: Path) -> None:
    config = config_of(store={"dram_gb": 4})
    left = needs_of(config).host_bytes - 4_000_000_000
    for num_pages, severity in ((1908, OK), (1907, ERROR)):  # 4e9 bytes are 1907.35 pages
        text = f"MemTotal: 9999999 kB\nMemAvailable: {left // 1024 + 1} kB\n"
        text += f"HugePages_Free: {num_pages}\nHugepagesize: 2048 kB\n"
        machine = FakeMachine(tmp_path / str(num_pages), {"proc/meminfo": text}).view()
        assert only(limits.memory, context_of(machine, config)).severity is severity


def test_transparent_huge_pages_are_distinguished(tmp_path: Path) -> None:
    setting = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    advise = FakeMachine(tmp_path / "a", {setting: "always within_size [advise] never deny force\n"}).view()
    never = FakeMachine(tmp_path / "b", {setting: "always within_size advise [never] deny force\n"}).view()
    assert "transparent huge pages" in only(limits.huge_pages, context_of(advise)).seen
    assert "pages of 4 KiB" in only(limits.huge_pages, context_of(never)).seen


def test_rdma_needs_memory_that_may_be_locked(tmp_path: Path) -> None:
    files: dict[str, str | None] = {"sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n"}
    tight = files | {"proc/self/limits": limits_text("Max locked memory", "65536", "65536")}
    assert only(limits.locked_memory, context_of(FakeMachine(tmp_path / "a", tight).view())).severity is ERROR
    assert only(limits.locked_memory, context_of(FakeMachine(tmp_path / "b", files).view())).severity is OK
    without = {"proc/self/limits": limits_text("Max locked memory", "65536", "65536")}
    assert not said(limits.locked_memory, context_of(FakeMachine(tmp_path / "c", without).view()))


def test_weights_and_kv_must_fit_into_a_gpu(tmp_path: Path) -> None:
    pool = {"name": "d", "role": "decode", "device": "cuda", "engine": {"kv_tokens": 1 << 20}}
    config = config_of(pools=[pool])
    question = "nvidia-smi --query-gpu=memory.total "
    large = FakeMachine(tmp_path / "a", commands={question: "81559\n143771\n"}).view()
    small = FakeMachine(tmp_path / "b", commands={question: "81559\n1024\n"}).view()
    assert only(limits.device_memory, context_of(large, config)).severity is OK
    assert only(limits.device_memory, context_of(small, config)).severity is ERROR
    needed_mib = int(only(limits.device_memory, context_of(large, config)).figures["needed_bytes"]) / (
        1 << 20
    )
    for share, severity in ((0.88, OK), (0.92, WARNING), (0.999, WARNING)):
        gpu = FakeMachine(tmp_path / str(share), commands={question: f"{math.ceil(needed_mib / share)}\n"})
        assert only(limits.device_memory, context_of(gpu.view(), config)).severity is severity, share
    assert not said(limits.device_memory, context_of(FakeMachine(tmp_path / "c").view(), config))
    assert not said(limits.device_memory, context_of(small))


@pytest.mark.parametrize(
    ("allowed", "quota", "severity"),
    [
        ("0-15", "max 100000", OK),
        ("0", "max 100000", WARNING),
        ("0-15", "150000 100000", WARNING),
        ("0-1", "", NOTE),
    ],
)
def test_processors_are_those_of_the_process_and_its_group(
    tmp_path: Path, allowed: str, quota: str, severity: Severity
) -> None:
    files = {"proc/self/status": f"Cpus_allowed_list:\t{allowed}\n", "sys/fs/cgroup/cpu.max": quota}
    assert only(hardware.cores, context_of(FakeMachine(tmp_path, files).view())).severity is severity


@pytest.mark.parametrize(
    ("flags", "dtype", "severity"),
    [
        ("avx2 avx512_bf16", "bf16", OK),
        ("avx2 avx512_bf16", "auto", OK),
        ("avx2 avx512_bf16", "fp32", OK),
        ("avx2", "fp32", OK),
        ("avx2", "auto", OK),
        ("avx2 fma f16c bmi2", "bf16", OK),
        ("avx2 fma f16c bmi2", "auto", OK),
        ("sse2", "bf16", WARNING),
    ],
)
def test_the_cpu_can_what_the_dtype_wants(tmp_path: Path, flags: str, dtype: str, severity: Severity) -> None:
    machine = FakeMachine(tmp_path, {"proc/cpuinfo": f"flags\t: fpu {flags}\n"}).view()
    config = config_of(pools=[{"name": "d", "role": "decode", "dtype": dtype}])
    assert only(hardware.features, context_of(machine, config)).severity is severity


@pytest.mark.parametrize(
    ("flags", "dtype", "better", "factor"),
    [("avx2", "bf16", "fp32", 6.6), ("avx2 amx_bf16", "fp16", "bf16", 12.0), ("avx2", "fp16", "fp32", 5.5)],
)
def test_a_dtype_that_the_cpu_emulates_is_reported_with_the_measured_factor(
    tmp_path: Path, flags: str, dtype: str, better: str, factor: float
) -> None:
    rates = {dtype: 10e9, better: factor * 10e9}
    machine = FakeMachine(tmp_path, {"proc/cpuinfo": f"flags\t: fpu {flags}\n"}).view(product_rates=rates)
    result = only(
        hardware.features,
        context_of(machine, config_of(pools=[{"name": "d", "role": "decode", "dtype": dtype}])),
    )
    assert result.severity is WARNING
    assert f"products of {dtype} take {factor} times as long as those of {better}" in result.seen
    assert result.figures["factor"] == factor


def test_products_are_measured_on_the_machine_itself() -> None:
    rates = Machine().product_rates(("fp32", "bf16"))
    assert rates.keys() == {"fp32", "bf16"}
    assert min(rates.values()) > 1e8


def test_arm_is_known_by_its_own_names(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, {"proc/cpuinfo": "Features\t: fp asimd bf16 sve\n"}).view()
    config = config_of(pools=[{"name": "d", "role": "decode"}])
    assert only(hardware.features, context_of(machine, config)).severity is OK


def test_a_compiler_is_missed_by_pools_on_cpus_only(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    assert only(hardware.compiler, context_of(machine.view())).severity is OK
    assert only(hardware.compiler, context_of(machine.view(programs=["g++"]))).severity is OK
    assert only(hardware.compiler, context_of(machine.view(programs=[]))).severity is WARNING
    on_gpu = config_of(pools=[{"name": "d", "role": "decode", "device": "cuda"}])
    assert not said(hardware.compiler, context_of(machine.view(programs=[]), on_gpu))


def test_a_governor_that_saves_power_is_slow_unless_the_processor_decides(tmp_path: Path) -> None:
    name = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    slow = FakeMachine(tmp_path / "a", {name: "powersave\n"}).view()
    fast = FakeMachine(tmp_path / "b", {name: "performance\n"}).view()
    status = "sys/devices/system/cpu/intel_pstate/status"
    managed = FakeMachine(tmp_path / "c", {name: "powersave\n", status: "active\n"}).view()
    assert only(hardware.governor, context_of(slow)).severity is WARNING
    assert only(hardware.governor, context_of(fast)).severity is OK
    assert only(hardware.governor, context_of(managed)).severity is OK
    assert not said(hardware.governor, context_of(FakeMachine(tmp_path / "d").view()))


def test_numa_nodes_are_reported(tmp_path: Path) -> None:
    one = FakeMachine(tmp_path / "a").view()
    two = FakeMachine(tmp_path / "b", {"sys/devices/system/node/node1/cpulist": "16-31\n"}).view()
    assert only(hardware.numa, context_of(one)).severity is OK
    result = only(hardware.numa, context_of(two))
    assert result.severity is NOTE
    assert "node1: CPUs 16-31" in result.seen


def test_ranges_of_the_kernel_are_read() -> None:
    assert numbers("0-2,5\n") == [0, 1, 2, 5]
    assert numbers("7") == [7]
    assert numbers("") == []


def test_commands_that_fail_or_are_missing_say_nothing() -> None:
    assert run_command(["echo", "x"]) == "x\n"
    assert run_command(["false"]) is None
    assert run_command(["no-such-command-here"]) is None


def test_a_machine_that_reports_nothing_breaks_nothing(tmp_path: Path) -> None:
    """Other systems, and containers that hide /proc or /sys."""
    context = context_of(Machine(root=tmp_path, run=lambda _: None, home=tmp_path))
    for check in (*limits.CHECKS, *hardware.CHECKS, *devices.CHECKS):
        for result in check.look(context):
            assert check.name in ("shared-memory", "processes", "compiler", "kv-capacity"), result
