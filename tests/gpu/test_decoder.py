"""A whole decoder by the kernels computes what the decoder on a CPU does, and of two ranks launches little
more in a step that decodes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch_recorder import recorded_launches
from quantized_checkpoints import FORMATS, draw_mxfp4, quantize
from runner_parts import by_kernels
from torch import Tensor

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import ManualClock
from workers.messages.rank_channel import BatchEntry, SlotSample, SlotStart, StepPlan, TableChange
from workers.messages.sampling import SamplingParams
from workers.model import cuda, native
from workers.model.attention.interface import MakeBackend, SequenceSpan, StepInput
from workers.model.attention.kinds_backend import backend_of_kinds
from workers.model.attention.torch_backend import TorchAttention
from workers.model.decoder import Decoder, load_decoder
from workers.model.parallel import parallelize
from workers.model.quantization.weight_form import AS_STORED, WeightForm
from workers.model.sizes import kv_heads
from workers.model.weights import ShardSpec
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity

CPU = torch.device("cpu")
BLOCK, NUM_LAYERS, VOCAB = 16, 2, 96
TOKENS = torch.arange(40) * 7 % VOCAB


@pytest.fixture(autouse=True)
def _use_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton serve the device of the tests, and nothing else the CPU."""
    monkeypatch.setattr(cuda, "DEVICE_TYPES", {device.type})
    monkeypatch.setattr(native, "load", lambda: None)


# Keys of config.json of families that compute what the others do not: caps of scores and logits, a scale of
# scores, norms of rows and of what a layer adds, a feed-forward without a gate, kinds of layers that rotate
# in their own ways or not; in one family, heads of two sizes, normed values, layers that attend to the KV of
# others, and inputs of layers; and experts, with a dense layer, with shared ones, or with biases and sinks.
_LATENT: dict[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 26,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 4},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 40},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "global_head_dim": 48,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": VOCAB,
    },
    "olmo2": {},
    "apertus": {"hidden_act": "xielu"},
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "mlp_only_layers": [0],
    },
    "qwen2_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 28,
    },
    "deepseek_v2": {
        **_LATENT,
        "num_hidden_layers": NUM_LAYERS,
        "first_k_dense_replace": 1,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "rope_scaling": None,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
}


def checkpoint(path: Path, family: str) -> Path:
    keys: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": NUM_LAYERS, "intermediate_size": 96}
    if family in OF_FAMILY:
        keys |= {"sliding_window": 7, **OF_FAMILY[family]}
    write_random_checkpoint(path, family, seed=2, **keys)
    return path


class Stage:
    """A decoder, or a rank's share of one, with its KV."""

    def __init__(
        self,
        model_dir: Path,
        device: torch.device,
        *,
        shard: ShardSpec | None = None,
        dtype: torch.dtype = torch.float32,
        is_deterministic: bool = False,
        form: WeightForm = AS_STORED,
    ) -> None:
        from workers.model.attention.triton_latents import make_triton

        self.device = device
        self.decoder: Decoder = load_decoder(
            model_dir, dtype, device, shard, is_deterministic=is_deterministic, form=form
        )
        config = self.decoder.config
        shard = self.decoder.shard
        cells = config.kv_cells
        num_cells = len(kv_heads(cells.num_cells, shard.tp_rank, shard.tp_size))
        kv = torch.zeros(8, cells.num_layers, cells.num_kinds, num_cells, BLOCK, cells.width)
        self.kv = kv.to(device, dtype)
        make: MakeBackend = TorchAttention
        if cuda.serves(device):
            make = functools.partial(make_triton, is_deterministic=is_deterministic)
        self.attention = backend_of_kinds(self.decoder.attention_shape, self.kv, make)

    def hidden(self, spans: Sequence[SequenceSpan], most_layers: int | None = None) -> Tensor:
        """Run the layers over the spans' tokens."""
        ids = torch.cat([TOKENS[span.start : span.start + span.num_tokens] for span in spans])
        plan = self.attention.plan(StepInput.of(spans, BLOCK))
        hidden = self.decoder.embed(ids.to(self.device))
        return self.decoder.run_layers(hidden, plan, most_layers)

    def logits(self, spans: Sequence[SequenceSpan]) -> Tensor:
        return self.decoder.logits(self.hidden(spans))

    def layer_launches(self, spans: Sequence[SequenceSpan]) -> list[str]:
        """Return what a layer behind the first one launches."""
        num_layers_to_names = {}
        for num_layers in (1, 2):
            with recorded_launches() as names:
                self.hidden(spans, num_layers)
            num_layers_to_names[num_layers] = names
        one, two = num_layers_to_names.values()
        begin = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), len(one))
        return two[begin : begin + len(two) - len(one)]


