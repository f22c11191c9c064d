"""From a client's request to a prepared one: limits, chat template, tokenizer, seeds, block keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cluster.config import GatewayConfig
from cluster.errors import TemplateError
from cluster.proto import tandem_pb2 as pb
from cluster.text.chat_template import ChatRenderer, ChatTurn, load_chat_template
from cluster.text.tokenizer import SHORT_CHARS, ModelText, SampleText
from cluster.text.validation import ServingLimits, max_tokens_of, sampling_of
from kvtransfer.blocks.keys import TOKEN_BYTES, block_keys
from kvtransfer.common.clock import Clock
from kvtransfer.rpc.handshake import draw_id
from workers.messages import SamplingParams
from workers.model.model_config import read_model_config

_MASK = (1 << 64) - 1


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

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.prompt) // TOKEN_BYTES

    @property
    def seed(self) -> int:
        """The seed of the request, which is that of its first sample."""
        return self.samples[0].seed


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
        block_tokens: int,
        allow_pins: bool,
    ) -> None:
        self._model_name = model_name
        self._gateway = gateway
        self._clock = clock
        self._draw_seed = draw_seed
        self._block_tokens = block_tokens
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
        fingerprint: bytes,
        deadline_at: float | None,
    ) -> tuple[PreparedRequest, list[SampleText]]:
        """Prepare a checked and tokenized request, with the text of each sample so far.

        Raises `InvalidRequestError` when the request is too long.
        """
        max_tokens = max_tokens_of(request, len(prompt) // TOKEN_BYTES, limits)
        seed = request.seed if request.HasField("seed") else self._draw_seed()
        starts, texts = self._samples(request, seed, max_tokens)
        unique = draw_id().hex()
        prepared = PreparedRequest(
            request_id=f"{request.request_id}~{unique[:8]}" if request.request_id else unique,
            tenant=request.tenant,
            priority=request.priority,
            prompt=prompt,
            block_keys=block_keys(prompt, self._block_tokens, fingerprint, request.tenant),
            sampling=sampling_of(request, max_tokens),
            samples=tuple(starts),
            deadline_at=deadline_at,
            max_attempts=self._gateway.max_attempts,
            pinned_prefill=request.pins.prefill,
            pinned_decode=request.pins.decode,
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
