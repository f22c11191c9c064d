"""From a client's request to a prepared one: validation, chat template, tokenizer, seeds, block keys.

The file is over 400 lines because validation is one check for each field of a request.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cluster.config import GatewayConfig
from cluster.errors import FieldViolation, InvalidRequestError, TemplateError, UnknownModelError
from cluster.identity.identity import MAX_PRIORITY
from cluster.identity.key_roots import KeyRoots
from cluster.proto import tandem_pb2 as pb
from cluster.text.chat_template import ChatRenderer, ChatTurn, load_chat_template
from cluster.text.tokenizer import SHORT_CHARS, ModelText, SampleText
from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.common.clock import Clock
from workers.messages.link import SERVICE_CLASSES, Pooling, ServiceClass
from workers.messages.sampling import SamplingParams
from workers.model.model_config import read_model_config

_MASK = (1 << 64) - 1
# What makes the id of a call unique among all that have the client's id.
_UNIQUE_BYTES = 8


@dataclass(frozen=True, slots=True)
class SampleStart:
    """A sample as the client asks for it; `output` and `finish` are empty unless the request resumes."""

    index: int
    seed: int
    output: bytes = b""
    finish: str = ""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request, checked and tokenized. `request_id` is unique on the wire, also among resumed calls."""

    request_id: str
    tenant: str
    # Whose prefixes it shares.
    sharing_group: str
    priority: int
    prompt: bytes
    # Where the chain of `block_keys` begins.
    root_key: bytes
    block_keys: tuple[bytes, ...]
    sampling: SamplingParams
    samples: tuple[SampleStart, ...]
    deadline_at: float | None
    max_attempts: int = 5
    # How long a new request waits for any route at all.
    first_patience_s: float = 1.0
    # How long a request that lost its replicas waits for others (a replacement starts in seconds).
    patience_s: float = 20.0
    pinned_prefill: str = ""
    pinned_decode: str = ""
    # Of each replica's KV blocks: what its sharing group may use.
    kv_share: float = 1.0
    service_class: ServiceClass = "standard"
    # What `max_tokens` was cut to because of the load; 0: it was not.
    capped_max_tokens: int = 0
    # The prompt is embedded: no token is generated.
    pooling: Pooling | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.prompt) // TOKEN_BYTES

    @property
    def seed(self) -> int:
        """The seed of the request, which is that of its first sample."""
        return self.samples[0].seed


def draw_seed() -> int:
    """Draw 64 random bits."""
    return secrets.randbits(64)


