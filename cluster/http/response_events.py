"""The answers of /v1/responses: items of reasoning, text and function calls, whole or in named events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from cluster.http.answers import Maker, encode
from cluster.http.call_output import CallOutput, num_text_bytes, split_calls
from cluster.http.errors import HttpProblem
from cluster.http.logprobs import ContentLogprob, NoLogprobs, content_logprobs
from cluster.http.request_parts import NamedTool
from cluster.http.responses import ResponsesRequest, wants_logprobs
from cluster.http.sse import named_event
from cluster.http.usage import capped_max_tokens, num_cached
from cluster.proto.tandem.v1 import inference_pb2 as pb

_TOO_MANY, _SERVER_ERRORS = 429, 500


class _OutputText(msgspec.Struct):
    text: str
    annotations: list[Any]
    logprobs: list[ContentLogprob]
    type: str = "output_text"


class _ReasoningText(msgspec.Struct):
    text: str
    type: str = "reasoning_text"


class _MessageItem(msgspec.Struct):
    id: str
    content: list[_OutputText]
    status: str
    role: str = "assistant"
    type: str = "message"


class _ReasoningItem(msgspec.Struct):
    id: str
    content: list[_ReasoningText]
    status: str
    summary: list[Any] = []
    type: str = "reasoning"


class _FunctionCall(msgspec.Struct):
    id: str
    call_id: str
    name: str
    arguments: str
    status: str
    type: str = "function_call"


_Item = _MessageItem | _ReasoningItem | _FunctionCall


class _CachedDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class _ReasoningDetails(msgspec.Struct):
    reasoning_tokens: int


class _Usage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: _CachedDetails
    output_tokens: int
    output_tokens_details: _ReasoningDetails
    total_tokens: int
    # The value to which max_output_tokens was cut, by the room in the context or because of the cluster's
    # load.
    capped_max_tokens: int | UnsetType = UNSET


class _Error(msgspec.Struct):
    # One of server_error, rate_limit_exceeded and invalid_prompt.
    code: str
    message: str


class _Response(msgspec.Struct):
    id: str
    created_at: int
    model: str
    # One of in_progress, completed, incomplete and failed.
    status: str
    output: list[_Item]
    parallel_tool_calls: bool
    tool_choice: Any
    tools: list[Any]
    temperature: float
    top_p: float
    object: str = "response"
    error: _Error | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: None = None
    reasoning: Any = None
    text: Any = None
    truncation: str = "disabled"
    usage: _Usage | None = None
    user: None = None


class _EventTop(msgspec.Struct):
    token: str
    logprob: float


class _EventLogprob(msgspec.Struct):
    """The log-probability of a token in an event, which has no bytes, as OpenAI's has none."""

    token: str
    logprob: float
    top_logprobs: list[_EventTop]

    @classmethod
    def of(cls, entry: ContentLogprob) -> _EventLogprob:
        top = [_EventTop(item.token, item.logprob) for item in entry.top_logprobs]
        return cls(entry.token, entry.logprob, top)


