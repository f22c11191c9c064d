"""Chat messages to text, by the model's own template, in a process of its own that may be killed.

A template comes with the weights and may be hostile. It runs in jinja2's immutable sandbox, which keeps it
from Python's objects, inside a child process with bounded memory, time and output, which keeps an endless
loop or a huge string from the gateway (`cluster.text.bounded_process`).
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import structs

from cluster.errors import TemplateRefusedError
from cluster.text.bounded_process import BoundedProcess, BoundsBrokenError, serve
from kvtransfer.codec import Codec, Message, Part
from workers.errors import CheckpointError
from workers.model.model_config import read_json

_RENDER_TIMEOUT_S = 5.0
_MAX_CPU_S = 6
_MAX_MEMORY_BYTES = 1 << 30
# Follows the content of a final message that is continued; the text ends there.
_OPEN_END = "\ue000continued\ue000"
# OpenAI's later name for the role; few templates know it, and others drop such a turn, or refuse it.
_SYSTEM, _DEVELOPER = "system", "developer"
_KNOWS_DEVELOPER = re.compile(rf"""['"]{_DEVELOPER}['"]""")
# Names of templates, where a model has several.
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Whatever else a template makes Python raise ends the child, which the parent reports and replaces.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class CalledTool(Part, frozen=True):
    """A tool call in an assistant's turn; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class ChatTurn(Part, frozen=True):
    """One message of a conversation."""

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[CalledTool, ...] = ()
    tool_call_id: str = ""
    name: str = ""


class ChatTool(Part, frozen=True):
    """A function that the model may call; `parameters_json` is the JSON schema of its arguments ("": any)."""

    name: str
    description: str = ""
    parameters_json: str = ""


class Chat(Part, frozen=True):
    """A conversation, and how it is rendered. `template_args_json` is a JSON object of further variables."""

    turns: tuple[ChatTurn, ...]
    tools: tuple[ChatTool, ...] = ()
    add_generation_prompt: bool = True
    # The last turn is left open.
    continue_final_message: bool = False
    template_args_json: str = ""


class ChatTemplate(Part, frozen=True):
    """The template's source, and the special tokens that it may name. Some models have another one for chats
    with tools, `tool_source` ("": the same)."""

    source: str
    special_tokens: dict[str, str]
    tool_source: str = ""

    def source_for(self, chat: Chat) -> str:
        """Return the source by which the chat is rendered."""
        return self.tool_source if chat.tools and self.tool_source else self.source


class RenderOrder(Message, frozen=True):
    """Parent to child. `wall_s` is what `strftime_now` shows."""

    template: ChatTemplate
    chat: Chat
    wall_s: float
    max_chars: int


class Rendered(Message, frozen=True):
    """The text."""

    text: str


class RenderRefused(Message, frozen=True):
    """The template refused the messages, or did what it may not."""

    reason: str


ORDER_CODEC: Codec[RenderOrder] = Codec(RenderOrder)
RESULT_CODEC: Codec[Rendered | RenderRefused] = Codec(Rendered | RenderRefused)


def load_chat_template(model_dir: Path) -> ChatTemplate | None:
    """From files in the model's folder, else `tokenizer_config.json`; None when the model has none."""
    path = model_dir / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    sources = _template_files(model_dir)
    if _DEFAULT not in sources:
        sources = {**_listed_templates(config.get("chat_template")), **sources}
    if _DEFAULT not in sources:
        return None
    tokens: dict[str, str] = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    return ChatTemplate(sources[_DEFAULT], tokens, sources.get(_WITH_TOOLS, ""))


