"""Tokenize and Detokenize: so many at once, beside the event loop and beside the threads of Generate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from cluster.errors import OverloadedError
from cluster.gateway.intake import Intake
from cluster.gateway.validation import Limits, check_detokenize, check_tokenize
from cluster.proto import tandem_pb2 as pb
from kvtransfer.clock import let_others_run

MAX_CALLS = 32
"""Of both kinds at once, running and waiting. The size of each is limited by the model's context."""
_NUM_THREADS = 2
_NUM_TOKENS = 4096
"""Copied between two chances of the event loop."""

T = TypeVar("T")


class TextCalls:
    """Of one gateway. `OverloadedError` when there are `MAX_CALLS` already."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._executor = ThreadPoolExecutor(_NUM_THREADS, "text")
        self._num_calls = 0

    async def tokenize(self, request: pb.TokenizeRequest, limits: Limits) -> pb.TokenizeResponse:
        """`RequestError` when the request cannot be served."""
        with self._admitted():
            await self._run(lambda: check_tokenize(request, limits))
            if request.WhichOneof("input") == "chat":
                text, adds_tokens = await self._intake.render_chat(request.chat, limits), False
            else:
                text, adds_tokens = request.text, True
            if request.HasField("add_special_tokens"):
                adds_tokens = request.add_special_tokens
            return await self._run(lambda: self._tokenized(text, adds_tokens))

    async def detokenize(self, request: pb.DetokenizeRequest, limits: Limits) -> pb.DetokenizeResponse:
        """`RequestError` when the request cannot be served."""
        with self._admitted():
            return await self._run(lambda: self._detokenized(request, limits))

    def close(self) -> None:
        """End the threads, after what they do now."""
        self._executor.shutdown(cancel_futures=True)

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[None]:
        if self._num_calls >= MAX_CALLS:
            raise OverloadedError(
                f"this gateway has {MAX_CALLS} calls of Tokenize and Detokenize, the most it takes at once"
            )
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _tokenized(self, text: str, adds_tokens: bool) -> pb.TokenizeResponse:
        tokens = np.frombuffer(self._intake.encode_now(text, add_special_tokens=adds_tokens), dtype="<u4")
        response = pb.TokenizeResponse()
        for start in range(0, len(tokens), _NUM_TOKENS):
            response.token_ids.extend(tokens[start : start + _NUM_TOKENS].tolist())
            let_others_run()
        return response

    def _detokenized(self, request: pb.DetokenizeRequest, limits: Limits) -> pb.DetokenizeResponse:
        check_detokenize(request, limits)
        tokens = _as_bytes(request.token_ids)
        text = self._intake.decode(tokens, keep_special_tokens=request.keep_special_tokens)
        return pb.DetokenizeResponse(text=text)


def _as_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as uint32 little-endian."""
    parts = []
    for start in range(0, len(ids), _NUM_TOKENS):
        parts.append(np.asarray(ids[start : start + _NUM_TOKENS], dtype="<u4").tobytes())
        let_others_run()
    return b"".join(parts)