class OneOfTwo:
    """Stands for the collectives of a stage of two ranks, of which the other one contributes nothing."""

    tp, tp_rank, shares_memory = 2, 0, False

    def __init__(self) -> None:
        self.num_sums = 0

    def all_reduce(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        self.num_sums += 1

    def exchange(self, parts: Sequence[Tensor], num_rows: Sequence[int] | None = None) -> list[Tensor]:
        raise AssertionError("no layer sends rows to others")

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        return tensor


DECODES = [SequenceSpan(9, 1, (0,)), SequenceSpan(20, 1, (2, 1))]


def test_two_ranks_take_two_launches_more(device: torch.device, tmp_path: Path) -> None:
    """Their sums, which the norms that follow add to the hidden states: twelve, where one rank has ten."""
    model = Stage(checkpoint(tmp_path, "qwen3"), device, shard=ShardSpec(0, NUM_LAYERS, 0, 2))
    collectives = OneOfTwo()
    parallelize(model.decoder, collectives)
    assert model.layer_launches(DECODES) == [
        "_rms_norm_kernel", "aten::mm", "_rotate_and_write_kernel", "_attend_pieces", "_reduce_pieces",
        "aten::mm", "_rms_norm_kernel", "aten::mm", "_gate_mul_kernel", "aten::mm",
    ]  # fmt: skip
    of_embeddings, of_layers = 2, 3 * 2
    assert collectives.num_sums == of_embeddings + of_layers


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "mistral", *OF_FAMILY])
def test_logits_are_those_of_a_cpu(
    device: torch.device, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt in two chunks, beside a sequence that decodes, and of the next token."""
    model_dir = checkpoint(tmp_path, family)
    steps = [
        [SequenceSpan(0, 11, (5, 0)), SequenceSpan(0, 4, (3,))],
        [SequenceSpan(11, 8, (5, 0)), SequenceSpan(4, 1, (3,))],
        [SequenceSpan(19, 1, (5, 0)), SequenceSpan(5, 1, (3,))],
    ]
    model = Stage(model_dir, device)
    actual = [model.logits(step).cpu() for step in steps]
    monkeypatch.setattr(cuda, "DEVICE_TYPES", {"cuda"})
    reference = Stage(model_dir, CPU)
    for step, logits in zip(steps, actual, strict=True):
        torch.testing.assert_close(logits, reference.logits(step), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("how", ["awq", "gptq in another order", "int8", "fp8 in blocks"])
def test_logits_of_quantized_weights(device: torch.device, tmp_path: Path, how: str) -> None:
    """They are those of what the weights are worth, up to the rounding of inputs where that is meant."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": NUM_LAYERS}
    write_random_checkpoint(tmp_path / "source", "llama", seed=4, vocab_size=VOCAB, **sizes)
    plain = quantize(tmp_path / "source", tmp_path, FORMATS[how], has_tables=True)
    spans = [SequenceSpan(0, 11, (5, 0)), SequenceSpan(4, 1, (3,))]
    with recorded_launches() as launches:
        actual = Stage(tmp_path, device).logits(spans)
    assert launches.count("_quantized_product_kernel") == 4 * NUM_LAYERS + 1
    assert launches.count("_look_up_kernel") == 1
    expected = Stage(plain, device).logits(spans)
    is_rounded = "_round_rows_kernel" in launches
    error = (actual - expected).norm() / expected.norm()
    assert error <= (0.1 if is_rounded else 2e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_logits_of_quantized_experts(device: torch.device, tmp_path: Path, family: str) -> None:
    """With two kernels for the products of all experts of a layer; they are those of dequantized experts."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": VOCAB}
    keys = OF_FAMILY[family] | {"intermediate_size": 32, "moe_intermediate_size": 32, "mlp_only_layers": []}
    folder = tmp_path if family == "gpt_oss" else tmp_path / "source"
    write_random_checkpoint(folder, family, seed=4, **keys | sizes)
    if family == "gpt_oss":
        draw_mxfp4(tmp_path)
    else:
        quantize(folder, tmp_path, FORMATS["awq"])
    spans = [SequenceSpan(0, 11, (5, 0)), SequenceSpan(4, 1, (3,))]
    with recorded_launches() as launches:
        actual = Stage(tmp_path, device).logits(spans)
    assert launches.count("_expert_product_kernel") == 2 + 2  # of a step, behind those that compile
    with recorded_launches() as launches:
        expected = Stage(tmp_path, device, form=WeightForm("fp32")).logits(spans)
    assert "_gate_up_kernel" in launches
    assert (actual - expected).norm() <= 1e-5 * expected.norm()


def test_deterministic_logits_are_the_same_bits(device: torch.device, tmp_path: Path) -> None:
    """In one chunk, in several, token by token, and beside other sequences."""
    model_dir = checkpoint(tmp_path, "qwen3")

    def logits(chunks: Sequence[int], others: Sequence[SequenceSpan] = ()) -> Tensor:
        model, rows, start = Stage(model_dir, device, is_deterministic=True), [], 0
        for length in chunks:
            spans = [*others, SequenceSpan(start, length, (6, 2))]
            rows.append(model.logits(spans)[-length:])
            start += length
        return torch.cat(rows)

    whole = logits([18])
    assert not bool(whole.isnan().any())
    assert torch.equal(logits([7, 10, 1]), whole)
    beside = [SequenceSpan(0, 9, (1, 3)), SequenceSpan(5, 1, (4,))]
    assert torch.equal(logits([17, 1], beside), whole)


def test_a_deterministic_rank_multiplies_by_such_kernels_alone(device: torch.device, tmp_path: Path) -> None:
    runner = ModelRunner(
        CheckpointFolder(checkpoint(tmp_path, "qwen2")),
        by_kernels(device, is_deterministic=True),
        RankCapacity(BLOCK, 4 * BLOCK),
        ManualClock(5.0),
    )
    tokens = np.arange(3, dtype="<u4").tobytes()
    plan = StepPlan(
        0,
        starts=(SlotStart(SamplingParams(), (SlotSample(0, 0, 0),)),),
        tables=(TableChange(0, 0, np.array([1], "<u4").tobytes()),),
        entries=(BatchEntry(0, 0, 3, tokens, (0,)),),
    )
    with recorded_launches() as launches:
        runner.steps.run(plan)
    runner.close()
    assert launches.count("_multiply_kernel") == 4 * NUM_LAYERS + 1
    assert [name for name in launches if "mm" in name] == []
