"""`kv_tokens: auto` of replicas on CPUs: what the node has left, divided among those that may be there."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from doctor_harness import FakeMachine, config_of, context_of, only
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples

from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.config import ClusterConfig, parse_config
from cluster.doctor import limits
from cluster.doctor.checks import Severity
from cluster.errors import ConfigError
from cluster.serve.auto_kv import NodeResources, engine_config, host_memory, most_replicas_here, planned_needs
from cluster.serve.machine import Machine
from cluster.serve.resource_needs import ENGINE_CORE_BYTES, RAY_BYTES
from workers.config import StepSizes

GB = 10**9
CONTEXT = 2048  # of the bundled model
MOST = 64 * CONTEXT  # max_sequences of them
# The parts that do not depend on the engine: Ray, one gateway.
FIXED = RAY_BYTES + ENGINE_CORE_BYTES


def machine(folder: Path, total: int, free: int | None = None, limit: int | None = None) -> Machine:
    """A machine with so much memory and so much of it free, and such a limit of the control group."""
    text = f"MemTotal: {total // 1024} kB\nMemAvailable: {(total if free is None else free) // 1024} kB\n"
    files: dict[str, str | None] = {"proc/meminfo": text}
    if limit is not None:
        files["sys/fs/cgroup/memory.max"] = f"{limit}\n"
    return FakeMachine(folder, files).view()


def pools(**fields: Any) -> list[dict[str, Any]]:
    engine = {"max_sequences": 100_000, **fields.pop("engine", {})}
    return [
        {"name": "p", "role": "prefill", "surge": False, "engine": engine, **fields},
        {"name": "d", "role": "decode", "surge": False, "engine": engine, **fields},
    ]


def config(store_gb: float = 0.0, **fields: Any) -> ClusterConfig:
    """Pools whose replicas can use more KV than any machine here has."""
    return config_of(pools=pools(**fields), store={"dram_gb": store_gb})


def tokens(given: ClusterConfig, on: Machine, node: NodeResources | None = None) -> dict[str, int]:
    return {pool.name: pool.kv_tokens for pool in planned_needs(given, on, node).pools}


def test_a_small_model_does_not_take_a_large_machine(tmp_path: Path) -> None:
    given = config_of()
    found = tokens(given, machine(tmp_path, 512 * GB))
    assert found == {"prefill": MOST, "decode": MOST}
    need = planned_needs(given, machine(tmp_path, 512 * GB)).pools[0]
    assert need.kv_reason == "all that max_sequences contexts can use"
    assert need.replica_bytes < 2 * GB


def test_what_is_left_is_counted_by_hand(tmp_path: Path) -> None:
    """Two replicas with all that they take, a store and Ray fill nine tenths of the memory, to a block."""
    given = config(store_gb=1.0)
    needs = planned_needs(given, machine(tmp_path, 20 * GB))
    total = FIXED + GB + sum(need.replica_bytes for need in needs.pools)
    assert 18 * GB - 20e6 < total <= 18 * GB
    assert len({need.kv_tokens for need in needs.pools}) == 1
    decode = engine_config(given, "d", machine(tmp_path, 20 * GB))
    assert decode.kv_tokens == needs.of("d").kv_tokens
    assert decode.kv_tokens % decode.block_tokens == 0
    assert (decode.max_batch_tokens, decode.chunk_tokens) == (512, 512)


def test_the_limit_of_the_control_group_counts_where_it_is_less(tmp_path: Path) -> None:
    whole = tokens(config(), machine(tmp_path / "a", 20 * GB))
    limited = tokens(config(), machine(tmp_path / "b", 99 * GB, limit=20 * GB))
    assert whole == pytest.approx(limited, rel=0.001)
    assert tokens(config(), machine(tmp_path / "c", 20 * GB, limit=99 * GB)) == whole
    found = host_memory(machine(tmp_path / "d", 20 * GB, free=3 * GB, limit=8 * GB))
    assert found is not None
    assert (found.total_bytes, found.free_bytes) == (8 * GB, 3 * GB // 1024 * 1024)


def test_no_replica_takes_more_than_is_free_now(tmp_path: Path) -> None:
    given = config()
    busy = machine(tmp_path, 64 * GB, free=4 * GB)
    need = planned_needs(given, busy).of("d")
    assert need.replica_bytes <= 0.9 * 4 * GB
    assert "are free here now" in need.kv_reason
    # While the cluster runs, what is free is what it left.
    assert planned_needs(given, busy, is_running=True).of("d").kv_tokens > need.kv_tokens


def test_all_replicas_that_may_come_are_counted(tmp_path: Path) -> None:
    on = machine(tmp_path, 40 * GB)
    base = tokens(config(), on)
    assert tokens(config(replicas=2), on)["d"] < base["d"]
    assert tokens(config(surge=True), on)["d"] == tokens(config(replicas=2), on)["d"]
    grows = config_of(
        pools=pools(), store={"dram_gb": 0}, scaling={"autoscale": True, "pools": {"d": {"max": 3}}}
    )
    assert most_replicas_here(grows, None) == {"p": 1, "d": 3}
    assert tokens(grows, on)["p"] < base["p"]
    named = config_of(
        pools=[*pools()[:1], {**pools()[1], "engine": {"kv_tokens": 4096}}], store={"dram_gb": 0}
    )
    assert tokens(named, on)["d"] == 4096
    assert tokens(named, on)["p"] > 1.9 * base["p"]


def test_a_node_that_cannot_hold_them_all_is_divided_by_its_cpus(tmp_path: Path) -> None:
    on, given = machine(tmp_path, 40 * GB), config(replicas=4)

    def node(cpus: float, **resources: float) -> NodeResources:
        return NodeResources({"CPU": cpus, **resources}, {"p": 4.0, "d": 4.0})

    everywhere = tokens(given, on)
    assert tokens(given, on, node(100.0)) == everywhere
    two = planned_needs(given, on, node(8.1)).pools  # two of the eight fit: any two
    for first in two:
        for second in two:
            assert FIXED + first.replica_bytes + second.replica_bytes <= 0.9 * 40 * GB
    assert two[0].kv_tokens > 3 * everywhere["p"]
    # A pod of the chart has a resource for its own pool alone.
    own = config_of(
        pools=[{**pool, "replicas": 4, "resources": {f"pool_{pool['name']}": 0.5}} for pool in pools()],
        store={"dram_gb": 0},
    )
    alone = node(100.0, pool_d=1.0)  # half of it for the engine core and half for the stage
    assert most_replicas_here(own, alone) == {"p": 0, "d": 1}
    assert FIXED + planned_needs(own, on, alone).of("d").replica_bytes > 0.899 * 40 * GB


def test_too_little_memory_is_refused_with_field_parts_and_remedy(tmp_path: Path) -> None:
    given = config(store_gb=3.0)
    with pytest.raises(ConfigError) as caught:
        engine_config(given, "d", machine(tmp_path, 5 * GB))
    message = str(caught.value)
    assert message.startswith("pools.d.engine.kv_tokens: auto leaves space for ")
    assert "needs 2048 at least" in message
    assert "90% of 5.0 GB of memory, for up to 1 of p, 1 of d" in message
    assert "store.dram_gb 3.0 GB" in message
    assert "Lower store.dram_gb, replicas or max_sequences" in message
    assert "pools.d.resources.memory in the chart" in message
    found = only(limits.kv_capacity, kv_context(config_of(pools=[pools()[1]]), machine(tmp_path, 2 * GB)))
    assert found.severity is Severity.ERROR
    assert "2048 are needed at least" in found.seen


def test_what_latents_save_is_shown(tmp_path: Path) -> None:
    """A latent of 64 and 8 columns, in place of 4 heads with keys of 24 and values of 16."""
    sizes: dict[str, Any] = {"kv_lora_rank": 64, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    sizes["v_head_dim"] = 16
    write_random_checkpoint(tmp_path / "model", "deepseek_v3", num_attention_heads=4, seed=1, **sizes)
    given = config_of(model=tmp_path / "model", pools=[pools()[1]], store={"dram_gb": 0})
    seen = only(limits.kv_capacity, kv_context(given, machine(tmp_path, 64 * GB))).seen
    assert "(keys and values of each head take 2.2 times that)" in seen


def test_windows_leave_memory_for_more_context(tmp_path: Path) -> None:
    """Of three layers two have a window of 100 tokens, and keep no more than their sequences need."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    write_random_checkpoint(
        tmp_path / "model", "gemma3_text", num_hidden_layers=3, sliding_window=100, layer_types=kinds, seed=1
    )
    engine = {"max_sequences": 4, "max_batch_tokens": 512, "kv_tokens": 65_536}
    pool = {**pools(engine=engine)[1], "engine": {**engine}}
    given = config_of(model=tmp_path / "model", pools=[pool], store={"dram_gb": 0})
    need = planned_needs(given, machine(tmp_path, 64 * GB)).of("d")
    full, windowed = need.ranks[0].block_bytes.block_bytes
    assert windowed == 2 * full
    num_blocks, most = 65_536 // 64, 6 * (2 + 2) + 8
    assert need.host_kv_bytes(65_536) == num_blocks * full + most * windowed
    assert need.saved_kv_bytes(65_536) == (num_blocks - most) * windowed
    assert need.fitting_kv_tokens(need.host_kv_bytes(65_536)) == 65_536


