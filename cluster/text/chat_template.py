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
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import structs

from cluster.errors import TemplateRefusedError
from cluster.text.bounded_process import BoundedProcess, BoundsBrokenError, serve
from cluster.text.special_text import SpecialText, StandIns, texts_of, with_plain
from cluster.text.template_dialects import in_dialect
from kvtransfer.codec import Codec, Message, Part
from workers.errors import CheckpointError
from workers.model.model_config import read_json

_RENDER_TIMEOUT_S = 5.0
_MAX_CPU_S = 6
_MAX_MEMORY_BYTES = 1 << 30
# Follows the content of a final message that is continued; the text ends there.
_OPEN_END = "\ue000continued\ue000"
# OpenAI's later name for the role; few templates know it, and others drop such a turn, or refuse it.
_SYSTEM, _DEVELOPER, _ASSISTANT = "system", "developer", "assistant"
_KNOWS_DEVELOPER = re.compile(rf"""['"]{_DEVELOPER}['"]""")
# The schema of a tool without parameters, and the name under which arguments that are no object are shown.
NO_PARAMETERS = {"type": "object", "properties": {}}
_CUT_ARGUMENTS = "arguments"
# A variable for our own filters, which no template can name.
_STAND_INS = "<stand-ins>"
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
# Names of templates, where a model has several.
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Any other exception of a template in Python ends the child, which the parent reports and replaces.
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
    """A message of a conversation."""

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[CalledTool, ...] = ()
    tool_call_id: str = ""
    name: str = ""


class ChatTool(Part, frozen=True):
    """A function that the model may call. `parameters_json` is the JSON schema of its arguments; "": it takes
    none."""

    name: str
    description: str = ""
    parameters_json: str = ""


class Chat(Part, frozen=True):
    """A conversation, and how it is rendered. `template_args_json` is a JSON object of further variables."""

    turns: tuple[ChatTurn, ...]
    tools: tuple[ChatTool, ...] = ()
    add_generation_prompt: bool = True
    # Whether the last turn is left open.
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
    """An order from parent to child. `wall_s` is the time that `strftime_now` shows; `special` are the
    special tokens that are text in users' input (None: they are special there too)."""

    template: ChatTemplate
    chat: Chat
    wall_s: float
    max_chars: int
    special: SpecialText | None = None


class Rendered(Message, frozen=True):
    """The text, and where in it the texts of special tokens begin that are not the template's own."""

    text: str
    plain_at: tuple[int, ...] = ()

    @property
    def markup(self) -> str:
        """The text to search for the template's own marks."""
        return with_plain(self.text, self.plain_at)


class RenderRefused(Message, frozen=True):
    """The template refused the messages, or did something forbidden."""

    reason: str


ORDER_CODEC: Codec[RenderOrder] = Codec(RenderOrder)
RESULT_CODEC: Codec[Rendered | RenderRefused] = Codec(Rendered | RenderRefused)


def load_chat_template(model_dir: Path) -> ChatTemplate | None:
    """Load the template from files in the model's folder, else from `tokenizer_config.json`; None when the
    model has none."""
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

    def __init__(
        self,
        template: ChatTemplate,
        special: SpecialText | None = None,
        *,
        render_timeout_s: float = _RENDER_TIMEOUT_S,
    ) -> None:
        """The tokens of `special` are text where users write them."""
        self._template = template
        self._special = special
        self._process = BoundedProcess("cluster.text.chat_template", timeout_s=render_timeout_s)

    async def render(self, chat: Chat, *, wall_s: float, max_chars: int, party: str = "") -> Rendered:
        """Return the prompt; `TemplateError` describes the template's failure. Parties take turns."""
        result: Rendered | RenderRefused
        try:
            result = await self.try_render(chat, wall_s=wall_s, max_chars=max_chars, party=party)
        except BoundsBrokenError as error:
            result = RenderRefused(str(error))
        if isinstance(result, RenderRefused):
            problem = f"the model's chat template failed: {result.reason}"
            raise TemplateRefusedError(f"{problem}; send text instead")
        return result

    async def try_render(
        self, chat: Chat, *, wall_s: float, max_chars: int, party: str = ""
    ) -> Rendered | RenderRefused:
        """Return the template's output for the chat; raise `BoundsBrokenError` where it broke a bound."""
        order = RenderOrder(
            template=self._template, chat=chat, wall_s=wall_s, max_chars=max_chars, special=self._special
        )
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
    """Render an order in the child: as transformers' `apply_chat_template` does, plus the bound of output.

    The arguments of a call that are no JSON object, because a limit cut them, go to the template as text. One
    that can write an object alone gets them as its only value.
    """
    result = _rendered(order, cut_arguments_key="")
    if isinstance(result, RenderRefused) and any(
        _is_cut(call) for turn in order.chat.turns for call in turn.tool_calls
    ):
        other = _rendered(order, cut_arguments_key=_CUT_ARGUMENTS)
        return other if isinstance(other, Rendered) else result
    return result


