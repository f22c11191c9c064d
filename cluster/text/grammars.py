"""From a request's demands on its output to a grammar that ranks apply.

A schema or grammar may be hostile. It is translated and compiled once in a process of its own with bounded
memory and time (`cluster.text.bounded_process`), under the limits of `workers.grammar_limits`; only what
passes there reaches a replica. What was made of it, or why it was refused, is kept by hash, unless the host
was too slow.

Tenants take turns there, and one whose order takes long does not delay the others: it is given up soon, and
made in a second process, as is what its tenant orders next.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
from msgspec import structs

from cluster.errors import GrammarError, InvalidToolsError, UnavailableError
from cluster.text.bounded_process import (
    BoundedProcess,
    BoundsBrokenError,
    PartyTurns,
    SlowProcessError,
    serve,
)
from cluster.text.json_schemas import prepared
from cluster.text.output_parsers.callable_tools import ToolSchemaError
from cluster.text.output_parsers.grammar_lines import SpecialToken
from cluster.text.output_parsers.tool_grammar import (
    CallRules,
    ReasoningRules,
    answer_grammar,
)
from cluster.text.tag_grammar import Tag, tags_grammar
from kvtransfer.codec import Codec, Message
from kvtransfer.common.recent_map import RecentMap
from workers.grammar_limits import parser_limits
from workers.messages.sampling import MAX_GRAMMAR_BYTES, Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Seconds of a core before an order is given up or made in the second process; seconds there; and seconds in
# all, on a busy host.
_QUICK_CPU_S = 2
_MAX_CPU_S = 5
_TIMEOUT_S = 20.0
# The number of orders made in the second process for a tenant that broke a bound, and the number of such
# tenants that are remembered.
_NUM_WATCHED = 20
_MAX_WATCHED_TENANTS = 1024
_MAX_MEMORY_BYTES = 3 << 29
# Kept results, and the bytes of their texts together.
_NUM_CACHED = 1024
_MAX_CACHED_BYTES = 32 << 20
_MAX_REASON_CHARS = 500
# The library's name for the error of a grammar without an output.
_UNSATISFIED = "NoExtension"
# Between the parts of an object or a list there may be one space: free whitespace has no end.
_JSON_STYLE: JsonCompileOptions = {
    "item_separator": ", ?",
    "key_separator": ": ?",
    "whitespace_flexible": False,
    "lenient": False,
}


class OutputConstraint(Message, frozen=True):
    """The required form of the output: `text` is a JSON schema, a regular expression, a grammar in GBNF or in
    Lark's syntax; `choices` and `tags` with `triggers` go with their kinds. The kind "anything" demands
    nothing of the content. `reasoning` may precede it, and `calls` are made instead of it or behind it."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar", "structural_tags", "anything"]
    text: str = ""
    choices: tuple[str, ...] = ()
    tags: tuple[Tag, ...] = ()
    triggers: tuple[str, ...] = ()
    calls: CallRules | None = None
    reasoning: ReasoningRules | None = None


class GrammarMade(Message, frozen=True):
    """The grammar in the library's own syntax."""

    text: str


class GrammarRefused(Message, frozen=True):
    """The reason why there is no grammar, and the tool whose schema is the reason ("": none)."""

    reason: str
    tool: str = ""


_ORDER_CODEC: Codec[OutputConstraint] = Codec(OutputConstraint)
_RESULT_CODEC: Codec[GrammarMade | GrammarRefused] = Codec(GrammarMade | GrammarRefused)


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
            BoundedProcess("cluster.text.grammars", *arguments, str(max_cpu_s), timeout_s=timeout_s)
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
        data = _ORDER_CODEC.encode(order)
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
                return _RESULT_CODEC.decode(await self._quick.exchange(data))
            except SlowProcessError:
                raise  # another time it may be made
            except BoundsBrokenError:
                num_watched = _NUM_WATCHED
        if num_watched > 1:
            self._watch(tenant, num_watched - 1)
        try:
            return _RESULT_CODEC.decode(await self._thorough.exchange(data))
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


# ----------------------------------------------------------------------------------------------
# The work of the child.


class _Refusal(Exception):
    """The order cannot be carried out; the text gives the reason."""


def grammar_text(order: OutputConstraint, special_token: SpecialToken, *, is_bounded: bool = True) -> str:
    """Return an order in the library's syntax; raise `ValueError` or a refusal where there is no such.
    `is_bounded` is that of `cluster.text.json_schemas.prepared`."""
    content = _of_content(order, special_token, is_bounded)
    if content is not None and order.calls is None and order.reasoning is None:
        return content
    return answer_grammar(
        order.calls, order.reasoning, content, special_token, _JSON_STYLE, is_bounded=is_bounded
    )


