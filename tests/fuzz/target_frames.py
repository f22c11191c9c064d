"""Frames: every codec of the product, streams of frames cut anywhere, and the proof of the secret."""

from __future__ import annotations

import asyncio
import importlib
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from engine_fakes import LinkEnd

from kvtransfer.codec import LENGTH, MAX_FRAME_BYTES, Codec, framed
from kvtransfer.errors import ProofError, StoreError, WireError
from kvtransfer.rpc.handshake import HANDSHAKE_CODEC, ClientHandshake, ServerHandshake
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.index.values import NodeRecord, decode_entries, decode_node, encode_node
from tests.fuzz.message_grammar import MessageGrammar
from tests.fuzz.mutation import any_text, mutate_bytes
from tests.fuzz.target import FindingError, Target, outcome

ROOT = Path(__file__).parents[2]
TRUST, OTHER_TRUST = Trust.of(bytes(32)), Trust.of(bytes(31) + b"\1")
# What only Ray's own storage and actors carry needs Ray to be imported.
_NOT_HERE = ("import ray", "from ray")


def open_targets(stack: ExitStack, folder: Path) -> list[Target]:
    """Return one target for each codec, and those of streams and proofs."""
    loop = stack.enter_context(asyncio.Runner()).get_loop()
    targets = [
        Target(f"codec {name}", partial(_decode, codec, MessageGrammar(codec.union)), 250)
        for name, codec in codecs().items()
    ]
    grammar = MessageGrammar(HANDSHAKE_CODEC.union)
    return [
        *targets,
        Target("stream of frames", lambda rng: loop.run_until_complete(_stream(rng, grammar)), 400),
        Target("proof, server", partial(_server_proof, grammar), 1000),
        Target("proof, client", partial(_client_proof, grammar), 1000),
        Target("index values", _index_values, 1000),
    ]


def codecs() -> dict[str, Codec[Any]]:
    """Return every codec that a module of the product makes, by module and name."""
    found: dict[str, Codec[Any]] = {}
    for package in ("kvtransfer", "workers", "cluster"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            if "Codec(" not in text or any(line in text for line in _NOT_HERE):
                continue
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for attribute, value in vars(importlib.import_module(name)).items():
                if isinstance(value, Codec) and not any(value is each for each in found.values()):
                    found[f"{name}.{attribute}"] = value
    return found


def _decode(codec: Codec[Any], grammar: MessageGrammar, rng: Random) -> str:
    """What can be decoded is encoded again to a frame that means the same."""

    def decode() -> None:
        encoded = codec.encode(codec.decode(frame))
        if codec.encode(codec.decode(encoded)) != encoded:
            raise FindingError(f"decoded and encoded again it differs: {encoded!r}")

    frame = grammar.frame(rng)
    return outcome(decode, WireError)


async def _stream(rng: Random, grammar: MessageGrammar) -> str:
    """A stream gives the frames that a plain reading of the bytes finds, however they arrive."""
    frames = [grammar.message(rng) if rng.random() < 0.7 else b"" for _ in range(rng.randint(1, 6))]
    if rng.random() < 0.1:
        frames.append(rng.randbytes(rng.choice((65531, 65532, 65533, 70000))))
    data = b"".join(map(framed, frames))
    if rng.random() < 0.6:
        data = mutate_bytes(rng, data)
    expected, is_cut_off, num_announced = _read(data)
    if num_announced > 1 << 20:  # its buffer would be taken, which costs time and finds nothing
        return "long frame"
    end = LinkEnd("fuzz")
    cuts = [rng.choice((1000, 5000, 1 << 16) if len(data) > 2000 else (1, 3, 5, 64, 1000)) for _ in range(4)]
    end.arrive(data[:is_cut_off] if is_cut_off else data, cuts)
    was_aborted = end.is_closing()
    end.feed(None)
    found: list[bytes] = []
    while (frame := await end.stream.receive()) is not None:
        found.append(frame)
    end.abort()
    if was_aborted != bool(is_cut_off) or (not was_aborted and found != expected):
        raise FindingError(f"{data!r} gave {found!r}, aborted: {was_aborted}")
    return "aborted" if was_aborted else "ok"


def _read(data: bytes) -> tuple[list[bytes], int, int]:
    """Return the frames that are not empty, where a length is impossible (the end of that header; 0: there is
    none), and the length of a frame that is not whole."""
    frames: list[bytes] = []
    start = 0
    while start + LENGTH.size <= len(data):
        (length,) = LENGTH.unpack_from(data, start)
        start += LENGTH.size
        if length > MAX_FRAME_BYTES:
            return frames, start, 0
        if start + length > len(data):
            return frames, 0, length
        if length:
            frames.append(data[start : start + length])
        start += length
    return frames, 0, 0


def _frame(rng: Random, grammar: MessageGrammar, honest: bytes) -> tuple[bytes, bool]:
    """Return a frame in place of an honest one, and whether it is the honest one."""
    choice = rng.randrange(4)
    if choice == 0:
        return honest, True
    frame = grammar.frame(rng) if choice == 1 else mutate_bytes(rng, honest)
    return frame, _is_same(frame, honest)


def _is_same(frame: bytes, honest: bytes) -> bool:
    """Whether both frames hold the same message; MessagePack has several encodings of one value."""
    try:
        return HANDSHAKE_CODEC.decode(frame) == HANDSHAKE_CODEC.decode(honest)
    except WireError:
        return False


def _server_proof(grammar: MessageGrammar, rng: Random) -> str:
    """Only who knows the secret and sends both honest frames is welcome."""
    knows = rng.random() < 0.6
    server = ServerHandshake(TRUST)
    client = ClientHandshake(TRUST if knows else OTHER_TRUST, any_text(rng))
    welcomed: list[bytes] = []

    def talk() -> None:
        hello, is_honest = _frame(rng, grammar, client.hello())
        challenge = server.challenge(hello)
        proof = b""
        try:
            proof = client.answer(challenge)
        except ProofError:
            is_honest = False
        proof, is_whole = _frame(rng, grammar, proof)
        welcomed.append(server.welcome(proof))
        if not (knows and is_honest and is_whole):
            raise FindingError("welcomed without a proof")

    return outcome(talk, WireError, ProofError)


def _client_proof(grammar: MessageGrammar, rng: Random) -> str:
    """A client sends its proof to nobody who does not know the secret."""
    knows = rng.random() < 0.6
    server = ServerHandshake(TRUST if knows else OTHER_TRUST)
    client = ClientHandshake(TRUST, any_text(rng))

    def talk() -> None:
        challenge, is_honest = _frame(rng, grammar, server.challenge(client.hello()))
        proof = client.answer(challenge)
        if not (knows and is_honest):
            raise FindingError("proven to a server that does not know the secret")
        answer, _ = _frame(rng, grammar, server.welcome(proof))
        client.finish(answer)

    return outcome(talk, WireError, ProofError)


def _index_values(rng: Random) -> str:
    """Whatever stands in Redis is an entry, or nothing."""
    record = NodeRecord(rng.randrange(1 << 40), rng.randrange(100), "127.0.0.1:1", any_text(rng))
    for _ in decode_entries(mutate_bytes(rng, rng.randbytes(29 * rng.randrange(4)))):
        pass
    value = mutate_bytes(rng, encode_node(record))
    return outcome(lambda: decode_node(value), StoreError)
