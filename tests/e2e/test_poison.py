"""A request that kills whatever runs it: two replicas, not all, and nobody else notices."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from e2e_front import Call, Front, copy_tiny, prompt, tokens_alone
from e2e_harness import E2eHarness, Replica, until

from kvtransfer.common.faults import FaultRule
from workers.config import Parallel
from workers.errors import RankDiedError

ENGINE: dict[str, Any] = {"kv_tokens": 4096, "chunk_tokens": 32}
# The seed of the poisonous request, and of no other.
POISON = 4001
NUM_INNOCENT, NUM_TOKENS = 8, 40
SAMPLINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1})


@asynccontextmanager
async def cluster(
    folder: Path, roles: Sequence[str], deadly: str, action: str, parallel: Parallel
) -> AsyncIterator[tuple[Front, list[Replica]]]:
    """Replicas of these roles. A rank of one whose role is `deadly` dies of the poison, or hangs."""
    model_dir = copy_tiny(folder)
    harness = E2eHarness(model_dir)
    front = Front(harness, model_dir)
    try:
        replicas = await asyncio.gather(
            *(
                harness.add(
                    f"r{number}",
                    role,
                    engine={**ENGINE, "stall_s": 2.0 if action == "stop" else 20.0},
                    parallel=parallel,
                    faults=[FaultRule(f"rank.start.{POISON}", action, str(folder / f"{number}"))]
                    if role == deadly
                    else [],
                )
                for number, role in enumerate(roles)
            )
        )
        await front.open()
        await front.register(*replicas)
        yield front, list(replicas)
    finally:
        harness.wake_all()
        await front.close()
        await harness.close()


def is_dead(replica: Replica) -> bool:
    try:
        replica.core.check_health()
    except RankDiedError:
        return True
    return False


@pytest.mark.parametrize(
    ("roles", "deadly", "action", "parallel"),
    [
        (["prefill"] * 3 + ["decode"], "prefill", "kill", Parallel()),
        pytest.param(["both"] * 4, "both", "kill", Parallel(), marks=pytest.mark.slow),
        pytest.param(["prefill"] + ["decode"] * 3, "decode", "kill", Parallel(), marks=pytest.mark.slow),
        pytest.param(["prefill"] * 3 + ["decode"], "prefill", "kill", Parallel(tp=2), marks=pytest.mark.slow),
        pytest.param(["prefill"] * 3 + ["decode"], "prefill", "stop", Parallel(tp=2), marks=pytest.mark.slow),
    ],
    ids=["prefill", "both", "decode", "prefill-tp2", "hang-tp2"],
)
async def test_a_poison_request_takes_few_replicas_down_and_its_neighbours_finish(
    tmp_path: Path, roles: list[str], deadly: str, action: str, parallel: Parallel
) -> None:
    async with cluster(tmp_path, roles, deadly, action, parallel) as (front, replicas):
        calls = [innocent(front, number) for number in range(NUM_INNOCENT // 2)]
        poison = front.call(prompt(99, 100), seed=POISON, max_tokens=NUM_TOKENS)
        calls += [innocent(front, number) for number in range(NUM_INNOCENT // 2, NUM_INNOCENT)]
        await poison.ended()
        assert poison.error is not None
        assert poison.error.code is grpc.StatusCode.INTERNAL
        for call in calls:
            await call.done()
        assert len([path for path in tmp_path.iterdir() if path.is_file()]) == 2
        await until(lambda: sum(map(is_dead, replicas)) == 2, "those replicas are found dead")
        dead = [replica for replica in replicas if is_dead(replica)]
        named = re.findall(r"(\w+)(?:: | stands still)", poison.error.message)
        assert len(set(named) & {replica.core.identity.replica_id for replica in dead}) == 2
        survivor = next(it for it in replicas if it not in dead and it.core.role != "prefill")
        for number, call in enumerate(calls):
            assert call.finished is not None
            assert call.finished.timing.attempts <= 3, "one for each replica that it may have lost, and one"
            assert call.sequence == await tokens_alone(
                survivor,
                front.harness,
                prompt(number),
                number,
                NUM_TOKENS,
                **SAMPLINGS[number % 2],
            )
        await front.harness.quiet(*(replica for replica in replicas if replica not in dead))
        await until(lambda: front.gateway.requests.num_running == 0, "nothing is left at the gateway")


def innocent(front: Front, number: int) -> Call:
    return front.call(prompt(number), seed=number, max_tokens=NUM_TOKENS, **SAMPLINGS[number % 2])
