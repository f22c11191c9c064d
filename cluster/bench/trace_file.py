"""Recorded traces of requests in Mooncake's format: a JSON object on each line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from cluster.bench.json_items import numbered_lines
from cluster.errors import BenchError
from kvtransfer.common.os_errors import os_reason

# The size of a block where a trace names none.
TRACE_BLOCK_TOKENS = 512
MAX_LENGTH_TOKENS = 1 << 24

Length = Annotated[int, msgspec.Meta(le=MAX_LENGTH_TOKENS)]


class TraceRequest(msgspec.Struct, frozen=True):
    """A request of a trace. The id of a block names all of the prompt up to its end; the last block may be a
    partial one. The fields behind `hash_ids` are Tandem's own (`tandem bench record`)."""

    timestamp_ms: Annotated[float, msgspec.Meta(ge=0)] = msgspec.field(name="timestamp")
    input_length: Annotated[Length, msgspec.Meta(ge=1)]
    output_length: Annotated[Length, msgspec.Meta(ge=0)]
    hash_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH_TOKENS)] = TRACE_BLOCK_TOKENS
    tenant: str = ""
    service_class: str = ""

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the prompt, a partial one included."""
        return -(-self.input_length // self.block_tokens)

    @property
    def full_blocks(self) -> tuple[int, ...]:
        """The ids of the full blocks: only these are ever stored."""
        return self.hash_ids[: self.input_length // self.block_tokens]


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of a trace, in the order of the file. `BenchError` names the line that is none, or
    that names too few blocks, or another size of blocks than the line before."""
    decoder = msgspec.json.Decoder(TraceRequest)
    block_tokens = 0
    for number, line in numbered_lines(path):
        try:
            request = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise BenchError(f"{path}, line {number}: {error}") from error
        if len(request.hash_ids) < request.num_blocks:
            raise BenchError(
                f"{path}, line {number}: input_length {request.input_length} needs {request.num_blocks} "
                f"hash_ids, not {len(request.hash_ids)}"
            )
        if request.block_tokens != (block_tokens or request.block_tokens):
            raise BenchError(
                f"{path}, line {number}: block_tokens is {request.block_tokens}, and {block_tokens} in the "
                "line before; split the trace by the size of its blocks"
            )
        block_tokens = request.block_tokens
        yield request


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> int:
    """Write the requests as a trace; returns how many there were. `BenchError` where the file cannot be
    written."""
    encoder = msgspec.json.Encoder()
    num_requests = 0
    try:
        with path.open("wb") as file:
            for request in requests:
                file.write(encoder.encode(request) + b"\n")
                num_requests += 1
    except OSError as error:
        raise BenchError(f"cannot write {path}: {os_reason(error)}") from error
    return num_requests
