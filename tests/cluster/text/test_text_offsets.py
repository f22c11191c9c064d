"""Where tokens begin in the text of a completion, and what their bytes are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gateway_harness import GatewayHarness, encode, train_tokenizer, write_model
from http_harness import HttpFrontHarness
from hypothesis import given, settings
from hypothesis import strategies as st
from text_harness import train_byte_fallback
from tokenizers import Tokenizer

from cluster.http.logprobs import LogprobLists, TextOffsets
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.tokenizer import REPLACEMENT, ModelText

TOKENIZERS = {"byte level": train_tokenizer(), "byte fallback": train_byte_fallback()}
TEXTS = st.text(st.sampled_from("ab the é€ 😀\nñ漢"), max_size=30)


def items_of(text: ModelText, ids: list[int]) -> list[pb.TokenLogprob]:
    found = []
    for token in ids:
        token_bytes = text.token_bytes(token)
        shown = token_bytes.decode("utf-8", "replace")
        found.append(pb.TokenLogprob(token_id=token, text=shown, token_bytes=token_bytes, logprob=-1))
    return found


def check(text: str, tokens: list[str], offsets: list[int]) -> None:
    """Each token begins where it is said to."""
    assert offsets == sorted(offsets)
    assert all(0 <= it <= len(text) for it in offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        if REPLACEMENT not in token:
            begun = text[offset:]
            assert begun.startswith(token) or (not offset and begun.startswith(token[1:]))


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=TEXTS)
@settings(deadline=None)
def test_offsets_are_those_of_the_text(kind: str, text: str) -> None:
    tokenizer: Tokenizer = TOKENIZERS[kind]
    model = ModelText(tokenizer)
    ids = list(tokenizer.encode(text, add_special_tokens=False).ids)
    shown = model.decode(np.asarray(ids, "<u4").tobytes())
    lists = LogprobLists(TextOffsets(model.detokenizer()))
    for item in items_of(model, ids):  # however they are grouped
        lists.add([item])
    found = lists.lists(len(shown))
    check(shown, found.tokens, found.text_offset)
    if kind == "byte level":
        assert b"".join(map(model.token_bytes, ids)).decode() == text
        alone = LogprobLists()
        alone.add(items_of(model, ids))
        assert alone.lists(None).text_offset == found.text_offset


def test_a_space_before_a_word_is_among_its_bytes() -> None:
    model = ModelText(TOKENIZERS["byte fallback"])
    ids = TOKENIZERS["byte fallback"].encode("the quick fox", add_special_tokens=False).ids
    assert b"".join(map(model.token_bytes, ids)) == b" the quick fox"


def test_parts_of_a_broken_character_count_as_it_is_shown() -> None:
    model = ModelText(TOKENIZERS["byte level"])
    euro, a = encode("€"), encode("a")
    lists = LogprobLists(TextOffsets(model.detokenizer()))
    lists.add(items_of(model, [*a, *euro[:1], *a, *euro, *a]))
    offsets = lists.lists(None).text_offset
    assert offsets[:3] == [0, 1, 2]
    assert (offsets[3], offsets[-1]) == (3, 4)
    assert set(offsets[3:-1]) == {3}


def test_of_tokens_that_look_the_same_the_chosen_and_the_likelier_is_shown() -> None:
    top = [pb.TopLogprob(token_id=number, logprob=-number, text="x") for number in (1, 2)]
    lists = LogprobLists()
    lists.add([pb.TokenLogprob(token_id=number, logprob=-number, text="x", top=top) for number in (1, 2, 3)])
    shown = msgspec.json.decode(msgspec.json.encode(lists.lists(None)))
    assert shown["top_logprobs"] == [{"x": -1}, {"x": -2}, {"x": -3}]


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[HttpFrontHarness]:
    harness = GatewayHarness(write_model(tmp_path / "m"))
    async with HttpFrontHarness(harness) as opened:
        yield opened
    await harness.close()


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"stop": ["漢"]}, {"echo": True, "stop": ["漢"]}])
async def test_offsets_over_http(front: HttpFrontHarness, fields: dict[str, Any]) -> None:
    said = encode("né 😀 a漢b")
    for replica in front.harness.replicas.values():
        replica.script.tokens, replica.script.eos_at = [*said, 0], len(said)
    body = {"prompt": "äö €<|pad|>ü", "logprobs": 2, "max_tokens": 40, **fields}
    reply = await front.post("/v1/completions", body)
    assert reply.status == 200, reply.body
    (choice,) = reply.json["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) > len(said) - 5
    offsets = found["text_offset"]
    check(
        choice["text"],
        [it for it in found["tokens"] if "|" not in it],
        [offset for offset, it in zip(offsets, found["tokens"], strict=True) if "|" not in it],
    )
    streamed = await front.post("/v1/completions", {**body, "stream": True})
    chunks = [it["choices"][0] for _, it in streamed.events if it != "[DONE]"]
    assert "".join(it["text"] for it in chunks) == choice["text"]
    places = [it for chunk in chunks if chunk["logprobs"] for it in chunk["logprobs"]["text_offset"]]
    assert [min(it, len(choice["text"])) for it in places] == offsets
