"""The checks of the model's folder: whole, cut short, or not what the pools need."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from doctor_harness import TINY, config_of, context_of, only, said

from cluster.doctor import model
from cluster.doctor.check_context import CheckContext
from cluster.doctor.checks import Severity
from cluster.serve.machine import Machine
from cluster.serve.resource_needs import needs_of
from kvtransfer.common.clock import SystemClock

OK, NOTE, WARNING, ERROR = Severity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled model."""
    copied = tmp_path / "m"
    shutil.copytree(TINY, copied)
    return copied


def context(folder: Path, *pools: dict[str, object]) -> CheckContext:
    """Of a folder that may be broken; what it needs is not of interest."""
    config = config_of(folder, pools)
    return CheckContext(Machine(), config, None, {}, SystemClock())


def test_the_bundled_model_is_well() -> None:
    for check in model.CHECKS:
        severities = [severity for severity, _ in said(check.look, context_of(Machine()))]
        assert severities, check.name
        assert set(severities) <= {OK}, check.name


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    assert only(model.config_json, context(tmp_path)).severity is ERROR
    assert only(model.weights, context(tmp_path)).severity is ERROR
    assert only(model.tokenizer, context(tmp_path)).severity is ERROR
    assert not said(model.split, context(tmp_path))


def test_an_architecture_that_is_not_supported_is_named(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["MambaForCausalLM"]}))
    result = only(model.config_json, context(folder))
    assert result.severity is ERROR
    assert "MambaForCausalLM" in result.seen


def test_a_key_that_changes_results_and_is_ignored_is_named(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"logits_scaling": 8.0}))
    well, ignored = model.config_json(context(folder))
    assert (well.severity, ignored.severity) == (OK, WARNING)
    assert "logits_scaling" in ignored.seen


@pytest.mark.parametrize(
    ("pool", "severity", "said_of_weights"),
    [
        ({"device": "cpu"}, OK, "(awq: int4 group 128), and stay so in products"),
        ({"device": "cuda", "gpus_per_rank": 1}, OK, "and stay so in products"),
        ({"dtype": "bf16", "weight_dtype": "bf16"}, OK, "and weight_dtype is bf16"),
    ],
)
def test_it_says_what_becomes_of_quantized_weights(
    pool: dict[str, object], severity: Severity, said_of_weights: str, folder: Path
) -> None:
    file = folder / "config.json"
    config = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    well, weights = model.config_json(context(folder, {"name": "p", "role": "both"} | pool))
    assert (well.severity, weights.severity) == (OK, severity)
    assert said_of_weights in weights.seen


def test_rounded_weights_need_less_memory() -> None:
    needed = [
        needs_of(config_of(TINY, ({"name": "p", "role": "both", "dtype": "bf16", "weight_dtype": form},)))
        for form in ("bf16", "int8", "int4")
    ]
    floats, eights, fours = (sum(rank.weight_bytes for rank in need.pools[0].ranks) for need in needed)
    assert fours < eights < floats


def test_weights_that_were_cut_short_are_named(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    result = only(model.weights, context(folder))
    assert result.severity is ERROR
    assert file.name in result.seen
    file.write_bytes(whole[:20])
    assert only(model.weights, context(folder)).severity is ERROR
    file.unlink()
    assert only(model.weights, context(folder)).severity is ERROR


def test_a_tensor_that_the_index_names_must_be_in_its_file(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    part = file.rename(folder / "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": part.name}}))
    assert only(model.weights, context(folder)).severity is OK
    index.write_text(json.dumps({"weight_map": {"model.none.weight": part.name}}))
    result = only(model.weights, context(folder))
    assert result.severity is ERROR
    assert "model.none.weight" in result.seen


def test_no_chat_template_is_a_note(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({}))
    assert only(model.tokenizer, context(folder)).severity is NOTE
    path.write_text("{")
    assert only(model.tokenizer, context(folder)).severity is ERROR


@pytest.mark.parametrize(
    ("pool", "severity", "word"),
    [
        ({"tp": 16}, ERROR, "attention heads"),
        ({"pp": 7}, ERROR, "layers"),
        ({"tp": 8}, NOTE, "KV heads"),
        ({"engine": {"kv_tokens": 1024}}, NOTE, "kv_tokens 1024"),
        ({}, OK, "can be split"),
    ],
)
def test_pools_must_suit_the_model(pool: dict[str, object], severity: Severity, word: str) -> None:
    result = only(model.split, context(TINY, {"name": "d", "role": "decode", **pool}))
    assert result.severity is severity
    assert word in result.seen


def test_a_dtype_that_nobody_names_is_a_warning(folder: Path) -> None:
    path = folder / "config.json"
    raw = {name: value for name, value in json.loads(path.read_text()).items() if "dtype" not in name}
    path.write_text(json.dumps(raw))
    pools: dict[str, object] = {"name": "d", "role": "decode"}
    assert only(model.split, context(folder, pools)).severity is WARNING
    assert needs_of(config_of(folder, [pools])).pools[0].ranks[0].weight_bytes > 0
    named = context(folder, {**pools, "dtype": "bf16"})
    assert only(model.split, named).severity is OK
