"""Vocabularies that follow grammars of answers, and random answers that these allow."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gateway_harness import train_tokenizer
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from cluster.text.grammar_orders import OutputConstraint
from cluster.text.grammar_text import grammar_text
from workers.grammar_limits import parser_limits

VOCAB = 400
END = 0


class Model:
    """A vocabulary in which the markers are tokens, or text as any other."""

    def __init__(self, *, has_tokens: bool, ends: Sequence[str] = ("<|end|>",)) -> None:
        """The tokens `ends` end an answer, and are tokens in any case."""
        self.tokenizer = train_tokenizer()
        self.tokenizer.add_special_tokens(list(ends))
        if has_tokens:
            self.tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"])
            self.tokenizer.add_special_tokens(["<|tool_call|>", "<|/tool_call|>", "<|tools_prefix|>"])
            self.tokenizer.add_special_tokens(["<|tools_suffix|>", "<seed:tool_call>", "</seed:tool_call>"])
            self.tokenizer.add_special_tokens(["<|tool_call>", "<tool_call|>", '<|"|>', "<|assistant|>"])
            self.tokenizer.add_special_tokens(["<function_calls>", "</function_calls>", "<|START_ACTION|>"])
            # As Qwen has them: added, and not special.
            markers = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<arg_key>", "</arg_key>")
            self.tokenizer.add_tokens([AddedToken(marker, special=False) for marker in markers])
            self.tokenizer.add_tokens([AddedToken(f"<{end}arg_value>", special=False) for end in ("", "/")])
            self.tokenizer.add_special_tokens(["<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"])
        self.ends = [self.tokenizer.get_vocab(with_added_tokens=True)[end] for end in ends]
        self.library = LLTokenizer(self.tokenizer.to_str(), n_vocab=VOCAB, eos_token=self.ends)

    def special_token(self, marker: str) -> int | None:
        ids = self.library.tokenize_str(marker, parse_special=True)
        return ids[0] if len(ids) == 1 and self.library.is_special_token(ids[0]) else None

    def matcher(self, order: OutputConstraint) -> LLMatcher:
        text = grammar_text(order, self.special_token)
        matcher = LLMatcher(self.library, text, log_level=0, limits=parser_limits())
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def spell(self, text: str) -> list[int]:
        """The ids of a text without added tokens."""
        return list(train_tokenizer().encode(text).ids)

    def takes(self, order: OutputConstraint, text: str | Sequence[int]) -> bool:
        ids = self.tokenizer.encode(text).ids if isinstance(text, str) else list(text)
        matcher = self.matcher(order)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


MODELS = {"tokens": Model(has_tokens=True), "text": Model(has_tokens=False)}


def random_answer(model: Model, order: OutputConstraint, randomness: random.Random, start: str) -> str | None:
    """A random text by the grammar that begins with `start`; None where it has no end in sight."""
    matcher = model.matcher(order)
    ids = list(model.tokenizer.encode(start).ids)
    assert matcher.consume_tokens(ids)
    for _ in range(250):
        allowed = allowed_tokens(matcher)
        may_end = not set(model.ends).isdisjoint(allowed)
        if may_end and (len(allowed) == len(model.ends) or randomness.random() < 0.3):
            return str(model.tokenizer.decode(ids, skip_special_tokens=False))
        rare = [index for index in allowed if index >= model.tokenizer.get_vocab_size() - 8]
        # Whatever closes something is likelier than by the count of tokens alone.
        closing = [
            index for index in allowed if (model.tokenizer.id_to_token(index) or "x") in ('"', "}", "]")
        ]
        chosen = randomness.choice([allowed, rare or allowed, closing or allowed, closing or allowed])
        token = randomness.choice([index for index in chosen if index not in model.ends] or chosen)
        assert matcher.consume_token(token), matcher.get_error()
        ids.append(token)
    return None


def allowed_tokens(matcher: LLMatcher) -> list[int]:
    """Return the tokens that may come next."""
    mask = matcher.compute_bitmask()
    return [index for index in range(VOCAB) if mask[index // 8] >> (index % 8) & 1]
