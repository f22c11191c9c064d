"""Checks of requests: every bad field is named, with the remedy, all at once.

What needs the token count is checked after tokenizing (`max_tokens_of`). The file is over 400 lines because
it has one check for each field of a request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from cluster.errors import FieldViolation, InvalidRequestError, UnknownModelError
from cluster.identity.identity import MAX_PRIORITY
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.chat_checks import chat_violations
from kvtransfer.request_facts import SERVICE_CLASSES
from workers.messages.sampling import MAX_GRAMMAR_BYTES, SamplingParams

# A prompt text longer than this times the context is refused before it is tokenized.
MAX_BYTES_PER_TOKEN = 32
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_CHOICES = 1024
MAX_TAGS = 128
# The length of the id of a request, or of a session.
MAX_ID_CHARS = 128
# The ends of a resumed sample; "": it has not ended.
FINISH_REASONS = ("", "stop", "length", "tool_calls")

_MAX_FLOAT32 = 3.4028234e38

_ID = re.compile(r"[A-Za-z0-9._:-]*")
_DEFAULTS = SamplingParams()
# Bad token ids that an error names.
_NUM_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """The limits of a request; from the configuration, the model and the connected replicas."""

    model_name: str
    vocab_size: int
    max_context_tokens: int
    max_samples: int
    default_max_tokens: int
    allow_pins: bool
    # Whether `max_tokens` is cut to what there is room for; otherwise the request is refused.
    caps_max_tokens: bool = True
    # The share of each replica's KV that the request's sharing group may use, and the tokens that fit it at
    # every replica (0: no limit).
    kv_share: float = 1.0
    max_share_tokens: int = 0

    @property
    def max_prompt_bytes(self) -> int:
        return self.max_context_tokens * MAX_BYTES_PER_TOKEN

    def within_share(self, share: float, num_tokens: int) -> ServingLimits:
        """Return the limits of a request whose sharing group may use this share of each replica's KV, which
        is at least this number of tokens (0: not known)."""
        if share == 1 or not num_tokens:
            return self
        return replace(self, kv_share=share, max_share_tokens=num_tokens)


def check_model(name: str, limits: ServingLimits) -> None:
    """Raise `UnknownModelError` when `name` is neither empty nor the served model."""
    if name not in ("", limits.model_name):
        raise UnknownModelError(f"model {name[:100]!r} is not served here; served: {limits.model_name!r}")


_UNKNOWN = 1 << 62
# Limits that refuse only values that no gateway accepts.
_ANYWHERE = ServingLimits(
    model_name="",
    vocab_size=_UNKNOWN,
    max_context_tokens=_UNKNOWN,
    max_samples=_UNKNOWN,
    default_max_tokens=1,
    allow_pins=True,
)


def check_values(request: pb.GenerateRequest) -> None:
    """As `check_request`, for a client that knows neither the model nor the gateway's limits."""
    found = _violations(request, _ANYWHERE)
    if found:
        raise InvalidRequestError(*found)


def check_request(request: pb.GenerateRequest, limits: ServingLimits) -> None:
    """Check everything that can be known before tokenizing; `InvalidRequestError` names every bad field."""
    check_model(request.model, limits)
    found = _violations(request, limits)
    if found:
        raise InvalidRequestError(*found)


def check_tokenize(request: pb.TokenizeRequest, limits: ServingLimits) -> None:
    """As `check_request`, for text that is only tokenized: empty text is fine."""
    check_model(request.model, limits)
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequestError(FieldViolation("input", "is missing; send one of text or chat"))
    if kind == "chat":
        found = list(chat_violations(request.chat, limits.max_prompt_bytes))
    else:
        found = list(_size_violations("text", _num_bytes(request.text), limits))
    if found:
        raise InvalidRequestError(*found)


def check_detokenize(request: pb.DetokenizeRequest, limits: ServingLimits) -> None:
    """Raise `UnknownModelError`, or `InvalidRequestError` for ids that the model does not have, or too
    many."""
    check_model(request.model, limits)
    num_tokens = len(request.token_ids)
    if num_tokens > limits.max_context_tokens:
        problem = f"has {num_tokens} tokens; at most the model's context, {limits.max_context_tokens}"
        raise InvalidRequestError(FieldViolation("token_ids", problem))
    found = list(_vocab_violations("token_ids", request.token_ids, limits))
    if found:
        raise InvalidRequestError(*found)


