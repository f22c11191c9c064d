"""What a pool's `weight_dtype` makes of weights, what they take in memory, and how they are told apart."""

from __future__ import annotations

import dataclasses
import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from family_checkpoints import write_family_checkpoint
from optional_programs import needs_compiler, uses_compiler
from paged_model import PagedModel, error_of, tokens_of
from quantized_checkpoints import FORMATS, LLAMA, OWN_ORDERS, is_product, is_table, quantize
from runner_parts import ON_CPU
from safetensors.torch import load_file, save_file

from kvtransfer.common.clock import ManualClock, SystemClock
from workers.errors import CheckpointError
from workers.model import tensor_files
from workers.model.decoder import load_decoder
from workers.model.experts import stored_experts
from workers.model.fingerprint import DigestCache, model_fingerprint
from workers.model.linear_weights import LinearWeights, are_quantized
from workers.model.model_config import read_model_config
from workers.model.quantization.packed_codes import PANEL, PackedForm
from workers.model.quantization.quantized_weight import QuantizedWeight
from workers.model.quantization.rounded_weight import rounded
from workers.model.quantization.stored_format import (
    CodeType,
    Layout,
    QuantizationScheme,
    StoredFormat,
    TargetedFormat,
)
from workers.model.quantization.weight_form import AS_STORED, WeightForm
from workers.model.rank_memory import Checkpoint, RankShape
from workers.model.weights import ShardSpec, WeightReader
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity

CPU = torch.device("cpu")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_family_checkpoint(tmp_path / "source", **LLAMA)
    return tmp_path / "source"


@pytest.mark.parametrize(("name", "most"), [("int8", 0.01), ("int4", 0.1), ("fp8", 0.04)])
def test_rounding_takes_the_nearest_codes(name: str, most: float) -> None:
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    form = WeightForm(name).rounded
    assert form is not None
    found = rounded(weight, form)
    assert found is not None
    values = found.dequantized()
    steps = found.scales.repeat_interleave(found.group, 1)
    error = (values - weight).abs()
    assert float(error.norm() / weight.norm()) <= most
    if name == "int8":
        assert bool((error <= steps * 0.5001).all())
    assert not values[3].any()


def test_scales_of_int4_have_both_signs() -> None:
    """The value of the largest magnitude becomes -8, or nearly so. Scales above zero bring values above zero
    to 7 at most: by a search of these, more is lost."""
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(4))
    form = WeightForm("int4").rounded
    assert form is not None
    found = rounded(weight, form)
    assert found is not None
    assert 0.2 < float((found.scales < 0).float().mean()) < 0.8
    grouped = weight.view(64, -1, 32)
    divisors = torch.linspace(6.5, 10, 36).view(-1, 1, 1, 1)
    scales = grouped.abs().amax(-1, keepdim=True) / divisors
    least = ((grouped / scales).round().clamp(-8, 7) * scales - grouped).square().sum(-1).amin(0).sum()
    assert float((found.dequantized() - weight).square().sum()) < 0.93 * float(least)


def test_groups_that_are_not_whole_are_not_rounded() -> None:
    assert rounded(torch.randn(4, 48), StoredFormat(Layout.PACKED, CodeType.INT4, 32)) is None


def rounding_of(name: str, form: WeightForm) -> StoredFormat | None:
    """Return the format to which the form rounds the tensor; None: to none."""
    if is_table(name):
        return form.rounded_table
    return form.rounded if is_product(name) else None


@uses_compiler
@pytest.mark.parametrize("form_name", ["int8", "int4", "fp8"])
def test_logits_are_those_of_the_rounded_weights(form_name: str, source: Path, tmp_path: Path) -> None:
    form = WeightForm(form_name)
    expected = Path(shutil.copytree(source, tmp_path / "expected"))
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if (target := rounding_of(name, form)) is not None:
            weight = rounded(tensor, target)
            assert weight is not None
            tensors[name] = weight.dequantized()
    save_file(tensors, expected / "model.safetensors")
    prompt = tokens_of(1, 50)
    found, other, exact = (
        PagedModel(load_decoder(folder, torch.float32, CPU, form=how), torch.float32).chunked(0, prompt, 32)
        for folder, how in ((source, form), (expected, AS_STORED), (source, AS_STORED))
    )
    assert error_of(found, other) <= 1e-4
    assert error_of(found, exact) >= 1e-3


