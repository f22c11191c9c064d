"""Calibrations layer by layer: what is rounded of a model, and how the layers behind make up for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import unpacked_tensors
from safetensors.torch import save_file
from torch import Tensor

from workers.quantizer.calibrated_rounder import CalibratedRounder
from workers.quantizer.checkpoint_plan import CheckpointPlan
from workers.quantizer.paired_layers import LayerProduct, PairedLayers
from workers.quantizer.quantize_checkpoint import QuantizationJob
from workers.quantizer.rounded_inputs import round_product_inputs
from workers.quantizer.rounding import NearestRounder, Rounded, Rounder
from workers.quantizer.target import QuantizationTarget
from workers.quantizer.window_states import WindowStates

MakeCheckpoint = Callable[..., Path]
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
WINDOWS = [torch.arange(number, number + 60) * 7 % 200 for number in range(0, 96, 12)]
_MODULES = {
    "projection": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def _noisy(source: Path, layer: int) -> dict[str, Tensor]:
    """Return the products of a layer with other values."""
    drawn, tensors = torch.Generator().manual_seed(layer), unpacked_tensors.stored_tensors(source)
    products = {name: it for name, it in tensors.items() if f"layers.{layer}." in name and "_proj" in name}
    return {
        name: it + 0.2 * it.std() * torch.randn(it.shape, generator=drawn) for name, it in products.items()
    }


def test_one_of_both_models_is_run_with_the_tensors_that_are_replaced(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """It takes the same as one that has them stored, bit for bit."""
    source = make_checkpoint("qwen3", **SHAPE, dtype="float32")
    changed, noisy = tmp_path / "changed", _noisy(source, 0)
    shutil.copytree(source, changed, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(unpacked_tensors.stored_tensors(source) | noisy, changed / "model.safetensors")
    one, other = (PairedLayers(folder, torch.float32, WINDOWS) for folder in (source, changed))
    one.advance(noisy)
    other.advance({})
    products = list(one.samples())
    assert products == [LayerProduct(1, name) for name in _MODULES]
    weight = torch.eye(SHAPE["hidden_size"])
    for product in products:
        ours, theirs = (it.pairs([product], {}, {})[product] for it in (one, other))
        assert torch.equal(ours.products.total, theirs.products.total)
        if ours.num_inputs == len(weight) and product.product != "output":
            assert torch.equal(theirs.moved(weight), weight)
            assert not torch.equal(ours.moved(weight), weight)


@pytest.mark.parametrize("family", ["llama", "granite", "cohere", "gemma2"])
def test_a_layer_makes_up_for_the_one_before(family: str, make_checkpoint: MakeCheckpoint) -> None:
    """Also where products are scaled before they are added, where attention and feed-forward are added at
    once, and where norms follow the products."""
    source = make_checkpoint(family, **SHAPE, dtype="float32")
    stored, noisy = unpacked_tensors.stored_tensors(source), _noisy(source, 0)
    layers, moved = PairedLayers(source, torch.float32, WINDOWS), dict[str, Tensor]()
    layers.advance(noisy)
    for product in layers.samples():
        inputs = layers.pairs([product], {}, moved)[product]
        names = [f"model.layers.1.{module}.weight" for module in _MODULES[product.product]]
        moved |= {name: inputs.moved(stored[name]) for name in names}
    exact, plain, mended = (WindowStates(source, torch.float32, WINDOWS) for _ in range(3))
    first, second = exact.stages()[:2]
    for states, of_first, of_second in ((exact, {}, {}), (plain, noisy, {}), (mended, noisy, moved)):
        states.advance(first, replaced=of_first)
        states.advance(second, replaced=of_second)
    errors = [_difference(exact.states, states.states) for states in (plain, mended)]
    assert errors[1] < 0.8 * errors[0]


def _difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return sum(float((a - b).double().square().sum()) for a, b in zip(ours, theirs, strict=True))


class _Stopped(Exception):
    pass


class _StoppedRounder(CalibratedRounder):
    """Is interrupted at a layer."""

    stop_at = 2

    def rounded(self, name: str, weight: Tensor, dtype: torch.dtype) -> Rounded:
        if f"layers.{self.stop_at}." in name:
            raise _Stopped
        return super().rounded(name, weight, dtype)


@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("qwen3", QuantizationTarget.of("int4")),
        ("qwen3", QuantizationTarget.of("w8a8")),
        ("qwen3", QuantizationTarget.of("int4", is_asymmetric=True)),
        ("qwen3_moe", QuantizationTarget.of("fp8")),
    ],
    ids=lambda it: it if isinstance(it, str) else f"{it.name} {it.is_asymmetric}",
)
def test_an_interrupted_calibration_ends_with_the_same_bytes(
    family: str,
    target: QuantizationTarget,
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The layers that are written are run with what is written, and not rounded again."""
    plan = CheckpointPlan.of
    monkeypatch.setattr(CheckpointPlan, "of", lambda source, target: plan(source, target, 1))
    source = make_checkpoint(family, **SHAPE, num_hidden_layers=4)

    def run(folder: Path, kind: type[CalibratedRounder]) -> None:
        rounder = kind(source, target, WINDOWS[:2], torch.bfloat16)
        QuantizationJob(source, folder, target, "calibrated").run(rounder)

    run(tmp_path / "whole", CalibratedRounder)
    with pytest.raises(_Stopped):
        run(tmp_path / "out", _StoppedRounder)
    assert not (tmp_path / "out" / "config.json").exists()
    run(tmp_path / "out", CalibratedRounder)
    whole, found = ({it.name: it.read_bytes() for it in (tmp_path / at).iterdir()} for at in ("whole", "out"))
    assert found == whole


@pytest.mark.parametrize("name", ["int4", "w8a8", "fp8"])
def test_hidden_states_change_less_than_by_the_nearest_codes(
    name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """On the tokens of the calibration."""
    source, target = make_checkpoint("qwen3", **SHAPE, dtype="float32"), QuantizationTarget.of(name)
    watch = round_product_inputs if target.quantizes_inputs else lambda decoder: None

    def states_of(folder: Path) -> list[Tensor]:
        states = WindowStates(folder, torch.float32, WINDOWS)
        for stage in states.stages():
            states.advance(stage, watch if folder != source else lambda decoder: None)
        return states.states

    def error_of(rounder: Rounder, folder: Path) -> float:
        QuantizationJob(source, folder, target).run(rounder)
        plain = unpacked_tensors.write_unpacked(folder, folder.with_name(f"{folder.name} plain"))
        return _difference(states_of(source), states_of(plain))

    nearest = error_of(NearestRounder(target), tmp_path / "nearest")
    calibrated = error_of(CalibratedRounder(source, target, WINDOWS, torch.float32), tmp_path / "calibrated")
    assert calibrated < 0.6 * nearest
