"""The model of the gateway's tests: a small tokenizer, a chat template, and tokens that a hash decides."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BLOCK_TOKENS = 16
MAX_CONTEXT = 512
# Of the model; the tokenizer has fewer.
VOCAB = 400
FINGERPRINT = bytes(range(16))
_PAD = {"__type": "AddedToken", "content": "<|pad|>", "special": True}
PROMPT = "def main(): return the answer, the quick brown fox"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def raw(ids: list[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def truth(prompt: bytes, seed: int, count: int) -> list[int]:
    """The first `count` tokens that every replica gives for this prompt and sample seed."""
    ids = []
    for index in range(count):
        digest = hashlib.sha256(prompt + seed.to_bytes(8, "little") + index.to_bytes(4, "little")).digest()
        ids.append(4 + int.from_bytes(digest[:4], "little") % 250)
    return ids


def train_tokenizer() -> Tokenizer:
    """A small byte-level BPE, with four special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["def main(): return the answer", "the quick brown fox, äöü €"]
    tokenizer.train_from_iterator(texts * 4, trainer)
    return tokenizer


_TOKENIZER = train_tokenizer()


def encode(text: str) -> list[int]:
    return list(_TOKENIZER.encode(text).ids)


def decode(ids: Sequence[int]) -> str:
    return str(_TOKENIZER.decode(list(ids)))


def expected(seed: int, count: int, prompt: str = PROMPT) -> list[int]:
    return truth(raw(encode(prompt)), seed, count)


def write_model(folder: Path, template: str | None = TEMPLATE) -> Path:
    """What a gateway reads of a model: config, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    _TOKENIZER.save(str(folder / "tokenizer.json"))
    tokens: dict[str, Any] = {"bos_token": None, "eos_token": "<|end|>", "pad_token": _PAD}
    if template is not None:
        tokens["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return folder
