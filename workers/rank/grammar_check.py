"""Check in a child process that a grammar compiles within bounds of time and memory.

Some grammars take exponential time to compile (intersections of regular expressions do), which none of the
library's limits covers, and a thread in the library cannot be stopped. So a grammar is compiled in a process
that ends when it takes too long or too much, before the rank compiles it itself."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from pathlib import Path

from llguidance import LLParserLimits

from workers.rank import grammar_check_child
from workers.rank.grammar_check_child import LENGTH, MAX_CPU_S, MAX_MEMORY_BYTES, GrammarCheck

# The fields of `LLParserLimits` that the child is told.
_LIMITS = (
    "max_items_in_row", "initial_lexer_fuel", "step_lexer_fuel", "step_max_items", "max_lexer_states",
    "max_grammar_size", "verbose_errors",
)  # fmt: skip
# A child that shares its core takes longer than `MAX_CPU_S`.
_MAX_WALL_S = 30.0
# The tokenizer is read once, of a large vocabulary in a few seconds.
_MAX_START_S = 120.0


class GrammarChecker:
    """A child process that compiles grammars for a tokenizer, started with the first one. Used by one
    thread."""

    def __init__(
        self, tokenizer_file: Path, vocab_size: int, end_ids: tuple[int, ...], limits: LLParserLimits
    ) -> None:
        values = {name: getattr(limits, name) for name in _LIMITS}
        self._arguments = json.dumps([str(tokenizer_file), vocab_size, end_ids, values])
        self._child: subprocess.Popen[bytes] | None = None

    def check(self, text: str) -> GrammarCheck:
        """Compile the grammar in the child."""
        if self._child is None and not self._start():
            self.close()
            return GrammarCheck(0, 0.0, "the process that checks grammars did not start", is_final=False)
        assert self._child is not None
        assert self._child.stdin is not None
        data = text.encode()
        answer: bytes | None = None
        try:
            self._child.stdin.write(LENGTH.pack(len(data)) + data)
            self._child.stdin.flush()
            answer = self._answer(_MAX_WALL_S)
        except BrokenPipeError:
            pass  # the child has ended
        if answer is None:
            self.close()
            limits = f"{MAX_CPU_S} s and {MAX_MEMORY_BYTES >> 20} MiB"
            return GrammarCheck(0, 0.0, f"too complex: it does not compile within {limits}")
        return GrammarCheck(*json.loads(answer))

    def close(self) -> None:
        """End the child; the next grammar starts another."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()

    def _start(self) -> bool:
        # The child is started by its path, and without that path's folder among those that are searched for
        # modules.
        command = [sys.executable, "-P", grammar_check_child.__file__, self._arguments]
        try:
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        except OSError:  # no memory, or no process more, is left to the host
            return False
        return self._answer(_MAX_START_S) is not None

    def _answer(self, timeout_s: float) -> bytes | None:
        """Return the child's next line, of which each part comes in time; None if it does not come."""
        assert self._child is not None
        assert self._child.stdout is not None
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(timeout_s):
                    return None
                part = os.read(self._child.stdout.fileno(), 1 << 16)
                if not part:
                    return None
                line += part
        return line
