"""POST /v1/completions: one call of `Generate` for each prompt, and OpenAI's older form of answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from cluster.http.answers import FINISH_NAMES, Maker, encode
from cluster.http.call_output import CallOutput, SampleAnswer, matched_stop
from cluster.http.chat import Translated
from cluster.http.errors import HttpProblem, bad_field, openai_error
from cluster.http.field_names import renamer
from cluster.http.field_types import TokenId
from cluster.http.logprobs import (
    CompletionLogprobs,
    LogprobLists,
    NoLogprobs,
    RankedLogprob,
    RankedLogprobs,
    TextOffsets,
)
from cluster.http.sampled_request import sampled_request
from cluster.http.schemas import CompletionRequest
from cluster.http.sse import DONE, event
from cluster.http.usage import Usage, openai_usage
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.tokenizer import Detokenizer


def translate(body: CompletionRequest, max_inputs: int) -> Translated:
    """Return a call for each prompt; `InvalidRequestError` names fields that it cannot express."""
    common, names = sampled_request(body)
    if body.max_tokens == 0:
        _check_prompt_alone(body)
        common.max_tokens = 1  # which is not shown
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
    calls, renames = [], []
    prompts: Sequence[str | list[int]] = inputs(body.prompt, "prompt", max_inputs)
    for number, prompt in enumerate(prompts):
        place = f"prompt[{number}]" if len(prompts) > 1 else "prompt"
        renames.append(renamer(names | dict.fromkeys(("prompt", "text", "token_ids"), place)))
        call = pb.GenerateRequest()
        call.CopyFrom(common)
        if isinstance(prompt, str):
            call.text = prompt
        else:
            call.token_ids.ids.extend(prompt)
        calls.append(call)
    return Translated(calls, renames)


def _check_prompt_alone(body: CompletionRequest) -> None:
    """Refuse fields that have no meaning for a request that wants its prompt alone."""
    if not body.echo:
        raise bad_field("max_tokens", "is 0: send 1 or more, or echo: true for the prompt alone")
    if (body.n or 1) > 1:
        raise bad_field("n", f"is {body.n}, and with max_tokens 0 there is one answer; remove it")
    if body.min_tokens:
        raise bad_field("min_tokens", f"is {body.min_tokens}, above max_tokens 0; remove it")


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


class _Choice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    # A field of vLLM: the entry of `stop` or `stop_token_ids` that ended the output.
    stop_reason: str | int | UnsetType = UNSET
    # A field of vLLM: log-probabilities of each token of the prompt, by the ids of tokens.
    prompt_logprobs: list[dict[str, RankedLogprob] | None] | UnsetType = UNSET


class _Completion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[_Choice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class _PromptOutput:
    """The output of the call of one prompt."""

    def __init__(self, body: CompletionRequest, offsets: Callable[[], TextOffsets]) -> None:
        self._echoes = bool(body.echo)
        self.ranked = None if body.prompt_logprobs is None else RankedLogprobs()
        self.lists = LogprobLists(offsets()) if body.echo and body.logprobs is not None else None
        kept = [it for it in (self.ranked, self.lists) if it is not None]

        def make() -> LogprobLists | NoLogprobs:
            return NoLogprobs() if body.logprobs is None else LogprobLists(offsets())

        self.output = CallOutput(make, *kept)

    def lists_with(self, logprobs: LogprobLists, *, has_prompt: bool = True) -> LogprobLists:
        """Return those of the prompt, where they are wanted, and those of its output, which follows."""
        found = LogprobLists()
        if self.lists is not None and has_prompt:
            found.extend(self.lists)
        found.extend(logprobs, len(self.output.prompt_text) if self._echoes else 0)
        return found


def _text_offsets(detokenizer: Callable[[], Detokenizer] | None) -> TextOffsets:
    return TextOffsets(None if detokenizer is None else detokenizer())


def _drop_output(response: pb.GenerateResponse) -> None:
    """Remove the one token that a request for its prompt alone has computed."""
    kind = response.WhichOneof("event")
    if kind == "delta":
        delta = response.delta
        is_end = bool(delta.finish_reason)
        for field in ("token_ids", "text", "logprobs", "reasoning", "matched_stop"):
            delta.ClearField(field)
        if is_end:
            delta.finish_reason = pb.FINISH_REASON_LENGTH
        if delta.HasField("usage"):
            delta.usage.completion_tokens = delta.usage.reasoning_tokens = 0
    elif kind == "finished":
        usage = response.finished.usage
        usage.completion_tokens = usage.reasoning_tokens = 0


class CompletionAnswer:
    """The answer to one or several prompts, as a stream of chunks or as a whole."""

    def __init__(
        self,
        body: CompletionRequest,
        num_calls: int,
        maker: Maker,
        detokenizer: Callable[[], Detokenizer] | None = None,
    ) -> None:
        """`detokenizer` makes one of the text that is answered."""
        self._maker = maker
        self._offsets = functools.partial(_text_offsets, detokenizer)
        self._prompts = [_PromptOutput(body, self._offsets) for _ in range(num_calls)]
        self._num_samples = body.n or 1
        self._echoes = bool(body.echo)
        self._is_prompt_alone = body.max_tokens == 0
        self._has_logprobs = body.logprobs is not None
        self._streams = bool(body.stream)
        options = body.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        # Characters sent so far and the beginnings of tokens in them, by index of the choice.
        self._num_chars: dict[int, int] = {}
        self._index_to_offsets: dict[int, TextOffsets] = {}
        self.num_kept_bytes = 0

    def take(self, number: int, response: pb.GenerateResponse) -> bytes:
        kind = response.WhichOneof("event")
        if self._is_prompt_alone:
            _drop_output(response)
        if kind == "delta" and self._streams:
            return self._chunk_of(number, response.delta)
        output = self._prompts[number].output
        num_before = output.num_bytes
        output.add(response)
        self.num_kept_bytes += output.num_bytes - num_before
        if kind == "accepted" and not self._maker.request_id:
            self._maker.request_id = response.accepted.request_id
        return b""

    def last(self) -> bytes:
        chunks = [DONE]
        if self._include_usage:
            chunk = self._chunk([])
            chunk.usage = self._usage()
            chunks.insert(0, event(encode(chunk)))
        return b"".join(chunks)

    def failed(self, problem: HttpProblem) -> bytes:
        return event(openai_error(problem))

    def whole(self) -> bytes:
        choices = [
            self._choice(number, index, sample)
            for number, prompt in enumerate(self._prompts)
            for index, sample in prompt.output.in_order()
        ]
        completion = self._chunk(choices)
        completion.usage = self._usage()
        return encode(completion)

    def _usage(self) -> Usage:
        return openai_usage([prompt.output.usage for prompt in self._prompts])

    def _chunk_of(self, number: int, delta: pb.Delta) -> bytes:
        finish = FINISH_NAMES.get(delta.finish_reason)
        index = self._index(number, delta.sample)
        choice = _Choice(index, delta.text, finish_reason=finish)
        is_first = index not in self._num_chars
        if is_first:
            self._num_chars[index] = 0
            self._index_to_offsets[index] = self._offsets()
            self._begin(choice, self._prompts[number])
        self._num_chars[index] += len(choice.text)
        logprobs = LogprobLists(self._index_to_offsets[index])
        if self._has_logprobs:
            logprobs.add(delta.logprobs)
        logprobs = self._prompts[number].lists_with(logprobs, has_prompt=is_first)
        if not (choice.text or finish or logprobs or choice.prompt_logprobs):
            return b""
        if logprobs:
            choice.logprobs = logprobs.lists(self._num_chars[index] if finish else None)
        if (stop := matched_stop(delta)) is not None:
            choice.stop_reason = stop
        chunk = self._chunk([choice])
        if delta.HasField("usage"):
            self._prompts[number].output.usage = delta.usage
            chunk.usage = self._usage()
        return event(encode(chunk))

    def _begin(self, choice: _Choice, prompt: _PromptOutput) -> None:
        """Put the requested values of the prompt before the output."""
        if self._echoes:
            choice.text = prompt.output.prompt_text + choice.text
        if prompt.ranked is not None:
            choice.prompt_logprobs = prompt.ranked.items

    def _choice(
        self, number: int, sample_index: int, sample: SampleAnswer[LogprobLists | NoLogprobs]
    ) -> _Choice:
        prompt = self._prompts[number]
        choice = _Choice(self._index(number, sample_index), sample.text, finish_reason=sample.finish)
        self._begin(choice, prompt)
        if isinstance(sample.logprobs, LogprobLists):
            choice.logprobs = prompt.lists_with(sample.logprobs).lists(len(choice.text))
        if sample.matched_stop is not None:
            choice.stop_reason = sample.matched_stop
        return choice

    def _index(self, number: int, sample: int) -> int:
        return number * self._num_samples + sample

    def _chunk(self, choices: list[_Choice]) -> _Completion:
        chunk = _Completion(f"cmpl-{self._maker.request_id}", self._maker.created, self._maker.model, choices)
        if self._include_usage:
            chunk.usage = None
        return chunk