def _of_content(order: OutputConstraint, special_token: SpecialToken, is_bounded: bool) -> str | None:
    """Return the grammar of the content alone; None where that is free."""
    match order.kind:
        case "anything":
            return None
        case "json_schema":
            return _of_schema(order.text, is_bounded)
        case "json_object":
            return _of_schema('{"type": "object"}', is_bounded)
        case "regex":
            return str(LLMatcher.grammar_from_regex(order.text))
        case "choice":
            return f"start: {' | '.join(json.dumps(choice) for choice in order.choices)}\n"
        case "grammar":
            return gbnf_to_lark(order.text) if "::=" in order.text else order.text
        case "structural_tags":
            return tags_grammar(order.tags, order.triggers, special_token, _JSON_STYLE, is_bounded=is_bounded)


def _of_schema(text: str, is_bounded: bool) -> str:
    """Return the grammar of a JSON schema."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise _Refusal(f"the schema is not JSON: {error}") from error
    if schema is True:
        schema = {}  # the same, as the library takes it
    if not isinstance(schema, dict):
        raise _Refusal("a JSON schema is an object, or true")
    schema.pop("x-guidance", None)  # the library's own options
    text = json.dumps(prepared(schema, is_bounded=is_bounded))
    return str(LLMatcher.grammar_from_json_schema(text, overrides=_JSON_STYLE))


class _Child:
    """Carries out orders for one vocabulary."""

    def __init__(self, tokenizer: str, size: int, end_token_ids: list[int]) -> None:
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=size, eos_token=end_token_ids or None)

    def answer(self, data: bytes) -> bytes:
        """Return the encoded result of an encoded order."""
        return _RESULT_CODEC.encode(self._result(_ORDER_CODEC.decode(data)))

    def _result(self, order: OutputConstraint) -> GrammarMade | GrammarRefused:
        result = self._attempt(order)
        if isinstance(result, GrammarMade) or order.calls is None or result.tool:
            return result
        return self._tool_refused(order.calls) or result

    def _tool_refused(self, calls: CallRules) -> GrammarRefused | None:
        """Return the refusal of the first tool that is refused alone."""
        for tool in calls.tools:
            alone = OutputConstraint(
                "anything", calls=structs.replace(calls, tools=(tool,), is_required=True)
            )
            if isinstance(result := self._attempt(alone), GrammarRefused):
                return GrammarRefused(result.reason, tool.name)
        return None

    def _attempt(self, order: OutputConstraint) -> GrammarMade | GrammarRefused:
        """Return the grammar of texts that end, or where there is none that of all."""
        result = self._compiled(order, is_bounded=True)
        return result if isinstance(result, GrammarMade) else self._compiled(order, is_bounded=False)

    def _compiled(self, order: OutputConstraint, *, is_bounded: bool) -> GrammarMade | GrammarRefused:
        try:
            text = grammar_text(order, self._special_token, is_bounded=is_bounded)
        except ToolSchemaError as error:
            return GrammarRefused(str(error), error.tool)
        except (ValueError, GbnfToLarkError, RecursionError, _Refusal) as error:
            return GrammarRefused(f"{str(error)[:_MAX_REASON_CHARS]}")
        if len(text.encode()) > MAX_GRAMMAR_BYTES:
            return GrammarRefused(f"its grammar has more than {MAX_GRAMMAR_BYTES} bytes; simplify it")
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            words = matcher.get_error()
            reason = "no output satisfies it" if words.startswith(_UNSATISFIED) else words
            return GrammarRefused(reason[:_MAX_REASON_CHARS])
        return GrammarMade(text)

    def _special_token(self, marker: str) -> int | None:
        ids = self._tokenizer.tokenize_str(marker, parse_special=True)
        return ids[0] if len(ids) == 1 and self._tokenizer.is_special_token(ids[0]) else None


def main() -> None:
    """Serve as `GrammarCompiler`'s child."""
    tokenizer, size, ends, max_cpu_s = sys.argv[1:5]
    child = _Child(tokenizer, int(size), [int(token) for token in ends.split(",") if token])
    serve(child.answer, max_memory_bytes=_MAX_MEMORY_BYTES, max_cpu_s=int(max_cpu_s))


if __name__ == "__main__":
    main()
