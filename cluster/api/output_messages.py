"""The output of a request as the messages of its stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from cluster.gateway.request_manager import RequestHandle
from cluster.gateway.sample_output import Output, OutputDelta, PromptLogprobsDelta
from cluster.metrics.ended_request import Summary
from cluster.metrics.gateway_counters import cached_by_tier
from cluster.proto.enums import value_of
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.output_parsers.pieces import ToolCallDelta
from cluster.text.tokenizer import Detokenizer, ModelText
from kvtransfer.blocks.keys import TOKEN_BYTES
from workers.messages.link import PrefillReport
from workers.messages.sampling import TokenLogprob

# Tokens of the prompt in one message.
_PART_TOKENS = 2048
_NUM_CACHED_TEXTS = 1 << 16


class OutputMessages:
    """Makes the messages of one stream: one `accepted`, the parts of the prompt that were asked for, deltas,
    and one `finished`."""

    def __init__(self, request: pb.GenerateRequest, accepted: RequestHandle, text: ModelText) -> None:
        self._request = request
        self._accepted = accepted
        self._text = text
        self._prompt = accepted.task.state.prepared.prompt
        # A client that resumes the stream with output has them.
        self._has_parts = not any(item.token_ids or item.finish_reason for item in request.resume)
        self._echo: Detokenizer | None = None
        if request.echo:
            self._echo = text.detokenizer(keeps_all=request.keep_special_tokens)

    def first(self) -> Iterator[pb.GenerateResponse]:
        """Yield the messages before any output of the engine."""
        accepted = self._accepted
        yield pb.GenerateResponse(
            accepted=pb.Accepted(
                request_id=accepted.request_id,
                seed=accepted.seed,
                num_prompt_tokens=accepted.num_prompt_tokens,
                resume_token=accepted.resume_token,
            )
        )
        if not self._has_parts:
            return
        asks_logprobs = self._request.HasField("prompt_logprobs")
        if asks_logprobs and accepted.num_prompt_tokens == 1:  # the engine has nothing to say of it
            yield self._part(0, 1, [None])
        elif self._request.echo and not asks_logprobs:
            for start in range(0, accepted.num_prompt_tokens, _PART_TOKENS):
                yield self._part(start, min(start + _PART_TOKENS, accepted.num_prompt_tokens), ())

    def of(self, output: Output) -> Iterator[pb.GenerateResponse]:
        """Yield the messages of an output of the engine."""
        if isinstance(output, OutputDelta):
            yield pb.GenerateResponse(delta=self._delta(output))
        elif isinstance(output, PromptLogprobsDelta):
            logprobs: list[TokenLogprob | None] = list(output.logprobs.unpacked())
            first = output.first_index
            if first == 1:
                first, logprobs = 0, [None, *logprobs]
            for start in range(0, len(logprobs), _PART_TOKENS):
                part = logprobs[start : start + _PART_TOKENS]
                yield self._part(first + start, first + start + len(part), part)

    def last(self, summary: Summary) -> pb.GenerateResponse:
        """Return the message with which a stream ends."""
        return pb.GenerateResponse(
            finished=pb.Finished(
                samples=[
                    pb.SampleEnd(
                        sample=item.index,
                        finish_reason=value_of(pb.FinishReason, item.finish),
                        num_tokens=item.num_tokens,
                    )
                    for item in summary.samples
                ],
                usage=usage_of(summary),
                timing=_timing(summary),
                prefill_replica=summary.prefill_replica,
                decode_replica=summary.decode_replica,
            )
        )

    def _delta(self, delta: OutputDelta) -> pb.Delta:
        token_ids = np.frombuffer(delta.tokens, dtype="<u4").tolist()
        message = pb.Delta(
            sample=delta.sample,
            first_index=delta.first_index,
            token_ids=token_ids,
            text=delta.text,
            finish_reason=value_of(pb.FinishReason, delta.finish),
            reasoning=delta.reasoning,
        )
        if delta.logprobs:
            message.logprobs.extend(
                self._logprob(token, item) for token, item in zip(token_ids, delta.logprobs, strict=False)
            )
        if delta.tool_calls:
            message.tool_calls.extend(_tool_call(call) for call in delta.tool_calls)
        if isinstance(delta.matched_stop, str):
            message.matched_stop.text = delta.matched_stop
        elif delta.matched_stop is not None:
            message.matched_stop.token_id = delta.matched_stop
        if self._request.include_usage:
            message.usage.CopyFrom(usage_of(self._accepted.task.summary()))
        return message

    def _part(self, start: int, end: int, logprobs: Sequence[TokenLogprob | None]) -> pb.GenerateResponse:
        """Return the prompt's tokens [start, end)."""
        tokens = np.frombuffer(self._prompt[start * TOKEN_BYTES : end * TOKEN_BYTES], dtype="<u4").tolist()
        part = pb.PromptPart(first_index=start, token_ids=tokens)
        if self._echo is not None:
            part.text = "".join(self._echo.push(token) for token in tokens)
            if end == self._accepted.num_prompt_tokens:
                part.text += self._echo.flush()
        if logprobs:
            part.logprobs.extend(
                self._logprob(token, item) for token, item in zip(tokens, logprobs, strict=True)
            )
        return pb.GenerateResponse(prompt=part)

    def _logprob(self, token: int, item: TokenLogprob | None) -> pb.TokenLogprob:
        text, token_bytes = _token_text(self._text, token)
        if item is None:
            return pb.TokenLogprob(token_id=token, text=text, token_bytes=token_bytes)
        return pb.TokenLogprob(
            logprob=item.logprob,
            token_id=token,
            text=text,
            token_bytes=token_bytes,
            top=[self._top(other, logprob) for other, logprob in item.top],
        )

    def _top(self, token: int, logprob: float) -> pb.TopLogprob:
        text, token_bytes = _token_text(self._text, token)
        return pb.TopLogprob(token_id=token, logprob=logprob, text=text, token_bytes=token_bytes)


@lru_cache(maxsize=_NUM_CACHED_TEXTS)
def _token_text(text: ModelText, token: int) -> tuple[str, bytes]:
    """Return a token as text and as bytes."""
    token_bytes = text.token_bytes(token)
    return token_bytes.decode("utf-8", "replace"), token_bytes


def _tool_call(call: ToolCallDelta) -> pb.ToolCallDelta:
    return pb.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)


def usage_of(summary: Summary) -> pb.Usage:
    """Return the usage of the request, finished or not."""
    return pb.Usage(
        prompt_tokens=summary.num_prompt_tokens,
        cached=_cached(summary.prefill),
        completion_tokens=summary.num_output_tokens,
        capped_max_tokens=summary.capped_max_tokens,
        reasoning_tokens=sum(item.num_reasoning_tokens for item in summary.samples),
        resumed_tokens=summary.num_resumed_tokens,
    )


def _cached(report: PrefillReport | None) -> pb.CachedTokens:
    return pb.CachedTokens() if report is None else pb.CachedTokens(**cached_by_tier(report))


def _timing(summary: Summary) -> pb.Timing:
    moved = summary.hand_over
    return pb.Timing(
        queue_ms=1e3 * summary.queue_s,
        prefill_ms=1e3 * summary.prefill_s,
        transfer_ms=1e3 * summary.transfer_s,
        decode_ms=1e3 * summary.decode_s,
        ttft_ms=1e3 * summary.ttft_s,
        e2e_ms=1e3 * summary.e2e_s,
        transfer_gb_s=moved.transfer_gb_s if moved else 0.0,
        transport=moved.transport if moved else "",
        transfer_bytes=moved.num_moved_bytes if moved else 0,
        attempts=summary.num_tries,
    )