def max_tokens_of(request: pb.GenerateRequest, num_prompt_tokens: int, limits: ServingLimits) -> int:
    """Return the request's `max_tokens`, or the default, cut to the room that the context leaves after the
    prompt. A resumed request was accepted, if elsewhere and under other limits, and is always cut."""
    if num_prompt_tokens == 0:
        raise InvalidRequestError(FieldViolation("prompt", "it has no tokens; send more text"))
    space = limits.max_context_tokens - num_prompt_tokens
    if space < 1:
        raise InvalidRequestError(_too_long(num_prompt_tokens, limits))
    if limits.max_share_tokens - num_prompt_tokens < space and limits.kv_share < 1:
        space = limits.max_share_tokens - num_prompt_tokens
        _check_share(request, num_prompt_tokens, limits)
    may_cap = limits.caps_max_tokens or bool(request.resume)
    if not request.HasField("max_tokens"):
        return max(min(limits.default_max_tokens, space), min(request.min_tokens, space))
    if request.max_tokens > space and not may_cap:
        problem = (
            f"{request.max_tokens} more than the {num_prompt_tokens} tokens of the prompt exceed the context "
            f"of {limits.max_context_tokens}; ask for at most {space}"
        )
        raise InvalidRequestError(FieldViolation("max_tokens", problem))
    return min(request.max_tokens, space)


def _check_share(request: pb.GenerateRequest, num_prompt_tokens: int, limits: ServingLimits) -> None:
    """Raise `InvalidRequestError` when the request alone exceeds its tenant's share of a replica's KV."""
    most = limits.max_share_tokens
    share = f"the tenant's share of a replica's KV, {most} tokens (device_kv_share {limits.kv_share:g})"
    if num_prompt_tokens >= most:
        problem = f"has {num_prompt_tokens} tokens and with one for the answer exceeds {share}; shorten it"
        raise InvalidRequestError(FieldViolation("prompt", problem))
    is_beyond = request.HasField("max_tokens") and num_prompt_tokens + request.max_tokens > most
    if is_beyond and not (limits.caps_max_tokens or request.resume):
        problem = (
            f"{request.max_tokens} more than the {num_prompt_tokens} tokens of the prompt exceed {share}; "
            f"ask for at most {most - num_prompt_tokens}"
        )
        raise InvalidRequestError(FieldViolation("max_tokens", problem))


def sampling_of(request: pb.GenerateRequest, max_tokens: int) -> SamplingParams:
    """Return the sampling parameters of a checked request; absent fields take the engine's defaults."""

    def value(field: str, default: Any) -> Any:
        return getattr(request, field) if request.HasField(field) else default

    return SamplingParams(
        temperature=value("temperature", _DEFAULTS.temperature),
        top_k=value("top_k", _DEFAULTS.top_k),
        top_p=value("top_p", _DEFAULTS.top_p),
        min_p=value("min_p", _DEFAULTS.min_p),
        repetition_penalty=value("repetition_penalty", _DEFAULTS.repetition_penalty),
        presence_penalty=value("presence_penalty", _DEFAULTS.presence_penalty),
        frequency_penalty=value("frequency_penalty", _DEFAULTS.frequency_penalty),
        logit_bias=dict(request.logit_bias),
        min_tokens=value("min_tokens", _DEFAULTS.min_tokens),
        max_tokens=max_tokens,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=value("ignore_eos", _DEFAULTS.ignore_eos),
        num_logprobs=value("logprobs", None),
        num_prompt_logprobs=value("prompt_logprobs", None),
    )


def _violations(request: pb.GenerateRequest, limits: ServingLimits) -> list[FieldViolation]:
    return [
        *_prompt_violations(request, limits),
        *_choice_violations(request, limits),
        *_constraint_violations(request),
        *_length_violations(request, limits),
        *_stop_violations(request, limits),
        *_identity_violations(request, limits),
        *_resume_violations(request, limits),
    ]


def _prompt_violations(request: pb.GenerateRequest, limits: ServingLimits) -> Iterator[FieldViolation]:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        num_bytes = _num_bytes(request.text)
        if not num_bytes:
            yield FieldViolation("prompt", "the text is empty; send at least one character")
        yield from _size_violations("prompt", num_bytes, limits)
    elif kind == "token_ids":
        ids = request.token_ids.ids
        if not ids:
            yield FieldViolation("prompt", "token_ids is empty; send at least one token")
        if len(ids) > limits.max_context_tokens:
            yield _too_long(len(ids), limits)
        else:
            yield from _vocab_violations("token_ids", ids, limits)
    elif kind == "chat":
        yield from chat_violations(request.chat, limits.max_prompt_bytes)
    else:
        yield FieldViolation("prompt", "is missing; send one of text, token_ids or chat")
    most = limits.max_context_tokens - 1
    yield from _number(request, "truncate_prompt_tokens", lambda it: 1 <= it <= most, _range(1, most))


