"""Read the lengths of recorded requests from a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cluster.bench.json_items import numbered_lines
from cluster.bench.trace_file import MAX_LENGTH_TOKENS
from cluster.errors import BenchError


class Lengths(NamedTuple):
    """Of one request, in tokens."""

    input: int
    output: int


def read_lengths(path: Path) -> Iterator[Lengths]:
    """Yield the lengths of a CSV file whose first two columns are input and output tokens; its first line may
    be a heading."""
    for number, line in numbered_lines(path):
        cells = line.decode(errors="replace").strip().split(",")
        if cells == [""]:
            continue
        try:
            lengths = Lengths(*(int(cell) for cell in cells[:2]))
        except (TypeError, ValueError):
            if number == 1:
                continue
            raise BenchError(
                f"{path}, line {number}: expected INPUT,OUTPUT, not {','.join(cells)[:80]!r}"
            ) from None
        if not all(1 <= length <= MAX_LENGTH_TOKENS for length in lengths):
            raise BenchError(f"{path}, line {number}: lengths are from 1 to {MAX_LENGTH_TOKENS} tokens")
        yield lengths
