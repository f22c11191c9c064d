"""From a request's demands on its output to a grammar that ranks apply.

A schema or grammar may be hostile. It is translated (`cluster.text.grammar_text`) and compiled once in a
process of its own (`cluster.text.grammar_child`) with bounded memory and time, under the limits of
`workers.grammar_limits`; only what passes there reaches a replica. What was made of it, or why it was
refused, is kept by hash, unless the host was too slow.

Tenants take turns there, and one whose order takes long does not delay the others: it is given up soon, and
made in a second process, as is what its tenant orders next.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cluster.errors import GrammarError, InvalidToolsError, UnavailableError
from cluster.text.bounded_process import BoundedProcess, BoundsBrokenError, PartyTurns, SlowProcessError
from cluster.text.grammar_orders import (
    ORDER_CODEC,
    RESULT_CODEC,
    GrammarMade,
    GrammarRefused,
    OutputConstraint,
)
from kvtransfer.common.recent_map import RecentMap
from workers.messages.sampling import MAX_GRAMMAR_BYTES, Grammar

# Seconds of a core before an order is given up or made in the second process; seconds there; and seconds in
# all, on a busy host.
_QUICK_CPU_S = 2
_MAX_CPU_S = 5
_TIMEOUT_S = 20.0
# The number of orders made in the second process for a tenant that broke a bound, and the number of such
# tenants that are remembered.
_NUM_WATCHED = 20
_MAX_WATCHED_TENANTS = 1024
# Kept results, and the bytes of their texts together.
_NUM_CACHED = 1024
_MAX_CACHED_BYTES = 32 << 20


class Vocabulary(NamedTuple):
    """The tokens of the model: its tokenizer, the number of its ids, and the tokens that end an answer."""

    tokenizer: Path
    size: int
    end_token_ids: Sequence[int]


class GrammarCompiler:
    """Makes grammars for one model."""

    def __init__(self, vocabulary: Vocabulary, *, timeout_s: float = _TIMEOUT_S) -> None:
        ends = ",".join(str(token) for token in vocabulary.end_token_ids)
        arguments = str(vocabulary.tokenizer), str(vocabulary.size), ends
        self._quick, self._thorough = (
            BoundedProcess("cluster.text.grammar_child", *arguments, str(max_cpu_s), timeout_s=timeout_s)
            for max_cpu_s in (_QUICK_CPU_S, _MAX_CPU_S)
        )
        self._tenants = PartyTurns()
        # Tenants whose recent orders took too long, and how many more of theirs are made apart.
        self._tenant_to_watched: RecentMap[str, int] = RecentMap(_MAX_WATCHED_TENANTS)
        self._results: OrderedDict[bytes, GrammarMade | GrammarRefused] = OrderedDict()
        self._num_bytes = 0
        self._making: dict[bytes, asyncio.Task[GrammarMade | GrammarRefused]] = {}

    async def make(self, order: OutputConstraint, tenant: str = "") -> Grammar:
        """Return the grammar for a tenant; raise `GrammarError` where the demand is wrong, unsupported or too
        complex, `UnavailableError` where this host is too slow now."""
        data = ORDER_CODEC.encode(order)
        if len(data) > MAX_GRAMMAR_BYTES:
            reason = f"it has {len(data)} bytes; at most {MAX_GRAMMAR_BYTES} are accepted"
            raise _refusal(order, GrammarRefused(reason))
        key = hashlib.sha256(data).digest()
        result = self._results.get(key)
        if result is None:
            try:
                result = await self._made(key, data, tenant)
            except SlowProcessError as error:
                raise UnavailableError(f"no grammar could be made of the constraint: {error}") from error
        else:
            self._results.move_to_end(key)
        if isinstance(result, GrammarRefused):
            raise _refusal(order, result)
        return Grammar.of(result.text)

    async def close(self) -> None:
        """End the processes, and whatever waits for them."""
        making = list(self._making.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        await self._quick.close()
        await self._thorough.close()

    async def _made(self, key: bytes, data: bytes, tenant: str) -> GrammarMade | GrammarRefused:
        """Return the result of an order, made once for all who wait: one who leaves stops nothing."""
        task = self._making.get(key)
        if task is None:
            task = asyncio.create_task(self._make(data, tenant), name="grammar")
            self._making[key] = task
            task.add_done_callback(lambda done: self._keep(key, done))
        return await asyncio.shield(task)

    async def _make(self, data: bytes, tenant: str) -> GrammarMade | GrammarRefused:
        async with self._tenants.turn_of(tenant):
            return await self._made_now(data, tenant)

    async def _made_now(self, data: bytes, tenant: str) -> GrammarMade | GrammarRefused:
        num_watched = self._tenant_to_watched.pop(tenant, 0)
        if not num_watched:
            try:
                return RESULT_CODEC.decode(await self._quick.exchange(data))
            except SlowProcessError:
                raise  # another time it may be made
            except BoundsBrokenError:
                num_watched = _NUM_WATCHED
        if num_watched > 1:
            self._watch(tenant, num_watched - 1)
        try:
            return RESULT_CODEC.decode(await self._thorough.exchange(data))
        except SlowProcessError:
            raise
        except BoundsBrokenError as error:
            self._watch(tenant, _NUM_WATCHED)
            return GrammarRefused(str(error))

    def _watch(self, tenant: str, num_orders: int) -> None:
        self._tenant_to_watched.put(tenant, num_orders)

    def _keep(self, key: bytes, done: asyncio.Task[GrammarMade | GrammarRefused]) -> None:
        del self._making[key]
        if done.cancelled() or done.exception() is not None:
            return
        self._results[key] = done.result()
        self._num_bytes += _num_bytes(done.result())
        while len(self._results) > _NUM_CACHED or self._num_bytes > _MAX_CACHED_BYTES:
            _, oldest = self._results.popitem(last=False)
            self._num_bytes -= _num_bytes(oldest)


def _refusal(order: OutputConstraint, refused: GrammarRefused) -> GrammarError:
    """Return the error that names the part of the request that was refused."""
    if refused.tool:
        return InvalidToolsError(f"the schema of {refused.tool!r} is refused: {refused.reason}")
    if order.kind == "anything" and order.calls is not None:
        num_tools = len(order.calls.tools)
        problem = f"the schemas of the {num_tools} tools together are refused: {refused.reason}"
        return InvalidToolsError(f"{problem}; send fewer tools, or simpler ones")
    return GrammarError(refused.reason)


def _num_bytes(result: GrammarMade | GrammarRefused) -> int:
    return len(result.text) if isinstance(result, GrammarMade) else len(result.reason)