def _choice_violations(request: pb.GenerateRequest, limits: ServingLimits) -> Iterator[FieldViolation]:
    """Check how tokens are chosen."""
    yield from _number(request, "temperature", lambda it: it >= 0, "0 (greedy) or more")
    yield from _number(request, "top_k", lambda it: it >= 0, "0 (off) or more")
    yield from _number(request, "top_p", lambda it: 0 < it <= 1, "above 0, at most 1 (off)")
    yield from _number(request, "min_p", lambda it: 0 <= it <= 1, "from 0 (off) to 1")
    yield from _number(request, "repetition_penalty", lambda it: it > 0, "above 0; 1 is off")
    for field in ("presence_penalty", "frequency_penalty"):
        yield from _number(
            request, field, lambda it: abs(it) <= MAX_PENALTY, f"from -{MAX_PENALTY:g} to {MAX_PENALTY:g}"
        )
    yield from _number(
        request, "logprobs", lambda it: 0 <= it <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}, or absent"
    )
    yield from _number(
        request, "prompt_logprobs", lambda it: 0 <= it <= MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}, or absent"
    )
    yield from _number(request, "n", lambda it: 1 <= it <= limits.max_samples, _range(1, limits.max_samples))
    if len(request.logit_bias) > MAX_LOGIT_BIASES:
        yield FieldViolation(
            "logit_bias", f"has {len(request.logit_bias)} entries; at most {MAX_LOGIT_BIASES}"
        )
        return
    yield from _vocab_violations("logit_bias", list(request.logit_bias), limits)
    for token, bias in request.logit_bias.items():
        if not abs(bias) <= MAX_LOGIT_BIAS:
            problem = f"is {bias:g}; must be from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
            yield FieldViolation(f"logit_bias[{token}]", problem)


def _constraint_violations(request: pb.GenerateRequest) -> Iterator[FieldViolation]:
    """Check the constraint of the output, as far as it is known before a grammar is made of it."""
    if not request.HasField("constraint"):
        return
    constraint = request.constraint
    kind = constraint.WhichOneof("kind")
    if constraint.ByteSize() > MAX_GRAMMAR_BYTES:
        yield FieldViolation("constraint", f"has more than {MAX_GRAMMAR_BYTES} bytes; simplify it")
    elif kind is None or (kind == "json_object" and not constraint.json_object):
        yield FieldViolation("constraint", "is empty; name what the output must be, or leave it out")
    elif kind == "choice":
        choices = constraint.choice.choices
        if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
            yield FieldViolation("constraint.choice", f"needs 1 to {MAX_CHOICES} choices, none empty")
    elif kind == "structural_tags":
        tags, triggers = constraint.structural_tags.tags, constraint.structural_tags.triggers
        if not 1 <= len(tags) <= MAX_TAGS or not 1 <= len(triggers) <= MAX_TAGS:
            yield FieldViolation("constraint.structural_tags", f"needs 1 to {MAX_TAGS} tags and triggers")
    elif not getattr(constraint, kind):
        yield FieldViolation(f"constraint.{kind}", "is empty")
    if request.ignore_eos:
        yield FieldViolation("ignore_eos", "and a constraint exclude each other; remove one")


def _length_violations(request: pb.GenerateRequest, limits: ServingLimits) -> Iterator[FieldViolation]:
    most = limits.max_context_tokens
    yield from _number(request, "max_tokens", lambda it: it >= 1, "1 or more, or absent")
    yield from _number(request, "min_tokens", lambda it: 0 <= it <= most, _range(0, most))
    if request.HasField("max_tokens") and 1 <= request.max_tokens < request.min_tokens <= most:
        problem = f"is {request.min_tokens}, above max_tokens {request.max_tokens}; lower it"
        yield FieldViolation("min_tokens", problem)


