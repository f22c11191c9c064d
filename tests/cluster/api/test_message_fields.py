"""What has too many fields or numbers is refused before one of them is made."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from gateway_harness import GatewayHarness
from hypothesis import given
from hypothesis import strategies as st

from cluster.api.message_fields import MAX_FIELDS, MAX_VALUES, SHORT_MESSAGE_BYTES, check_fields
from cluster.errors import InvalidRequestError
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.chat_checks import MAX_CHAT_MESSAGES, MAX_TOOLS
from cluster.text.validation import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, MAX_STOPS

FIELDS = pb.GenerateRequest.DESCRIPTOR.fields_by_name


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def held(number: int, content: bytes) -> bytes:
    """A field with a length."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def inside(path: str, content: bytes) -> bytes:
    """The fields `content` within the message at this path of a `GenerateRequest`."""
    kind: Any = pb.GenerateRequest.DESCRIPTOR
    numbers = []
    for name in path.split(".") if path else []:
        numbers.append(kind.fields_by_name[name].number)
        kind = kind.fields_by_name[name].message_type
    for number in reversed(numbers):
        content = held(number, content)
    return content


async def check(message: bytes) -> None:
    await check_fields(message, pb.GenerateRequest.DESCRIPTOR, MAX_VALUES)


MANY = MAX_FIELDS + 1


@pytest.mark.parametrize(
    "message",
    [
        held(FIELDS["logit_bias"].number, b"") * MANY,
        held(FIELDS["stop"].number, b"x") * MANY,
        held(FIELDS["resume"].number, b"") * MANY,
        held(FIELDS["token_ids"].number, b"") * MANY,
        varint(FIELDS["stop_token_ids"].number << 3) * 2 * MANY,
        inside("chat", held(1, b"") * MANY),
        inside("chat.messages", held(2, b"") * MANY),
        inside("chat.messages", held(2, b"") * MANY) + b"\xff",
        held(1000, b"") * MANY,
        held(15, b"") * MANY,
        varint(1000 << 3 | 3) * MANY,
        (varint(1000 << 3 | 5) + bytes(4)) * MANY,
        (varint(1000 << 3 | 1) + bytes(8)) * MANY,
    ],
)
async def test_a_message_of_too_many_fields_is_refused(message: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=f"has more than {MAX_FIELDS} fields"):
        await check(message)


@pytest.mark.parametrize("path", ["token_ids", "resume", ""])
async def test_a_message_of_too_many_numbers_is_refused(path: str) -> None:
    kind: Any = FIELDS[path].message_type if path else pb.GenerateRequest.DESCRIPTOR
    (number,) = [it.number for it in kind.fields if it.name in ("ids", "token_ids") and it.is_repeated] or [
        FIELDS["stop_token_ids"].number
    ]
    for content in (b"\x05", b"\x85\x01"):
        await check(inside(path, held(number, content * MAX_VALUES)))
        with pytest.raises(InvalidRequestError, match=f"has more than {MAX_VALUES} numbers in lists"):
            await check(inside(path, held(number, content * (MAX_VALUES + 1))))


async def test_the_most_that_a_request_may_have_passes() -> None:
    request = pb.GenerateRequest(
        stop=["x" * 256] * MAX_STOPS,
        stop_token_ids=[5] * MAX_STOP_TOKEN_IDS,
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIASES), 1.0),
    )
    for number in range(MAX_CHAT_MESSAGES):
        request.chat.messages.add(role=pb.ROLE_USER).content.add(text=f"{number}" * 200)
    for number in range(MAX_TOOLS):
        request.chat.tools.add(name=f"f{number}", description="x" * 1000, parameters_json="{}")
    message = request.SerializeToString()
    assert len(message) > 5 * SHORT_MESSAGE_BYTES
    await check(message)
    await check(pb.GenerateRequest(text="x" * 5_000_000).SerializeToString())
    await check_fields(struct.pack("<6f", *range(6)), pb.EmbedResponse.DESCRIPTOR, 0)


@given(st.binary(max_size=200))
async def test_whatever_the_bytes_are_they_are_counted_to_their_end(message: bytes) -> None:
    await check(message)


@pytest_asyncio.fixture
async def address(harness: GatewayHarness) -> AsyncIterator[str]:
    await harness.add_replica("d0", "decode")
    yield (await harness.add_gateway())[1]


async def test_a_gateway_refuses_such_a_call_before_it_parses_it(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        for method, message in (
            ("Generate", inside("chat", held(1, b"") * MANY)),
            ("Embed", held(1000, b"") * MANY),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in channel.unary_stream(f"/tandem.v1.Inference/{method}")(message):
                    pass
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"has more than {MAX_FIELDS} fields" in str(caught.value.details())
