"""`Embed` and `Score`: several prompts in one call, each a request of its own, which ends with the call."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cluster.admission import read_budget
from cluster.api.output_messages import OutputMessages, usage_of
from cluster.errors import (
    FieldViolation,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    UnavailableError,
    is_failure,
    own_cancellations,
)
from cluster.gateway.request_manager import RequestHandle, RequestManager
from cluster.gateway.sample_output import EmbeddingDelta
from cluster.identity.identity import Identity
from cluster.identity.request_ids import draw_request_id
from cluster.metrics.ended_request import Caller, Summary
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.preprocess import Preprocessor
from cluster.text.validation import MAX_ID_CHARS, ServingLimits, check_request
from kvtransfer.common.clock import give_way
from kvtransfer.request_facts import Pooling

# Characters of an id's hash, where the hash stands for the rest of the id.
_DIGEST_CHARS = 32
# The largest number of inputs of one call.
MAX_INPUTS = 256
# Inputs of one call that run at once.
_NUM_AT_ONCE = 32
# Alternatives for each place of a continuation: the chosen token and the likeliest one.
_NUM_TOP = 1

T = TypeVar("T")


# The names that `Generate` gives to an input, which a call with several inputs replaces by its own.
_INPUT_FIELDS = frozenset(("prompt", "token_ids"))


@dataclass(frozen=True, slots=True)
class CallContext:
    """The caller, the seconds that are left of the call now, and the requests that it has begun."""

    identity: Identity
    caller: Caller
    time_left_s: Callable[[], float | None]
    accepted: list[RequestHandle] = field(default_factory=list)
    # The reasons why other inputs were not accepted.
    refusals: list[RequestError] = field(default_factory=list)

    def usage(self) -> pb.Usage | None:
        """Return the usage of the call so far; None where nothing of it was accepted."""
        return _usage([item.task.summary() for item in self.accepted]) if self.accepted else None


class PromptCalls:
    """Answers calls whose prompts are computed, and not continued."""

    def __init__(self, requests: RequestManager, preprocessor: Preprocessor, gateway_id: str) -> None:
        self._requests = requests
        self._preprocessor = preprocessor
        self._gateway_id = gateway_id

    async def embed(self, request: pb.EmbedRequest, context: CallContext) -> pb.EmbedResponse:
        """Return the embedding of each input; raise the `RequestError` of the first that fails."""
        _check_inputs("inputs", request.inputs)
        if request.HasField("dimensions") and request.dimensions < 1:
            raise InvalidRequestError(
                FieldViolation("dimensions", f"is {request.dimensions}; must be 1 or more")
            )
        _check_dimensions(request, self._preprocessor.hidden_size)
        read_budget.divide(len(request.inputs))
        await self._requests.charges.charge(request.tenant, len(request.inputs))
        request_id = request.request_id or draw_request_id(self._gateway_id)

        async def one(index: int) -> tuple[NDArray[np.float32], Summary]:
            prompt = self._generate(request, part_id(request_id, f":{index}"))
            _set_prompt(prompt, request.inputs[index])
            if request.HasField("truncate_prompt_tokens"):
                prompt.truncate_prompt_tokens = request.truncate_prompt_tokens
            with _named(f"inputs[{index}]"):
                return await self._run(prompt, context, "last", _embedding)

        with self._giving_back(request.tenant, len(request.inputs), context):
            found = await _gather(len(request.inputs), one)
        reply = pb.EmbedResponse(request_id=request_id, usage=_usage([summary for _, summary in found]))
        for vector, _ in found:
            reply.embeddings.add(values=_shaped(vector, request).tolist())
        return reply

    async def score(self, request: pb.ScoreRequest, context: CallContext) -> pb.ScoreResponse:
        """Return how likely each continuation is; raise the `RequestError` of the first that fails."""
        _check_inputs("continuations", request.continuations)
        asked, limits = self._asked(request), self._requests.limits()
        check_request(asked, limits)
        context.identity.check_may_use(limits.model_name)
        read_budget.divide(len(request.continuations))
        await self._requests.charges.charge(request.tenant, len(request.continuations))
        request_id = request.request_id or draw_request_id(self._gateway_id)
        prompt = await self._prompt_tokens(asked, limits)

        async def one(index: int) -> tuple[pb.ContinuationScore, Summary]:
            tokens = await self._continuation_tokens(request.continuations[index], request.tenant)
            if not len(tokens):
                raise InvalidRequestError(FieldViolation(f"continuations[{index}]", "has no tokens"))
            asked = self._generate(request, part_id(request_id, f":{index}"))
            asked.token_ids.ids.extend([*prompt, *tokens])
            asked.max_tokens = 1
            asked.prompt_logprobs = _NUM_TOP
            with _named(f"continuations[{index}]"):
                parts, summary = await self._run(asked, context, None, self._collector(asked))
            return _score(parts, len(prompt)), summary

        with self._giving_back(request.tenant, len(request.continuations), context):
            found = await _gather(len(request.continuations), one)
        usage = _usage([summary for _, summary in found])
        return pb.ScoreResponse(request_id=request_id, usage=usage, scores=[score for score, _ in found])

    @contextlib.contextmanager
    def _giving_back(self, tenant: str, count: int, context: CallContext) -> Iterator[None]:
        """Give the requests of a call back that nobody has looked at when one of them is refused because of
        the load."""
        try:
            yield
        except (OverloadedError, UnavailableError):
            num_left = count - len(context.accepted) - len(context.refusals)
            self._requests.charges.give_back(tenant, num_left)
            raise

    def _generate(self, request: pb.EmbedRequest | pb.ScoreRequest, request_id: str) -> pb.GenerateRequest:
        """Return a request without prompt, of the same caller."""
        return pb.GenerateRequest(
            model=request.model,
            priority=request.priority,
            tenant=request.tenant,
            service_class=request.service_class,
            request_id=request_id,
        )

    async def _run(
        self,
        request: pb.GenerateRequest,
        context: CallContext,
        pooling: Pooling | None,
        read: Callable[[RequestHandle], Awaitable[T]],
    ) -> tuple[T, Summary]:
        """Run one request to its end."""
        try:
            accepted = await self._requests.accept(
                request, context.time_left_s(), context.identity, context.caller, pooling, is_charged=True
            )
        except RequestError as error:
            context.refusals.append(error)
            raise
        read_budget.pass_on()
        context.accepted.append(accepted)
        try:
            result = await read(accepted)
            while not isinstance(output := await accepted.task.next(), Summary):
                pass
            return result, output
        finally:
            accepted.task.abandon()

    def _collector(
        self, request: pb.GenerateRequest
    ) -> Callable[[RequestHandle], Awaitable[list[pb.TokenLogprob]]]:
        """Return the collector of the log-probabilities of a request's prompt."""

        async def collect(accepted: RequestHandle) -> list[pb.TokenLogprob]:
            messages = OutputMessages(request, accepted, self._preprocessor.text)
            found: list[pb.TokenLogprob] = []
            while len(found) < accepted.num_prompt_tokens:
                output = await accepted.task.next()
                assert not isinstance(output, Summary), "log-probabilities of the prompt come first"
                for message in messages.of(output):
                    found.extend(message.prompt.logprobs)
            return found

        return collect

    def _asked(self, request: pb.ScoreRequest) -> pb.GenerateRequest:
        """Return a request with the prompt alone."""
        asked = self._generate(request, request.request_id)
        match request.WhichOneof("prompt"):
            case "text":
                asked.text = request.text
            case "token_ids":
                asked.token_ids.CopyFrom(request.token_ids)
            case "chat":
                asked.chat.CopyFrom(request.chat)
        return asked

    async def _prompt_tokens(self, asked: pb.GenerateRequest, limits: ServingLimits) -> list[int]:
        """Return the prompt's tokens, as `Generate` would have them."""
        prompt = await self._preprocessor.prompt_tokens(asked, limits)
        if not prompt.tokens:
            raise InvalidRequestError(FieldViolation("prompt", "it has no tokens; send more text"))
        return list(np.frombuffer(prompt.tokens, dtype="<u4").tolist())

    async def _continuation_tokens(self, continuation: pb.EmbedInput, tenant: str) -> list[int]:
        if continuation.WhichOneof("input") == "token_ids":
            return list(continuation.token_ids.ids)
        encoded = await self._preprocessor.encode(continuation.text, add_special_tokens=False, party=tenant)
        return list(np.frombuffer(encoded, dtype="<u4").tolist())


