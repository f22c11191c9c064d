"""Tokens that end a chat: all end tokens of a checkpoint, and the one that its template writes behind an
answer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from gateway_harness import GatewayHarness, encode, write_model
from text_harness import FAMILIES

from cluster.api.generate_options import GenerateOptions, Turn
from cluster.text.bounded_process import BoundsBrokenError
from cluster.text.chat_template import Chat, ChatRenderer, ChatTemplate, Rendered, RenderRefused
from cluster.text.turn_end import TurnEnd
from workers.model.model_config import read_model_config

IDS = {"<|im_end|>": 1, "<|im_start|>": 2, "<end_of_turn>": 3, "<|end|>": 4, "<|eot_id|>": 5, "<turn|>": 6}
IDS |= {"<|end_of_text|>": 7, "<seed:eos>": 8, "<|user|>": 9, "<|assistant_end|>": 10, "<tool_call>": 11}


def found(template: str, ids: dict[str, int] = IDS) -> tuple[int, ...]:
    async def ask() -> tuple[int, ...]:
        renderer = ChatRenderer(ChatTemplate(template, {}))
        try:
            return await TurnEnd(renderer, ids).token_ids(0.0)
        finally:
            await renderer.close()

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("family", "token"),
    [
        ("hermes", "<|im_end|>"),
        ("llama3", "<|eot_id|>"),
        ("gemma3", "<end_of_turn>"),
        ("phi4", "<|end|>"),
        ("gemma4", "<turn|>"),
        ("granite", "<|end_of_text|>"),
        ("seed_oss", "<seed:eos>"),
        ("apertus", "<|assistant_end|>"),
        # Where nothing ends a turn, the beginning of the user's does.
        ("glm4", "<|user|>"),
    ],
)
def test_the_template_says_what_ends_a_turn(family: str, token: str) -> None:
    assert found(FAMILIES[family]) == (IDS[token],)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",
        "{{ raise_exception('no chats') }}",
        "{{ messages[0].content }}",
        "{% for m in messages %}{{ m.content }}<|other|>{% endfor %}",
    ],
)
def test_a_template_may_end_turns_with_no_token(template: str) -> None:
    assert found(template) == ()


def test_the_longest_token_is_meant() -> None:
    ids = {"<|end|>": 1, "<|end|>\n": 2, "<": 3}
    assert found("{% for m in messages %}{{ m.content }}<|end|>\n{% endfor %}", ids) == (2,)


class SlowOnce(ChatRenderer):
    """Breaks its bound the first time."""

    was_slow = False

    async def try_render(
        self, chat: Chat, *, wall_s: float, max_chars: int, party: str = ""
    ) -> Rendered | RenderRefused:
        if not self.was_slow:
            self.was_slow = True
            raise BoundsBrokenError("it did not end")
        return await super().try_render(chat, wall_s=wall_s, max_chars=max_chars, party=party)


async def test_a_template_that_takes_too_long_is_asked_again() -> None:
    source = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    renderer = SlowOnce(ChatTemplate(source, {}))
    try:
        end = TurnEnd(renderer, IDS)
        assert [await end.token_ids(0.0) for _ in range(3)] == [(), (4,), (4,)]
    finally:
        await renderer.close()


@pytest.mark.parametrize("by_generation_config", [True, False])
def test_all_end_tokens_of_a_list_are_read(tmp_path: Path, by_generation_config: bool) -> None:
    folder = write_model(tmp_path / "m")
    if by_generation_config:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3, 7]}))
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [0, 3, 7]}))
    assert sorted(read_model_config(folder).eos_token_ids) == [0, 3, 7]


async def test_a_chat_ends_at_the_end_of_a_turn_and_a_text_does_not(tmp_path: Path) -> None:
    """The checkpoint names token 0 alone; its template ends turns with another."""
    template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    harness = GatewayHarness(write_model(tmp_path / "m", template))
    (end,) = encode("<|im_end|>")
    try:
        replica = await harness.add_replica("d0", "decode")
        _, address = await harness.add_gateway(harness.config())
        client = harness.client(address)
        chat = [Turn("user", "the quick")]
        await client.complete(chat, GenerateOptions(max_tokens=2))
        await client.complete(chat, GenerateOptions(max_tokens=2, stop_token_ids=(end, 5)))
        await client.complete(chat, GenerateOptions(max_tokens=2, ignore_eos=True))
        await client.complete("the quick", GenerateOptions(max_tokens=2))
        ends = [it.sampling.stop_token_ids for it in replica.submissions]
        assert ends == [(end,), (end, 5), (), ()]
    finally:
        await harness.close()
