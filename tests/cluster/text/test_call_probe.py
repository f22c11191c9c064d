"""How a template writes tool calls, found by what it makes of some; where it shows none, by its marks."""

from __future__ import annotations

import pytest
from text_harness import FAMILIES

from cluster.text.call_probe import CallProbe
from cluster.text.chat_template import ChatRenderer, ChatTemplate
from cluster.text.output_parsers.choose import OutputParsers

_CALLS = "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
_END = "{% endfor %}{% endfor %}"
_JSON = '{"name": "{{ call.function.name }}", "%s": {{ call.function.arguments | tojson }}'
_SINGLE = "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}\
{{ raise_exception('one at a time') }}{% endif %}{% endfor %}"
_TAGS = (
    "<function={{ call.function.name }}>\n{% for name, value in call.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>"
)
# With notes that name the marks of another family.
TEMPLATES = {
    "hermes": f"{_CALLS}\n<tool_call>\n{_JSON % 'arguments'}}}\n</tool_call>{_END}",
    "llama3": f"{{# no <tool_call> #}}{_CALLS}{_JSON % 'parameters'}}}{_END}",
    "mistral": f'{_CALLS}[TOOL_CALLS][{_JSON % "arguments"}, "id": "{{{{ call.id }}}}"}}]{_END}',
    "mistral_args": _CALLS
    + "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}"
    + _END,
    "qwen3_coder": f"{{# not as Hermes #}}{_CALLS}<tool_call>\n{_TAGS}\n</tool_call>{_END}",
    # <tool_call> is no sign of JSON.
    None: _CALLS + "<tool_call>{{ call.function.name }}<key>{{ call.function.arguments }}</tool_call>" + _END,
}


async def probed(template: str, *, finds_notation: bool = True, timeout_s: float = 20.0) -> OutputParsers:
    renderer = ChatRenderer(ChatTemplate(template, {}), render_timeout_s=timeout_s)
    marked = OutputParsers.choose(template, "auto", "auto")
    try:
        return await CallProbe(marked, renderer, finds_notation=finds_notation).parsers(0.0)
    finally:
        await renderer.close()


@pytest.mark.parametrize("notation", TEMPLATES)
async def test_the_notation_is_what_the_template_writes(notation: str | None) -> None:
    found = await probed(TEMPLATES[notation])
    assert (found.call_notation, found.allows_several) == (notation, True)


@pytest.mark.parametrize(
    ("family", "tools"),
    [
        *((name, name) for name in ("seed_oss", "glm45", "glm4", "granite", "phi4", "apertus", "olmo3")),
        *((name, name) for name in ("gemma3", "gemma4", "cohere2", "harmony")),
        ("smollm3", "hermes"),
        ("mistral, named", "mistral"),
    ],
)
async def test_each_family_s_template_writes_its_notation(family: str, tools: str) -> None:
    found = await probed(FAMILIES[family])
    assert (found.tools, found.allows_several) == (tools, True)


async def test_a_template_that_refuses_two_calls_means_one() -> None:
    found = await probed(_SINGLE + TEMPLATES["llama3"])
    assert (found.call_notation, found.allows_several) == ("llama3", False)


async def test_a_template_that_shows_the_first_call_alone_means_one() -> None:
    template = TEMPLATES["hermes"].replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    assert (await probed(template)).allows_several is False


@pytest.mark.parametrize(
    "template", ["{# <tool_call> #}{{ messages[0].content }}", "{{ raise_exception('no <tool_call>') }}"]
)
async def test_where_no_call_is_shown_marks_decide(template: str) -> None:
    found = await probed(template)
    assert (found.call_notation, found.allows_several) == ("hermes", True)


async def test_a_configured_notation_stays() -> None:
    renderer = ChatRenderer(ChatTemplate(_SINGLE + TEMPLATES["hermes"], {}))
    named = OutputParsers.choose(TEMPLATES["hermes"], "llama3", "auto")
    found = await CallProbe(named, renderer, finds_notation=False).parsers(0.0)
    await renderer.close()
    assert (found.call_notation, found.allows_several) == ("llama3", False)


async def test_a_model_without_a_template_has_what_is_configured() -> None:
    parsers = OutputParsers.choose(None, "hermes", "auto")
    assert await CallProbe(parsers, None, finds_notation=True).parsers(0.0) == parsers


async def test_a_template_that_was_too_slow_is_asked_again() -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    renderer = ChatRenderer(ChatTemplate(loop, {}), render_timeout_s=0.2)
    marked = OutputParsers.choose("<tool_call>", "auto", "auto")
    probe = CallProbe(marked, renderer, finds_notation=True)
    assert await probe.parsers(0.0) == marked
    renderer._template = ChatTemplate(TEMPLATES["llama3"], {})
    renderer._process.timeout_s = 20.0
    assert (await probe.parsers(0.0)).call_notation == "llama3"
    await renderer.close()
