"""Layers with a state that the CPU kernels run in one call compute what their parts compute, bit for bit."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_kernels import KERNELS, kernels_of
from family_checkpoints import write_family_checkpoint
from hybrid_attention import attention_over, with_state_tables
from hypothesis import given, settings
from hypothesis import strategies as st
from optional_programs import needs_compiler
from paged_model import PagedModel, tokens_of
from quantized_checkpoints import FORMATS, quantize
from slow_cases import slow_but

from workers.model import native
from workers.model.attention.interface import Marks, SequenceSpan, StepInput
from workers.model.decoder import Decoder, load_decoder
from workers.model.quantization.weight_form import AS_STORED, WeightForm
from workers.model.weights import ShardSpec

pytestmark = needs_compiler

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 100,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 30,
}
MAMBA: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 12,
    "mamba_d_state": 18,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 52,
    "residual_multiplier": 0.6,
    "mamba_proj_bias": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA | EXPERTS,
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_bias": True},
    "granitemoehybrid": MAMBA,
    # Layers of one block, of which those with a feed-forward alone run by parts between the others.
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 11,
        "ssm_state_size": 18,
        "n_groups": 3,
        "use_bias": True,
    },
}
# Sequences begin, go on in chunks and decode, within blocks and across their borders, also in one step.
STEPS: Sequence[dict[int, int]] = ({0: 40, 1: 7}, {0: 1, 1: 1, 2: 33}, {0: 1, 1: 1, 2: 1}, {2: 1})


def _write(folder: Path, family: str, **keys: Any) -> Path:
    write_family_checkpoint(folder, family, **(SHAPE | keys))
    return folder


def _results(
    decoder: Decoder, dtype: torch.dtype, steps: Sequence[dict[int, int]], *, exact: bool
) -> list[torch.Tensor]:
    """Return the logits of each step, and all KV and states after the last."""
    model = PagedModel(decoder, dtype)
    model.attention = attention_over(decoder, model.kv, is_deterministic=exact)
    found = []
    for number, counts in enumerate(steps):
        work = [(sequence, tokens_of(10 * number + sequence, count)) for sequence, count in counts.items()]
        found.append(torch.cat(model.step(work)))
    return [*found, *model.attention.kvs]


def _check(
    folder: Path,
    dtype: torch.dtype,
    steps: Sequence[dict[int, int]] = STEPS,
    *,
    form: WeightForm = AS_STORED,
    is_deterministic: bool = False,
) -> Decoder:
    """Compare steps in which layers are one call each with those in which their parts are called."""
    decoder = load_decoder(folder, dtype, CPU, form=form, is_deterministic=is_deterministic)
    assert any(layer.packed() is not None for layer in decoder.layers if layer.state_mixer is not None)
    found = _results(decoder, dtype, steps, exact=is_deterministic)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(decoder.__dict__, "_native_layers", None)
        expected = _results(decoder, dtype, steps, exact=is_deterministic)
    assert not any(bool(logits.isnan().any()) for logits in found[: len(steps)])
    for each, by_parts in zip(found, expected, strict=True):
        assert torch.equal(each.isnan(), by_parts.isnan())
        assert torch.equal(each.nan_to_num(), by_parts.nan_to_num())
    return decoder


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels_of(request.param)
    monkeypatch.setattr(native, "load", lambda: found)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", slow_but((torch.float32, torch.bfloat16), torch.bfloat16))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_in_one_call_is_its_parts(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    decoder = _check(_write(tmp_path, family, **FAMILIES[family]), dtype)
    is_packed = [layer.packed() is not None for layer in decoder.layers]
    assert is_packed == [True, family != "nemotron_h", True, True]


@pytest.mark.parametrize("family", slow_but(FAMILIES, "qwen3_5_text"))
def test_deterministic_layers_are_their_parts(family: str, tmp_path: Path) -> None:
    _check(_write(tmp_path, family, **FAMILIES[family]), torch.bfloat16, is_deterministic=True)


@pytest.mark.parametrize("family", slow_but(("qwen3_5_text", "lfm2"), "qwen3_5_text"))
def test_quantized_layers_are_their_parts(family: str, tmp_path: Path) -> None:
    _check(_write(tmp_path, family, **FAMILIES[family]), torch.bfloat16, form=WeightForm("int8"))


def test_two_products_of_the_hidden_states(tmp_path: Path) -> None:
    """A checkpoint has those of betas and decays as floats, and the others quantized."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    keys = DELTA | sizes | heads | {"intermediate_size": 64}
    folder = _write(tmp_path / "source", "qwen3_5_text", **keys)
    quantize(folder, tmp_path, FORMATS["int4 with zero points"])
    packed = _check(tmp_path, torch.bfloat16).layers[0].packed()
    assert packed is not None
    assert packed.others is not None


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_drawn_shapes_of_the_delta_rule(data: st.DataObject) -> None:
    num_parts = data.draw(st.integers(1, 3))
    num_key_heads = num_parts * data.draw(st.integers(1, 2))
    keys = {
        "num_attention_heads": 2 * num_parts,
        "num_key_value_heads": num_parts,
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_key_heads * data.draw(st.integers(1, 3)),
        "linear_key_head_dim": data.draw(st.sampled_from((6, 16, 36))),
        "linear_value_head_dim": data.draw(st.sampled_from((32, 96, 128))),
        "linear_conv_kernel_dim": data.draw(st.integers(2, 5)),
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
    }
    counts = st.dictionaries(st.integers(0, 3), st.integers(1, 70), min_size=1)
    steps = data.draw(st.lists(counts, min_size=1, max_size=3))
    steps += [dict.fromkeys(steps[-1], 1)]
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)))
    with tempfile.TemporaryDirectory() as folder:
        _check(_write(Path(folder), "qwen3_5_text", **keys), dtype, steps)


