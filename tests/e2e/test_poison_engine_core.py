"""Errors of the engine core itself: the request that it was at is told apart from those that merely run
there."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from e2e_harness import E2eHarness, Heard, Replica, until
from msgspec.structs import replace

from cluster.gateway.circuit_breaker import STALLED_S
from workers.errors import RankDiedError
from workers.messages.link import Submission
from workers.scheduler.sequence import Sequence


class Poisoned:
    """Wraps a method of the replica: it fails for the request "bad"."""

    def __init__(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, *, late: bool = False) -> None:
        self._real = getattr(owner, name)
        self._late = late
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *args: Any) -> Any:
        result = self._real(*args) if self._late else None
        for arg in args:
            submission = arg.request.submission if isinstance(arg, Sequence) else arg
            if isinstance(submission, Submission) and submission.request_id == "bad":
                raise ZeroDivisionError("poison")
        return result if self._late else self._real(*args)


async def start(harness: E2eHarness) -> tuple[Replica, Heard]:
    """A replica with a stream that runs."""
    replica = await harness.add("r")
    replica.send(harness.submission("good", [5, 6, 7], max_tokens=400))
    heard = harness.heard.setdefault(("good", 0), Heard())
    await until(lambda: len(heard.tokens.get(0, {})) > 3, "it decodes")
    return replica, heard


async def test_a_request_that_cannot_be_checked_ends_alone(
    harness: E2eHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, good = await start(harness)
    Poisoned(replica.core.scheduler, "check_capacity", monkeypatch)
    bad = await harness.run(replica, harness.submission("bad", [5, 6, 7]))
    assert bad.failure is not None
    assert (bad.failure.code, bad.failure.suspect) == ("internal", True)
    assert "poison" in bad.failure.reason
    replica.core.check_health()
    await until(lambda: 0 in good.finish, "the other one finishes")
    await harness.quiet()


@pytest.mark.parametrize("where", ["taken", "planned"])
async def test_a_request_on_which_the_engine_core_breaks_is_the_only_suspect(
    harness: E2eHarness, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    replica, good = await start(harness)
    scheduler = replica.core.scheduler
    if where == "taken":
        Poisoned(scheduler, "submit", monkeypatch, late=True)
    else:
        Poisoned(scheduler._planner, "_take_blocks", monkeypatch)
    bad = await harness.run(replica, harness.submission("bad", [5, 6, 7]))
    await until(lambda: good.failure is not None, "the other one fails too")
    assert bad.failure is not None
    assert good.failure is not None
    assert (bad.failure.code, bad.failure.suspect) == ("internal", True)
    assert (good.failure.code, good.failure.suspect) == ("internal", False)
    with pytest.raises(RankDiedError, match="poison"):
        replica.core.check_health()


async def test_what_a_killed_rank_was_at_is_suspect_and_what_waits_is_not(harness: E2eHarness) -> None:
    replica = await harness.add("r", engine={"max_sequences": 1})
    replica.send(harness.submission("runs", [5, 6, 7], max_tokens=1500))
    waiting = harness.submission("waits", [5, 6, 8])
    replica.send(waiting)
    runs = harness.heard.setdefault(("runs", 0), Heard())
    await until(lambda: len(runs.tokens.get(0, {})) > 3, "one decodes")
    for handle in replica.core._group._handles:
        handle.kill()
    waits, _ = await asyncio.gather(
        harness.ended(waiting), until(lambda: runs.failure is not None, "it fails")
    )
    assert runs.failure is not None
    assert waits.failure is not None
    assert (runs.failure.code, waits.failure.code) == ("internal", "internal")
    assert (runs.failure.suspect, waits.failure.suspect) == (True, False)


async def test_what_is_in_a_step_that_stands_still_is_named_before_gateways_leave_and_what_waits_is_not(
    harness: E2eHarness,
) -> None:
    replica = await harness.add("r", engine={"max_sequences": 1, "stall_s": 60.0})
    replica.send(harness.submission("runs", [5, 6, 7], max_tokens=1500))
    replica.send(harness.submission("waits", [5, 6, 8]))
    runs = harness.heard.setdefault(("runs", 0), Heard())
    await until(lambda: len(runs.tokens.get(0, {})) > 3, "one decodes")
    for process_id in replica.core.rank_process_ids:
        os.kill(process_id, signal.SIGSTOP)
    await until(lambda: replica.load is not None and replica.load.stalled_s >= STALLED_S, "it is noticed")
    assert runs.num_stalls == 1
    assert ("waits", 0) not in harness.heard
    harness.wake_all()
    await until(lambda: 0 in runs.finish, "it was only slow")


async def test_a_suspect_is_isolated_at_both_replicas_and_cleared_by_the_second(harness: E2eHarness) -> None:
    prefill, decode = await harness.add("p", "prefill"), await harness.add("d", "decode")
    prompt = [5, 6, 7] * 20
    sampling: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0}
    others = [harness.submission(f"o{seed}", [9, seed], decode=decode, max_tokens=60) for seed in range(4)]
    for other in others:
        prefill.send(other)
    submission = harness.submission("s", prompt, decode=decode, **sampling)
    heard = await harness.run(prefill, replace(submission, suspect=True))
    assert [it.is_cleared for it in heard.isolations] == [False, False, True]
    wanted = await harness.run(prefill, harness.submission("w", prompt, **sampling))
    assert heard.sequence() == wanted.sequence()
    for other in others:
        assert (await harness.ended(other)).failure is None
    await harness.quiet()
