"""Embeddings and heads are kept quantized as the checkpoint has them or as a pool's `weight_dtype` says, each
table once, and are worth what their codes are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import write_family_checkpoint
from optional_programs import needs_compiler, uses_compiler
from paged_model import PagedModel, error_of, reference_logits, reference_of, tokens_of
from parallel_ranks import ParallelCase, RankProcesses
from quantized_checkpoints import FORMATS, LLAMA, quantize
from safetensors.torch import load_file
from torch import Tensor

from workers.model import tensor_files
from workers.model.decoder import Decoder, load_decoder
from workers.model.model_config import read_model_config
from workers.model.quantization.quantized_weight import QuantizedWeight
from workers.model.quantization.rounded_weight import rounded
from workers.model.quantization.weight_form import AS_STORED, DEQUANTIZED, WeightForm
from workers.model.rank_memory import Checkpoint, RankShape
from workers.model.weights import ShardSpec, WeightReader

CPU = torch.device("cpu")
ALL_IDS = torch.arange(211)
EMBEDDING = "model.embed_tokens.weight"
# A format, and what the model has beside `LLAMA`: heads of their own, tied, with a bias, and with a cap.
STORED: dict[str, tuple[str, dict[str, Any]]] = {
    "own head": ("gptq in another order", {}),
    "tied": ("awq", {"tie_word_embeddings": True}),
    "head with a bias": ("int8", {"family": "phimoe", "num_local_experts": 2, "lm_head_bias": True}),
    "inputs of layers": (
        "int4",
        {
            "family": "gemma4_text",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 20,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 211,
        },
    ),
    "capped": ("fp8 in blocks", {"family": "gemma2", "sliding_window": 20, "final_logit_softcapping": 5.0}),
}


def _tables(folder: Path, shard: ShardSpec, form: WeightForm) -> list[Tensor | QuantizedWeight]:
    """Read the embedding and the head."""
    config = read_model_config(folder)
    with WeightReader(folder, config, shard, torch.float32, CPU, form=form) as reader:
        embedding = reader.embedding()
        found = [embedding, reader.head(embedding)]
        assert (found[0] is found[1]) == config.tie_word_embeddings
        return [_copied(it) for it in found]


def _copied(table: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
    return table.clone() if isinstance(table, Tensor) else table.at(torch.arange(table.num_outputs))


def _values(table: Tensor | QuantizedWeight) -> Tensor:
    assert isinstance(table, QuantizedWeight)
    return table.dequantized()


def _logits(decoder: Decoder) -> Tensor:
    return PagedModel(decoder, torch.float32).chunked(0, tokens_of(1, 50), 32)


@uses_compiler
@pytest.mark.parametrize("model", STORED)
def test_stored_tables_are_worth_their_codes(model: str, tmp_path: Path) -> None:
    how, keys = STORED[model]
    write_family_checkpoint(tmp_path / "source", **LLAMA | keys)
    plain = quantize(tmp_path / "source", tmp_path, FORMATS[how], has_tables=True)
    decoder, expected = load_decoder(tmp_path, torch.float32, CPU), load_decoder(plain, torch.float32, CPU)
    assert torch.equal(decoder.embed(ALL_IDS), expected.embed(ALL_IDS))
    halves = load_decoder(tmp_path, torch.bfloat16, CPU).embed(ALL_IDS)
    assert torch.equal(halves, load_decoder(plain, torch.bfloat16, CPU).embed(ALL_IDS))
    found = _logits(decoder)
    assert error_of(found, reference_logits(reference_of(plain), tokens_of(1, 50))) <= 1e-3
    assert float(found.std()) >= 0.1


@uses_compiler
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_tables_are_rounded_to_8_bits(
    name: str, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also piece by piece; and without kernels they are worth the same."""
    write_family_checkpoint(tmp_path, **LLAMA, tie_word_embeddings=is_tied)
    form = WeightForm(name)
    assert form.rounded_table is not None
    assert form.rounded_table.codes.num_bits == 8
    whole = rounded(load_file(tmp_path / "model.safetensors")[EMBEDDING], form.rounded_table)
    assert whole is not None
    monkeypatch.setattr(tensor_files, "_ROUNDED_BYTES", 4 * 64 * 50)
    decoder = load_decoder(tmp_path, torch.float32, CPU, form=form)
    assert torch.equal(decoder.embed(ALL_IDS), whole.dequantized())
    found = _logits(decoder)
    monkeypatch.setattr(tensor_files, "has_products", lambda weight: False)
    unpacked = load_decoder(tmp_path, torch.float32, CPU, form=form)
    assert torch.equal(unpacked.embed(ALL_IDS), whole.dequantized())
    assert error_of(found, _logits(unpacked)) <= 1e-4


@needs_compiler
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("form", ["auto", "int8", "fp8"])
def test_ranks_hold_their_rows(form: str, tp: int, tmp_path: Path) -> None:
    """Those of the embedding as those of the head, at the first stage as at the last."""
    write_family_checkpoint(tmp_path / "source", **LLAMA)
    quantize(tmp_path / "source", tmp_path, FORMATS["awq"], has_tables=True)
    folder, asked = (tmp_path, AS_STORED) if form == "auto" else (tmp_path / "source", WeightForm(form))
    whole = [_values(it) for it in _tables(folder, ShardSpec(0, 2), asked)]
    for layers in ((0, 1), (1, 2)):
        ranks = [_tables(folder, ShardSpec(*layers, rank, tp), asked) for rank in range(tp)]
        for number, expected in enumerate(whole):
            assert torch.equal(torch.cat([_values(rank[number]) for rank in ranks]), expected)


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with RankProcesses(2) as started:
        yield started