def part_id(request_id: str, part: str) -> str:
    """Return the id of a part of a request; one that is too long for that ends with a hash of itself."""
    num_over = len(request_id) + len(part) - MAX_ID_CHARS
    if num_over > 0 and len(request_id) <= MAX_ID_CHARS:
        digest = hashlib.sha256(request_id.encode()).hexdigest()[:_DIGEST_CHARS]
        request_id = request_id[: -num_over - _DIGEST_CHARS] + digest
    return request_id + part


def _check_inputs(field: str, inputs: Sequence[pb.EmbedInput]) -> None:
    if not 1 <= len(inputs) <= MAX_INPUTS:
        problem = f"has {len(inputs)}; send 1 to {MAX_INPUTS}, the others in another call"
        raise InvalidRequestError(FieldViolation(field, problem))
    missing = [index for index, item in enumerate(inputs) if item.WhichOneof("input") is None]
    if missing:
        raise InvalidRequestError(
            FieldViolation(f"{field}[{missing[0]}]", "is empty; send text or token_ids")
        )


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Name the input in the errors about it."""
    try:
        yield
    except InvalidRequestError as error:
        found = [
            FieldViolation(name if path in _INPUT_FIELDS else path, problem)
            for path, problem in error.violations
        ]
        raise InvalidRequestError(*found) from error


def _set_prompt(request: pb.GenerateRequest, item: pb.EmbedInput) -> None:
    if item.WhichOneof("input") == "text":
        request.text = item.text
    else:
        request.token_ids.CopyFrom(item.token_ids)


async def _gather(count: int, one: Callable[[int], Awaitable[T]]) -> list[T]:
    """Return the results in order; the first error cancels the others."""
    places = asyncio.Semaphore(_NUM_AT_ONCE)

    async def placed(index: int) -> T:
        async with places:
            try:
                return await one(index)
            except asyncio.CancelledError as error:
                if not is_failure(error):
                    raise
                raise InternalError from error  # a group would not notice it

    try:
        with own_cancellations():
            async with asyncio.TaskGroup() as group:
                tasks = []
                for index in range(count):
                    tasks.append(group.create_task(placed(index)))
                    await give_way()
    except* RequestError as errors:
        raise _first(errors) from None
    return [task.result() for task in tasks]


def _first(errors: BaseExceptionGroup[RequestError]) -> RequestError:
    """Return the first error of a group."""
    found = errors.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


async def _embedding(accepted: RequestHandle) -> NDArray[np.float32]:
    """Wait for the embedding of a prompt."""
    output = await accepted.task.next()
    assert isinstance(output, EmbeddingDelta), f"an embedding, not {type(output).__name__}"
    return np.frombuffer(output.vector, dtype="<f4")


def _check_dimensions(request: pb.EmbedRequest, size: int) -> None:
    """Raise where more values are asked for than the model's vectors have."""
    if request.HasField("dimensions") and request.dimensions > size:
        problem = f"is {request.dimensions}; the model's vectors have {size}"
        raise InvalidRequestError(FieldViolation("dimensions", problem))


