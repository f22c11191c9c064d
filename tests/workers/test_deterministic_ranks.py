"""`engine.deterministic` with more ranks than two, whose sums are added in the order of ranks."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_engine import LocalEngine, submitted
from optional_programs import needs_compiler

from workers.config import EngineConfig
from workers.errors import WorkerError
from workers.messages.link import Submission
from workers.messages.sampling import SamplingParams, TokenLogprob

TP = 3
Answer = list[tuple[int, TokenLogprob]]


@pytest.fixture(scope="module")
def model_dir(make_checkpoint: Any) -> Path:
    path: Path = make_checkpoint(
        "qwen3",
        seed=8,
        dtype="bfloat16",
        num_hidden_layers=2,
        hidden_size=96,
        intermediate_size=192,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        vocab_size=500,
    )
    return path


def ask(number: int) -> Submission:
    """One of some requests, of unlike lengths."""
    prompt = np.random.default_rng(number).integers(0, 500, 5 + 31 * number, "<u4").tobytes()
    return submitted(f"r{number}", prompt, SamplingParams(max_tokens=5, num_logprobs=0, ignore_eos=True))


def answers(model_dir: Path, requests: list[Submission], **options: Any) -> dict[str, Answer]:
    """What three ranks answer when all requests arrive at once."""
    config = EngineConfig(
        block_tokens=16, deterministic=True, max_batch_tokens=128, chunk_tokens=128, max_sequences=8
    )
    found: dict[str, Answer] = {}
    ranks: dict[str, Any] = {"tp": TP, "dtype": torch.bfloat16} | options
    with closing(LocalEngine(model_dir, config, 40, **ranks)) as engine:
        for request in requests:
            engine.scheduler.submit(request, 0.0)
        while (outcome := engine.step()) is not None:
            assert not outcome.failures
            for delta in outcome.tokens:
                tokens = np.frombuffer(delta.tokens, dtype="<u4").tolist()
                found.setdefault(delta.request_id, []).extend(zip(tokens, delta.logprobs, strict=True))
    return found


@needs_compiler
@pytest.mark.slow
def test_three_ranks_have_one_answer_alone_and_in_a_batch(model_dir: Path) -> None:
    """Bit for bit: log-probabilities are compared as they are."""
    requests = [ask(number) for number in range(4)]
    alone: dict[str, Answer] = {}
    for request in requests:
        alone |= answers(model_dir, [request], host_id="here")
    assert all(len(answer) == 5 for answer in alone.values())
    assert answers(model_dir, requests, host_id="here") == alone


@needs_compiler
def test_three_ranks_without_common_memory_are_refused(model_dir: Path) -> None:
    with pytest.raises(WorkerError, match="with tp 3 needs the ranks of a stage on CPUs of one host"):
        answers(model_dir, [], host_id="")
