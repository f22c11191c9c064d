"""Check in a child process that a grammar compiles within bounds of time and memory.

Some grammars take exponential time to compile (intersections of regular expressions do), which none of the
library's limits covers, and a thread in the library cannot be stopped. So a grammar is compiled in a process
that ends when it takes too long or too much, before the rank compiles it itself.

This file is the child's program as well: it is run by its path, and imports nothing of this project."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import selectors
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# The fields of `LLParserLimits` that the child is told.
_LIMITS = (
    "max_items_in_row", "initial_lexer_fuel", "step_lexer_fuel", "step_max_items", "max_lexer_states",
    "max_grammar_size", "verbose_errors",
)  # fmt: skip
MAX_CPU_S = 3
MAX_MEMORY_BYTES = 512 << 20
# A child that shares its core takes longer than `MAX_CPU_S`.
_MAX_WALL_S = 30.0
# The tokenizer is read once, of a large vocabulary in a few seconds.
_MAX_START_S = 120.0
_LENGTH = struct.Struct("<I")


class GrammarCheck(NamedTuple):
    """The cost of compiling: memory in use afterwards and time of a core; or why the grammar is refused, here
    or, where that `is_final`, anywhere."""

    num_bytes: int
    seconds: float
    error: str = ""
    is_final: bool = True


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
            self._child.stdin.write(_LENGTH.pack(len(data)) + data)
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
        command = [sys.executable, "-P", __file__, self._arguments]
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


def load_tokenizer(text: str, vocab_size: int, end_ids: tuple[int, ...]) -> LLTokenizer:
    """Return the tokenizer of a `tokenizer.json`, of a model with `vocab_size` tokens. Raises `ValueError` if
    there is none, or a grammar could not end."""
    if not end_ids:
        raise ValueError("the model has no end token")
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(end_ids))


def compile_grammar(tokenizer: LLTokenizer, text: str, limits: LLParserLimits) -> LLMatcher:
    """Return a matcher at the beginning of the text. Raises `ValueError` for a grammar that is refused."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(error_of(matcher))
    return matcher


def error_of(matcher: LLMatcher) -> str:
    """Return why a matcher failed, in one line of bounded length."""
    text = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    return text[:300]


# ------------------------------------------------------------------------------------------- the child


_MALLOC_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _MallocInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLOC_FIELDS]


class _Memory:
    """Bytes that the process has allocated, where its C library counts them."""

    def __init__(self) -> None:
        self._info: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if self._info is not None:
            self._info.restype = _MallocInfo

    def num_bytes(self) -> int:
        """Return the number of allocated bytes; 0: unknown."""
        if self._info is None:
            return 0
        info = self._info()
        return int(info.uordblks + info.hblkhd)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _limit_cpu() -> None:
    """Let the process end after `MAX_CPU_S` more of its core."""
    most = int(_cpu_s()) + 1 + MAX_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _limit_memory() -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = num_pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _check(tokenizer: LLTokenizer, text: str, limits: LLParserLimits, memory: _Memory) -> GrammarCheck:
    num_bytes, started_at = memory.num_bytes(), _cpu_s()
    try:
        matcher = compile_grammar(tokenizer, text, limits)
    except ValueError as error:
        return GrammarCheck(0, 0.0, str(error))
    seconds = _cpu_s() - started_at
    matcher.compute_bitmask()
    return GrammarCheck(max(0, memory.num_bytes() - num_bytes), seconds, error_of(matcher))


def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer every grammar with a line, until the parent ends."""
    name, vocab_size, end_ids, limits = json.loads(sys.argv[1])
    tokenizer = load_tokenizer(Path(name).read_text(encoding="utf-8"), vocab_size, tuple(end_ids))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory()
    sink.write(b"ready\n")
    sink.flush()
    memory = _Memory()
    while len(header := source.read(_LENGTH.size)) == _LENGTH.size:
        text = source.read(*_LENGTH.unpack(header)).decode()
        _limit_cpu()
        sink.write(json.dumps(_check(tokenizer, text, LLParserLimits(**limits), memory)).encode() + b"\n")
        sink.flush()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the parent has ended
        _serve(sys.stdin.buffer, sys.stdout.buffer)
    os._exit(0)  # nothing of it is left to write