def _shaped(vector: NDArray[np.float32], request: pb.EmbedRequest) -> NDArray[np.float32]:
    """Return a vector as the request wants it."""
    if request.HasField("dimensions"):
        _check_dimensions(request, len(vector))
        vector = vector[: request.dimensions]
    if request.HasField("normalize") and not request.normalize:
        return vector
    length = float(np.linalg.norm(vector))
    return vector / length if length else vector


def _score(parts: list[pb.TokenLogprob], num_prompt_tokens: int) -> pb.ContinuationScore:
    """Return the score of the text that follows the prompt."""
    tokens = parts[num_prompt_tokens:]
    return pb.ContinuationScore(
        logprob=sum(item.logprob for item in tokens),
        num_tokens=len(tokens),
        is_greedy=all(item.top[0].token_id == item.token_id for item in tokens),
        tokens=tokens,
    )


def _usage(summaries: Sequence[Summary]) -> pb.Usage:
    """Return the usage of the requests together."""
    total = pb.Usage()
    for summary in summaries:
        usage = usage_of(summary)
        total.prompt_tokens += usage.prompt_tokens
        total.completion_tokens += usage.completion_tokens
        for tier in ("device", "dram", "nvme", "remote"):
            setattr(total.cached, tier, getattr(total.cached, tier) + getattr(usage.cached, tier))
    return total
