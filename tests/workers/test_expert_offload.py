"""Models some of whose experts the CPU computes, with a CPU in place of their device: the same logits and
tokens, also while experts change places. Not yet validated on a card."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family_checkpoints import CASES, write_family_checkpoint
from local_engine import BLOCK, LocalEngine, draw, packed, submitted
from optional_programs import uses_compiler
from paged_model import PagedModel, error_of, reference_logits, reference_of, tokens_of
from runner_parts import ON_CPU

from kvtransfer.common.clock import ManualClock
from workers.config import EngineConfig
from workers.errors import CheckpointError
from workers.messages.link import Submission
from workers.messages.sampling import SamplingParams
from workers.model.decoder import load_decoder
from workers.model.experts.expert_placement import PlacementRules
from workers.model.experts.host_experts import SplitExperts
from workers.model.experts.hot_experts import HotExperts
from workers.model.model_config import read_model_config
from workers.model.rank_memory import Checkpoint, RankShape, activation_bytes
from workers.model.sizes import refuse_expert_offload
from workers.rank.device_queue import CpuQueue
from workers.rank.device_steps import DeviceSteps
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity

pytestmark = uses_compiler

CPU = torch.device("cpu")
# Qwen3 with seven experts in each of four layers.
CASE = "qwen3_moe-1"
NUM_LAYERS, NUM_EXPERTS, OFFLOAD = 4, 7, 4
PROMPT_TOKENS = 60


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_family_checkpoint(path, **CASES[CASE])
    return path


@pytest.mark.parametrize(
    ("case", "offload"),
    [(CASE, OFFLOAD), (CASE, NUM_EXPERTS), ("gpt_oss-1", 2), ("qwen2_moe-1", 3), ("gemma4_text-4", 2)],
)
def test_logits_equal_transformers(tmp_path: Path, case: str, offload: int) -> None:
    """With biases, beside shared experts, and beside a feed-forward; chunk by chunk and token by token."""
    write_family_checkpoint(tmp_path, **CASES[case])
    decoder = load_decoder(tmp_path, torch.float32, CPU, expert_offload=offload)
    assert decoder.split_experts
    assert all((split.places < 0).sum() == offload for split in decoder.split_experts)
    prompt = tokens_of(1, PROMPT_TOKENS)
    model = PagedModel(decoder, torch.float32)
    output = model.greedy(0, prompt, 12)
    expected = reference_logits(reference_of(tmp_path), prompt + output[:-1])
    assert output == expected[PROMPT_TOKENS - 1 :].argmax(-1).tolist()
    assert error_of(model.chunked(1, prompt, 7), expected[:PROMPT_TOKENS]) <= 1e-4


def test_bfloat16_is_as_close_to_float32_as_without_an_offload(tmp_path: Path) -> None:
    """In the shape in which tokens choose all experts; the error may be half as large again."""
    write_family_checkpoint(tmp_path, **(CASES["qwen3_moe-3"] | {"dtype": "bfloat16"}))
    prompt = tokens_of(2, PROMPT_TOKENS)
    exact = reference_logits(reference_of(tmp_path), prompt)
    errors = [
        error_of(
            PagedModel(
                load_decoder(tmp_path, torch.bfloat16, CPU, expert_offload=offload), torch.bfloat16
            ).chunked(0, prompt, 20),
            exact,
        )
        for offload in (0, 2)
    ]
    assert 1e-4 < errors[1] <= 1.5 * errors[0]


def ask(name: str, num_prompt: int) -> Submission:
    prompt = packed([token % 211 for token in draw(num_prompt, seed=num_prompt)])
    return submitted(name, prompt, SamplingParams(temperature=1.1, max_tokens=24, ignore_eos=True))


class RunningClock(ManualClock):
    """A clock that moves by a second whenever it is read."""

    def now(self) -> float:
        self.advance(1.0)
        return super().now()


class NotedSwaps(HotExperts):
    """Swaps experts whenever they may be, and notes how many at a time."""

    def __init__(self, layers: Sequence[SplitExperts]) -> None:
        rules = PlacementRules(factor=1.0, margin=0.1, memory_s=2.0, swaps_per_s=3.0)
        super().__init__(layers, RunningClock(), rules)
        self.num_swaps: list[int] = []

    def between_steps(self) -> int:
        self.num_swaps.append(super().between_steps())
        return self.num_swaps[-1]


def test_swaps_while_sequences_decode_change_no_token(model_dir: Path) -> None:
    outputs: dict[int, dict[tuple[str, int], bytes]] = {}
    for offload in (0, OFFLOAD):
        config = EngineConfig(
            block_tokens=BLOCK,
            max_batch_tokens=64,
            chunk_tokens=32,
            max_sequences=4,
            expert_offload=offload,
        )
        engine = LocalEngine(model_dir, config, 40, stages=((0, NUM_LAYERS),))
        runner: Any = engine.runners[0]
        layers = runner._model.decoder.split_experts
        before = [split.places.tolist() for split in layers]
        runner.steps._hot_experts = noted = NotedSwaps(layers)
        outputs[offload] = engine.run([ask("a", 50), ask("b", 9), ask("c", 21)])
        engine.close()
        assert [len(output) for output in outputs[offload].values()] == [24 * 4] * 3
        if offload:
            assert sum(noted.num_swaps) >= 20
            assert sum(map(bool, noted.num_swaps)) >= 10, "swaps between many steps"
            assert [split.places.tolist() for split in layers] != before
            assert all((split.places >= 0).sum() == NUM_EXPERTS - OFFLOAD for split in layers)
    assert outputs[OFFLOAD] == outputs[0]


def test_experts_that_tokens_choose_come_to_the_device(model_dir: Path) -> None:
    """Layers whose tokens are the same again and again have their experts there in the end."""
    decoder = load_decoder(model_dir, torch.float32, CPU, expert_offload=OFFLOAD)
    clock = ManualClock(1.0)
    hot = HotExperts(decoder.split_experts, clock)
    model, prompt = PagedModel(decoder, torch.float32), tokens_of(3, 1)
    for sequence in range(30):
        model.step([(sequence, prompt)])
        clock.advance(1.0)
        hot.between_steps()
    assert hot.between_steps() == 0
    for split in decoder.split_experts:
        assert {number for number, count in enumerate(split.counts) if count} == set(
            (split.places >= 0).nonzero()[0]
        )


def runner_of(model_dir: Path, offload: int) -> ModelRunner:
    compute = ON_CPU._replace(queue=CpuQueue(), expert_offload=offload)
    return ModelRunner(
        CheckpointFolder(model_dir), compute, RankCapacity(16, 512, max_sequences=4), ManualClock(5.0)
    )


@pytest.mark.parametrize("offload", [0, OFFLOAD])
def test_steps_are_no_graphs_where_the_host_has_to_see_the_experts(
    model_dir: Path, offload: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="tandem.rank"):
        runner = runner_of(model_dir, offload)
    steps = runner.steps.steps
    assert isinstance(steps, DeviceSteps)
    graphs: Any = steps.graphs
    # All else of a step may be recorded.
    graphs._attention = graphs._sampler = SimpleNamespace(can_capture=True)
    assert bool(steps.graph_sizes) == (offload == 0)
    assert ("engine.expert_offload 4: decoding steps are not recorded" in caplog.text) == (offload > 0)
    runner.close()


@pytest.mark.parametrize(
    ("offload", "device", "tp", "is_deterministic", "problem"),
    [
        (8, "cuda", 1, False, "a layer has 7 experts; set at most 7"),
        (4, "cpu", 1, False, "on device cpu all experts are in host memory already; set 0"),
        (4, "cuda:1", 2, False, "tp is 2; set 0, or tp: 1"),
        (4, "cuda", 1, True, "not deterministic; set 0, or deterministic: false"),
    ],
)
def test_an_offload_that_cannot_be_is_refused(
    model_dir: Path, offload: int, device: str, tp: int, is_deterministic: bool, problem: str
) -> None:
    config = read_model_config(model_dir)
    refuse_expert_offload(config, 0, (device,), tp=tp, is_deterministic=is_deterministic)
    refuse_expert_offload(config, 7, ("cuda",), tp=1, is_deterministic=False)
    with pytest.raises(CheckpointError, match=rf"^engine.expert_offload {offload}: .*{problem}"):
        refuse_expert_offload(config, offload, (device,), tp=tp, is_deterministic=is_deterministic)


def test_the_device_has_the_weights_of_the_experts_that_it_computes(model_dir: Path) -> None:
    config, checkpoint = read_model_config(model_dir), Checkpoint.read(model_dir)
    assert config.mixture is not None
    expert = 4 * config.mixture.weights_of_expert(config.hidden_size)
    for first, end in ((0, NUM_LAYERS), (1, 3)):
        shape = RankShape(config, first, end)
        whole = checkpoint.weight_bytes(shape, 4)
        assert checkpoint.host_expert_bytes(shape, 4) == 0
        for offload in (1, OFFLOAD, NUM_EXPERTS):
            split = dataclasses.replace(shape, expert_offload=offload)
            num_layers = end - first
            assert whole - checkpoint.weight_bytes(split, 4) == num_layers * offload * expert
            assert checkpoint.host_expert_bytes(split, 4) == num_layers * NUM_EXPERTS * expert
            row = 4 * config.hidden_size
            assert activation_bytes(split, 4, 100, 8) == activation_bytes(shape, 4, 100, 8) + 100 * row
