"""POST /v1/completions: one call of `Generate` for each prompt, and OpenAI's older form of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from cluster.http.answers import (
    FINISH_NAMES,
    CallOutput,
    Maker,
    RankedLogprob,
    SampleAnswer,
    Usage,
    encode,
    matched_stop,
    openai_usage,
    ranked_logprobs,
)
from cluster.http.chat import Translated
from cluster.http.errors import HttpProblem, bad_field, openai_error
from cluster.http.prompts import renamer, sampled_request
from cluster.http.schemas import CompletionRequest, TokenId
from cluster.http.sse import DONE, event
from cluster.proto.tandem.v1 import inference_pb2 as pb


def translate(body: CompletionRequest, max_inputs: int) -> Translated:
    """Return a call for each prompt; `InvalidRequestError` names what it cannot say."""
    common, names = sampled_request(body)
    if body.suffix:
        raise bad_field("suffix", "is not supported; remove it")
    if body.best_of not in (None, body.n or 1):
        raise bad_field("best_of", "is served equal to n only; remove it")
    if body.add_special_tokens is False:
        raise bad_field("add_special_tokens", "is served as true only; send token ids instead")
    if body.logprobs is not None:
        common.logprobs = body.logprobs
    common.echo = bool(body.echo)
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        common.prompt_logprobs = body.logprobs
    calls = []
    for prompt in inputs(body.prompt, "prompt", max_inputs):
        call = pb.GenerateRequest()
        call.CopyFrom(common)
        if isinstance(prompt, str):
            call.text = prompt
        else:
            call.token_ids.ids.extend(prompt)
        calls.append(call)
    return Translated(calls, renamer(names))


def inputs(given: str | list[Any], field: str, max_inputs: int) -> list[str] | list[list[int]]:
    """Return the texts, or the lists of token ids, that a field holds: one or several of them."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_field(field, "is empty; send text, token ids, or a list of one of them")
    for kind in (list[TokenId], list[str], list[list[TokenId]]):
        try:
            found: Any = msgspec.convert(given, kind)
        except msgspec.ValidationError:
            continue
        listed = [found] if isinstance(found[0], int) else found
        if len(listed) > max_inputs:
            raise bad_field(
                field, f"has {len(listed)} entries; at most {max_inputs} (gateway.http.max_inputs)"
            )
        return listed
    raise bad_field(field, "must be text, token ids, or a list of one of them")


class _Logprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class _Choice(msgspec.Struct):
    index: int
    text: str
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    # vLLM's, as in chats.
    stop_reason: str | int | UnsetType = UNSET
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | UnsetType = UNSET


class _Completion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[_Choice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class CompletionAnswer:
    """The answer to one or several prompts, as a stream of chunks or as a whole."""

    def __init__(self, body: CompletionRequest, num_calls: int, maker: Maker) -> None:
        self._maker = maker
        self._outputs = [CallOutput() for _ in range(num_calls)]
        self._num_samples = body.n or 1
        self._echoes = bool(body.echo)
        self._has_logprobs = body.logprobs is not None
        self._has_prompt_logprobs = body.prompt_logprobs is not None
        self._streams = bool(body.stream)
        options = body.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        # By index of the choice: how much text its tokens had.
        self._num_chars: dict[int, int] = {}

    def take(self, number: int, response: pb.GenerateResponse) -> bytes:
        output = self._outputs[number]
        kind = response.WhichOneof("event")
        if kind == "delta" and self._streams:
            return self._chunk_of(number, output, response.delta)
        output.add(response)
        if kind == "accepted" and not self._maker.request_id:
            self._maker.request_id = response.accepted.request_id
        return b""

    def last(self) -> bytes:
        chunks = [DONE]
        if self._include_usage:
            chunk = self._chunk([])
            chunk.usage = openai_usage([it.usage for it in self._outputs])
            chunks.insert(0, event(encode(chunk)))
        return b"".join(chunks)

    def failed(self, problem: HttpProblem) -> bytes:
        return event(openai_error(problem))

    def whole(self) -> bytes:
        choices = [
            self._choice(number, index, sample)
            for number, output in enumerate(self._outputs)
            for index, sample in output.in_order()
        ]
        completion = self._chunk(choices)
        completion.usage = openai_usage([it.usage for it in self._outputs])
        return encode(completion)

    def _chunk_of(self, number: int, output: CallOutput, delta: pb.Delta) -> bytes:
        finish = FINISH_NAMES.get(delta.finish_reason)
        index = self._index(number, delta.sample)
        choice = _Choice(index, delta.text, finish_reason=finish)
        logprobs = list(delta.logprobs) if self._has_logprobs else []
        is_first = index not in self._num_chars
        if is_first:
            self._num_chars[index] = 0
            self._begin(choice, output)
            if self._echoes and self._has_logprobs:
                logprobs = [*output.prompt_logprobs, *logprobs]
        if not (choice.text or finish or logprobs or choice.prompt_logprobs):
            return b""
        if logprobs:
            choice.logprobs = self._logprobs(index, logprobs)
        if (stop := matched_stop(delta)) is not None:
            choice.stop_reason = stop
        chunk = self._chunk([choice])
        if delta.HasField("usage"):
            chunk.usage = openai_usage([delta.usage])
        return event(encode(chunk))

    def _begin(self, choice: _Choice, output: CallOutput) -> None:
        """Put before the output what is wanted of the prompt."""
        if self._echoes:
            choice.text = output.prompt_text + choice.text
        if self._has_prompt_logprobs:
            choice.prompt_logprobs = ranked_logprobs(output.prompt_logprobs)

    def _choice(self, number: int, sample_index: int, sample: SampleAnswer) -> _Choice:
        output = self._outputs[number]
        index = self._index(number, sample_index)
        choice = _Choice(index, sample.text, finish_reason=sample.finish)
        self._begin(choice, output)
        if self._has_logprobs:
            self._num_chars[index] = 0
            prompt = output.prompt_logprobs if self._echoes else []
            choice.logprobs = self._logprobs(index, [*prompt, *sample.logprobs])
        if sample.matched_stop is not None:
            choice.stop_reason = sample.matched_stop
        return choice

    def _logprobs(self, index: int, items: Sequence[pb.TokenLogprob]) -> _Logprobs:
        offsets = []
        offset = self._num_chars[index]
        for item in items:
            offsets.append(offset)
            offset += len(item.text)
        self._num_chars[index] = offset
        return _Logprobs(
            text_offset=offsets,
            token_logprobs=[item.logprob if item.HasField("logprob") else None for item in items],
            tokens=[item.text for item in items],
            top_logprobs=[
                {top.text: top.logprob for top in item.top} if item.HasField("logprob") else None
                for item in items
            ],
        )

    def _index(self, number: int, sample: int) -> int:
        return number * self._num_samples + sample

    def _chunk(self, choices: list[_Choice]) -> _Completion:
        chunk = _Completion(f"cmpl-{self._maker.request_id}", self._maker.created, self._maker.model, choices)
        if self._include_usage:
            chunk.usage = None
        return chunk
