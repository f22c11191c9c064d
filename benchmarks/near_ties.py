"""How often the way in which a sequence is computed changes its greedy tokens, as JSON lines.

Every prompt is computed alone and at once, then in chunks, in a batch of 16, resumed (prompt and half of
the output computed again as one prompt) and moved (its KV copied to other blocks). Where a token differs,
`gap` is the distance of the two best logits and `noise` the largest difference of that row's logits between
the two ways: a divergence is above noise if its gap is more than twice that, which rounding cannot explain.

    python -m benchmarks.near_ties [--prompts 64] [--tokens 32] [--dtype bf16] [--backend kernels,torch]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.random_checkpoint import write_random_checkpoint
from workers.model import native
from workers.model.attention.choice import choose_attention
from workers.model.attention.interface import SequenceSpan, StepInput
from workers.model.decoder import load_decoder
from workers.rank.runner_settings import read_dtype

BLOCK_TOKENS, PROMPT_TOKENS, BATCH, CHUNK_TOKENS = 16, 150, 16, 37
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "vocab_size": 4096,
}
WAYS = ("chunked", "batch", "resumed", "moved")


class Outputs:
    """The sampled tokens of a run's sequences, `tokens` of each, and the logits that they came from."""

    def __init__(self, num_sequences: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_sequences)]
        self.logits: list[list[Tensor]] = [[] for _ in range(num_sequences)]


class Model:
    """A decoder with KV for a batch of sequences."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, num_tokens: int) -> None:
        self.decoder = load_decoder(model_dir, dtype, torch.device("cpu"))
        config = self.decoder.config
        self._num_tokens = num_tokens
        self._blocks_each = -(-(PROMPT_TOKENS + num_tokens) // BLOCK_TOKENS)
        cells = config.kv_cells
        self._kv = torch.zeros(
            2 * BATCH * self._blocks_each,
            cells.num_layers,
            cells.num_kinds,
            cells.num_cells,
            BLOCK_TOKENS,
            cells.width,
        ).to(dtype)
        self.attention = choose_attention(self.decoder.attention_shape, self._kv)

    def generate(self, prompts: Sequence[list[int]], chunk_tokens: int, *, moves: bool = False) -> Outputs:
        """Compute the sequences together until each has its prompt's and `num_tokens` tokens."""
        outputs = Outputs(len(prompts))
        tables = [self._table(number) for number in range(len(prompts))]
        texts, at = [list(prompt) for prompt in prompts], [0] * len(prompts)
        while any(len(text) < PROMPT_TOKENS + self._num_tokens for text in texts):
            spans = [
                SequenceSpan(start, min(chunk_tokens, len(text) - start), table)
                for start, text, table in zip(at, texts, tables, strict=True)
            ]
            flat = [text[s.start : s.start + s.num_tokens] for text, s in zip(texts, spans, strict=True)]
            hidden = self.decoder.forward(
                torch.tensor([token for part in flat for token in part]),
                StepInput.of(spans, BLOCK_TOKENS),
                self.attention,
            )
            ends = np.cumsum([span.num_tokens for span in spans]) - 1
            logits = self.decoder.logits(hidden[torch.from_numpy(ends)])
            for number, span in enumerate(spans):
                at[number] = span.start + span.num_tokens
                if at[number] == len(texts[number]):
                    texts[number].append(int(logits[number].argmax()))
                    outputs.tokens[number].append(texts[number][-1])
                    outputs.logits[number].append(logits[number].clone())
            if moves and len(texts[0]) == PROMPT_TOKENS + self._num_tokens // 2:
                tables = [self._move(table) for table in tables]
        return outputs

    def _table(self, number: int) -> list[int]:
        return list(range(number * self._blocks_each, (number + 1) * self._blocks_each))

    def _move(self, table: list[int]) -> list[int]:
        moved = [block + BATCH * self._blocks_each for block in reversed(table)]
        self._kv[moved] = self._kv[table]
        return moved


def compute(model: Model, way: str, prompts: list[list[int]], alone: list[list[int]]) -> Outputs:
    """Compute a batch of prompts in this way; `alone` are the tokens of each by itself."""
    if way == "batch":
        return model.generate(prompts, PROMPT_TOKENS)
    outputs = Outputs(0)
    for prompt, tokens in zip(prompts, alone, strict=True):
        if way == "resumed":
            half = len(tokens) // 2
            found = model.generate([prompt + tokens[:half]], PROMPT_TOKENS + half)
        else:
            chunk_tokens = CHUNK_TOKENS if way == "chunked" else PROMPT_TOKENS
            found = model.generate([prompt], chunk_tokens, moves=way == "moved")
        outputs.tokens += found.tokens
        outputs.logits += found.logits
    return outputs


def compare(way: str, number: int, expected: Outputs, found: Outputs) -> dict[str, object] | None:
    """Return the first divergence of a sequence, None if there is none."""
    tokens, logits = found.tokens[number], found.logits[number]
    skipped = len(expected.tokens[number]) - len(tokens)  # those that a resumed sequence was given
    for place, token in enumerate(tokens):
        if token != expected.tokens[number][skipped + place]:
            before = expected.logits[number][skipped + place]
            best, second = before.topk(2).values.tolist()
            noise = float((before - logits[place]).abs().max())
            return {
                "way": way,
                "token": skipped + place,
                "gap": round(best - second, 5),
                "noise": round(noise, 5),
                "above_noise": best - second > 2 * noise,
            }
    return None


@torch.inference_mode()
def measure(model_dir: Path, name: str, args: argparse.Namespace) -> None:
    """Print the divergences of one backend and a summary."""
    model = Model(model_dir, read_dtype(args.dtype), args.tokens)
    generator = np.random.default_rng(0)
    divergences = []
    for _ in range(0, args.prompts, BATCH):
        prompts = generator.integers(0, SHAPE["vocab_size"], (BATCH, PROMPT_TOKENS)).tolist()
        alone = Outputs(0)
        for prompt in prompts:
            found = model.generate([prompt], PROMPT_TOKENS)
            alone.tokens += found.tokens
            alone.logits += found.logits
        for way in WAYS:
            found = compute(model, way, prompts, alone.tokens)
            divergences += [it for number in range(BATCH) if (it := compare(way, number, alone, found))]
    common = {"benchmark": "near_ties", "backend": model.attention.name, "dtype": args.dtype}
    for divergence in divergences:
        print(json.dumps({**common, **divergence}))
    summary = {
        "prompts": -(-args.prompts // BATCH) * BATCH,
        "tokens": args.tokens,
        "divergences": {way: sum(it["way"] == way for it in divergences) for way in WAYS},
        "above_noise": sum(bool(it["above_noise"]) for it in divergences),
        "target": 0,
    }
    print(json.dumps({**common, **summary}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--backend", default="kernels,torch")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        name = str(read_dtype(args.dtype)).removeprefix("torch.")
        write_random_checkpoint(Path(folder), "qwen3", seed=0, dtype=name, **SHAPE)
        for backend in args.backend.split(","):
            serves = native.serves if backend == "kernels" else lambda device, dtype: False
            with mock.patch.object(native, "serves", serves):
                measure(Path(folder), backend, args)


if __name__ == "__main__":
    main()
