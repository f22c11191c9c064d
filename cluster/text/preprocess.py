"""From a client's checked request to a prepared one: chat template, tokenizer, seeds, block keys."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs

from cluster.config import GatewayConfig
from cluster.errors import TemplateError
from cluster.identity.key_roots import KeyRoots
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.text.call_probe import CallProbe
from cluster.text.chat_template import (
    CalledTool,
    Chat,
    ChatRenderer,
    ChatTool,
    ChatTurn,
    Rendered,
    load_chat_template,
)
from cluster.text.constraints import demands_calls, output_constraint, tags_of
from cluster.text.grammars import GrammarCompiler, Vocabulary
from cluster.text.marked_prompt import MarkedPromptEncoder, marks_in_answers
from cluster.text.message_ends import MessageEnds
from cluster.text.output_parsers.choose import OutputParsers, ParserNeeds
from cluster.text.output_parsers.tool_grammar import ReasoningRules
from cluster.text.sample_text import SampleText
from cluster.text.shown_tools import with_tools_shown
from cluster.text.special_text import SpecialText
from cluster.text.tag_grammar import tag_markers
from cluster.text.text_threads import TextThreads
from cluster.text.tokenizer import ModelText
from cluster.text.turn_end import TurnEnd
from cluster.text.validation import ServingLimits, max_tokens_of, sampling_of
from kvtransfer.blocks.keys import TOKEN_BYTES
from kvtransfer.common.clock import Clock
from kvtransfer.request_facts import RequestFacts
from workers.messages.sampling import Grammar, SamplingParams
from workers.model.model_config import read_model_config

_MASK = (1 << 64) - 1
# More output of a resumed request is worth a thread: reading it takes some 20 us a token.
_SHORT_TOKENS = 256
# Memory of a request without its prompt, the keys of its blocks and its grammar.
_REQUEST_BYTES = 4096
# The part that makes the id of a call unique among all that have the client's id.
_UNIQUE_BYTES = 8


@dataclass(frozen=True, slots=True)
class SampleStart:
    """A sample as the client requests it; `output` and `finish` are empty unless the request resumes."""

    index: int
    seed: int
    output: bytes = b""
    finish: str = ""


class Prompt(NamedTuple):
    """The prompt's token ids, uint32 little-endian, the parsers of its answer, whether it ends with the
    beginning of reasoning, the rules of reasoning that may follow it (None: a grammar allows none), and
    tokens that end the answer beside the model's end tokens."""

    tokens: bytes
    parsers: OutputParsers
    opens_reasoning: bool = False
    reasoning: ReasoningRules | None = None
    end_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request, checked and tokenized. `request_id` is unique on the wire, also among resumed calls."""

    request_id: str
    facts: RequestFacts
    prompt: bytes
    # The beginning of the chain of `block_keys`.
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
    # The value to which `max_tokens` was cut, by the room that the context has or because of the load; 0: it
    # was not.
    capped_max_tokens: int = 0
    # The required form of the output.
    grammar: Grammar | None = None
    # Whether the grammar comes from the tools of the chat alone.
    is_grammar_of_tools: bool = False
    # How many tokens of the prompt are before the end of each message; of models with recurrent states alone.
    message_ends: tuple[int, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """The length of the prompt."""
        return len(self.prompt) // TOKEN_BYTES

    @property
    def num_bytes(self) -> int:
        """The bytes that the request takes while it waits, without the client's message."""
        num_grammar_bytes = 0 if self.grammar is None else len(self.grammar.text)
        return len(self.prompt) + sum(map(len, self.block_keys)) + num_grammar_bytes + _REQUEST_BYTES

    @property
    def num_resumed_tokens(self) -> int:
        """The number of output tokens that a resuming caller brought."""
        return sum(len(it.output) for it in self.samples) // TOKEN_BYTES

    @property
    def num_claimed_tokens(self) -> int:
        """The number of output tokens that a resuming caller brought that are computed once more: those of
        samples that have not ended."""
        return sum(len(it.output) for it in self.samples if not it.finish) // TOKEN_BYTES

    @property
    def seed(self) -> int:
        """The seed of the request, which is that of its first sample."""
        return self.samples[0].seed

    def waiting_for_start(self, start_patience_s: float) -> PreparedRequest:
        """Return the request with at least this patience for the first replica."""
        if start_patience_s <= self.first_patience_s:
            return self
        return replace(self, first_patience_s=start_patience_s)

    def capped(self, max_tokens: int) -> PreparedRequest:
        """Return the request with at most this many tokens of output a sample; 0: unchanged."""
        if not 0 < max_tokens < self.sampling.max_tokens:
            return self
        samples = tuple(
            replace(it, finish="length")
            if not it.finish and len(it.output) >= max_tokens * TOKEN_BYTES
            else it
            for it in self.samples
        )
        sampling = structs.replace(self.sampling, max_tokens=max_tokens)
        return replace(self, samples=samples, sampling=sampling, capped_max_tokens=max_tokens)


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
        self._threads = TextThreads("prompt")
        template = load_chat_template(model_dir)
        tokenizer = model_dir / "tokenizer.json"
        marks = template.source + template.tool_source if template is not None else None
        self._parsers = OutputParsers.choose(marks, gateway.tool_parser, gateway.reasoning_parser)
        self._chat: ChatRenderer | None = None
        self._turn_end: TurnEnd | None = None
        self._message_ends: MessageEnds | None = None
        self._marked_prompts: MarkedPromptEncoder | None = None
        if template is not None:
            special = None
            ends = set(map(self._text.token_text, self._model.eos_token_ids))
            named = {*template.special_tokens.values(), *ends}
            tokens = self._text.special_tokens(marks or "", named)
            if gateway.special_tokens_in_content == "plain":
                in_answers = {*self._parsers.markers, *marks_in_answers(marks or "")} - named
                special = SpecialText.of(tokens, in_answers)
                self._marked_prompts = self._text.marked_prompt_encoder(tokens)
            self._chat = ChatRenderer(template, special)
            token_to_id = self._text.token_ids(tokens)
            self._turn_end = TurnEnd(self._chat, token_to_id, self._parsers.answer_ends)
            if self._model.state is not None:
                self._message_ends = MessageEnds(self._chat, token_to_id)
        self._calls = CallProbe(self._parsers, self._chat, finds_notation=gateway.tool_parser == "auto")
        self._grammars = GrammarCompiler(
            Vocabulary(tokenizer, self._model.vocab_size, tuple(self._model.eos_token_ids))
        )

    @property
    def text(self) -> ModelText:
        """The model's tokenizer."""
        return self._text

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return self._chat is not None

    @property
    def hidden_size(self) -> int:
        """The number of values that an embedding has."""
        return self._model.hidden_size

    def limits(self, max_context_tokens: int) -> ServingLimits:
        """Return the limits of a request; `max_context_tokens` 0: no replica has reported its own yet."""
        return ServingLimits(
            model_name=self._model_name,
            vocab_size=self._model.vocab_size,
            max_context_tokens=max_context_tokens or self._model.max_context_tokens,
            max_samples=self._gateway.max_samples,
            default_max_tokens=self._gateway.default_max_tokens,
            allow_pins=self._allow_pins,
            caps_max_tokens=self._gateway.max_tokens_beyond_context == "cap",
        )

    async def prompt_tokens(self, request: pb.GenerateRequest, limits: ServingLimits) -> Prompt:
        """Return the prompt of a checked request: its end where it is truncated."""
        opens_reasoning, reasoning, parsers = False, None, self._parsers
        ends: tuple[int, ...] = ()
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            prompt = np.asarray(request.token_ids.ids, dtype="<u4").tobytes()
        elif kind == "text":
            opens_reasoning = self._parsers.opens_reasoning(request.text)
            prompt = await self.encode(request.text, party=request.tenant)
        else:
            rendered = await self.render_chat(request.chat, limits, request.tenant)
            continued = _continued_text(request.chat)
            opens_reasoning = self._parsers.opens_reasoning(rendered.markup, continued)
            reasoning = self._parsers.reasoning_rules(rendered.markup, continued)
            prompt = await self.encode(rendered, add_special_tokens=False, party=request.tenant)
            ends = await self._turn_ends(request)
            if parser_needs_of(request).tools:
                parsers = await self._calls.parsers(self._clock.wall())
            if demands_calls(request.chat):
                parsers = parsers.demanded()
        if request.HasField("truncate_prompt_tokens"):
            prompt = prompt[-request.truncate_prompt_tokens * TOKEN_BYTES :]
        return Prompt(prompt, parsers, opens_reasoning, reasoning, ends)

    async def grammar(self, request: pb.GenerateRequest, prompt: Prompt) -> Grammar | None:
        """Return the required form of the output of a checked request; raise `GrammarError` where there can
        be none."""
        constraint = output_constraint(request, prompt.parsers, prompt.reasoning)
        return None if constraint is None else await self._grammars.make(constraint, request.tenant)

    async def prepare(
        self,
        request: pb.GenerateRequest,
        limits: ServingLimits,
        *,
        request_id: str,
        facts: RequestFacts,
        fingerprint: bytes,
        deadline_at: float | None,
    ) -> tuple[PreparedRequest, list[SampleText]]:
        """Tokenize a checked request, write the required form of its output as a grammar, and return it with
        the text of each sample so far. `request_id` is the client's, or drawn.

        Raises `InvalidRequestError` when the request is too long, and what `prompt_tokens` and `grammar`
        raise. One whose prompt is embedded has no use for its other sampling parameters.
        """
        prompt = await self.prompt_tokens(request, limits)
        grammar = await self.grammar(request, prompt)
        max_tokens = max_tokens_of(request, len(prompt.tokens) // TOKEN_BYTES, limits)
        seed = request.seed if request.HasField("seed") else self._draw_seed()
        read = partial(self._samples, request, seed, max_tokens, request_id, prompt)
        is_short = sum(len(item.token_ids) for item in request.resume) <= _SHORT_TOKENS
        starts, texts = read() if is_short else await self._threads.run(request.tenant, read)
        sampling = sampling_of(request, max_tokens) if facts.decodes else SamplingParams(max_tokens=1)
        if facts.decodes and prompt.end_token_ids:
            ends = (*sampling.stop_token_ids, *prompt.end_token_ids)
            sampling = structs.replace(sampling, stop_token_ids=ends)
        chain = await self._key_roots.chain(prompt.tokens, fingerprint, facts.sharing_group)
        message_ends: tuple[int, ...] = ()
        if self._message_ends is not None:
            message_ends = await self._message_ends.positions(prompt.tokens, self._clock.wall())
        prepared = PreparedRequest(
            request_id=f"{request_id}~{secrets.token_hex(_UNIQUE_BYTES)}",
            facts=facts,
            prompt=prompt.tokens,
            root_key=chain.root_key,
            block_keys=chain.block_keys,
            sampling=sampling,
            samples=tuple(starts),
            deadline_at=deadline_at,
            max_attempts=self._gateway.max_attempts,
            pinned_prefill=request.pins.prefill,
            pinned_decode=request.pins.decode,
            capped_max_tokens=max_tokens if request.max_tokens > max_tokens else 0,
            grammar=grammar,
            is_grammar_of_tools=grammar is not None and not request.HasField("constraint"),
            message_ends=message_ends,
        )
        return prepared, texts

    async def encode(
        self, prompt: str | Rendered, *, add_special_tokens: bool = True, party: str = ""
    ) -> bytes:
        """Return the token ids of a prompt as uint32 little-endian bytes. In a text, special tokens keep
        their meaning. Parties take turns with long prompts."""
        encode = partial(self.encode_now, prompt, add_special_tokens=add_special_tokens)
        is_short = len(prompt if isinstance(prompt, str) else prompt.text) <= self._text.short_chars
        return encode() if is_short else await self._threads.run(party, encode)

    def encode_now(self, prompt: str | Rendered, *, add_special_tokens: bool) -> bytes:
        """Encode in the calling thread."""
        if isinstance(prompt, str):
            return self._text.encode(prompt, add_special_tokens=add_special_tokens)
        marked = self._marked_prompts
        if marked is None or not (prompt.plain_at or marked.has_variants):
            return self._text.encode(prompt.text, add_special_tokens=add_special_tokens)
        with self._text.encoding(len(prompt.text)):
            ids = marked.encode(prompt.text, prompt.plain_at, add_special_tokens=add_special_tokens)
        return np.asarray(ids, dtype="<u4").tobytes()

    def decode(self, tokens: bytes, *, keep_special_tokens: bool) -> str:
        """Return the text of token ids."""
        return self._text.decode(tokens, keep_special_tokens=keep_special_tokens)

    async def render_chat(self, chat: pb.ChatPrompt, limits: ServingLimits, tenant: str) -> Rendered:
        """Render a tenant's prompt by the model's template; raise `TemplateError` where that cannot be."""
        if self._chat is None:
            raise TemplateError("this model has no chat template; send text instead")
        said = chat_of(chat)
        if demands_calls(chat) and (await self._calls.parsers(self._clock.wall())).call_notation is None:
            names = [chat.tool_choice.name] if chat.tool_choice.name else [tool.name for tool in chat.tools]
            said = with_tools_shown(said, names)
        return await self._chat.render(
            said,
            wall_s=self._clock.wall(),
            max_chars=limits.max_prompt_bytes,
            party=tenant,
        )

    async def close(self) -> None:
        """End the processes of the chat template and of grammars."""
        if self._chat is not None:
            await self._chat.close()
        await self._grammars.close()
        self._threads.close()

    def _samples(
        self, request: pb.GenerateRequest, seed: int, max_tokens: int, request_id: str, prompt: Prompt
    ) -> tuple[list[SampleStart], list[SampleText]]:
        """Return fresh samples, or the part of them that a resuming client has, which may be complete."""
        resumed = {item.sample: item for item in request.resume}
        starts: list[SampleStart] = []
        texts: list[SampleText] = []
        for index in range(max(1, request.n)):
            text = self._sample_text(request, request_id, index, prompt)
            output, finish = b"", ""
            if index in resumed:
                output = np.asarray(resumed[index].token_ids, dtype="<u4").tobytes()
                finish = name_of(pb.FinishReason, resumed[index].finish_reason)
            if output:  # what it said is counted, though it may have ended
                has_end = not finish and resumed[index].token_ids[-1] in self._end_token_ids(request, prompt)
                ended = "stop" if has_end or finish == "tool_calls" else finish
                found = text.push(output, ended).finish
                finish = finish or found
                if not finish and len(output) >= max_tokens * TOKEN_BYTES:
                    finish = "length"
            starts.append(SampleStart(index, sample_seed(seed, index), output, finish))
            texts.append(text)
        return starts, texts

    def _sample_text(
        self, request: pb.GenerateRequest, request_id: str, sample: int, prompt: Prompt
    ) -> SampleText:
        """Return the text of a sample without output."""
        needs = parser_needs_of(request)
        kept = prompt.parsers.kept_tokens(needs)
        if request.constraint.HasField("structural_tags"):
            kept |= tag_markers(tags_of(request.constraint))
        return SampleText(
            self._text.detokenizer(kept, keeps_all=request.keep_special_tokens),
            request.stop,
            stop_token_ids=request.stop_token_ids,
            includes_stop=request.include_stop,
            parser=prompt.parsers.make(needs, request_id, sample, opens_reasoning=prompt.opens_reasoning),
        )

    async def _turn_ends(self, request: pb.GenerateRequest) -> tuple[int, ...]:
        """Return the tokens that end the model's turn in a chat, and are no end tokens of the model."""
        if self._turn_end is None or request.ignore_eos:
            return ()
        known = {*self._model.eos_token_ids, *request.stop_token_ids}
        return tuple(it for it in await self._turn_end.token_ids(self._clock.wall()) if it not in known)

    def _end_token_ids(self, request: pb.GenerateRequest, prompt: Prompt) -> set[int]:
        ends = {*request.stop_token_ids, *prompt.end_token_ids}
        return ends if request.ignore_eos else ends | set(self._model.eos_token_ids)


def sample_seed(seed: int, index: int) -> int:
    """Return the 64-bit seed of a sample: the request's own for 0, else splitmix64's `index`-th output."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def parser_needs_of(request: pb.GenerateRequest) -> ParserNeeds:
    """Return which parts of the answer the request wants apart."""
    is_chat = request.WhichOneof("prompt") == "chat"
    separates = request.separate_reasoning if request.HasField("separate_reasoning") else is_chat
    may_call = is_chat and request.chat.tool_choice.mode != pb.ToolChoice.MODE_NONE
    tools = {tool.name: tool.parameters_json for tool in request.chat.tools} if may_call else {}
    return ParserNeeds(tools, separates_reasoning=separates, is_turn=is_chat)


def _continued_text(chat: pb.ChatPrompt) -> str:
    """Return the text that the answer continues; "" where it begins."""
    if not chat.continue_final_message:
        return ""
    return "".join(part.text for part in chat.messages[-1].content)


def chat_of(chat: pb.ChatPrompt) -> Chat:
    """Return the template's input for a checked chat."""
    opens_turn = not chat.continue_final_message
    if chat.HasField("add_generation_prompt"):
        opens_turn = chat.add_generation_prompt
    return Chat(
        turns=tuple(
            ChatTurn(
                role=name_of(pb.Role, turn.role),
                content="".join(part.text for part in turn.content),
                reasoning=turn.reasoning,
                tool_calls=tuple(CalledTool(it.id, it.name, it.arguments) for it in turn.tool_calls),
                tool_call_id=turn.tool_call_id,
                name=turn.name,
            )
            for turn in chat.messages
        ),
        tools=tuple(
            ChatTool(it.name, it.description, it.parameters_json)
            for it in chat.tools
            if chat.tool_choice.mode != pb.ToolChoice.MODE_NONE
        ),
        add_generation_prompt=opens_turn,
        continue_final_message=chat.continue_final_message,
        template_args_json=chat.template_args_json,
    )
