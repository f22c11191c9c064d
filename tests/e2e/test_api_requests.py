"""What a request may ask for beside tokens, through the real gateway and ranks, against transformers."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio
import torch
import transformers
from e2e_front import Front, copy_tiny
from e2e_harness import E2eHarness

from cluster.api.generate_options import GenerateOptions, Turn
from cluster.errors import CallError
from cluster.proto.tandem.v1 import inference_pb2 as pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE = {"kv_tokens": 8192, "chunk_tokens": 64}
TEXT = "import os\n\ndef read_lines(path):\n    with open(path) as file:\n        return"


class Reference:
    """The same weights in transformers, in fp32."""

    def __init__(self, model_dir: Path) -> None:
        torch.set_num_threads(1)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_dir)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Of each next token, at every place [num_tokens, V]."""
        logits: torch.Tensor = self._model(torch.tensor([tokens])).logits[0]
        return logits.log_softmax(-1)

    @torch.inference_mode()
    def embedding(self, tokens: list[int]) -> torch.Tensor:
        state: torch.Tensor = self._model.model(torch.tensor([tokens])).last_hidden_state[0, -1]
        return state


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tiny(tmp_path_factory.mktemp("e2e"))


@pytest.fixture(scope="module")
def reference(tiny_dir: Path) -> Reference:
    return Reference(tiny_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tiny_dir: Path) -> AsyncIterator[Front]:
    """p0 (prefill) and d0 (decode) behind a gateway."""
    async with AsyncExitStack() as ends:
        harness = await ends.enter_async_context(E2eHarness(tiny_dir))
        p0, d0 = await harness.add_all({"p0": "prefill", "d0": "decode"}, engine=ENGINE)
        built = Front(harness, tiny_dir)
        await built.open()
        ends.push_async_callback(built.close)
        await built.register(p0, d0)
        yield built


