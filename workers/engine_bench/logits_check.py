"""The checks of the engine benchmark: our logits against those of transformers, and logits of a form of
weights against those of the stored one."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.engine_bench.driver import EngineDriver
from workers.engine_bench.peer_process import INSTALL

# The tokens of the prompt, and of each chunk of its first half.
CHECK_TOKENS = 96
_CHUNK_TOKENS = 32


def check_logits(driver: EngineDriver, model_dir: Path) -> dict[str, Any]:
    """Compare the logits of a prompt, in chunks and then token by token, with those of transformers in
    the same dtype, and both with those of transformers in float32. Returns the benchmark's line."""
    if importlib.util.find_spec("transformers") is None:
        return {"what": "check", "skipped": f"transformers is not installed: {INSTALL['transformers']}"}
    tokens, ends = driver.draw(CHECK_TOKENS), _ends()
    ours = driver.logits(tokens, ends)
    dtype, device = driver.runner.kv.dtype, driver.runner.kv.device
    theirs, exact = (
        _transformers_logits(model_dir, each, device, tokens)[[end - 1 for end in ends]]
        for each in (dtype, torch.float32)
    )
    largest = theirs.abs().max()
    return {
        "what": "check",
        "against": "transformers",
        "positions": len(ends),
        "max_error": float((ours - theirs).abs().max() / largest),
        "argmax_agreement": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
        "max_error_to_fp32": float((ours - exact).abs().max() / largest),
        "transformers_error_to_fp32": float((theirs - exact).abs().max() / largest),
    }


def check_form(name: str, driver: EngineDriver, stored: EngineDriver) -> dict[str, Any]:
    """Compare the logits of the same prompt where weights have the form of this name with those of the
    weights as they are `stored`. Returns the benchmark's line; `kl` is the mean divergence, in nats, of what
    would be sampled."""
    tokens, ends = stored.draw(CHECK_TOKENS), _ends()
    found, expected = driver.logits(tokens, ends), stored.logits(tokens, ends)
    log_found, log_expected = found.log_softmax(-1), expected.log_softmax(-1)
    return {
        "what": "check",
        "of": name,
        "against": "weights as stored",
        "positions": len(ends),
        "max_error": float((found - expected).abs().max() / expected.abs().max()),
        "argmax_agreement": float((found.argmax(-1) == expected.argmax(-1)).float().mean()),
        "kl": float((log_expected.exp() * (log_expected - log_found)).sum(-1).mean()),
    }


def _ends() -> list[int]:
    """Return where the parts of the prompt end: chunks, then single tokens."""
    num_chunked = CHECK_TOKENS // 2
    return [*range(_CHUNK_TOKENS, num_chunked, _CHUNK_TOKENS), *range(num_chunked, CHECK_TOKENS + 1)]


@torch.inference_mode()
def _transformers_logits(model_dir: Path, dtype: torch.dtype, device: torch.device, tokens: bytes) -> Tensor:
    """Return float32 [num_tokens, vocab_size], the logits of the same checkpoint at every position."""
    transformers = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(device).eval()
    ids = torch.from_numpy(np.frombuffer(tokens, dtype="<u4").astype(np.int64))[None]
    output: Tensor = model(ids.to(device)).logits
    return output[0].float()
