"""Clients that know nothing but gRPC, in a process of their own: calls one after the other, without retries,
resuming or waiting for a connection. Prints how many calls there were, and what each failed one met."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter

import grpc
import grpc.aio

from cluster.api.generate_options import GenerateOptions, generate_request
from cluster.proto.tandem.v1 import inference_pb2_grpc

_PROMPT = "def main(): return the answer"
_CALL_S = 60.0


class PlainClients:
    """Several channels, each with calls at the same time, until a given number were made together."""

    def __init__(self, address: str, num_calls: int, num_channels: int, num_at_once: int) -> None:
        self.num_done = 0
        self.num_replies: Counter[int] = Counter()
        self.failures: list[str] = []
        self._address = address
        self._left = iter(range(num_calls))
        self._num_channels, self._num_at_once = num_channels, num_at_once

    async def run(self) -> None:
        """Make all calls."""
        await asyncio.gather(*(self._channel() for _ in range(self._num_channels)))

    async def _channel(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._address, options) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await asyncio.gather(*(self._calls(stub) for _ in range(self._num_at_once)))

    async def _calls(self, stub: inference_pb2_grpc.InferenceStub) -> None:
        for number in self._left:
            request = generate_request(_PROMPT, GenerateOptions(max_tokens=2, seed=number))
            num_replies = 0
            try:
                async for _ in stub.Generate(request, timeout=_CALL_S):
                    num_replies += 1
            except grpc.aio.AioRpcError as error:
                self.failures.append(f"{error.code().name}: {error.details()}; {error.debug_error_string()}")
            else:
                self.num_done += 1
                self.num_replies[num_replies] += 1


def main() -> None:
    """Run the client as the arguments define."""
    address, *numbers = sys.argv[1:]
    clients = PlainClients(address, *map(int, numbers))
    asyncio.run(clients.run())
    print(json.dumps({"done": clients.num_done, "failures": clients.failures[:50]}))


if __name__ == "__main__":
    main()
