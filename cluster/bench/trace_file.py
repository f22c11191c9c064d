"""Recorded traces of requests in Mooncake's format: a JSON object on each line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from cluster.bench.json_items import numbered_lines
from cluster.errors import BenchError

TRACE_BLOCK_TOKENS = 512
MAX_LENGTH_TOKENS = 1 << 24

Length = Annotated[int, msgspec.Meta(le=MAX_LENGTH_TOKENS)]


class TraceRequest(msgspec.Struct, frozen=True):
    """A request of a trace. The id of a block of `TRACE_BLOCK_TOKENS` names all of the prompt up to its end;
    the last block may be a partial one."""

    timestamp_ms: Annotated[float, msgspec.Meta(ge=0)] = msgspec.field(name="timestamp")
    input_length: Annotated[Length, msgspec.Meta(ge=1)]
    output_length: Annotated[Length, msgspec.Meta(ge=0)]
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """The ids of the full blocks: only these are ever stored."""
        return self.hash_ids[: self.input_length // TRACE_BLOCK_TOKENS]


def read_trace(path: Path, *, needs_blocks: bool = True) -> Iterator[TraceRequest]:
    """Yield the requests of a trace, in the order of the file. `BenchError` names the line that is none, or
    that names too few blocks, if it `needs_blocks`."""
    decoder = msgspec.json.Decoder(TraceRequest)
    for number, line in numbered_lines(path):
        try:
            request = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise BenchError(f"{path}, line {number}: {error}") from error
        num_blocks = -(-request.input_length // TRACE_BLOCK_TOKENS)
        if needs_blocks and len(request.hash_ids) < num_blocks:
            raise BenchError(
                f"{path}, line {number}: input_length {request.input_length} needs {num_blocks} hash_ids, "
                f"not {len(request.hash_ids)}"
            )
        yield request