def _rendered(order: RenderOrder, *, cut_arguments_key: str) -> Rendered | RenderRefused:
    stand_ins = None
    try:
        chat, source = order.chat, order.template.source_for(order.chat)
        args = json.loads(chat.template_args_json) if chat.template_args_json else {}
        messages = _messages(chat, source, cut_arguments_key)
        tools = [_tool(tool) for tool in chat.tools] or None
        if order.special is not None:
            said = texts_of([args, messages, tools])
            stand_ins = StandIns(order.special, said, source)
            if stand_ins:
                args = {name: stand_ins.put(value) for name, value in args.items()}
                messages = [_with_stand_ins(message, stand_ins) for message in messages]
                tools = stand_ins.put(tools)
        messages, tools = in_dialect(messages, tools, source)
        if chat.continue_final_message:
            messages[-1]["content"] += _OPEN_END
        context: dict[str, Any] = {
            **order.template.special_tokens,
            "documents": None,
            **args,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": chat.add_generation_prompt,
            "strftime_now": lambda pattern: datetime.fromtimestamp(order.wall_s).strftime(pattern),
            _STAND_INS: stand_ins,
        }
        pieces: list[str] = []
        num_chars = 0
        for piece in _compiled(source).generate(context):
            num_chars += len(piece)
            if num_chars > order.max_chars:
                return RenderRefused(f"its text exceeds {order.max_chars} characters")
            pieces.append(piece)
    except _RENDER_ERRORS as error:
        reason = f"{type(error).__name__}: {str(error)[:500]}"
        return RenderRefused(stand_ins.taken_out(reason)[0] if stand_ins else reason)
    text = "".join(pieces)
    if order.chat.continue_final_message:
        text, mark, _ = text.rpartition(_OPEN_END)
        if not mark:
            return RenderRefused("it does not show the final message, to be continued")
    return Rendered(*stand_ins.taken_out(text)) if stand_ins else Rendered(text)


def _with_stand_ins(message: dict[str, Any], stand_ins: StandIns) -> dict[str, Any]:
    """Return the message with stand-ins; marks that an answer may consist of stay in those of the
    assistant."""
    is_answer = message["role"] == _ASSISTANT
    return {
        key: stand_ins.put(value, is_answer=is_answer and key == "content") for key, value in message.items()
    }


def _messages(chat: Chat, source: str, cut_arguments_key: str) -> list[dict[str, Any]]:
    """Return the turns as the template knows them."""
    turns = chat.turns if _KNOWS_DEVELOPER.search(source) else _without_developer(chat.turns)
    return [_message(turn, cut_arguments_key) for turn in turns]


def _without_developer(turns: tuple[ChatTurn, ...]) -> list[ChatTurn]:
    """Return the turns with the developer's given to the system, merged with the system's own turn just
    before or behind: few templates show a second one."""
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


def _message(turn: ChatTurn, cut_arguments_key: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call, cut_arguments_key)},
            }
            for call in turn.tool_calls
        ]
    if turn.tool_call_id:
        message["tool_call_id"] = turn.tool_call_id
    if turn.name:
        message["name"] = turn.name
    return message


def _arguments(call: CalledTool, cut_arguments_key: str) -> dict[str, Any] | str:
    """Return the arguments of a call: an object, or where they are cut their text, under this key if any."""
    if not _is_cut(call):
        found: dict[str, Any] = json.loads(call.arguments or "{}")
        return found
    return {cut_arguments_key: call.arguments} if cut_arguments_key else call.arguments


def _is_cut(call: CalledTool) -> bool:
    """Return whether the arguments of a call are no JSON object."""
    try:
        return not isinstance(json.loads(call.arguments or "{}"), dict)
    except (ValueError, RecursionError):
        return True


def _tool(tool: ChatTool) -> dict[str, Any]:
    parameters = json.loads(tool.parameters_json) if tool.parameters_json else NO_PARAMETERS
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


@jinja2.pass_context
def _to_json(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return the value as JSON, without the HTML escapes of jinja2's own filter."""
    stand_ins: StandIns | None = context.get(_STAND_INS)
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii and not stand_ins,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    if ensure_ascii and stand_ins:  # which are characters to keep
        return _NOT_ASCII.sub(lambda it: it[0] if it[0] in stand_ins else json.dumps(it[0])[1:-1], text)
    return text


def answer(order: bytes) -> bytes:
    """Return the result of an encoded order."""
    return RESULT_CODEC.encode(render(ORDER_CODEC.decode(order)))


if __name__ == "__main__":
    serve(answer, max_memory_bytes=_MAX_MEMORY_BYTES, max_cpu_s=_MAX_CPU_S)
