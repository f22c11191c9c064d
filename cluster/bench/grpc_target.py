"""Send the load of `tandem bench serve` over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.api.channel import ClientCredentials
from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.bench.serving_load import AnswerEnd, BenchPrompt
from cluster.bench.targets import Target, TargetModel
from cluster.proto.tandem.v1 import inference_pb2 as pb


class GrpcTarget:
    """Sends to a gateway over gRPC."""

    def __init__(self, client: Client, model: TargetModel, timeout_s: float) -> None:
        self.model = model
        self._client = client
        self._timeout_s = timeout_s

    async def send(
        self, prompt: BenchPrompt, num_tokens: int, service_class: str
    ) -> AsyncIterator[int | AnswerEnd]:
        options = GenerateOptions(max_tokens=num_tokens, ignore_eos=True, seed=0, service_class=service_class)
        token_ids: list[int] = []
        events = aiter(self._client.generate(prompt, options, timeout_s=self._timeout_s, resume=False))
        async for event in events:
            if isinstance(event, pb.Accepted):
                yield 0
            elif isinstance(event, pb.Delta) and event.token_ids:
                token_ids += event.token_ids
                yield len(event.token_ids)
            elif isinstance(event, pb.Finished):
                usage = event.usage
                cached = usage.cached.device + usage.cached.dram + usage.cached.nvme + usage.cached.remote
                yield AnswerEnd(usage.prompt_tokens, cached, usage.completion_tokens, token_ids)


@asynccontextmanager
async def grpc_target(address: str, timeout_s: float, who: ClientCredentials | None) -> AsyncIterator[Target]:
    """Connect to a gateway."""
    async with Client(address, credentials=who) as client:
        model = (await client.models())[0]
        yield GrpcTarget(
            client, TargetModel(model.name, model.vocab_size, model.max_context_tokens), timeout_s
        )
