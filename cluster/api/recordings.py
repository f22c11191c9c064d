"""The recordings of all gateways, as the admin service gives them out: blocks as numbers that only one answer
has."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB

from cluster.errors import FieldViolation, InvalidRequestError
from cluster.gateway.fleet.fleet import Fleet, GatewayRecording
from cluster.gateway.request_recording import SHORT_KEY_BYTES, RecordedRequest
from cluster.proto.enums import value_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb
from kvtransfer.common.clock import Clock

# JSON's numbers are exact up to here.
_ID_BITS = 53
_AES_BYTES = 16
# Block ids of one message, about; a message has at least one request.
_MAX_MESSAGE_IDS = 1 << 16
_MAX_MESSAGE_REQUESTS = 500


class BlockNumbers:
    """Maps shortened block keys to numbers, equal ones to equal numbers, by AES under a key that is drawn for
    one answer and kept nowhere. Neither the keys nor a block of another answer can be found by the
    numbers."""

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(AES(key), ECB()).encryptor()

    def of(self, short_keys: bytes) -> list[int]:
        """Return the number of each key."""
        keys = np.frombuffer(short_keys, "<u8")
        padded = np.zeros((len(keys), _AES_BYTES // SHORT_KEY_BYTES), "<u8")
        padded[:, 0] = keys
        encrypted = np.frombuffer(self._encryptor.update(padded.tobytes()), "<u8")
        numbers: list[int] = (encrypted[:: padded.shape[1]] >> np.uint64(64 - _ID_BITS)).tolist()
        return numbers


class Recordings:
    """Answers `Recording`."""

    def __init__(
        self, fleet: Fleet, block_tokens: int, draw_bytes: Callable[[int], bytes], clock: Clock
    ) -> None:
        self._fleet = fleet
        self._block_tokens = block_tokens
        self._draw_bytes = draw_bytes
        self._clock = clock

    async def parts(self, request: admin_pb.RecordingRequest) -> AsyncIterator[admin_pb.RecordingPart]:
        """Yield the recordings of all gateways."""
        if not (math.isfinite(request.last_s) and request.last_s >= 0):
            raise InvalidRequestError(FieldViolation("last_s", "must be a number of seconds, or 0 for all"))
        last_s = request.last_s or self._clock.now()
        numbers = BlockNumbers(self._draw_bytes(_AES_BYTES))
        async for part in self._fleet.recording(last_s):
            for message in self._messages(part, numbers):
                yield message

    def _messages(self, part: GatewayRecording, numbers: BlockNumbers) -> Iterator[admin_pb.RecordingPart]:
        to_unix_s = self._clock.wall() - self._clock.now()
        message = self._begun(part.gateway_id)
        num_ids = 0
        for each in part.requests:
            if num_ids > _MAX_MESSAGE_IDS or len(message.requests) >= _MAX_MESSAGE_REQUESTS:
                yield message
                message, num_ids = self._begun(part.gateway_id), 0
            block_ids = numbers.of(each.short_keys)
            message.requests.append(_recorded(each, each.arrived_at + to_unix_s, block_ids))
            num_ids += len(block_ids)
        if part.complete_since is not None:
            message.complete_since = part.complete_since + to_unix_s
        message.problem = part.problem
        yield message

    def _begun(self, gateway_id: str) -> admin_pb.RecordingPart:
        return admin_pb.RecordingPart(gateway_id=gateway_id, block_tokens=self._block_tokens)


def _recorded(request: RecordedRequest, arrived_at: float, block_ids: list[int]) -> admin_pb.RecordedRequest:
    return admin_pb.RecordedRequest(
        arrived_at=arrived_at,
        state=request.state,
        code=request.code,
        tenant=request.tenant,
        service_class=value_of(pb.ServiceClass, request.service_class) if request.service_class else None,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=request.num_output_tokens,
        num_samples=request.num_samples,
        max_output_tokens=request.max_output_tokens,
        ttft_s=request.ttft_s or None,
        e2e_s=request.e2e_s,
        block_ids=block_ids,
    )