@pytest.mark.slow
@uses_compiler
@pytest.mark.parametrize("layout", ["2x1", "1x2"])
def test_ranks_share_a_tied_table(layout: str, processes: RankProcesses, tmp_path: Path) -> None:
    """Its rows, or whole at the first stage as at the last."""
    how, keys = STORED["tied"]
    write_family_checkpoint(tmp_path / "source", **LLAMA | keys)
    plain = quantize(tmp_path / "source", tmp_path, FORMATS[how], has_tables=True)
    tp, stages = (2, [(0, 2)]) if layout == "2x1" else (1, [(0, 1), (1, 2)])
    prompt = tokens_of(1, 50)
    case = ParallelCase(layout, str(tmp_path), tp, stages, [prompt], [[32, 18]], 6, str(tmp_path))
    processes.run(case)
    ranks = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(2)]
    logits = next(it["logits"] for it in ranks if it.get("logits", torch.empty(0)).numel())
    expected = reference_logits(reference_of(plain), prompt)
    assert error_of(logits[: len(prompt)], expected) <= 1e-3


def test_a_head_that_differs_from_a_tied_embedding_is_kept(tmp_path: Path) -> None:
    """One that is the same is the embedding, whatever form both have."""
    write_family_checkpoint(tmp_path / "own", **LLAMA)
    write_family_checkpoint(tmp_path / "tied", **LLAMA, tie_word_embeddings=True)
    config = read_model_config(tmp_path / "tied")
    for form in (WeightForm("int8"), DEQUANTIZED):
        reader = WeightReader(tmp_path / "own", config, ShardSpec(0, 2), torch.float32, CPU, form=form)
        with reader:
            embedding = reader.embedding()
            assert reader.head(embedding) is not embedding
            assert type(reader.head(embedding)) is type(embedding)


@needs_compiler
@pytest.mark.parametrize("form", ["auto", "bf16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_tables_are_counted_as_they_are_kept(form: str, is_tied: bool, tmp_path: Path) -> None:
    """At the first and at the last stage, a tied one once."""
    write_family_checkpoint(tmp_path / "source", **LLAMA, tie_word_embeddings=is_tied, vocab_size=1024)
    quantize(tmp_path / "source", tmp_path, FORMATS["int8"], has_tables=True)
    folder = tmp_path if form == "auto" else tmp_path / "source"
    asked, config, checkpoint = WeightForm(form), read_model_config(folder), Checkpoint.read(folder)
    of_tables = Checkpoint(
        {name: size for name, size in checkpoint.name_to_size.items() if ".layers." not in name},
        checkpoint.name_to_format,
    )
    tables = _tables(folder, ShardSpec(0, 2), asked)
    sizes = [2 * it.numel() if isinstance(it, Tensor) else it.num_bytes for it in tables]
    assert all(isinstance(it, QuantizedWeight) for it in tables) == (form != "bf16")
    for stage, kept in (((0, 1), sizes[:1]), ((1, 2), sizes[1:]), ((0, 2), sizes[: 2 - is_tied])):
        counted = of_tables.weight_bytes(RankShape(config, *stage), 2, asked)
        assert counted == pytest.approx(sum(kept), rel=0.07)


@needs_compiler
@pytest.mark.parametrize("form", ["auto", "int8"])
def test_inputs_of_layers_are_counted_as_they_are_kept(form: str, tmp_path: Path) -> None:
    """Their table stays as it is stored, and is not rounded."""
    how, keys = STORED["inputs of layers"]
    write_family_checkpoint(tmp_path / "source", **LLAMA | keys)
    quantize(tmp_path / "source", tmp_path, FORMATS[how], has_tables=True)
    folder = tmp_path if form == "auto" else tmp_path / "source"
    config, asked, checkpoint = read_model_config(folder), WeightForm(form), Checkpoint.read(folder)
    with WeightReader(folder, config, ShardSpec(0, 2), torch.float32, CPU, form=asked) as reader:
        inputs = reader.input_embedding()
        assert inputs is not None
        parts = [inputs.table, *inputs.projection.parts]
    assert [isinstance(it, QuantizedWeight) for it in parts] == [form == "auto", form == "int8"]
    whole, sizes, kept = RankShape(config, 0, 2), dict(checkpoint.name_to_size), list[int]()
    for name, part in zip(("embed_tokens_per_layer", "per_layer_model_projection"), parts, strict=True):
        without = Checkpoint(
            {it: size for it, size in sizes.items() if name not in it}, checkpoint.name_to_format
        )
        counted = checkpoint.weight_bytes(whole, 2, asked) - without.weight_bytes(whole, 2, asked)
        kept.append(2 * part.numel() if isinstance(part, Tensor) else part.packed.nbytes)
        assert counted == pytest.approx(kept[-1], rel=0.13)
