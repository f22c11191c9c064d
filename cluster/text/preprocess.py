"""From a client's request to a plan: checks, chat template, tokenizer, seed, block keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cluster.config import ClusterConfig
from cluster.errors import TemplateError
from cluster.proto import tandem_pb2 as pb
from cluster.text.chat_template import ChatRenderer, ChatTurn, load_chat_template
from cluster.text.tokenizer import SHORT_CHARS, ModelText, SampleText
from cluster.text.validation import Limits, max_tokens_of, sampling_of
from kvtransfer.blocks.keys import TOKEN_BYTES, block_keys
from kvtransfer.common.clock import Clock
from kvtransfer.rpc.handshake import draw_id
from workers.messages import SamplingParams
from workers.model.model_config import read_model_config

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SampleStart:
    """A sample as the client asks for it: `output` and `finish` are empty unless it resumes."""

    index: int
    seed: int
    output: bytes = b""
    finish: str = ""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One request, checked and tokenized. `request_id` is unique on the wire, also among resumed calls."""

    request_id: str
    tenant: str
    priority: int
    prompt: bytes
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


class Preprocessed(NamedTuple):
    """A request ready to go: what to do, the text of each sample so far, and the seed of them all."""

    plan: PreparedRequest
    texts: list[SampleText]
    seed: int


class Preprocessor:
    """The model's texts and limits; holds nothing of any request."""

    def __init__(self, config: ClusterConfig, clock: Clock, draw_seed: Callable[[], int]) -> None:
        self._config = config
        self._clock = clock
        self._draw_seed = draw_seed
        self._model = read_model_config(config.model)
        self._text = ModelText.load(config.model)
        template = load_chat_template(config.model)
        self._chat = ChatRenderer(template) if template is not None else None

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def limits(self, max_context_tokens: int) -> Limits:
        """What a request may ask for; `max_context_tokens` 0: no replica has told its own yet."""
        gateway = self._config.gateway
        return Limits(
            model_name=self._config.model_name,
            vocab_size=self._model.vocab_size,
            max_context_tokens=max_context_tokens or self._model.max_context_tokens,
            max_samples=gateway.max_samples,
            default_max_tokens=gateway.default_max_tokens,
            allow_pins=self._config.debug.allow_pins,
        )

    async def prompt_tokens(self, request: pb.GenerateRequest, limits: Limits) -> bytes:
        """The prompt of a checked request, as uint32 little-endian."""
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            return np.asarray(request.token_ids.ids, dtype="<u4").tobytes()
        if kind == "text":
            return await self.encode(request.text)
        return await self.encode(await self.render_chat(request.chat, limits), add_special_tokens=False)

    def plan(
        self,
        request: pb.GenerateRequest,
        prompt: bytes,
        limits: Limits,
        *,
        fingerprint: bytes,
        deadline_at: float | None,
    ) -> Preprocessed:
        """The plan of a checked and tokenized request; `InvalidRequestError` when it is too long."""
        max_tokens = max_tokens_of(request, len(prompt) // TOKEN_BYTES, limits)
        seed = request.seed if request.HasField("seed") else self._draw_seed()
        starts, texts = self._samples(request, seed, max_tokens)
        unique = draw_id().hex()
        block_tokens = self._config.pools[0].engine.block_tokens
        plan = PreparedRequest(
            request_id=f"{request.request_id}~{unique[:8]}" if request.request_id else unique,
            tenant=request.tenant,
            priority=request.priority,
            prompt=prompt,
            block_keys=block_keys(prompt, block_tokens, fingerprint, request.tenant),
            sampling=sampling_of(request, max_tokens),
            samples=tuple(starts),
            deadline_at=deadline_at,
            max_attempts=self._config.gateway.max_attempts,
            pinned_prefill=request.pins.prefill,
            pinned_decode=request.pins.decode,
        )
        return Preprocessed(plan, texts, seed)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """Token ids as uint32 little-endian bytes."""
        if len(text) <= SHORT_CHARS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode_now, text, add_special_tokens=add_special_tokens)

    def encode_now(self, text: str, *, add_special_tokens: bool) -> bytes:
        """As `encode`, in whatever thread this is."""
        return self._text.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, tokens: bytes, *, keep_special_tokens: bool) -> str:
        """The text of token ids."""
        return self._text.decode(tokens, keep_special_tokens=keep_special_tokens)

    async def render_chat(self, chat: pb.ChatMessages, limits: Limits) -> str:
        """The prompt's text by the model's template; `TemplateError` when that cannot be."""
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
        """Fresh samples, or what a resuming client has of them, which may be all there is to have."""
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
    """The 64-bit seed of sample `index`: the request's own for 0, else splitmix64's `index`-th output."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
