"""Models that are described by sizes, on the command line or by a config.json that the engine refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from cluster.cli.main import cli
from cluster.errors import ConfigError
from cluster.planning.described_shape import stand_in
from cluster.planning.planned_model import PlannedModel, model_of_shape, planned_model

# Sizes of published models, and KV of a token in kB as DeepSeek's paper on the hardware of V3 has them.
LLAMA_405B = "layers=126,hidden=16384,heads=128,kv_heads=8,intermediate=53248,vocab=128256"
QWEN_72B = "layers=80,hidden=8192,heads=64,kv_heads=8,intermediate=29568,vocab=152064"
DEEPSEEK = (
    "layers=61,hidden=7168,heads=128,latent=512,rotary=64,query_latent=1536,key_dim=128,value_dim=128,"
    "experts=256,chosen=8,expert_intermediate=2048,shared_experts=1,dense_layers=3,intermediate=18432,"
    "vocab=129280"
)
QWEN_30B = (
    "layers=48,hidden=2048,heads=32,kv_heads=4,head_dim=128,experts=128,chosen=8,expert_intermediate=768,"
    "vocab=151936"
)


def of_shape(text: str) -> PlannedModel:
    return model_of_shape(text, "bf16", "auto")


def kv_of_token(model: PlannedModel) -> float:
    work = model.work
    return (work.of([(999, 1)], 1).read_bytes - work.read_weight_bytes(1)) / 1000


@pytest.mark.parametrize(
    ("text", "billions", "kv_kb"),
    [
        (LLAMA_405B, 405.9, 516.096),
        (QWEN_72B, 72.7, 327.680),
        (DEEPSEEK, 671.0, 70.272),
        (QWEN_30B, 30.5, 98.304),
    ],
    ids=["Llama 405B", "Qwen2.5 72B", "DeepSeek V3", "Qwen3 30B"],
)
def test_sizes_are_those_of_published_models(text: str, billions: float, kv_kb: float) -> None:
    model = of_shape(text)
    assert model.weight_bytes / 2e9 == pytest.approx(billions, rel=0.005)
    assert kv_of_token(model) == pytest.approx(1e3 * kv_kb)


def test_the_operations_of_a_token_are_two_for_each_weight_that_it_chooses() -> None:
    """DeepSeek V3 has 37 billion of them."""
    flops = of_shape(DEEPSEEK).work.of([(0, 1)], 1).flops
    assert flops / 2 == pytest.approx(37e9, rel=0.02)


def test_a_described_shape_is_the_named_one() -> None:
    named = planned_model("qwen3-30b-a3b", "bf16", "auto")
    described = of_shape(QWEN_30B + ",context=40960")
    assert described.weight_bytes == pytest.approx(named.weight_bytes, rel=1e-5)
    assert described.work.of([(0, 512)], 1).flops == named.work.of([(0, 512)], 1).flops


def test_windows() -> None:
    """Five of six layers keep 512 tokens."""
    model = of_shape("layers=12,hidden=1024,heads=16,window=512,intermediate=4096,vocab=32000,tied=1")
    held = model.work.of([(4095, 1)], 1).read_bytes - model.work.read_weight_bytes(1)
    assert held == 2 * 16 * 64 * 2 * (2 * 4096 + 10 * 512)


def test_latents_without_experts() -> None:
    model = of_shape("layers=10,hidden=1024,heads=16,latent=512,intermediate=4096,vocab=32000")
    assert kv_of_token(model) == 10 * 576 * 2
    assert not any(map(model.shape.has_experts, range(10)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers=32,hidden=4096", "--shape: has no heads, vocab"),
        ("layers=32,hidden=4096,heads=32,vocab=9", "has no intermediate"),
        ("layers=32,width=4096", "--shape width=4096: give sizes as layers=32; there are layers, hidden"),
        ("layers", "--shape layers: give sizes as layers=32"),
        ("layers=0", "layers must be a whole number above 0"),
        ("layers=-1", "layers must be a whole number above 0"),
        ("layers=2.5", "layers must be a whole number above 0"),
        (
            "layers=2,hidden=100,heads=3,intermediate=8,vocab=9",
            "heads 3 do not divide hidden 100; give head_dim",
        ),
    ],
)
def test_bad_shapes(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of_shape(text)


def tandem_plan(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["plan", "--no-check", *map(str, arguments)], env={"COLUMNS": "300"})


def test_the_command_line_takes_a_shape() -> None:
    done = tandem_plan("--shape", QWEN_72B, "--gpu", "H200", "--rate", 2)
    assert done.exit_code == 0, done.output
    file = yaml.safe_load(done.stdout.partition("name its folder)")[2].partition("# values")[0])
    assert file["model"] == "model-folder"
    both = tandem_plan("--shape", QWEN_72B, "--model", "qwen3-8b", "--rate", 2)
    neither = tandem_plan("--rate", 2)
    for bad in (both, neither):
        assert bad.exit_code == 2
        assert "give either --model or --shape" in bad.output


UNKNOWN: dict[str, Any] = {
    "architectures": ["NovelForCausalLM"],
    "model_type": "novel",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def test_what_the_engine_refuses_is_planned_with_its_sentence_and_no_file(tmp_path: Path) -> None:
    folder, written = tmp_path / "novel", tmp_path / "cluster.yaml"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(UNKNOWN))
    sentence = "architectures 'NovelForCausalLM' is not supported"
    for name in (folder, folder / "config.json"):
        done = tandem_plan("--model", name, "--gpu", "H200", "--rate", 1)
        assert done.exit_code == 0, done.output
        assert "no file: the engine does not start this" in done.output
        assert " ".join(done.output.split()).count(sentence) >= 1
        assert "cluster.yaml" not in done.output
        assert "tandem-plan-" not in done.output, "no folder that is gone is named"
    (plan, *_) = json.loads(tandem_plan("--model", folder, "--rate", 1, "--json").stdout)["plans"]
    assert sentence in plan["refusal"]
    assert plan["cluster_yaml"] == plan["values_yaml"] == ""
    weights = next(line for line in plan["lines"] if line["name"] == "weights")
    assert weights["value"] == "61.06 GB, as stored"
    done = tandem_plan("--model", folder, "--rate", 1, "--out", written)
    assert done.exit_code == 1
    assert sentence in done.output
    assert not written.exists()


def test_sizes_of_the_text_are_taken_from_models_with_images() -> None:
    of_text = stand_in({"text_config": UNKNOWN, "vocab_size": 7, "vision_config": {"hidden_size": 1}})
    assert of_text is not None
    assert (of_text["vocab_size"], of_text["hidden_size"]) == (151936, 2048)
    assert stand_in({"hidden_size": 64}) is None
    assert stand_in({**UNKNOWN, "hidden_size": "much"}) is None