def _template_files(model_dir: Path) -> dict[str, str]:
    """Return the templates that are files of their own, by name."""
    files = {_DEFAULT: model_dir / "chat_template.jinja"}
    files[_WITH_TOOLS] = model_dir / "additional_chat_templates" / f"{_WITH_TOOLS}.jinja"
    sources: dict[str, str] = {}
    for name, file in files.items():
        if file.is_file():
            try:
                sources[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{file}: unreadable: {error}") from error
    return sources


def _listed_templates(found: object) -> dict[str, str]:
    """Return the templates of the tokenizer's configuration, which has one, or several by name."""
    if not isinstance(found, list):
        found = [{"name": _DEFAULT, "template": found}]
    named = [(it.get("name"), it.get("template")) for it in found if isinstance(it, dict)]
    return {name: source for name, source in named if isinstance(name, str) and isinstance(source, str)}


class ChatRenderer:
    """The parent's side."""

    def __init__(self, template: ChatTemplate, *, render_timeout_s: float = _RENDER_TIMEOUT_S) -> None:
        self._template = template
        self._process = BoundedProcess("cluster.text.chat_template", timeout_s=render_timeout_s)

    async def render(self, chat: Chat, *, wall_s: float, max_chars: int, party: str = "") -> str:
        """The prompt's text; `TemplateError` says what the template did. Parties take turns."""
        result: Rendered | RenderRefused
        try:
            result = await self.try_render(chat, wall_s=wall_s, max_chars=max_chars, party=party)
        except BoundsBrokenError as error:
            result = RenderRefused(str(error))
        if isinstance(result, RenderRefused):
            problem = f"the model's chat template failed: {result.reason}"
            raise TemplateRefusedError(f"{problem}; send text instead")
        return result.text

    async def try_render(
        self, chat: Chat, *, wall_s: float, max_chars: int, party: str = ""
    ) -> Rendered | RenderRefused:
        """Return what the template made of the chat; raise `BoundsBrokenError` where it broke a bound."""
        order = RenderOrder(template=self._template, chat=chat, wall_s=wall_s, max_chars=max_chars)
        return RESULT_CODEC.decode(await self._process.exchange(ORDER_CODEC.encode(order), party))

    async def start(self) -> None:
        """Start the child ahead of the first chat."""
        await self._process.start()

    async def close(self) -> None:
        """End the child."""
        await self._process.close()


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here its content is simply shown."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateNamespace(jinja2.utils.Namespace):
    """A namespace without underscore names."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


def render(order: RenderOrder) -> Rendered | RenderRefused:
    """What the child does with an order: as transformers' `apply_chat_template`, plus the bound of output."""
    try:
        chat, source = order.chat, order.template.source_for(order.chat)
        context: dict[str, Any] = {
            **order.template.special_tokens,
            "documents": None,
            **(json.loads(chat.template_args_json) if chat.template_args_json else {}),
            "messages": _messages(chat, source),
            "tools": [_tool(tool) for tool in chat.tools] or None,
            "add_generation_prompt": chat.add_generation_prompt,
            "strftime_now": lambda pattern: datetime.fromtimestamp(order.wall_s).strftime(pattern),
        }
        pieces: list[str] = []
        num_chars = 0
        for piece in _compiled(source).generate(context):
            num_chars += len(piece)
            if num_chars > order.max_chars:
                return RenderRefused(f"its text exceeds {order.max_chars} characters")
            pieces.append(piece)
    except _RENDER_ERRORS as error:
        return RenderRefused(f"{type(error).__name__}: {str(error)[:500]}")
    text = "".join(pieces)
    if not order.chat.continue_final_message:
        return Rendered(text)
    before, mark, _ = text.rpartition(_OPEN_END)
    return Rendered(before) if mark else RenderRefused("it does not show the final message, to be continued")


def _messages(chat: Chat, source: str) -> list[dict[str, Any]]:
    """The turns as the template knows them; the end of one to be continued is marked."""
    turns = chat.turns if _KNOWS_DEVELOPER.search(source) else _without_developer(chat.turns)
    messages = [_message(turn) for turn in turns]
    if chat.continue_final_message:
        messages[-1]["content"] += _OPEN_END
    return messages


def _without_developer(turns: tuple[ChatTurn, ...]) -> list[ChatTurn]:
    """What the developer says is said by the system, in one turn with what that says just before or behind:
    few templates show a second one."""
    found: list[ChatTurn] = []
    was_developer = False
    for turn in turns:
        is_developer = turn.role == _DEVELOPER
        said = structs.replace(turn, role=_SYSTEM) if is_developer else turn
        if found and found[-1].role == said.role == _SYSTEM and (is_developer or was_developer):
            found[-1] = structs.replace(found[-1], content=f"{found[-1].content}\n\n{said.content}")
        else:
            found.append(said)
        was_developer = is_developer
    return found


def _message(turn: ChatTurn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments or "{}")},
            }
            for call in turn.tool_calls
        ]
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    if turn.name:
        message["name"] = turn.name
    return message


def _tool(tool: ChatTool) -> dict[str, Any]:
    parameters = json.loads(tool.parameters_json) if tool.parameters_json else {"type": "object"}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


@lru_cache(maxsize=4)
def _compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = _TemplateNamespace
    return environment.from_string(source)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def answer(order: bytes) -> bytes:
    """Return the result of an encoded order."""
    return RESULT_CODEC.encode(render(ORDER_CODEC.decode(order)))


if __name__ == "__main__":
    serve(answer, max_memory_bytes=_MAX_MEMORY_BYTES, max_cpu_s=_MAX_CPU_S)
