"""Chat templates: as transformers renders them, and walled in when they are hostile."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import TEMPLATE, GatewayHarness, expected, write_model
from slow_cases import slow_but
from transformers import PreTrainedTokenizerFast

from cluster.api.generate_options import GenerateOptions, Turn
from cluster.errors import CallError, TemplateError
from cluster.text.chat_template import (
    Chat,
    ChatRenderer,
    ChatTemplate,
    ChatTool,
    ChatTurn,
    load_chat_template,
)
from workers.errors import CheckpointError

TURNS = [
    ChatTurn("system", "be brief"),
    ChatTurn("user", "say {{ 1 + 1 }} & <b>\n"),
    ChatTurn("assistant", "ok"),
]
TEMPLATES = [
    TEMPLATE,
    # whitespace control, loop variables, namespaces, special tokens, tojson, filters
    """{%- set ns = namespace(system='') -%}
    {%- for message in messages %}
        {%- if message['role'] == 'system' %}
            {%- set ns.system = message.content | trim %}
        {%- elif message.role == 'user' %}
            {{- bos_token + '[INST] ' + ns.system + message.content | upper + ' [/INST]' }}
        {%- else %}
            {{- ' ' ~ message.content ~ eos_token }}
        {%- endif %}
    {%- endfor %}
    {{ messages | length }} {{ messages[0] | tojson }}""",
    # lines and indents that trim_blocks and lstrip_blocks remove
    """{% for message in messages %}
    {% if loop.first %}