def _stop_violations(request: pb.GenerateRequest, limits: ServingLimits) -> Iterator[FieldViolation]:
    if len(request.stop) > MAX_STOPS:
        yield FieldViolation("stop", f"has {len(request.stop)} strings; at most {MAX_STOPS} are accepted")
    for index, stop in enumerate(request.stop[:MAX_STOPS]):
        if not stop:
            yield FieldViolation(f"stop[{index}]", "is empty; remove it")
        if len(stop) > MAX_STOP_CHARS:
            problem = f"has {len(stop)} characters; at most {MAX_STOP_CHARS} are accepted"
            yield FieldViolation(f"stop[{index}]", problem)
    if len(request.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        problem = f"has {len(request.stop_token_ids)} tokens; at most {MAX_STOP_TOKEN_IDS} are accepted"
        yield FieldViolation("stop_token_ids", problem)
    else:
        yield from _vocab_violations("stop_token_ids", request.stop_token_ids, limits)


def _identity_violations(request: pb.GenerateRequest, limits: ServingLimits) -> Iterator[FieldViolation]:
    """Check the names of the caller and the request, its urgency and its pins."""
    for field, max_chars in (("tenant", 64), ("request_id", MAX_ID_CHARS), ("session_id", MAX_ID_CHARS)):
        value = getattr(request, field)
        if len(value) > max_chars or not _ID.fullmatch(value):
            problem = f"must be at most {max_chars} letters, digits, dots, colons, dashes or underscores"
            yield FieldViolation(field, problem)
    if name_of(pb.ServiceClass, request.service_class) not in ("", *SERVICE_CLASSES):
        yield FieldViolation("service_class", f"must be one of {', '.join(SERVICE_CLASSES)}, or unspecified")
    if request.cache_control not in pb.CacheControl.values():
        yield FieldViolation("cache_control", "must be no_store, or unspecified")
    if abs(request.priority) > MAX_PRIORITY:
        yield FieldViolation(
            "priority", f"is {request.priority}; must be from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        )
    if request.HasField("pins") and not limits.allow_pins:
        problem = "is for debugging and not allowed here; remove it, or set debug.allow_pins"
        yield FieldViolation("pins", problem)


def _resume_violations(request: pb.GenerateRequest, limits: ServingLimits) -> Iterator[FieldViolation]:
    if not request.resume:
        return
    if not request.HasField("seed"):
        yield FieldViolation("seed", "is missing; a resumed request needs the seed that `accepted` gave")
    if not request.request_id:
        yield FieldViolation("request_id", "is missing; a resumed request needs the one that `accepted` gave")
    num_samples = max(1, request.n)
    seen: set[int] = set()
    for index, resumed in enumerate(request.resume[: limits.max_samples + 1]):
        field = f"resume[{index}]"
        if resumed.sample >= num_samples or resumed.sample in seen:
            problem = f"is {resumed.sample}; name each of the samples 0 to {num_samples - 1} once at most"
            yield FieldViolation(f"{field}.sample", problem)
        seen.add(resumed.sample)
        if name_of(pb.FinishReason, resumed.finish_reason) not in FINISH_REASONS:
            yield FieldViolation(f"{field}.finish_reason", "must be as a delta gave it, or unspecified")
        if len(resumed.token_ids) > limits.max_context_tokens:
            yield FieldViolation(f"{field}.token_ids", "is longer than the model's context")
        else:
            yield from _vocab_violations(f"{field}.token_ids", resumed.token_ids, limits)


def _range(least: int, most: int) -> str:
    return f"from {least} to {most}" if most < _UNKNOWN else f"{least} or more"


def _number(
    request: pb.GenerateRequest, field: str, accepts: Callable[[float], bool], wanted: str
) -> Iterator[FieldViolation]:
    """Check a number: an absent field is fine; infinity, NaN and values that single precision cannot hold
    never are."""
    if request.HasField(field):
        value = getattr(request, field)
        if not abs(value) <= _MAX_FLOAT32 or not accepts(value):
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            yield FieldViolation(field, f"is {shown}; must be {wanted}")


def _num_bytes(text: str) -> int:
    """Return the bytes of a text in UTF-8, without a copy where it is ASCII."""
    return len(text) if text.isascii() else len(text.encode())


def _size_violations(field: str, num_bytes: int, limits: ServingLimits) -> Iterator[FieldViolation]:
    if num_bytes > limits.max_prompt_bytes:
        problem = (
            f"is {num_bytes} bytes long; at most {limits.max_prompt_bytes} can fit the model's context "
            f"of {limits.max_context_tokens} tokens; shorten it"
        )
        yield FieldViolation(field, problem)


def _vocab_violations(field: str, ids: Any, limits: ServingLimits) -> Iterator[FieldViolation]:
    bad = [token for token in ids if token >= limits.vocab_size]
    if bad:
        shown = ", ".join(str(token) for token in bad[:_NUM_SHOWN])
        more = f" and {len(bad) - _NUM_SHOWN} more" if len(bad) > _NUM_SHOWN else ""
        problem = f"names {shown}{more}; token ids of this model are 0 to {limits.vocab_size - 1}"
        yield FieldViolation(field, problem)


def _too_long(num_tokens: int, limits: ServingLimits) -> FieldViolation:
    problem = (
        f"has {num_tokens} tokens; the model's context is {limits.max_context_tokens} and at least one "
        "must be left for the answer; shorten it"
    )
    return FieldViolation("prompt", problem)