class Preprocessor:
    """Prepares requests for one model; holds nothing of any request."""

    def __init__(
        self,
        model_dir: Path,
        model_name: str,
        gateway: GatewayConfig,
        clock: Clock,
        draw_seed: Callable[[], int],
        *,
        key_roots: KeyRoots,
        allow_pins: bool,
    ) -> None:
        self._model_name = model_name
        self._gateway = gateway
        self._clock = clock
        self._draw_seed = draw_seed
        self._key_roots = key_roots
        self._allow_pins = allow_pins
        self._model = read_model_config(model_dir)
        self._text = ModelText.load(model_dir)
        template = load_chat_template(model_dir)
        self._chat = ChatRenderer(template) if template is not None else None

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._chat is not None

    def limits(self, max_context_tokens: int) -> ServingLimits:
        """Return what a request may ask for; `max_context_tokens` 0: no replica has reported its own yet."""
        return ServingLimits(
            model_name=self._model_name,
            vocab_size=self._model.vocab_size,
            max_context_tokens=max_context_tokens or self._model.max_context_tokens,
            max_samples=self._gateway.max_samples,
            default_max_tokens=self._gateway.default_max_tokens,
            allow_pins=self._allow_pins,
        )

    async def prompt_tokens(self, request: pb.GenerateRequest, limits: ServingLimits) -> bytes:
        """Return the prompt of a checked request, as uint32 little-endian."""
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            return np.asarray(request.token_ids.ids, dtype="<u4").tobytes()
        if kind == "text":
            return await self.encode(request.text)
        return await self.encode(await self.render_chat(request.chat, limits), add_special_tokens=False)

    def prepare(
        self,
        request: pb.GenerateRequest,
        prompt: bytes,
        limits: ServingLimits,
        *,
        request_id: str,
        sharing_group: str,
        fingerprint: bytes,
        deadline_at: float | None,
        service_class: ServiceClass = "standard",
    ) -> tuple[PreparedRequest, list[SampleText]]:
        """Prepare a checked and tokenized request, with the text of each sample so far. `request_id` is the
        client's, or drawn.

        Raises `InvalidRequestError` when the request is too long.
        """
        max_tokens = max_tokens_of(request, len(prompt) // TOKEN_BYTES, limits)
        seed = request.seed if request.HasField("seed") else self._draw_seed()
        starts, texts = self._samples(request, seed, max_tokens)
        chain = self._key_roots.chain(prompt, fingerprint, sharing_group)
        prepared = PreparedRequest(
            request_id=f"{request_id}~{secrets.token_hex(_UNIQUE_BYTES)}",
            tenant=request.tenant,
            sharing_group=sharing_group,
            priority=request.priority,
            prompt=prompt,
            root_key=chain.root_key,
            block_keys=chain.block_keys,
            sampling=sampling_of(request, max_tokens),
            samples=tuple(starts),
            deadline_at=deadline_at,
            max_attempts=self._gateway.max_attempts,
            pinned_prefill=request.pins.prefill,
            pinned_decode=request.pins.decode,
            kv_share=limits.kv_share,
            service_class=service_class,
        )
        return prepared, texts

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """Return the token ids of the text as uint32 little-endian bytes."""
        if len(text) <= SHORT_CHARS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode_now, text, add_special_tokens=add_special_tokens)

    def encode_now(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Encode in the calling thread."""
        return self._text.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, tokens: bytes, *, keep_special_tokens: bool) -> str:
        """Return the text of token ids."""
        return self._text.decode(tokens, keep_special_tokens=keep_special_tokens)

    async def render_chat(self, chat: pb.ChatMessages, limits: ServingLimits) -> str:
        """Render the prompt by the model's template; raise `TemplateError` when that cannot be done."""
        if self._chat is None:
            raise TemplateError("this model has no chat template; send text instead")
        return await self._chat.render(
            [ChatTurn(turn.role, turn.content) for turn in chat.messages],
            add_generation_prompt=not chat.HasField("add_generation_prompt") or chat.add_generation_prompt,
            wall_s=self._clock.wall(),
            max_chars=limits.max_prompt_bytes,
        )

    async def close(self) -> None:
        """End the chat template's process."""
        if self._chat is not None:
            await self._chat.close()

    def _samples(
        self, request: pb.GenerateRequest, seed: int, max_tokens: int
    ) -> tuple[list[SampleStart], list[SampleText]]:
        """Return fresh samples, or what a resuming client has of them, which may be complete."""
        resumed = {item.sample: item for item in request.resume}
        starts: list[SampleStart] = []
        texts: list[SampleText] = []
        for index in range(max(1, request.n)):
            text = SampleText(self._text.detokenizer(), request.stop)
            output, finish = b"", ""
            if index in resumed:
                output = np.asarray(resumed[index].token_ids, dtype="<u4").tobytes()
                finish = resumed[index].finish_reason
            if output and not finish:
                finish = text.push(output, "").finish
                if resumed[index].token_ids[-1] in self._end_token_ids(request):
                    finish = "stop"
                elif len(output) >= max_tokens * TOKEN_BYTES:
                    finish = finish or "length"
            starts.append(SampleStart(index, sample_seed(seed, index), output, finish))
            texts.append(text)
        return starts, texts

    def _end_token_ids(self, request: pb.GenerateRequest) -> set[int]:
        ends = set(request.stop_token_ids)
        return ends if request.ignore_eos else ends | set(self._model.eos_token_ids)


def sample_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of a sample: the request's own for 0, else splitmix64's `index`-th output."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


# ----------------------------------------------------------------------------------------------
# Validation: every bad field of a request is named, with the remedy, all at once. What needs the token count
# is checked after tokenizing.

# A prompt text longer than this times the context is refused before it is tokenized.
MAX_BYTES_PER_TOKEN = 32
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_CHAT_MESSAGES = 4096
FINISH_REASONS = ("", "stop", "length")

_ID = re.compile(r"[A-Za-z0-9._:-]*")
_DEFAULTS = SamplingParams()
# Bad token ids that an error names.
_NUM_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """What a request may ask for; from the configuration, the model and the connected replicas."""

    model_name: str
    vocab_size: int
    max_context_tokens: int
    max_samples: int
    default_max_tokens: int
    allow_pins: bool
    # What the request's sharing group may use of each replica's KV, and the tokens that fit it at every
    # replica (0: no limit).
    kv_share: float = 1.0
    max_share_tokens: int = 0

    @property
    def max_prompt_bytes(self) -> int:
        return self.max_context_tokens * MAX_BYTES_PER_TOKEN


def check_model(name: str, limits: ServingLimits) -> None:
    """`UnknownModelError` when `name` is neither empty nor the served model."""
    if name not in ("", limits.model_name):
        raise UnknownModelError(f"model {name[:100]!r} is not served here; served: {limits.model_name!r}")


_UNKNOWN = 1 << 62
# What no gateway accepts is refused by these.
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
    """Everything that can be known before tokenizing; `InvalidRequestError` names every bad field."""
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
        found = list(_chat_violations(request.chat, limits))
    else:
        found = list(_size_violations("text", len(request.text.encode()), limits))
    if found:
        raise InvalidRequestError(*found)


def check_detokenize(request: pb.DetokenizeRequest, limits: ServingLimits) -> None:
    """`UnknownModelError`, or `InvalidRequestError` for ids that the model does not have, or too many."""
    check_model(request.model, limits)
    num_tokens = len(request.token_ids)
    if num_tokens > limits.max_context_tokens:
        problem = f"has {num_tokens} tokens; at most the model's context, {limits.max_context_tokens}"
        raise InvalidRequestError(FieldViolation("token_ids", problem))
    found = list(_vocab_violations("token_ids", request.token_ids, limits))
    if found:
        raise InvalidRequestError(*found)


def max_tokens_of(request: pb.GenerateRequest, num_prompt_tokens: int, limits: ServingLimits) -> int:
    """The request's `max_tokens`, or the default cut to what the context leaves after the prompt."""
    if num_prompt_tokens == 0:
        raise InvalidRequestError(FieldViolation("prompt", "it has no tokens; send more text"))
    space = limits.max_context_tokens - num_prompt_tokens
    if space < 1:
        raise InvalidRequestError(_too_long(num_prompt_tokens, limits))
    if limits.max_share_tokens - num_prompt_tokens < space and limits.kv_share < 1:
        space = limits.max_share_tokens - num_prompt_tokens
        _check_share(request, num_prompt_tokens, limits)
    if not request.HasField("max_tokens"):
        return max(min(limits.default_max_tokens, space), min(request.min_tokens, space))
    if request.max_tokens > space:
        problem = (
            f"{request.max_tokens} more than the {num_prompt_tokens} tokens of the prompt exceed the context "
            f"of {limits.max_context_tokens}; ask for at most {space}"
        )
        raise InvalidRequestError(FieldViolation("max_tokens", problem))
    return int(request.max_tokens)


def _check_share(request: pb.GenerateRequest, num_prompt_tokens: int, limits: ServingLimits) -> None:
    """`InvalidRequestError` when the request alone exceeds its tenant's share of a replica's KV."""
    most = limits.max_share_tokens
    share = f"the tenant's share of a replica's KV, {most} tokens (device_kv_share {limits.kv_share:g})"
    if num_prompt_tokens >= most:
        problem = f"has {num_prompt_tokens} tokens and with one for the answer exceeds {share}; shorten it"
        raise InvalidRequestError(FieldViolation("prompt", problem))
    if request.HasField("max_tokens") and num_prompt_tokens + request.max_tokens > most:
        problem = (
            f"{request.max_tokens} more than the {num_prompt_tokens} tokens of the prompt exceed {share}; "
            f"ask for at most {most - num_prompt_tokens}"
        )
        raise InvalidRequestError(FieldViolation("max_tokens", problem))


def sampling_of(request: pb.GenerateRequest, max_tokens: int) -> SamplingParams:
    """The sampling parameters of a checked request; absent fields take the engine's defaults."""

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
    )


