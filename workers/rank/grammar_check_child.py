"""The child of a `GrammarChecker`: compiles grammars within bounds of time and memory, which may end it.

This file is run by its path, and imports nothing of this project. The rank compiles by the same functions."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_CPU_S = 3
MAX_MEMORY_BYTES = 512 << 20
LENGTH = struct.Struct("<I")


class GrammarCheck(NamedTuple):
    """The cost of compiling: memory in use afterwards and time of a core; or why the grammar is refused, here
    or, where that `is_final`, anywhere."""

    num_bytes: int
    seconds: float
    error: str = ""
    is_final: bool = True


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
    while len(header := source.read(LENGTH.size)) == LENGTH.size:
        text = source.read(*LENGTH.unpack(header)).decode()
        _limit_cpu()
        sink.write(json.dumps(_check(tokenizer, text, LLParserLimits(**limits), memory)).encode() + b"\n")
        sink.flush()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the parent has ended
        _serve(sys.stdin.buffer, sys.stdout.buffer)
    os._exit(0)  # nothing of it is left to write