def kv_context(given: ClusterConfig, on: Machine) -> Any:
    return context_of(on, given, needs=planned_needs(given, on))


def test_the_doctor_reports_the_capacity_and_its_reason(tmp_path: Path) -> None:
    on = machine(tmp_path, 512 * GB)
    capped, *_ = limits.kv_capacity(kv_context(config_of(), on))
    assert capped.severity is Severity.OK
    assert capped.seen.startswith(f"pool prefill: kv_tokens auto is {MOST} a replica, 402.7 MB: all that")
    assert capped.figures["kv_tokens"] == MOST
    several = config_of(pools=[pools()[1]], transfer={"data_host": "auto"})
    seen = only(limits.kv_capacity, kv_context(several, on))
    assert seen.severity is Severity.NOTE
    assert "more where fewer of them are placed here" in seen.why
    named = config_of(pools=[{**pools()[1], "engine": {"kv_tokens": 4096}}])
    assert list(limits.kv_capacity(kv_context(named, on))) == []
    cuda = config_of(pools=[{**pools()[1], "device": "cuda"}])
    assert (
        only(limits.kv_capacity, kv_context(cuda, on)).seen == "pool d: kv_tokens is what each GPU has left"
    )


def test_a_gpu_pool_leaves_its_capacity_to_the_ranks(tmp_path: Path) -> None:
    given = config(device="cuda", gpus_per_rank=0.5)
    decided = engine_config(given, "d", machine(tmp_path, 20 * GB))
    assert decided.kv_tokens == 100_000 * CONTEXT
    assert (decided.max_batch_tokens, decided.chunk_tokens) == (4096, 2048)
    assert given.pools[1].device_kv_share == pytest.approx(0.45)
    assert config().pools[1].device_kv_share == 0.0
    assert config(device="cuda", engine={"kv_tokens": 4096}).pools[1].device_kv_share == 0.0


