"""Compiled grammars of the rank that samples, by digest.

    reader thread:  CompileGrammar, ReleaseGrammar --> queue
    this thread:    queue --> checked in a child process --> compiled here --> GrammarCompiled
    step's thread:  slots start with copies of what is compiled (`workers.rank.slot_matchers`)

Copies of a compiled grammar share its lexer, which keeps the states that it has met, and fails for all of
them when they are too many. Then it is `worn`: the next slot compiles another."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvtransfer.common.panics import PanicError, panics_as_errors
from workers.errors import GrammarRefusedError
from workers.grammar_limits import parser_limits
from workers.messages.rank_channel import CompileGrammar, GrammarCompiled, GrammarOrder
from workers.messages.sampling import Grammar
from workers.rank.grammar_check import GrammarChecker
from workers.rank.grammar_check_child import compile_grammar, load_tokenizer

GRAMMAR_THREAD = "grammars"
# The number of grammars that are kept although no request needs them, and the bytes that they take at most.
MAX_IDLE = 64
MAX_IDLE_BYTES = 128 << 20
# The bytes that all grammars may take; beyond these a grammar is refused, but for the first one.
MAX_BYTES = 1 << 30
# A grammar that compiles faster may be compiled between two steps.
_MAX_PAUSE_S = 0.05
# The process that checks grammars ends when it was not needed for this long.
_IDLE_S = 300.0


@dataclass(slots=True)
class _Compiled:
    """A grammar with a matcher that is never advanced: that of every slot is a copy."""

    grammar: Grammar
    prototype: LLMatcher
    num_bytes: int
    seconds: float
    is_needed: bool = True
    is_worn: bool = False


class CompiledGrammars:
    """The tokenizer of a model, and its compiled grammars. Unneeded grammars are forgotten, the least
    recently used first. Used by several threads."""

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        end_ids: tuple[int, ...],
        limits: LLParserLimits | None = None,
    ) -> None:
        self.limits = limits or parser_limits()
        self.tokenizer_file = model_dir / "tokenizer.json"
        self.vocab_size = vocab_size
        self.end_ids = end_ids
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._digest_to_compiled: OrderedDict[bytes, _Compiled] = OrderedDict()

    @property
    def tokenizer(self) -> LLTokenizer:
        """The model's tokenizer, read with the first call: of 150,000 tokens in 2 s, in which Python waits.
        Raises `GrammarRefusedError` if grammars cannot be used with this model."""
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            return self._tokenizer

    def find(self, digest: bytes) -> bool:
        """Return whether the grammar is compiled; then it is needed from now on."""
        with self._lock:
            compiled = self._digest_to_compiled.get(digest)
            if compiled is not None:
                compiled.is_needed = True
                self._digest_to_compiled.move_to_end(digest)
            return compiled is not None

    def compile(self, grammar: Grammar, num_bytes: int = 0, seconds: float = 0.0) -> None:
        """Compile a grammar, which is needed until its `release`; compiling it elsewhere took `num_bytes` and
        `seconds`. Raises `GrammarRefusedError` if it is refused."""
        if self.find(grammar.digest):
            return
        prototype = self._compile(grammar.text)
        with self._lock:
            self._digest_to_compiled[grammar.digest] = _Compiled(grammar, prototype, num_bytes, seconds)

    def release(self, digest: bytes) -> None:
        """Note that no request needs the grammar now."""
        with self._lock:
            compiled = self._digest_to_compiled.get(digest)
            if compiled is not None:
                compiled.is_needed = False
                self._digest_to_compiled.move_to_end(digest)
                self._forget_idle()

    def matcher(self, digest: bytes) -> LLMatcher:
        """Return a matcher at the beginning of the text. Raises `GrammarRefusedError` if the grammar is not
        compiled or cannot be used again."""
        with self._lock:
            compiled = self._compiled(digest)
            if compiled.is_worn:
                self._refuse_pause(compiled)
                compiled.prototype, compiled.is_worn = self._compile(compiled.grammar.text), False
            with panics_as_errors:
                return compiled.prototype.deep_copy()

    def is_worn(self, digest: bytes) -> bool:
        """Return whether copies of the compiled grammar fail whatever they are to match. Called when one has
        failed."""
        with self._lock:
            compiled = self._digest_to_compiled.get(digest)
            if compiled is not None and not compiled.is_worn:
                with panics_as_errors:
                    probe = compiled.prototype.deep_copy()
                    probe.compute_bitmask()
                    compiled.is_worn = probe.is_error()
            return compiled is not None and compiled.is_worn

    def separate_matcher(self, digest: bytes) -> LLMatcher:
        """Return a matcher that shares nothing with others. Raises as `matcher`."""
        with self._lock:
            compiled = self._compiled(digest)
            self._refuse_pause(compiled)
            return self._compile(compiled.grammar.text)

    @property
    def num_bytes(self) -> int:
        """The memory that all grammars took when they were compiled."""
        with self._lock:
            return sum(it.num_bytes for it in self._digest_to_compiled.values())

    @property
    def num_compiled(self) -> int:
        return len(self._digest_to_compiled)

    def _load(self) -> LLTokenizer:
        try:
            text = self.tokenizer_file.read_text(encoding="utf-8")
            with panics_as_errors:
                return load_tokenizer(text, self.vocab_size, self.end_ids)
        except (OSError, ValueError, PanicError) as error:
            raise GrammarRefusedError(f"this model cannot follow a grammar: {error}") from error

    def _compile(self, text: str) -> LLMatcher:
        try:
            with panics_as_errors:
                return compile_grammar(self.tokenizer, text, self.limits)
        except (ValueError, PanicError) as error:
            raise GrammarRefusedError(str(error)) from error

    def _compiled(self, digest: bytes) -> _Compiled:
        compiled = self._digest_to_compiled.get(digest)
        if compiled is None:
            raise GrammarRefusedError("it is not compiled here")
        return compiled

    @staticmethod
    def _refuse_pause(compiled: _Compiled) -> None:
        if compiled.seconds > _MAX_PAUSE_S:
            raise GrammarRefusedError("too complex: its lexer has too many states")

    def _forget_idle(self) -> None:
        idle = [it for it in self._digest_to_compiled.values() if not it.is_needed]
        num_idle, num_bytes = len(idle), sum(it.num_bytes for it in idle)
        for compiled in idle:
            if num_idle <= MAX_IDLE and num_bytes <= MAX_IDLE_BYTES:
                return
            del self._digest_to_compiled[compiled.grammar.digest]
            num_idle, num_bytes = num_idle - 1, num_bytes - compiled.num_bytes


class CompileThread:
    """The thread that compiles the grammars that the engine core orders, in order; first of all it reads the
    tokenizer. `is_loaded` is set when it has."""

    def __init__(self, grammars: CompiledGrammars, report: Callable[[GrammarCompiled], None]) -> None:
        self.is_loaded = threading.Event()
        self.grammars = grammars
        self._report = report
        self._orders: SimpleQueue[GrammarOrder | None] = SimpleQueue()
        self._checker = GrammarChecker(
            grammars.tokenizer_file, grammars.vocab_size, grammars.end_ids, grammars.limits
        )
        self._thread = threading.Thread(target=self._run, name=GRAMMAR_THREAD, daemon=True)
        self._thread.start()

    def handle(self, order: GrammarOrder) -> None:
        """Queue an order."""
        self._orders.put(order)

    def close(self) -> None:
        """End the thread after the order that it is at."""
        self._orders.put(None)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(GrammarRefusedError):  # every grammar that comes is answered with it
            _ = self.grammars.tokenizer
        self.is_loaded.set()
        while True:
            try:
                order = self._orders.get(timeout=_IDLE_S)
            except Empty:
                self._checker.close()
                continue
            if order is None:
                self._checker.close()
                return
            if isinstance(order, CompileGrammar):
                self._report(self._compiled(order.grammar))
            else:
                self.grammars.release(order.digest)

    def _compiled(self, grammar: Grammar) -> GrammarCompiled:
        if self.grammars.find(grammar.digest):
            return GrammarCompiled(grammar.digest)
        try:
            _ = self.grammars.tokenizer  # else there is nothing to check
            check = self._checker.check(grammar.text)
            if check.error:
                return GrammarCompiled(grammar.digest, check.error, is_transient=not check.is_final)
            num_bytes = self.grammars.num_bytes
            if num_bytes and num_bytes + check.num_bytes > MAX_BYTES:
                reason = f"grammars of {num_bytes} bytes are in use, {MAX_BYTES} are the limit"
                return GrammarCompiled(grammar.digest, reason, is_transient=True)
            self.grammars.compile(grammar, check.num_bytes, check.seconds)
        except GrammarRefusedError as error:
            return GrammarCompiled(grammar.digest, str(error))
        return GrammarCompiled(grammar.digest)
