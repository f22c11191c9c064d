"""The child process of a `GrammarCompiler`: compiles what may be hostile, under bounds of memory and time."""

from __future__ import annotations

import sys

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError
from msgspec import structs

from cluster.text.bounded_process import serve
from cluster.text.grammar_orders import (
    ORDER_CODEC,
    RESULT_CODEC,
    GrammarMade,
    GrammarRefused,
    OutputConstraint,
)
from cluster.text.grammar_text import grammar_text
from cluster.text.output_parsers.callable_tools import ToolSchemaError
from cluster.text.output_parsers.tool_grammar import CallRules
from workers.grammar_limits import parser_limits
from workers.messages.sampling import MAX_GRAMMAR_BYTES

_MAX_MEMORY_BYTES = 3 << 29
_MAX_REASON_CHARS = 500
# The library's name for the error of a grammar without an output.
_UNSATISFIED = "NoExtension"


class _Child:
    """Carries out orders for one vocabulary."""

    def __init__(self, tokenizer: str, size: int, end_token_ids: list[int]) -> None:
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=size, eos_token=end_token_ids or None)

    def answer(self, data: bytes) -> bytes:
        """Return the encoded result of an encoded order."""
        return RESULT_CODEC.encode(self._result(ORDER_CODEC.decode(data)))

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
        except (ValueError, GbnfToLarkError, RecursionError) as error:
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
