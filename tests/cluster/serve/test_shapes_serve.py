"""Five prefill and five decode pools of different shapes in one cluster: every pair gives the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import psutil
import pytest
from patience import WAIT_S
from serving import TINY, RunningCluster, free_port

from cluster.api.blocking_client import BlockingClient
from cluster.api.client import Completion
from cluster.api.generate_options import GenerateOptions

# Slow: 26 ranks and 10 brains start on whatever cores there are.
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]
START_S = 600.0
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    lines = [f"model: {TINY}", "debug: {allow_pins: true}", "pools:"]
    for role, (tp, pp) in itertools.product(("prefill", "decode"), SHAPES):
        engine = "{block_tokens: 16, kv_tokens: 4096, stall_s: 60}"
        lines.append(
            f"  - {{name: {role}-{tp}x{pp}, role: {role}, tp: {tp}, pp: {pp}, dtype: fp32, "
            f"health_check_timeout_s: 60, engine: {engine}}}"
        )
    file = tmp_path_factory.mktemp("shapes") / "cluster.yaml"
    file.write_text("\n".join(lines) + "\n")
    running = RunningCluster("--file", str(file), "--port", str(free_port()), start_s=START_S)
    processes = running.processes()
    yield running
    assert running.stop() == 0
    _, alive = psutil.wait_procs(processes, timeout=WAIT_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_all_25_pairs_give_the_same_tokens(cluster: RunningCluster) -> None:
    status = cluster.status()
    by_pool = {replica.pool: replica for replica in status.replicas}
    assert len(by_pool) == 10
    assert by_pool["prefill-2x2"].tp == 2
    assert sum(by_pool["prefill-2x2"].stage_layers) == 6
    prompt = list(range(100, 276))
    with BlockingClient(cluster.address) as client:

        def run(prefill: str, decode: str, tenant: str) -> Completion:
            """Each pair is a tenant of its own, so that nothing is cached."""
            options = GenerateOptions(
                max_tokens=NUM_TOKENS,
                temperature=0.8,
                seed=5,
                ignore_eos=True,
                tenant=tenant,
                pinned_prefill=prefill,
                pinned_decode=decode,
            )
            return client.complete(prompt, options, timeout_s=120)

        expected = run("", by_pool["decode-1x1"].replica_id, "alone").token_ids
        assert len(expected[0]) == NUM_TOKENS
        for number, (source, target) in enumerate(itertools.product(SHAPES, SHAPES)):
            prefill = by_pool[f"prefill-{source[0]}x{source[1]}"].replica_id
            decode = by_pool[f"decode-{target[0]}x{target[1]}"].replica_id
            done = run(prefill, decode, f"pair-{number}")
            assert (done.finished.prefill_replica, done.finished.decode_replica) == (prefill, decode)
            assert done.finished.timing.transport == "shm"
            assert done.token_ids == expected, f"{prefill} to {decode}"
