"""The autoscaler in the running service: a burst grows decode, which comes back, and no stream is cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster_operator import Stream, pool_of, ready
from serving import RunningCluster, free_port, write_long_llama

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]
# More than are made before the test ends.
NUM_LONG_TOKENS = 20_000
NUM_BURST = 9
NUM_BURST_TOKENS = 800
SLOTS = 4
GROW_S = 120.0


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("autoscaling")
    model_dir = write_long_llama(folder / "model", 256)
    common = "dtype: fp32, cpus_per_rank: 0.1, drain_s: 20"
    engine = f"block_tokens: 16, kv_tokens: 32768, max_sequences: {SLOTS}"
    file = folder / "cluster.yaml"
    file.write_text(
        f"model: {model_dir}\n"
        "pools:\n"
        f"  - {{name: prefill, role: prefill, {common}, engine: {{block_tokens: 16}}}}\n"
        f"  - {{name: decode, role: decode, {common}, engine: {{{engine}}}}}\n"
        "scaling:\n"
        "  autoscale: true\n"
        "  pools: {decode: {min: 1, max: 2}}\n"
        "  interval_s: 0.5\n"
        "  forecast_s: 20\n"
        "  ttft_slo_s: 30\n"  # prefill keeps its count
        "  itl_slo_s: 2\n"
        "  up_cool_down_s: 5\n"
        "  down_cool_down_s: 10\n"
    )
    running = RunningCluster("--file", str(file), "--port", str(free_port()))
    yield running
    assert running.stop() == 0


def test_a_burst_grows_decode_and_it_comes_back_with_no_stream_cut(cluster: RunningCluster) -> None:
    steady = Stream(cluster.address, NUM_LONG_TOKENS)
    steady.has_grown(20)
    assert pool_of(cluster.status(), "decode").desired == 1
    burst = [Stream(cluster.address, NUM_BURST_TOKENS, number) for number in range(1, NUM_BURST + 1)]
    cluster.wait_for(lambda status: pool_of(status, "decode").desired == 2, GROW_S)
    cluster.wait_for(ready("decode", 2), GROW_S)
    late = Stream(cluster.address, NUM_LONG_TOKENS, NUM_BURST + 1)
    late.has_grown(10)
    cluster.wait_for(lambda status: status.num_finished_requests == NUM_BURST, GROW_S)
    for stream in burst:
        stream.has_ended()
        assert len(stream.tokens) == NUM_BURST_TOKENS
    status = cluster.wait_for(ready("decode", 1), GROW_S)
    for stream in (steady, late):
        stream.has_grown(20)
        stream.end()
        stream.was_never_cut_off()
        stream.has_the_same_tokens()
    moves = [move for move in status.scaling_changes if move.before != move.after]
    assert [(move.pool, move.before, move.after, move.by) for move in moves] == [
        ("decode", 1, 2, "autoscaler"),
        ("decode", 2, 1, "autoscaler"),
    ]
    assert f"sequences share {SLOTS} slots" in moves[0].reason
    assert "1 would serve 1.2 times the demand of the last 10 s" in moves[1].reason
    assert cluster.status().num_failed_requests == 0
