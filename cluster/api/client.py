"""A small client of `tandem.v1.Inference`: streams that survive the loss of a gateway, and everything else.

For asyncio; `cluster.api.blocking_client` is the same for all others. The command line and the benchmarks use
it. `cluster.api.admin_client` is for operators.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from cluster.api.channel import GatewayCaller, call_error, closed_error
from cluster.api.generate_options import (
    GenerateOptions,
    Prompt,
    Turn,
    chat_prompt,
    embed_input,
    generate_request,
)
from cluster.errors import CallError
from cluster.proto import APPLICATION_KEY
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.proto.tandem.v1 import inference_pb2_grpc
from kvtransfer.common.health import JITTER, backoff_s, spread_s

__all__ = [
    "Client",
    "Collector",
    "Completion",
    "Event",
    "GenerateOptions",
    "GenerateStream",
    "Prompt",
    "Turn",
]
# How long a request that no gateway has accepted yet is tried again.
_FIRST_PATIENCE_S = 10.0
# How long an accepted request is tried again without a new token; a gateway is replaced in less.
_PATIENCE_S = 60.0
_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
# How long a client waits for the status behind the last message.
_STATUS_S = 1.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole stream: per sample, the text, the token ids and the finish reason; usage and timing.

    `logprobs` has one entry per token of each sample, `prompt_logprobs` one per token of the prompt, and none
    where they were not asked for. `prompt_text` is there for `echo`.
    """

    request_id: str
    seed: int
    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[str, ...]
    finished: pb.Finished
    logprobs: tuple[tuple[pb.TokenLogprob, ...], ...] = ()
    reasonings: tuple[str, ...] = ()
    tool_calls: tuple[tuple[pb.ToolCall, ...], ...] = ()
    prompt_logprobs: tuple[pb.TokenLogprob, ...] = ()
    prompt_text: str = ""


Event = pb.Accepted | pb.PromptPart | pb.Delta | pb.Finished


class PromptParts:
    """Finds the new ones among the prompt's parts: a call that resumes without output gives the others
    again."""

    def __init__(self) -> None:
        # Tokens received in all calls together, and the text received in the present one.
        self._num_tokens = 0
        self._num_chars = 0
        self._num_call_chars = 0

    def begin_call(self) -> None:
        """Note that the parts come from their beginning now."""
        self._num_call_chars = 0

    def new(self, part: pb.PromptPart) -> pb.PromptPart | None:
        """Return the part of the message that has not come before; None where there is none."""
        num_known = self._num_tokens - part.first_index
        num_known_chars = self._num_chars - self._num_call_chars
        self._num_call_chars += len(part.text)
        if num_known >= len(part.token_ids):
            return None
        self._num_tokens = part.first_index + len(part.token_ids)
        self._num_chars = self._num_call_chars
        if not num_known:
            return part
        return pb.PromptPart(
            first_index=part.first_index + num_known,
            token_ids=part.token_ids[num_known:],
            text=part.text[num_known_chars:],
            logprobs=part.logprobs[num_known:],
        )


async def _read_status(attempt: AsyncIterator[Event]) -> None:
    """Read the status behind the last message, which comes at once. A call that its client cancels before
    leaves memory behind at the gateway (https://github.com/grpc/grpc/issues/43360)."""
    with contextlib.suppress(CallError, TimeoutError):
        async with asyncio.timeout(_STATUS_S):
            async for _ in attempt:
                pass


