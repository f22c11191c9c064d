"""A link's stream without a network: a test feeds it, and reads what it sent."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from kvtransfer.rpc.stream import FrameStream


class LinkEnd(asyncio.Transport):
    """The transport of `stream`, which believes that it is connected."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._written = bytearray()
        self._is_closing = False
        self.stream = FrameStream(name, has_heartbeat=True)
        self.stream.connection_made(self)

    def feed(self, frame: bytes | None) -> None:
        """A frame arrives; None: the other side ends."""
        if frame is None:
            self.stream.eof_received()
        else:
            self.arrive(len(frame).to_bytes(4, "little") + frame, [1 << 16])

    def arrive(self, data: bytes, cuts: Sequence[int]) -> None:
        """Bytes arrive in parts of at most these sizes, in turn."""
        for cut in itertools.cycle(cuts):
            if not data:
                return
            space = self.stream.get_buffer(-1)
            size = min(len(space), cut, len(data))
            space[:size] = data[:size]
            data = data[size:]
            self.stream.buffer_updated(size)

    def sent(self) -> list[bytes]:
        """The frames sent since the last call, without the empty ones of an idle link."""
        frames = []
        while self._written:
            end = 4 + int.from_bytes(self._written[:4], "little")
            frames.append(bytes(self._written[4:end]))
            del self._written[:end]
        return [frame for frame in frames if frame]

    # what the stream calls

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._written += data

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self.stream.connection_lost(None)
