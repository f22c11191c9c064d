"""Families with windows, two rotary bases, norms over all heads and states, and quantized weights, as a user
serves them: a prefill pool of two ranks and a decode pool of two stages give the tokens of `transformers`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest
from paged_model import continued, tokens_of
from patience import WAIT_S
from quantized_checkpoints import FORMATS, quantize
from serving import TINY, RunningCluster, free_port
from state_families import write_state_checkpoint
from wrapped_checkpoints import wrap_checkpoint

from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.api.blocking_client import BlockingClient
from cluster.api.generate_options import GenerateOptions

# Slow: a cluster and four ranks start for each model.
pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_TOKENS = 64
PROMPT = tokens_of(5)
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 101,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "num_hidden_layers": 3,
    "sliding_window": 20,
    "layer_types": KINDS,
}
FILE = """
model: {model}
pools:
  - {{name: prefill, role: prefill, tp: 2, dtype: fp32, engine: {engine}}}
  - {{name: decode, role: decode, pp: 2, dtype: fp32, engine: {engine}}}
"""
ENGINE = "{block_tokens: 16, kv_tokens: 4096}"


def write_plain(folder: Path) -> tuple[Path, Path]:
    write_random_checkpoint(folder, "olmo3", seed=7, tokenizer_from=TINY, rope_theta=500000.0, **SHAPE)
    return folder, folder


def write_wrapped(folder: Path) -> tuple[Path, Path]:
    """As the text model of one of text and images."""
    plain = folder / "text"
    write_random_checkpoint(plain, "gemma3_text", seed=7, tokenizer_from=TINY, **SHAPE)
    return plain, wrap_checkpoint(folder / "model", plain, "Gemma3ForConditionalGeneration")


def write_gemma4(folder: Path) -> tuple[Path, Path]:
    """With two cells of three heads each, of which two ranks hold one each, and two layers that share KV."""
    plain = folder / "text"
    keys = SHAPE | {
        "num_hidden_layers": 5,
        "num_key_value_heads": 6,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "global_head_dim": 24,
        "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 2],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 7,
        "vocab_size_per_layer_input": 4096,
        "use_bidirectional_attention": "vision",
    }
    write_random_checkpoint(plain, "gemma4_text", seed=8, tokenizer_from=TINY, **keys)
    return plain, wrap_checkpoint(folder / "model", plain, "Gemma4ForConditionalGeneration", "transformers 5")


def write_with_states(folder: Path) -> tuple[Path, Path]:
    """With experts, and with states in three of four layers."""
    write_state_checkpoint(folder, "qwen3_next", vocab_size=4096)
    shutil.copy(TINY / "tokenizer.json", folder)
    return folder, folder


def write_quantized(folder: Path) -> tuple[Path, Path]:
    """With weights in 4 bits, as AWQ stores them."""
    keys: dict[str, Any] = {
        "intermediate_size": 192,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    write_random_checkpoint(folder / "source", "llama", seed=7, tokenizer_from=TINY, **keys)
    plain = quantize(folder / "source", folder, FORMATS["awq"])
    shutil.copy(TINY / "tokenizer.json", folder)
    return plain, folder


WAYS = {
    "olmo3": write_plain,
    "gemma3": write_wrapped,
    "gemma4": write_gemma4,
    "qwen3_next": write_with_states,
    "awq": write_quantized,
}


@pytest.mark.parametrize("write", WAYS.values(), ids=WAYS)
def test_a_served_family_gives_the_tokens_of_transformers(write: Any, tmp_path: Path) -> None:
    """The first time moved from the prefill replica, then with its prompt found."""
    reference, model = write(tmp_path / "written")
    expected = continued(reference, PROMPT, NUM_TOKENS)
    assert len(set(expected)) >= 20, "a stream that repeats itself shows little"
    file = tmp_path / "cluster.yaml"
    file.write_text(FILE.format(model=model, engine=ENGINE))
    running = RunningCluster("--file", str(file), "--port", str(free_port()))
    processes = running.processes()
    try:
        with BlockingClient(running.address) as client:
            options = GenerateOptions(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
            first, second = (client.complete(PROMPT, options, timeout_s=120) for _ in range(2))
    finally:
        assert running.stop() == 0
    _, alive = psutil.wait_procs(processes, timeout=WAIT_S)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    assert [list(first.token_ids[0]), list(second.token_ids[0])] == [expected, expected]
    assert first.finished.timing.transport == "shm"
    assert first.finished.prefill_replica != first.finished.decode_replica