class GenerateStream:
    """One request: iterate over its events, once. Ends after `Finished`, or raises `CallError`.

    When the connection or the gateway is lost, it calls again, at the next address, with the tokens it has;
    events already given do not come again. So it does after a refusal, when the time has passed that the
    gateway suggests, unless that is beyond its patience or the deadline. `num_resumes` counts both.
    """

    def __init__(self, client: Client, request: pb.GenerateRequest, deadline_at: float | None, resumes: bool):
        self.num_resumes = 0
        self.request_id = request.request_id
        self._client = client
        self._request = request
        self._deadline_at = deadline_at
        self._may_resume = resumes
        self._call: Any = None
        self._address = ""
        self._is_cancelled = False
        self._accepted: pb.Accepted | None = None
        self._resume_token = ""
        self._application = ""
        self._outputs: dict[int, _Output] = {}
        self._prompt_parts = PromptParts()

    def cancel(self) -> None:
        """Stop the request wherever it is; the iteration ends with a `CallError` of CANCELLED."""
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self.events()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the events of the request; closing the generator early cancels the request."""
        num_failures, failing_since, before = 0, 0.0, ""
        while True:
            num_tokens = self._num_tokens()
            try:
                # The attempt is closed at once: later, the client that it belongs to may be closed.
                async with aclosing(self._attempt()) as attempt:
                    async for event in attempt:
                        yield event
                        if isinstance(event, pb.Finished):
                            await _read_status(attempt)
                            return
                raise CallError(grpc.StatusCode.UNAVAILABLE, "the stream ended without its last message")
            except CallError as error:
                num_failures = 1 if self._num_tokens() > num_tokens else num_failures + 1
                if num_failures == 1:
                    failing_since = self._client.clock.now()
                if not self._should_resume(error, failing_since):
                    if before and error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
                        raise CallError(
                            error.code, f"{error.message}; the failure before: {before}"
                        ) from error
                    raise
                before = error.message
                await self._client.pause(error, num_failures)
            finally:
                if self._call is not None:
                    self._call.cancel()  # also when the iteration is left early
            self.num_resumes += 1
            self._client.leave_address(self._address)

    async def _attempt(self) -> AsyncGenerator[Event, None]:
        """Yield the new events of one call."""
        timeout_s = None
        if self._deadline_at is not None:
            timeout_s = max(0.001, self._deadline_at - self._client.clock.now())
        if self._is_cancelled:
            raise CallError(grpc.StatusCode.CANCELLED, "cancelled by this client")
        self._address = self._client.address
        self._prompt_parts.begin_call()
        began_at = ((APPLICATION_KEY, self._application),) if self._application else ()
        self._call = self._client.stub().Generate(
            self._resumed_request(), timeout=timeout_s, metadata=(*began_at, *self._client.metadata())
        )
        try:
            async for response in self._call:
                kind = response.WhichOneof("event")
                if kind == "accepted":
                    self._resume_token = response.accepted.resume_token
                    if self._accepted is None:
                        self._accepted = response.accepted
                        metadata = dict(await self._call.initial_metadata() or ())
                        self._application = metadata.get(APPLICATION_KEY, "")
                        self.request_id = response.accepted.request_id
                        yield response.accepted
                elif kind == "delta":
                    self._outputs.setdefault(response.delta.sample, _Output()).add(response.delta)
                    yield response.delta
                elif kind == "prompt":
                    if (part := self._prompt_parts.new(response.prompt)) is not None:
                        yield part
                elif kind == "finished":
                    yield response.finished
        except grpc.aio.AioRpcError as error:
            raise call_error(error) from error
        except asyncio.CancelledError:
            if self._client.is_closed:
                raise closed_error() from None
            if not self._is_cancelled:
                raise
            raise CallError(grpc.StatusCode.CANCELLED, "cancelled by this client") from None

    def _should_resume(self, error: CallError, failing_since: float) -> bool:
        now = self._client.clock.now()
        patience_s = _PATIENCE_S if self._accepted is not None else _FIRST_PATIENCE_S
        if not self._may_resume or self._is_cancelled or now >= failing_since + patience_s:
            return False
        if self._deadline_at is not None and now >= self._deadline_at:
            return False
        if error.is_refusal:
            until = failing_since + patience_s
            until = until if self._deadline_at is None else min(until, self._deadline_at)
            return now + (1 + JITTER) * (error.retry_after_s or 0.0) < until
        return error.code is grpc.StatusCode.UNAVAILABLE

    def _resumed_request(self) -> pb.GenerateRequest:
        if self._accepted is None:
            return self._request
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.request_id = self._accepted.request_id
        request.seed = self._accepted.seed
        request.resume_token = self._resume_token
        for sample, output in sorted(self._outputs.items()):
            request.resume.add(sample=sample, token_ids=output.token_ids, finish_reason=output.finish_reason)
        if not request.resume:
            request.resume.add(sample=0)
        return request

    def _num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self._outputs.values())


class Client(GatewayCaller):
    """Calls one of several gateways. Use it inside one event loop; `async with` closes it.

    `host:port` is reached without TLS, `tls://host:port` with it; see `ClientCredentials` for whom to trust
    then, and for who calls.
    """

    stub_type = inference_pb2_grpc.InferenceStub

    def generate(
        self,
        prompt: Prompt,
        options: GenerateOptions | None = None,
        *,
        timeout_s: float | None = None,
        resume: bool = True,
    ) -> GenerateStream:
        """Start a request when the result is iterated. `timeout_s` is its deadline, resumes included; without
        `resume` it is called once."""
        request = generate_request(prompt, options or GenerateOptions())
        deadline_at = None if timeout_s is None else self.clock.now() + timeout_s
        return GenerateStream(self, request, deadline_at, resume)

    async def complete(
        self,
        prompt: Prompt,
        options: GenerateOptions | None = None,
        *,
        timeout_s: float | None = None,
        resume: bool = True,
    ) -> Completion:
        """Return the whole result at once."""
        collector = Collector()
        async for event in self.generate(prompt, options, timeout_s=timeout_s, resume=resume):
            collector.add(event)
        return collector.completion()

    async def embed(
        self,
        inputs: Sequence[str | Sequence[int]],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        timeout_s: float | None = None,
    ) -> list[list[float]]:
        """Return the embedding of each text, or of each list of token ids."""
        request = pb.EmbedRequest(
            inputs=[embed_input(item) for item in inputs], normalize=normalize, dimensions=dimensions
        )
        reply: pb.EmbedResponse = await self._unary("Embed", request, timeout_s)
        return [list(item.values) for item in reply.embeddings]

    async def score(
        self,
        prompt: Prompt,
        continuations: Sequence[str | Sequence[int]],
        *,
        timeout_s: float | None = None,
    ) -> list[pb.ContinuationScore]:
        """Return how likely each continuation of the prompt is."""
        asked = generate_request(prompt, GenerateOptions())
        request = pb.ScoreRequest(continuations=[embed_input(item) for item in continuations])
        match asked.WhichOneof("prompt"):
            case "text":
                request.text = asked.text
            case "token_ids":
                request.token_ids.CopyFrom(asked.token_ids)
            case "chat":
                request.chat.CopyFrom(asked.chat)
        reply: pb.ScoreResponse = await self._unary("Score", request, timeout_s)
        return list(reply.scores)

    async def tokenize(self, prompt: str | Sequence[Turn]) -> list[int]:
        if isinstance(prompt, str):
            request = pb.TokenizeRequest(text=prompt)
        else:
            request = pb.TokenizeRequest(chat=chat_prompt(prompt))
        reply: pb.TokenizeResponse = await self._unary("Tokenize", request)
        return list(reply.token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids)
        reply: pb.DetokenizeResponse = await self._unary("Detokenize", request)
        return reply.text

    async def models(self) -> list[pb.Model]:
        reply: pb.ListModelsResponse = await self._unary("ListModels", pb.ListModelsRequest())
        return list(reply.models)

    async def explain(self, request_id: str) -> pb.ExplainResponse:
        """Return where a running or recent request of this caller's tenant went, and why."""
        reply: pb.ExplainResponse = await self._unary("Explain", pb.ExplainRequest(request_id=request_id))
        return reply

    async def requests(self, limit: int | None = None) -> list[pb.RequestSummary]:
        """Return the running and recent requests of this caller's tenant, the latest arrivals first."""
        reply: pb.ListRequestsResponse = await self._unary(
            "ListRequests", pb.ListRequestsRequest(limit=limit)
        )
        return list(reply.requests)

    async def pause(self, error: CallError, num_failures: int) -> None:
        """Wait before another try: as the gateway suggests, at least for the growing pause of our own. An
        unavailable service may be back earlier than suggested; a refusal is obeyed."""
        suggested_s = error.retry_after_s or 0.0
        if not error.is_refusal:
            suggested_s = min(suggested_s, _MAX_BACKOFF_S)
        pause_s = max(suggested_s, backoff_s(num_failures, _BACKOFF_S, _MAX_BACKOFF_S))
        await self.sleep(spread_s(pause_s, secrets.randbits(32)))