class _ItemLogprobs:
    """The log-probabilities of an item's tokens, each as JSON already: in the item, and in events."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.in_events: list[Any] = []

    def add(self, entries: Iterable[pb.TokenLogprob], *, has_events: bool) -> int:
        """Append those of further tokens, and return how much is kept of them."""
        num_bytes = 0
        for entry in content_logprobs(entries):
            text = encode(entry)
            self.items.append(msgspec.Raw(text))
            num_bytes += len(text)
            if has_events:
                text = encode(_EventLogprob.of(entry))
                self.in_events.append(msgspec.Raw(text))
                num_bytes += len(text)
        return num_bytes

    def extend(self, others: _ItemLogprobs) -> None:
        """Append those that are kept elsewhere."""
        self.items += others.items
        self.in_events += others.in_events


class _Event(msgspec.Struct, omit_defaults=True):
    """Any of the events: each kind has some of these fields."""

    type: str
    # From 0, without gaps.
    sequence_number: int
    response: _Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: _Item | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: Any = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[_EventLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ResponsesAnswer:
    """The answer to one request, as a stream of named events or as a whole."""

    def __init__(self, body: ResponsesRequest, maker: Maker) -> None:
        self._body = body
        self._maker = maker
        self._streams = bool(body.stream)
        self._has_logprobs = wants_logprobs(body)
        self._output = CallOutput(NoLogprobs)
        self._has_begun = False
        self._num_events = 0
        self._items: list[_Item] = []
        # Parts of the last item, while it grows; "" where none does.
        self._open = ""
        self._texts: list[str] = []
        self._logprobs = _ItemLogprobs()
        # Log-probabilities of tokens without text so far, which may begin a message.
        self._waiting_logprobs = _ItemLogprobs()
        self._finish = 0
        # The events at the end have all of it again, four times.
        self._num_copies = 5 if self._streams else 1
        self.num_kept_bytes = 0

    def take(self, number: int, response: pb.GenerateResponse) -> bytes:
        kind = response.WhichOneof("event")
        if kind == "delta":
            return self._events_of(response.delta)
        self._output.add(response)
        if kind == "accepted":
            self._maker.request_id = response.accepted.request_id
        return b""

    def last(self) -> bytes:
        events = self._close()
        name = "response.incomplete" if self._is_incomplete else "response.completed"
        return events + self._response_event(name, self._status)

    def failed(self, problem: HttpProblem) -> bytes:
        response = self._response("failed")
        response.error = _Error(_failure_code(problem.status), problem.message)
        if problem.usage is not None:
            response.usage = _usage(problem.usage)
        return self._event("response.failed", response=response)

    def whole(self) -> bytes:
        self._close()
        return encode(self._response(self._status))

    @property
    def _is_incomplete(self) -> bool:
        return self._finish in (pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_CONTENT_FILTER)

    @property
    def _status(self) -> str:
        return "incomplete" if self._is_incomplete else "completed"

    # ------------------------------------------------------------------------------------------- items

    def _events_of(self, delta: pb.Delta) -> bytes:
        events = []
        if not self._has_begun:
            self._has_begun = True
            events.append(self._response_event("response.created", "in_progress"))
            events.append(self._response_event("response.in_progress", "in_progress"))
        if delta.reasoning:
            events.append(self._grow_reasoning(delta.reasoning))
        continued, begun = split_calls(delta)
        events += map(self._grow_call, continued)
        num_bytes = num_text_bytes(delta)
        if self._has_logprobs:
            num_bytes += self._waiting_logprobs.add(delta.logprobs, has_events=self._streams)
        self.num_kept_bytes += self._num_copies * num_bytes
        if delta.text or (self._open == "message" and self._waiting_logprobs.items and not begun):
            events.append(self._grow_text(delta.text))
        elif delta.reasoning or delta.tool_calls:
            self._waiting_logprobs = _ItemLogprobs()
        events += map(self._grow_call, begun)
        self._finish = delta.finish_reason or self._finish
        return b"".join(events)

    def _grow_reasoning(self, text: str) -> bytes:
        events = b""
        if self._open != "reasoning":
            item = _ReasoningItem(f"rs_{self._next_id()}", [], "in_progress")
            events = self._begin("reasoning", item)
            events += self._event("response.content_part.added", **self._place(), part=_ReasoningText(""))
        self._texts.append(text)
        return events + self._event("response.reasoning_text.delta", **self._place(), delta=text)

    def _grow_text(self, text: str) -> bytes:
        events = b""
        if self._open != "message":
            events = self._begin("message", _MessageItem(f"msg_{self._next_id()}", [], "in_progress"))
            part = _OutputText("", [], [])
            events += self._event("response.content_part.added", **self._place(), part=part)
        self._texts.append(text)
        logprobs, self._waiting_logprobs = self._waiting_logprobs, _ItemLogprobs()
        self._logprobs.extend(logprobs)
        return events + self._event(
            "response.output_text.delta", **self._place(), delta=text, logprobs=logprobs.in_events
        )

    def _grow_call(self, part: pb.ToolCallDelta) -> bytes:
        events = b""
        what = f"call {part.index}"
        if self._open != what:
            item = _FunctionCall(f"fc_{self._next_id()}", part.id, part.name, "", "in_progress")
            events = self._begin(what, item)
        if not part.arguments:
            return events
        self._texts.append(part.arguments)
        name = "response.function_call_arguments.delta"
        return events + self._event(name, **self._item_place(), delta=part.arguments)

    def _begin(self, what: str, item: _Item) -> bytes:
        events = self._close()
        self._open = what
        self._items.append(item)
        return events + self._event(
            "response.output_item.added", output_index=len(self._items) - 1, item=item
        )

    def _close(self) -> bytes:
        """Complete the last item; return the events that say so."""
        if not self._open:
            return b""
        item, text = self._items[-1], "".join(self._texts)
        item.status = self._status
        if isinstance(item, _MessageItem):
            part = _OutputText(text, [], self._logprobs.items)
            events = self._event(
                "response.output_text.done",
                **self._place(),
                text=text,
                logprobs=self._logprobs.in_events,
            )
            events += self._event("response.content_part.done", **self._place(), part=part)
            item.content = [part]
        elif isinstance(item, _ReasoningItem):
            thought = _ReasoningText(text)
            events = self._event("response.reasoning_text.done", **self._place(), text=text)
            events += self._event("response.content_part.done", **self._place(), part=thought)
            item.content = [thought]
        else:
            events = self._event(
                "response.function_call_arguments.done",
                **self._item_place(),
                name=item.name,
                arguments=text,
            )
            item.arguments = text
        self._open, self._texts, self._logprobs = "", [], _ItemLogprobs()
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _next_id(self) -> str:
        return f"{self._maker.request_id}-{len(self._items)}"

    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1].id, "output_index": len(self._items) - 1}

    def _place(self) -> dict[str, Any]:
        return {**self._item_place(), "content_index": 0}

    # ----------------------------------------------------------------------------------------- wire

    def _event(self, kind: str, **fields: Any) -> bytes:
        """Return an event; nothing where the answer is no stream."""
        if not self._streams:
            return b""
        event = _Event(kind, self._num_events, **fields)
        self._num_events += 1
        return named_event(kind, encode(event))

    def _response_event(self, kind: str, status: str) -> bytes:
        return self._event(kind, response=self._response(status)) if self._streams else b""

    def _response(self, status: str) -> _Response:
        body = self._body
        response = _Response(
            id=f"resp_{self._maker.request_id}",
            created_at=self._maker.created,
            model=self._maker.model,
            status=status,
            output=list(self._items) if status != "in_progress" else [],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            tool_choice=_shown_choice(body.tool_choice),
            tools=list(body.tools or ()),
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            reasoning=body.reasoning,
            text=body.text or {"format": {"type": "text"}},
        )
        if status == "incomplete":
            reason = "max_output_tokens" if self._finish == pb.FINISH_REASON_LENGTH else "content_filter"
            response.incomplete_details = {"reason": reason}
        if status != "in_progress":
            response.usage = _usage(self._output.usage)
        return response


def _failure_code(status: int) -> str:
    """Return the code of an error, of those that OpenAI's API has."""
    if status == _TOO_MANY:
        return "rate_limit_exceeded"
    return "server_error" if status >= _SERVER_ERRORS else "invalid_prompt"


def _shown_choice(choice: str | NamedTool | None) -> str | dict[str, str | None]:
    if isinstance(choice, NamedTool):
        return {"type": choice.type, "name": choice.name}
    return choice or "auto"


def _usage(usage: pb.Usage) -> _Usage:
    return _Usage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=_CachedDetails(num_cached(usage)),
        output_tokens=usage.completion_tokens,
        output_tokens_details=_ReasoningDetails(usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        capped_max_tokens=capped_max_tokens(usage),
    )