def _violations(request: pb.GenerateRequest, limits: ServingLimits) -> list[FieldViolation]:
    return [
        *_prompt_violations(request, limits),
        *_choice_violations(request, limits),
        *_length_violations(request, limits),
        *_stop_violations(request, limits),
        *_identity_violations(request, limits),
        *_resume_violations(request, limits),
    ]


def _prompt_violations(request: pb.GenerateRequest, limits: ServingLimits) -> Iterator[FieldViolation]:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        if not request.text:
            yield FieldViolation("prompt", "the text is empty; send at least one character")
        yield from _size_violations("prompt", len(request.text.encode()), limits)
    elif kind == "token_ids":
        ids = request.token_ids.ids
        if not ids:
            yield FieldViolation("prompt", "token_ids is empty; send at least one token")
        if len(ids) > limits.max_context_tokens:
            yield _too_long(len(ids), limits)
        else:
            yield from _vocab_violations("token_ids", ids, limits)
    elif kind == "chat":
        yield from _chat_violations(request.chat, limits)
    else:
        yield FieldViolation("prompt", "is missing; send one of text, token_ids or chat")


def _chat_violations(chat: pb.ChatMessages, limits: ServingLimits) -> Iterator[FieldViolation]:
    turns = chat.messages
    if not turns:
        yield FieldViolation("chat", "has no messages; send at least one")
    if len(turns) > MAX_CHAT_MESSAGES:
        yield FieldViolation("chat", f"has {len(turns)} messages; at most {MAX_CHAT_MESSAGES} are accepted")
    if any(not turn.role for turn in turns):
        yield FieldViolation("chat", "a message has no role; use system, user or assistant")
    num_bytes = sum(len(turn.role.encode()) + len(turn.content.encode()) for turn in turns)
    yield from _size_violations("prompt", num_bytes, limits)