class Collector:
    """Puts the events of a stream together."""

    def __init__(self) -> None:
        self._accepted = pb.Accepted()
        self._outputs: dict[int, _Output] = {}
        self._finished: pb.Finished | None = None
        self._prompt_logprobs: list[pb.TokenLogprob] = []
        self._prompt_text: list[str] = []

    def add(self, event: Event) -> None:
        if isinstance(event, pb.Accepted):
            self._accepted = event
        elif isinstance(event, pb.PromptPart):
            self._prompt_logprobs.extend(event.logprobs)
            self._prompt_text.append(event.text)
        elif isinstance(event, pb.Delta):
            self._outputs.setdefault(event.sample, _Output()).add(event)
        else:
            self._finished = event

    @property
    def num_tokens(self) -> int:
        """Received so far, of all samples."""
        return sum(len(output.token_ids) for output in self._outputs.values())

    def completion(self) -> Completion:
        """Return the result; to be called only after `Finished` was added."""
        assert self._finished is not None
        outputs = [self._outputs.get(end.sample, _Output()) for end in self._finished.samples]
        return Completion(
            request_id=self._accepted.request_id,
            seed=self._accepted.seed,
            texts=tuple("".join(output.texts) for output in outputs),
            token_ids=tuple(tuple(output.token_ids) for output in outputs),
            finish_reasons=tuple(
                name_of(pb.FinishReason, end.finish_reason) for end in self._finished.samples
            ),
            finished=self._finished,
            logprobs=tuple(tuple(output.logprobs) for output in outputs),
            reasonings=tuple("".join(output.reasonings) for output in outputs),
            tool_calls=tuple(tuple(output.tool_calls) for output in outputs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            prompt_text="".join(self._prompt_text),
        )


@dataclass(slots=True)
class _Output:
    """The received output of one sample."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    reasonings: list[str] = field(default_factory=list)
    tool_calls: list[pb.ToolCall] = field(default_factory=list)
    finish_reason: pb.FinishReason = pb.FINISH_REASON_UNSPECIFIED

    def add(self, delta: pb.Delta) -> None:
        if delta.first_index != len(self.token_ids):
            raise CallError(
                grpc.StatusCode.DATA_LOSS,
                f"sample {delta.sample} went from token {len(self.token_ids)} to {delta.first_index}",
            )
        self.token_ids.extend(delta.token_ids)
        self.texts.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        self.reasonings.append(delta.reasoning)
        for part in delta.tool_calls:
            while len(self.tool_calls) <= part.index:
                self.tool_calls.append(pb.ToolCall())
            self.tool_calls[part.index].MergeFrom(pb.ToolCall(id=part.id, name=part.name))
            self.tool_calls[part.index].arguments += part.arguments
        self.finish_reason = delta.finish_reason