@uses_compiler
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_rounded_values_do_not_depend_on_the_kernels(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on who computes the experts: replicas of both kinds have one identity of KV."""
    keys = {"family": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    write_family_checkpoint(tmp_path, **LLAMA | keys)
    prompt = tokens_of(1, 50)

    def logits_with(form: str) -> torch.Tensor:
        decoder = load_decoder(tmp_path, torch.float32, CPU, form=WeightForm(form))
        return PagedModel(decoder, torch.float32).chunked(0, prompt, 32)

    kept = logits_with(name)
    assert error_of(kept, logits_with("auto")) >= 1e-3
    monkeypatch.setattr(tensor_files, "has_products", lambda weight: False)
    monkeypatch.setattr(stored_experts, "has_experts", lambda weight: False)
    assert error_of(logits_with(name), kept) <= 1e-4


def _parts_of(folder: Path, rank: int, tp: int, form: WeightForm, name: str) -> list[QuantizedWeight]:
    config = read_model_config(folder)
    with WeightReader(folder, config, ShardSpec(0, 1, rank, tp), torch.float32, CPU, form=form) as reader:
        weights: LinearWeights = getattr(reader.layer(0), name)
        assert are_quantized(weights.parts)
        return list(weights.parts)


@needs_compiler
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_ranks_round_as_one_does(name: str, source: Path) -> None:
    form = WeightForm(name)
    (whole,) = (it.dequantized() for it in _parts_of(source, 0, 1, form, "down"))
    parts = [_parts_of(source, rank, 2, form, "down")[0].dequantized() for rank in range(2)]
    assert torch.equal(torch.cat(parts, 1), whole)
    gate, up = (it.dequantized() for it in _parts_of(source, 0, 1, form, "gate_up"))
    ranks = [[it.dequantized() for it in _parts_of(source, rank, 2, form, "gate_up")] for rank in range(2)]
    assert torch.equal(torch.cat([rank[0] for rank in ranks]), gate)
    assert torch.equal(torch.cat([rank[1] for rank in ranks]), up)


@needs_compiler
@pytest.mark.parametrize("how", sorted(FORMATS.keys() - {OWN_ORDERS}))
def test_weights_are_counted_as_they_are_kept(how: str, source: Path, tmp_path: Path) -> None:
    plain = quantize(source, tmp_path, FORMATS[how])
    config, checkpoint = read_model_config(tmp_path), Checkpoint.read(tmp_path)
    rank = RankShape(config, 0, 2)
    dequantized = Checkpoint.read(plain).weight_bytes(rank, 2)
    # GPTQ has biases of zeros that are not kept.
    assert 0 <= checkpoint.weight_bytes(rank, 2) - dequantized <= 2 * 2 * 64
    counted = checkpoint.weight_bytes(rank, 2) - checkpoint.weight_bytes(rank, 2, AS_STORED)
    saved = 0.0
    with WeightReader(tmp_path, config, ShardSpec(0, 2), torch.float32, CPU) as reader:
        for layer in map(reader.layer, range(2)):
            for weights in (layer.qkv, layer.output, layer.gate_up, layer.down):
                assert weights is not None
                assert are_quantized(weights.parts)
                whole = QuantizedWeight.joined(weights.parts)
                assert whole is not None
                form = PackedForm.of([whole])
                assert form is not None
                num_panels = -(-whole.num_outputs // PANEL)
                saved += 2 * whole.num_outputs * whole.num_inputs - num_panels * form.num_panel_bytes
    assert counted == pytest.approx(saved, rel=0.2)


@uses_compiler
@pytest.mark.parametrize(
    ("asked", "reported"),
    [("auto", "int4 group 32"), ("bf16", "bfloat16"), ("int8", "int8, rounded")],
)
def test_a_rank_reports_the_form_of_its_weights(
    asked: str, reported: str, source: Path, tmp_path: Path
) -> None:
    quantize(source, tmp_path, FORMATS["awq"])
    compute = ON_CPU._replace(dtype=torch.bfloat16, weights=WeightForm(asked))
    runner = ModelRunner(CheckpointFolder(tmp_path), compute, RankCapacity(16, 512), ManualClock(5.0))
    with closing(runner):
        assert runner.ready_fields.compatibility.weight_dtype == reported


@uses_compiler
@pytest.mark.parametrize("how", ["int4 with zero points", "gptq", "fp8 in blocks", "int8 packed"])
def test_bfloat16_computes_with_quantized_weights(how: str, source: Path, tmp_path: Path) -> None:
    """Nearer to float32 than with weights that are rounded to bfloat16, or about as near."""
    plain = quantize(source, tmp_path, FORMATS[how])
    prompt = tokens_of(1, 50)

    def logits_of(folder: Path, dtype: torch.dtype, form: WeightForm) -> torch.Tensor:
        decoder = load_decoder(folder, dtype, CPU, form=form)
        return PagedModel(decoder, dtype).chunked(0, prompt, 32)

    exact = logits_of(plain, torch.float32, AS_STORED)
    kept, rounded_once = (
        error_of(logits_of(tmp_path, torch.bfloat16, form), exact) for form in (AS_STORED, WeightForm("bf16"))
    )
    assert kept <= 1.3 * rounded_once + 1e-3


@uses_compiler
@pytest.mark.parametrize("how", ["awq", "fp8 in blocks"])
def test_experts_are_counted_as_they_are_kept(how: str, tmp_path: Path) -> None:
    keys = {"family": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    write_family_checkpoint(tmp_path / "source", **LLAMA | keys)
    quantize(tmp_path / "source", tmp_path, FORMATS[how])
    config, checkpoint = read_model_config(tmp_path), Checkpoint.read(tmp_path)
    names = {name for name in checkpoint.name_to_size if ".experts." in name}
    of_experts = Checkpoint(
        {name: checkpoint.name_to_size[name] for name in names}, checkpoint.name_to_format
    )
    rank, split = RankShape(config, 0, 2), RankShape(config, 0, 2, 1, 2, 2)
    num_weights = 2 * 5 * 3 * 64 * 64
    assert of_experts.weight_bytes(rank, 2) == 2 * num_weights
    assert 0.5 * num_weights < of_experts.weight_bytes(rank, 2, AS_STORED) < 1.2 * num_weights
    assert of_experts.weight_bytes(split, 2, AS_STORED) < of_experts.weight_bytes(rank, 2, AS_STORED)
    copied = dataclasses.replace(split, expert_copies=1)
    assert of_experts.weight_bytes(copied, 2, AS_STORED) == of_experts.weight_bytes(copied, 2)


@uses_compiler
@pytest.mark.parametrize("how", ["int4", "gptq", "fp8 of channels", "nvfp4"])
@pytest.mark.parametrize("form", ["auto", "fp32"])
def test_a_loaded_model_does_not_depend_on_its_files(
    how: str, form: str, source: Path, tmp_path: Path
) -> None:
    """Codes are packed from the mapped files, which are unmapped afterwards."""
    quantize(source, tmp_path, FORMATS[how])
    decoder = load_decoder(tmp_path, torch.float32, CPU, form=WeightForm(form))
    assert str(tmp_path / "model.safetensors") not in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert decoder.layers


def test_the_identity_of_kv_has_the_form_of_weights(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path, FORMATS["awq"])
    scheme = read_model_config(tmp_path).quantization
    found = [
        WeightForm(name).identity(scheme, "bfloat16", "cpu")
        for name in ("auto", "bf16", "int8", "int4", "fp8")
    ]
    assert found == [
        "int4 group 32",
        "bfloat16",
        "int8, rounded",
        "int4 group 32 and int8, rounded in way 2",
        "fp8 and int8, rounded",
    ]
    assert AS_STORED.identity(None, "bfloat16", "cuda") == "bfloat16"


def test_products_of_rounded_inputs_have_kv_of_their_own() -> None:
    """CPUs round those of int8 where a scale belongs to all inputs, as GPUs do, and no others."""

    def identities_of(*formats: StoredFormat) -> list[str]:
        scheme = QuantizationScheme("any", tuple(TargetedFormat(("Linear",), it) for it in formats))
        return [AS_STORED.identity(scheme, "bfloat16", device) for device in ("cpu", "cuda")]

    whole = StoredFormat(Layout.PLAIN, CodeType.INT8, quantizes_inputs=True)
    in_groups = dataclasses.replace(whole, group=64)
    fp8 = dataclasses.replace(whole, codes=CodeType.FP8)
    assert identities_of(whole) == ["int8, of rounded inputs"] * 2
    assert identities_of(dataclasses.replace(whole, quantizes_inputs=False)) == ["int8"] * 2
    assert identities_of(in_groups) == ["int8 group 64", "int8 group 64, of rounded inputs"]
    both = "int8, of rounded inputs and fp8"
    assert identities_of(whole, fp8) == [both, f"{both}, of rounded inputs"]


def test_the_fingerprint_has_the_scheme(source: Path, tmp_path: Path) -> None:
    """The same tensors mean other weights in another version of GPTQ."""
    quantize(source, tmp_path, FORMATS["gptq"])
    cache = DigestCache(None, SystemClock())
    first = model_fingerprint(tmp_path, cache)
    file = tmp_path / "config.json"
    keys = json.loads(file.read_text(encoding="utf-8"))
    keys["quantization_config"]["checkpoint_format"] = "gptq_v2"
    file.write_text(json.dumps(keys), encoding="utf-8")
    assert model_fingerprint(tmp_path, cache) != first


def test_products_have_the_formats_that_name_them(source: Path, tmp_path: Path) -> None:
    """By their names first, and then by their class."""
    weights = {"type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "a": {"targets": ["Linear"], "weights": weights | {"num_bits": 4}},
            "b": {"targets": ["re:.*down_proj"], "weights": weights | {"num_bits": 8}},
        },
    }
    quantize(source, tmp_path, FORMATS["int4"], config)
    scheme = read_model_config(tmp_path).quantization
    assert scheme is not None
    assert scheme.name == "int4 group 32 and int8 group 32"
    assert scheme.format_of("model.layers.0.mlp.down_proj") == StoredFormat(Layout.PACKED, CodeType.INT8, 32)
    assert scheme.format_of("model.layers.0.mlp.up_proj") == StoredFormat(Layout.PACKED, CodeType.INT4, 32)


def test_tensors_that_do_not_fit_the_scheme_are_refused(source: Path, tmp_path: Path) -> None:
    wrong = FORMATS["gptq"].config | {"group_size": 64}
    quantize(source, tmp_path, FORMATS["gptq"], wrong)
    with pytest.raises(
        CheckpointError, match=r"proj\.scales has shape \[2, 192\], config\.json says \[1, 192\]"
    ):
        load_decoder(tmp_path, torch.float32, CPU)


def test_products_that_no_group_names_are_refused(source: Path, tmp_path: Path) -> None:
    config = json.loads(json.dumps(FORMATS["int4"].config))
    config["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
    quantize(source, tmp_path, FORMATS["int4"], config)
    with pytest.raises(CheckpointError, match=r"self_attn\.q_proj is quantized, and quantization_config"):
        load_decoder(tmp_path, torch.float32, CPU)
