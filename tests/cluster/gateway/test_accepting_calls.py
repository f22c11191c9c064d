"""Accepting a request seldom returns to a file that it has left, so that its code can be read in order."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from gateway_harness import PROMPT, Pair, expected

import cluster
from cluster.api.generate_options import GenerateOptions
from cluster.gateway import request_manager, request_task
from cluster.gateway.request_manager import RequestHandle, RequestManager

MOST_RETURNS = 6
_PACKAGE = str(Path(cluster.__file__).parent)
_SUSPENDS = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class CallTrace:
    """Records the calls from one file of `cluster` into another while a request is accepted.

    A callee that gives its result to its caller returns to no place, and neither does a function that
    continues after an `await` or a `yield`. Callers outside `cluster` (a callback of another package,
    `functools`) are passed over.
    """

    def __init__(self) -> None:
        # By file: which function was entered, and from where.
        self.entries: defaultdict[str, list[str]] = defaultdict(list)
        self._accept: FrameType | None = None
        # Kept alive, so that a later frame never takes the identity of an earlier one.
        self._begun: set[FrameType] = set()

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note a call (a function for `sys.setprofile`)."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_PACKAGE):
            return
        if code.co_flags & _SUSPENDS:
            if frame in self._begun:
                return
            self._begun.add(frame)
        if self._accept is None and code.co_qualname == "RequestManager.accept":
            self._accept = frame
            self.entries[code.co_filename].append(code.co_qualname)
            return
        callers = [caller for caller in _callers(frame) if caller.f_code.co_filename.startswith(_PACKAGE)]
        if self._accept in callers and callers[0].f_code.co_filename != code.co_filename:
            self.entries[code.co_filename].append(f"{code.co_qualname}, from {callers[0].f_code.co_qualname}")

    def returns(self, file: str) -> list[str]:
        """Return the entries into the file after the first one."""
        return self.entries[file][1:]


def _callers(frame: FrameType) -> list[FrameType]:
    found, caller = [], frame.f_back
    while caller is not None:
        found.append(caller)
        caller = caller.f_back
    return found


async def test_an_accepted_request_seldom_returns_to_its_manager_and_its_task(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the call of `RequestManager.accept` until the request is submitted to its replica."""
    trace, accept = CallTrace(), RequestManager.accept

    async def traced(*args: Any, **kwargs: Any) -> RequestHandle:
        sys.setprofile(trace.note)
        try:
            accepted = await accept(*args, **kwargs)
        finally:
            sys.setprofile(None)
        assert accepted.task.state.attempt == 1, "it was not submitted at once, so more calls follow"
        return accepted

    await pair.client.complete(PROMPT, GenerateOptions(seed=5, max_tokens=2))  # what is done once
    monkeypatch.setattr(RequestManager, "accept", traced)
    done = await pair.client.complete(PROMPT, GenerateOptions(seed=7, max_tokens=12))
    assert list(done.token_ids[0]) == expected(7, 12)
    for module in (request_manager, request_task):
        assert module.__file__ is not None
        assert trace.entries[module.__file__], "nothing was recorded"
        returns = trace.returns(module.__file__)
        assert len(returns) <= MOST_RETURNS, "\n".join(returns)