async def test_logprobs_name_their_tokens(front: Front, reference: Reference) -> None:
    done = await front.client.complete(TEXT, GenerateOptions(max_tokens=12, logprobs=3))
    (items,), (ids,) = done.logprobs, done.token_ids
    wanted = reference.logprobs([*reference.ids(TEXT), *ids])[-13:-1]
    assert [item.token_id for item in items] == list(ids)
    assert b"".join(item.token_bytes for item in items).decode() == done.texts[0]
    for place, item in zip(wanted, items, strict=True):
        assert item.logprob == pytest.approx(place[item.token_id].item(), abs=1e-4)
        best = place.topk(3)
        assert [top.token_id for top in item.top] == best.indices.tolist()
        assert [top.logprob for top in item.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert item.top[0].text == reference.tokenizer.decode([item.top[0].token_id])


async def test_a_prompt_comes_back_with_its_logprobs(front: Front, reference: Reference) -> None:
    asked = GenerateOptions(max_tokens=2, prompt_logprobs=1, echo=True)
    done = await front.client.complete(TEXT, asked)
    ids = reference.ids(TEXT)
    assert done.prompt_text == TEXT
    assert [item.token_id for item in done.prompt_logprobs] == ids
    assert not done.prompt_logprobs[0].HasField("logprob")
    wanted = reference.logprobs(ids)
    for place, item in zip(wanted, done.prompt_logprobs[1:], strict=False):
        assert item.logprob == pytest.approx(place[item.token_id].item(), abs=1e-4)
        assert item.top[0].token_id == place.argmax().item()
    assert done.finished.usage.cached.device == 0
    alone = await front.client.complete(TEXT, GenerateOptions(max_tokens=1, echo=True))
    assert (alone.prompt_text, alone.prompt_logprobs) == (TEXT, ())


async def test_usage_comes_with_each_delta_where_it_is_asked_for(front: Front) -> None:
    counts = []
    async for event in front.client.generate(TEXT, GenerateOptions(max_tokens=6, include_usage=True)):
        if isinstance(event, pb.Delta):
            counts.append((event.usage.prompt_tokens, event.usage.completion_tokens))
    assert counts[-1][1] == 6
    assert all(before <= after for before, after in itertools.pairwise(counts))
    assert {prompt for prompt, _ in counts} == {counts[0][0]}


async def test_what_stopped_a_sample_is_told(front: Front, reference: Reference) -> None:
    free = await front.client.complete(TEXT, GenerateOptions(max_tokens=30))
    stop = free.texts[0][8:11]
    for included in (False, True):
        asked = GenerateOptions(max_tokens=30, stop=["never", stop], include_stop=included)
        deltas = [it async for it in front.client.generate(TEXT, asked) if isinstance(it, pb.Delta)]
        text = "".join(delta.text for delta in deltas)
        end = free.texts[0].index(stop) + len(stop) * included
        assert (text, deltas[-1].matched_stop.text) == (free.texts[0][:end], stop)
    token = free.token_ids[0][5]
    asked = GenerateOptions(max_tokens=30, stop_token_ids=[token])
    deltas = [it async for it in front.client.generate(TEXT, asked) if isinstance(it, pb.Delta)]
    assert deltas[-1].matched_stop.token_id == token
    plain = [it async for it in front.client.generate(TEXT, GenerateOptions(max_tokens=3))]
    assert not any(it.HasField("matched_stop") for it in plain if isinstance(it, pb.Delta))


async def test_a_prompt_is_truncated_at_its_beginning(front: Front, reference: Reference) -> None:
    ids = reference.ids(TEXT)
    done = await front.client.complete(TEXT, GenerateOptions(max_tokens=5, truncate_prompt_tokens=7))
    assert done.finished.usage.prompt_tokens == 7
    wanted = await front.client.complete(ids[-7:], GenerateOptions(max_tokens=5))
    assert done.token_ids == wanted.token_ids


async def test_kv_that_is_not_stored_is_found_by_nobody(front: Front) -> None:
    text = "class Private:\n" + "    value = 1\n" * 40
    for _ in range(2):
        done = await front.client.complete(text, GenerateOptions(max_tokens=2, no_store=True))
        assert done.finished.usage.cached.device == 0
    await front.client.complete(text, GenerateOptions(max_tokens=2))
    again = await front.client.complete(text, GenerateOptions(max_tokens=2))
    assert again.finished.usage.cached.device > 0


async def test_embeddings_are_the_last_hidden_state(front: Front, reference: Reference) -> None:
    texts = [TEXT, "import", "def f(x): return x\n" * 12]
    raw = await front.client.embed([*texts, reference.ids(TEXT)], normalize=False)
    for text, vector in zip([*texts, TEXT], raw, strict=True):
        wanted = reference.embedding(reference.ids(text))
        assert torch.tensor(vector) == pytest.approx(wanted, rel=1e-3, abs=1e-3)
    normal = await front.client.embed(texts)
    wanted = torch.tensor(raw[0])
    assert torch.tensor(normal[0]) == pytest.approx(wanted / wanted.norm(), abs=1e-5)
    short = await front.client.embed(texts[:1], dimensions=8)
    assert len(short[0]) == 8
    assert torch.tensor(short[0]).norm().item() == pytest.approx(1.0, abs=1e-5)
    for wrong in (0, 1 << 20):
        with pytest.raises(CallError, match="dimensions"):
            await front.client.embed(texts[:1], dimensions=wrong)
    with pytest.raises(CallError, match="inputs"):
        await front.client.embed([])


async def test_scores_are_the_models_logprobs(front: Front, reference: Reference) -> None:
    continuations = [" file.read()", " 1", "\n\n\n"]
    best = await front.client.complete(TEXT, GenerateOptions(max_tokens=4))
    scores = await front.client.score(TEXT, [*continuations, list(best.token_ids[0])])
    prompt = reference.ids(TEXT)
    for continuation, score in zip([*continuations, best.token_ids[0]], scores, strict=True):
        ids = reference.ids(continuation) if isinstance(continuation, str) else list(continuation)
        places = reference.logprobs([*prompt, *ids])[len(prompt) - 1 : -1]
        wanted = sum(place[token].item() for place, token in zip(places, ids, strict=True))
        assert score.logprob == pytest.approx(wanted, abs=1e-3)
        assert score.num_tokens == len(ids)
        assert score.is_greedy == (places.argmax(-1).tolist() == ids)
    assert scores[-1].is_greedy
    with pytest.raises(CallError, match="prompt"):
        await front.client.score("", ["x"])
    with pytest.raises(CallError, match=r"continuations\[0\]"):
        await front.client.score(TEXT, [""])


async def test_an_error_has_a_reason_for_programs(front: Front) -> None:
    for options, reason in (
        (GenerateOptions(model="other"), "UNKNOWN_MODEL"),
        (GenerateOptions(temperature=-1.0), "INVALID_REQUEST"),
        (GenerateOptions(constraint=pb.Constraint(regex="(")), "GRAMMAR"),
    ):
        with pytest.raises(CallError) as caught:
            await front.client.complete(TEXT, options)
        assert caught.value.reason == reason


async def test_a_final_message_is_continued(front: Front) -> None:
    chat = pb.ChatPrompt(
        messages=[
            pb.ChatMessage(role=pb.ROLE_USER, content=[pb.ContentPart(text="hi")]),
            pb.ChatMessage(role=pb.ROLE_ASSISTANT, content=[pb.ContentPart(text="hel")]),
        ],
        continue_final_message=True,
    )
    asked = GenerateOptions(max_tokens=1, echo=True, keep_special_tokens=True)
    done = await front.client.complete(chat, asked)
    assert done.prompt_text.endswith("hel")
    opened = await front.client.complete([Turn("user", "hi")], asked)
    assert done.prompt_text.startswith(opened.prompt_text)


async def test_what_does_not_fit_the_schema_is_never_generated(front: Front) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "size": {"type": "integer", "maximum": 99},
        },
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    constraint = pb.Constraint(json_schema=json.dumps(schema))
    for seed in range(4):
        options = GenerateOptions(max_tokens=80, temperature=1.0, seed=seed, constraint=constraint)
        done = await front.client.complete(TEXT, options)
        assert done.finish_reasons == ("stop",)
        jsonschema.validate(json.loads(done.texts[0]), schema)
    one = GenerateOptions(
        max_tokens=8, constraint=pb.Constraint(choice=pb.Choices(choices=["left", "right"]))
    )
    assert (await front.client.complete(TEXT, one)).texts[0] in ("left", "right")