def test_threads_change_nothing(tmp_path: Path) -> None:
    folder, before = _write(tmp_path, "qwen3_5_text", **DELTA), torch.get_num_threads()
    decoder = load_decoder(folder, torch.bfloat16, CPU)
    found = []
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            found.append(_results(decoder, torch.bfloat16, STEPS, exact=False))
    finally:
        torch.set_num_threads(before)
    for one, several in zip(*found, strict=True):
        assert torch.equal(one.nan_to_num(), several.nan_to_num())


def test_a_stage_may_have_states_alone(tmp_path: Path) -> None:
    """The first two layers keep a state. Their progress is counted within the layer."""
    decoder = load_decoder(
        _write(tmp_path, "qwen3_5_text", **DELTA), torch.float32, CPU, ShardSpec(0, 2, 0, 1)
    )
    assert decoder._native_layers is not None
    shape = decoder.config
    kv = torch.zeros(4, 2, 2, shape.num_kv_heads, 16, shape.head_dim)
    hidden = torch.randn(18, shape.hidden_size, generator=torch.Generator().manual_seed(3))
    found = []
    for is_native in (True, False):
        attention, marks = attention_over(decoder, kv), Marks()
        spans = (SequenceSpan(0, 17, (1, 2)), SequenceSpan(0, 1, (3,)))
        step = StepInput.of(spans, 16, marks=marks)
        plan = attention.plan(with_state_tables(decoder, step))
        with pytest.MonkeyPatch.context() as patch:
            if not is_native:
                patch.setitem(decoder.__dict__, "_native_layers", None)
            found.append((decoder.run_layers(hidden.clone(), plan), attention.kvs[1]))
        assert (marks.pieces.value >= 8) is is_native
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1].nan_to_num(), found[1][1].nan_to_num())


def test_another_backend_has_other_states(tmp_path: Path) -> None:
    decoder = load_decoder(_write(tmp_path, "lfm2", **FAMILIES["lfm2"]), torch.float32, CPU)
    models = [PagedModel(decoder, torch.float32) for _ in range(2)]
    expected = models[0].chunked(0, tokens_of(5, 40), 40)
    assert torch.equal(models[1].chunked(0, tokens_of(5, 40), 40), expected)
    more = [model.chunked(0, tokens_of(6, 3), 1) for model in models]
    assert torch.equal(*more)
