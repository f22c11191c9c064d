"""What `dtype: auto` stands for, by checkpoint, device and the processors of all nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving import TINY

from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.config import ClusterConfig, parse_config
from cluster.dtypes import computes_bf16, may_compute, needs_flags, resolve_dtype, settle_dtype
from cluster.errors import ConfigError
from cluster.serve.rollout import carried_over, changes, check_update, plan_rolls, pool_version
from kvtransfer.common import host
from workers.model.native.isa import Isa

SSE = frozenset({"fpu", "sse4_2"})
AVX2 = SSE | {"avx2", "fma", "f16c", "bmi2"}
AVX512 = AVX2 | {"avx512f"}
ZEN4 = AVX512 | {"avx512_bf16"}
AMX = ZEN4 | {"amx_bf16"}
ARM, OLD_ARM = frozenset({"asimd", "bf16", "sve"}), frozenset({"asimd"})
UNKNOWN: frozenset[str] = frozenset()


def make(model: Path = TINY, **pool: Any) -> ClusterConfig:
    names = ("prefill", "decode")
    pools = [{"name": name, "role": name, "engine": {"block_tokens": 16}, **pool} for name in names]
    return parse_config({"model": str(model), "pools": pools}, "test")


@pytest.mark.parametrize("flags", [AVX2, AVX512, ZEN4, AMX, ARM])
def test_bf16_is_taken_where_every_node_has_it(flags: frozenset[str]) -> None:
    settled = settle_dtype(make(), {"10.0.0.1": flags, "10.0.0.2": AMX})
    assert [pool.dtype for pool in settled.config.pools] == ["bf16", "bf16"]
    assert settled.reason.startswith("bf16: every node computes bf16 without emulation")


@pytest.mark.parametrize("flags", [SSE, AVX2 - {"fma"}, OLD_ARM, UNKNOWN])
def test_the_weakest_node_decides_for_all_pools(flags: frozenset[str]) -> None:
    settled = settle_dtype(make(), {"10.0.0.1": AMX, "10.0.0.2": flags})
    assert [pool.dtype for pool in settled.config.pools] == ["fp32", "fp32"]
    assert settled.reason.startswith("fp32: 1 of 2 nodes would emulate bf16")
    assert "10.0.0.2" in settled.reason


@pytest.mark.parametrize(
    ("saved", "device", "flags", "dtype"),
    [
        ("float32", "cpu", AMX, "fp32"),
        ("float16", "cpu", AMX, "bf16"),
        ("float16", "cpu", AVX2, "bf16"),
        ("bfloat16", "cpu", SSE, "fp32"),
        ("float16", "cuda", AVX2, "fp16"),
        ("bfloat16", "cuda", AVX2, "bf16"),
    ],
)
def test_the_checkpoint_and_the_device_count_too(
    tmp_path: Path, saved: str, device: str, flags: frozenset[str], dtype: str
) -> None:
    write_random_checkpoint(tmp_path, "llama", seed=1, dtype=saved)
    config = make(tmp_path, device=device)
    assert settle_dtype(config, {"n": flags}).config.pools[0].dtype == dtype
    assert needs_flags(config) == (device == "cpu" and saved != "float32")


def test_what_the_operator_chose_stays() -> None:
    config = make(dtype="bf16")
    settled = settle_dtype(config, {})
    assert settled == (config, "bf16, as configured")
    assert not needs_flags(config)


def test_gpus_beside_cpus_compute_in_what_suits_both() -> None:
    config = make(pp=2, devices=["cuda", "cpu"])
    assert needs_flags(config)
    assert resolve_dtype(config.pools, TINY, [SSE]) == "fp32"


@pytest.mark.parametrize(
    ("lines", "dtype"),
    [
        ("flags\t\t: fpu avx2 avx512_bf16\n", "bf16"),
        ("flags\t\t: fpu avx2 avx512_bf16\n\nflags\t\t: fpu avx2\n", "fp32"),
        ("flags\t\t: fpu avx2 fma f16c bmi2\n", "bf16"),
        ("Features\t: fp asimd bf16\n", "bf16"),
        ("processor\t: 0\n", "fp32"),
        (None, "fp32"),
    ],
)
def test_a_machine_that_is_asked_alone_looks_at_its_own_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str | None, dtype: str
) -> None:
    file = tmp_path / "cpuinfo"
    if lines is not None:
        file.write_text(lines)
    monkeypatch.setattr(host, "CPU_INFO", file)
    assert resolve_dtype(make().pools, TINY) == dtype


def test_bf16_is_taken_wherever_the_kernels_run() -> None:
    for isa in Isa:
        assert computes_bf16(isa.needed_flags)
    for flag in Isa.AVX2.needed_flags:
        assert not computes_bf16(Isa.AVX2.needed_flags - {flag})


def test_only_nodes_that_may_hold_a_cpu_rank_are_asked() -> None:
    pools = make(resources={"fast": 1}).pools
    assert may_compute(pools, {"Alive": True, "Resources": {"CPU": 2.0, "fast": 1.0}})
    assert not may_compute(pools, {"Alive": True, "Resources": {"CPU": 2.0}})
    assert not may_compute(pools, {"Alive": False, "Resources": {"CPU": 2.0, "fast": 1.0}})
    assert not may_compute(pools, {"Alive": True, "Resources": {"fast": 1.0}})
    assert not may_compute(make(device="cuda").pools, {"Alive": True, "Resources": {"CPU": 2.0}})


# ----------------------------------------------------------------------------------------- what follows


def test_an_update_keeps_what_auto_stood_for_at_the_start() -> None:
    """Other nodes may be there by now: replicas that exchange KV must not change their dtype one by one."""
    running = settle_dtype(make(), {"n": SSE}).config
    updated = carried_over(running, make())
    check_update(running, updated)
    assert changes(running, updated) == []
    assert pool_version(running, "decode") == pool_version(updated, "decode")
    cpus = {"prefill": 0.1, "decode": 0.1}
    assert {roll.action for roll in plan_rolls(running, updated, (cpus, cpus), {})} == {"stay"}


def test_an_update_to_another_dtype_is_refused_by_name() -> None:
    running = settle_dtype(make(), {"n": SSE}).config
    with pytest.raises(ConfigError, match="dtype is fp32 now, the file says bf16"):
        check_update(running, carried_over(running, make(dtype="bf16")))


@pytest.mark.parametrize("weight_dtype", ["auto", "bf16", "int8", "int4", "fp8"])
def test_weights_may_be_named_like_kv(weight_dtype: str) -> None:
    assert make(dtype="bf16", weight_dtype=weight_dtype).pools[0].weight_dtype == weight_dtype


def test_an_update_to_other_weights_is_refused_by_name() -> None:
    running = settle_dtype(make(), {"n": SSE}).config
    with pytest.raises(ConfigError, match="weight_dtype is auto now, the file says int8"):
        check_update(running, carried_over(running, make(weight_dtype="int8")))


@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_weights_in_another_form_than_kv_are_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match=rf"pools\[0\]: weight_dtype bf16 with dtype {dtype}: .* leave"):
        make(dtype=dtype, weight_dtype="bf16")


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"dtype": "fp16"}, "use bf16 or fp32"),
        ({"tp": 4, "ep": 2}, "use ep 1, or tp 2"),
    ],
)
def test_deterministic_names_what_it_is_not_available_with(changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.deterministic is not available .*{remedy}"):
        make(engine={"deterministic": True, "block_tokens": 16}, **changes)
    assert make(engine={"deterministic": True}).pools[0].engine.deterministic
    assert make(engine={"deterministic": True}, tp=4).pools[0].engine.deterministic
    assert make(engine={"deterministic": True}, device="cuda", dtype="fp16").pools[0].engine.deterministic
