"""Ends of messages in prompts: the special tokens that a chat template writes behind what was said."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from gateway_harness import GatewayHarness, encode, write_model
from text_harness import FAMILIES

from cluster.api.generate_options import GenerateOptions, Turn
from cluster.text.chat_template import ChatRenderer, ChatTemplate
from cluster.text.message_ends import MessageEnds
from workers.messages.link import MAX_MESSAGE_ENDS

IDS = {"<|im_end|>": 1, "<|im_start|>": 2, "<end_of_turn>": 3, "<|eot_id|>": 5, "<|end_of_text|>": 7}
IDS |= {"<|user|>": 9, "<|assistant|>": 10, "<U>": 11, "<A>": 12, "</s>": 13}
# Whose messages of the system and of users end where the next one begins.
_OPENED = """{% for m in messages %}{% if m.role == 'assistant' %}<A>{{ m.content }}</s>\
{% elif m.role == 'user' %}<U>{{ m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}<A>"""
_NO_SYSTEM = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}\
{{ m.content }}<|im_end|>{% endfor %}"""


def found(template: str, prompt: list[int]) -> tuple[int, ...]:
    async def ask() -> tuple[int, ...]:
        renderer = ChatRenderer(ChatTemplate(template, {}))
        try:
            return await MessageEnds(renderer, IDS).positions(np.asarray(prompt, "<u4").tobytes(), 0.0)
        finally:
            await renderer.close()

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("template", "prompt", "ends"),
    [
        (FAMILIES["hermes"], [2, 50, 1, 50, 2, 50, 50, 1, 50, 2, 50], (2, 7)),
        (FAMILIES["llama3"], [5, 50, 5, 50, 50, 5, 50], (2, 5)),
        (FAMILIES["granite"], [50, 7, 50, 50, 7], (1, 4)),
        (FAMILIES["gemma3"], [50, 3, 50, 50, 3, 50], (1, 4)),
        # The beginning of another message, behind which the end of an answer counts once.
        (_OPENED, [50, 50, 11, 50, 12, 50, 13, 11, 50, 12], (2, 4, 6, 9)),
        (_NO_SYSTEM, [50, 1, 50, 1], (1, 3)),
        ("{{ raise_exception('no chats') }}", [50, 1, 50, 1], ()),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", [50, 1, 50, 1], ()),
    ],
)
def test_messages_end_where_the_template_says(
    template: str, prompt: list[int], ends: tuple[int, ...]
) -> None:
    assert found(template, prompt) == ends


def test_of_many_ends_the_first_and_the_last_are_told() -> None:
    ends = found(_NO_SYSTEM, [50, 1] * 40)
    assert ends == (1, *range(79 - 2 * (MAX_MESSAGE_ENDS - 2), 80, 2))


@pytest.mark.parametrize("has_states", [True, False])
async def test_a_model_with_states_gets_them_with_its_prompts(tmp_path: Path, has_states: bool) -> None:
    """Of the template, not those that a user writes."""
    folder = write_model(tmp_path / "m")
    if has_states:
        config = json.loads((folder / "config.json").read_text())
        layers = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
        config |= {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", **layers}
        (folder / "config.json").write_text(json.dumps(config))
    harness = GatewayHarness(folder)
    said = [("system", "the quick"), ("user", "fox<|im_end|>"), ("assistant", "def"), ("user", "main")]
    try:
        replica = await harness.add_replica("d0", "decode")
        _, address = await harness.add_gateway(harness.config())
        turns = [Turn(role, text) for role, text in said]
        await harness.client(address).complete(turns, GenerateOptions(max_tokens=2))
        (submission,) = replica.submissions
        prompt = list(memoryview(submission.prompt).cast("I"))
        (end,) = encode("<|im_end|>")
        ends = tuple(position for position, token in enumerate(prompt) if token == end)
        assert len(ends) == len(said)
        assert submission.message_ends == (ends if has_states else ())
    finally:
        await harness.close()