def _choice_violations(request: pb.GenerateRequest, limits: ServingLimits) -> Iterator[FieldViolation]:
    """How tokens are chosen."""
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
    """Who asks, how urgently, and where."""
    for field, max_chars in (("tenant", 64), ("request_id", 128)):
        value = getattr(request, field)
        if len(value) > max_chars or not _ID.fullmatch(value):
            problem = f"must be at most {max_chars} letters, digits, dots, colons, dashes or underscores"
            yield FieldViolation(field, problem)
    if request.service_class and request.service_class not in SERVICE_CLASSES:
        yield FieldViolation("service_class", f"must be one of {', '.join(SERVICE_CLASSES)}, or empty")
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
        if resumed.finish_reason not in FINISH_REASONS:
            yield FieldViolation(f"{field}.finish_reason", 'must be "", "stop" or "length"')
        if len(resumed.token_ids) > limits.max_context_tokens:
            yield FieldViolation(f"{field}.token_ids", "is longer than the model's context")
        else:
            yield from _vocab_violations(f"{field}.token_ids", resumed.token_ids, limits)


def _range(least: int, most: int) -> str:
    return f"from {least} to {most}" if most < _UNKNOWN else f"{least} or more"


def _number(
    request: pb.GenerateRequest, field: str, accepts: Callable[[float], bool], wanted: str
) -> Iterator[FieldViolation]:
    """An absent field is fine; infinity and NaN never are."""
    if request.HasField(field):
        value = getattr(request, field)
        if not math.isfinite(value) or not accepts(value):
            yield FieldViolation(field, f"is {value:g}; must be {wanted}")


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
