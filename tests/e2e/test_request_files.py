"""One streamed request enters exactly the files that `docs/architecture.md` lists."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
from e2e_front import Front, copy_tiny
from e2e_harness import E2eHarness
from entered_files import EnteredFiles, documented_files

from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.proto.tandem.v1 import inference_pb2_grpc

TEXT = "import os\n\ndef read_lines(path):\n    with open(path) as file:\n        return" * 4


async def stream(stub: inference_pb2_grpc.InferenceStub, text: str) -> list[str]:
    """The kinds of events of one request."""
    request = pb.GenerateRequest(text=text, max_tokens=24, ignore_eos=True)
    return [event.WhichOneof("event") async for event in stub.Generate(request)]


async def test_one_request_enters_the_documented_files(tmp_path: Path) -> None:
    """Gateway and engine cores run in this process; the ranks do not, and the client is gRPC alone."""
    entered = EnteredFiles()
    model = copy_tiny(tmp_path)
    with entered.watching():
        async with E2eHarness(model) as harness:
            roles = {"p0": "prefill", "d0": "decode"}
            replicas = await harness.add_all(roles, engine={"kv_tokens": 8192, "chunk_tokens": 64})
            front = Front(harness, model)
            await front.open()
            try:
                await front.register(*replicas)
                async with grpc.aio.insecure_channel(front.address) as channel:
                    stub = inference_pb2_grpc.InferenceStub(channel)
                    for number in range(2):
                        await stream(stub, f"warm-up {number} {TEXT}")
                    for number in range(3):
                        with entered.recording():
                            events = await stream(stub, f"request {number} {TEXT}")
                        assert (events[0], events[-1]) == ("accepted", "finished")
            finally:
                await front.close()
    assert entered.paths == documented_files("Files of one request")