first
    {% endif %}
{{ loop.index }}:{{ message.role }}={{ message.content }}
{% if message.role == 'user' %}{% continue %}{% endif %}
{% generation %}shown{% endgeneration %}
{% endfor %}
{{ tools is none }} {{ undefined_thing is defined }} {{ add_generation_prompt }}""",
]
HOSTILE = {
    "an endless loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a huge range": "{% for a in range(10**9) %}x{% endfor %}",
    "a huge string": "{{ 'a' * 10**10 }}",
    "a huge format": "{{ '{:>9999999999}'.format(1) }}",
    "much output": "{% for a in range(99999) %}{{ 'abcdefgh' * 99 }}{% endfor %}",
    "python's objects": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a change of its input": "{{ messages.append(1) }}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a wrong type": "{{ 1 + 'a' }}",
    "an unknown filter": "{{ messages | launch }}",
    "no syntax": "{{ unclosed",
    "an import": "{% import 'os' as os %}",
    "underscore names": "{% set ns = namespace(_x=1) %}{% set ns.__class__ = 1 %}",
}


async def render(
    template: ChatTemplate, turns: list[ChatTurn], timeout_s: float = 5.0, opens: bool = True
) -> str:
    renderer = ChatRenderer(template, render_timeout_s=timeout_s)
    try:
        chat = Chat(tuple(turns), add_generation_prompt=opens)
        return (await renderer.render(chat, wall_s=0.0, max_chars=100_000)).text
    finally:
        await renderer.close()


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("opens", [True, False])
async def test_the_text_is_that_of_transformers(tmp_path: Path, source: str, opens: bool) -> None:
    folder = write_model(tmp_path, source)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["bos_token"] = "<|im_start|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    reference: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": turn.role, "content": turn.content} for turn in TURNS]
    wanted = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens)
    template = load_chat_template(folder)
    assert template is not None
    assert await render(template, TURNS, opens=opens) == wanted


# The next chat is rendered by a new process: some cases are enough for the fast tests.
@pytest.mark.parametrize(
    "what",
    slow_but(
        HOSTILE, "an endless loop", "a huge string", "python's objects", "endless recursion", "no syntax"
    ),
)
async def test_a_hostile_template_is_an_error_and_the_next_chat_works(what: str) -> None:
    renderer = ChatRenderer(ChatTemplate(HOSTILE[what], {}), render_timeout_s=0.5)
    for _ in range(2):
        with pytest.raises(TemplateError):
            await renderer.render(Chat(tuple(TURNS)), wall_s=0.0, max_chars=10_000)
    await renderer.close()
    assert "be brief" in await render(ChatTemplate(TEMPLATE, {}), TURNS)


async def test_a_template_may_refuse_with_its_own_words() -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TemplateError, match="roles must alternate"):
        await render(ChatTemplate(source, {}), TURNS)


# As Qwen's: what it does not know is not shown.
KNOWS_FEW = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}[{{ m.role }}: {{ m.content }}]"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        ([("developer", "In French."), ("user", "hi")], "[system: In French.][user: hi]"),
        (
            [("system", "Be brief."), ("developer", "In French."), ("user", "hi")],
            "[system: Be brief.\n\nIn French.][user: hi]",
        ),
        (
            [("developer", "In French."), ("system", "Be brief."), ("developer", "Be kind.")],
            "[system: In French.\n\nBe brief.\n\nBe kind.]",
        ),
        (
            [("user", "hi"), ("assistant", "yes?"), ("developer", "In French."), ("user", "so")],
            "[user: hi][assistant: yes?][system: In French.][user: so]",
        ),
        ([("system", "a"), ("system", "b")], "[system: a][system: b]"),
    ],
)
async def test_what_a_developer_says_is_the_system_s(turns: list[tuple[str, str]], text: str) -> None:
    said = [ChatTurn(role, content) for role, content in turns]
    assert await render(ChatTemplate(KNOWS_FEW, {}), said) == text


async def test_a_template_that_knows_developers_shows_them() -> None:
    source = KNOWS_FEW.replace("['system',", "['system', \"developer\",")
    turns = [ChatTurn("system", "a"), ChatTurn("developer", "b")]
    assert await render(ChatTemplate(source, {}), turns) == "[system: a][developer: b]"


async def test_the_date_is_an_argument() -> None:
    text = await render(ChatTemplate("{{ strftime_now('%Y') }}", {}), TURNS)
    assert text in ("1969", "1970")


def test_where_templates_are_found(tmp_path: Path) -> None:
    folder = write_model(tmp_path, None)
    assert load_chat_template(folder) is None
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokens = {"eos_token": "<|end|>", "pad_token": "<|pad|>"}
    assert load_chat_template(folder) == ChatTemplate("d", tokens, "t")
    (folder / "chat_template.jinja").write_text("file")
    assert load_chat_template(folder) == ChatTemplate("file", tokens), "files replace what the list says"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert load_chat_template(folder) == ChatTemplate("file", tokens, "tools")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: unreadable"):
        load_chat_template(folder)
    for damaged in ("{", "7", "[" * 100_000):
        (folder / "tokenizer_config.json").write_text(damaged)
        with pytest.raises(CheckpointError, match="tokenizer_config"):
            load_chat_template(folder)


async def test_a_chat_with_tools_is_rendered_by_the_template_for_tools(tmp_path: Path) -> None:
    folder = write_model(tmp_path, None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    with_tools = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}" + TEMPLATE
    config["chat_template"] = [
        {"name": "default", "template": TEMPLATE},
        {"name": "tool_use", "template": with_tools},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_chat_template(folder)
    assert template is not None
    reference: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": turn.role, "content": turn.content} for turn in TURNS]
    renderer = ChatRenderer(template)
    for tools in ((), (ChatTool("find", "finds"),)):
        shown = [
            {"type": "function", "function": {"name": it.name, "description": it.description}} for it in tools
        ]
        wanted = reference.apply_chat_template(messages, tools=shown or None, tokenize=False)
        chat = Chat(tuple(TURNS), tools, add_generation_prompt=False)
        assert (await renderer.render(chat, wall_s=0.0, max_chars=100_000)).text == wanted
        assert wanted.startswith("find ") == bool(tools)
    await renderer.close()


@pytest.mark.parametrize("templates", [[], ["default"], [{"name": "default"}], [{"template": "d"}], 7])
def test_templates_that_are_none_are_none(tmp_path: Path, templates: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert load_chat_template(tmp_path) is None


@pytest.fixture
async def hostile_gateway(tmp_path: Path) -> AsyncIterator[GatewayHarness]:
    built = GatewayHarness(write_model(tmp_path, HOSTILE["a huge string"]))
    yield built
    await built.close()


async def test_a_hostile_template_ends_its_own_request_only(hostile_gateway: GatewayHarness) -> None:
    await hostile_gateway.add_replica("d0", "decode")
    _, address = await hostile_gateway.add_gateway()
    client = hostile_gateway.client(address)
    with pytest.raises(CallError, match="INVALID_ARGUMENT") as caught:
        await client.complete([Turn("user", "hi")])
    assert [field for field, _ in caught.value.fields] == ["chat"]
    done = await client.complete("the fox", GenerateOptions(seed=1, max_tokens=3))
    assert list(done.token_ids[0]) == expected(1, 3, "the fox")