def test_a_mixed_pool_takes_the_smallest_steps() -> None:
    engine = config(pp=2, devices=["cuda", "cpu"]).pools[1].engine
    engine = engine.model_copy(update={"max_sequences": "auto"})
    assert engine.step_sizes(["cuda", "cpu"], has_groups=False) == StepSizes(512, 512, 64)
    assert engine.step_sizes(["cuda:1"], has_groups=False) == StepSizes(4096, 2048, 256)
    assert engine.step_sizes(["cuda:1"], has_groups=True) == StepSizes(4096, 2048, 64)


def test_a_machine_that_hides_its_memory_gets_a_modest_capacity(tmp_path: Path) -> None:
    hidden = Machine(root=tmp_path)
    assert host_memory(hidden) is None
    assert engine_config(config(), "d", hidden).kv_tokens == 16384


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kv_tokens", 255, "255 is neither a whole number of at least 256 nor auto"),
        ("kv_tokens", "all", "'all' is neither a whole number"),
        ("max_batch_tokens", 0, "0 is neither a whole number of at least 1 nor auto"),
        ("max_sequences", 0, "0 is neither a whole number of at least 1 nor auto"),
        ("max_sequences", "all", "'all' is neither a whole number nor auto"),
        ("chunk_tokens", 1.5, "1.5 is neither a whole number"),
        ("memory_share", 1.5, "must be at most 1"),
    ],
)
def test_a_wrong_size_is_refused_by_its_path(field: str, value: object, message: str) -> None:
    raw = {"model": "m", "pools": [{"name": "d", "role": "decode", "engine": {field: value}}]}
    with pytest.raises(ConfigError) as caught:
        parse_config(raw, "f.yaml")
    assert f"f.yaml: pools[0].engine.{field}: " in str(caught.value)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@settings(deadline=None, max_examples=examples(60))
@given(
    total_gb=st.integers(1, 200),
    replicas=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    store_gb=st.integers(0, 8),
    shape=st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]),
    cpus=st.one_of(st.none(), st.tuples(st.floats(0.5, 64), st.floats(0.1, 8), st.floats(0.1, 8))),
)
def test_whatever_is_placed_here_fits(
    total_gb: int,
    replicas: tuple[int, int],
    store_gb: int,
    shape: tuple[int, int],
    cpus: tuple[float, float, float] | None,
) -> None:
    """Of all mixes of replicas whose CPUs the node has, none exceeds the share of its memory, as long as the
    replicas start at all."""
    tp, pp = shape
    given = config_of(
        pools=[
            {**pool, "replicas": count, "tp": tp, "pp": pp}
            for pool, count in zip(pools(), replicas, strict=True)
        ],
        store={"dram_gb": store_gb},
    )
    node = None if cpus is None else NodeResources({"CPU": cpus[0]}, {"p": cpus[1], "d": cpus[2]})
    with tempfile.TemporaryDirectory() as folder:
        needs = planned_needs(given, machine(Path(folder), total_gb * GB), node)
    asked = {name: 0.05 + tp * pp * share for name, share in node.cpus.items()} if node else {}
    for num_p in range(replicas[0] + 1):
        for num_d in range(replicas[1] + 1):
            counts = {"p": num_p, "d": num_d}
            placed = [need for need in needs.pools if counts[need.name]]
            if node and sum(counts[name] * asked[name] for name in asked) > node.total["CPU"]:
                continue
            if any(need.kv_tokens < CONTEXT for need in placed):
                continue
            taken = sum(counts[need.name] * need.replica_bytes for need in placed)
            assert FIXED + store_gb * GB + taken <= 0.9 * total_gb * GB or not placed
