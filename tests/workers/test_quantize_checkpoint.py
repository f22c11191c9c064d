"""Checkpoints quantized to folders of compressed-tensors: the values, the files, and what interrupts them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import unpacked_tensors
from decoder_logits import decoder_logits
from torch import Tensor

from workers.errors import QuantizationError
from workers.quantizer.checkpoint_plan import CheckpointPlan, SourceTensors
from workers.quantizer.quantize_checkpoint import RECORD, QuantizationJob
from workers.quantizer.rounding import NearestRounder, Rounded
from workers.quantizer.target import TARGETS, QuantizationTarget

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
MakeCheckpoint = Callable[..., Path]


def _quantized(source: Path, out: Path, name: str, group: int | None = None) -> Path:
    target = QuantizationTarget.of(name, group)
    QuantizationJob(source, out, target).run(NearestRounder(target))
    return out


def _scheme(folder: Path) -> dict[str, Any]:
    scheme: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return scheme


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def _one_shard_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = CheckpointPlan.of
    monkeypatch.setattr(CheckpointPlan, "of", lambda source, target: plan(source, target, 1))


@pytest.mark.parametrize(
    ("name", "group", "limit"),
    [("int8", None, 0.5), ("int8", 32, 0.5), ("w8a8", None, 0.5), ("int4", None, 0.75), ("int4", 16, 0.75)],
)
def test_values_are_as_near_as_codes_can_be(
    name: str, group: int | None, limit: float, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """No value is further than half a step from its code, but for the largest of a group of 4 bits, which may
    be clipped. All other tensors are as they were."""
    source = make_checkpoint("qwen3", **SHAPE)
    folder = _quantized(source, tmp_path / "out", name, group)
    before, after = unpacked_tensors.stored_tensors(source), unpacked_tensors.unpacked(folder)
    stored = unpacked_tensors.stored_tensors(folder)
    assert before.keys() == after.keys()
    changed = set()
    for key, values in before.items():
        if f"{key}_scale" not in stored:
            assert torch.equal(values, after[key]), key
            continue
        changed.add(key.split(".")[-2])
        scales = stored[f"{key}_scale"]
        assert scales.dtype == values.dtype
        num_groups = (
            1 if name == "w8a8" or (name == "int8" and group is None) else values.shape[1] // (group or 32)
        )
        assert scales.shape == (len(values), num_groups)
        steps = (_grouped(after[key], num_groups) - _grouped(values, num_groups)).abs() / scales[..., None]
        if name == "int4":
            largest = _grouped(values, num_groups).abs().argmax(-1, keepdim=True)
            steps = steps.scatter(-1, largest, 0.0)
        assert float(steps.quantile(0.98)) <= 0.5 + 1e-4
        assert float(steps.double().square().mean().sqrt()) < limit * 0.6
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_zero_points_are_stored_as_they_are_read(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """By an independent unpacking, and by our own reader; values that are no more below zero than above lose
    less by them, too."""
    source, plain = make_checkpoint("qwen3", **SHAPE), tmp_path / "plain"
    target = QuantizationTarget.of("int4", is_asymmetric=True)
    QuantizationJob(source, tmp_path / "out", target).run(NearestRounder(target))
    key = "model.layers.0.mlp.down_proj.weight"
    stored = unpacked_tensors.stored_tensors(tmp_path / "out")
    assert stored[f"{key}_zero_point"].dtype == torch.int32
    assert stored[f"{key}_zero_point"].shape == (SHAPE["hidden_size"] // 8, SHAPE["intermediate_size"] // 32)
    weights = _scheme(tmp_path / "out")["config_groups"]["group_0"]["weights"]
    assert (weights["symmetric"], weights["zp_dtype"]) == (False, "torch.int8")
    unpacked_tensors.write_unpacked(tmp_path / "out", plain)
    of_plain = decoder_logits(plain, range(30))
    torch.testing.assert_close(decoder_logits(tmp_path / "out", range(30)), of_plain, rtol=1e-3, atol=1e-3)
    symmetric = unpacked_tensors.unpacked(_quantized(source, tmp_path / "symmetric", "int4"))
    before, after = unpacked_tensors.stored_tensors(source)[key], unpacked_tensors.stored_tensors(plain)[key]
    errors = [float((it.double() - before.double()).square().sum()) for it in (after, symmetric[key])]
    assert errors[0] < 0.95 * errors[1]


def test_fp8_is_stored_as_it_is_read(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """By an independent unpacking, and by our own reader. Values are off by a sixteenth at most, but for
    those far below the largest of their output."""
    source, plain = make_checkpoint("qwen3", **SHAPE), tmp_path / "plain"
    folder = _quantized(source, tmp_path / "out", "fp8")
    key = "model.layers.0.mlp.down_proj.weight"
    assert unpacked_tensors.stored_tensors(folder)[key].dtype == torch.float8_e4m3fn
    unpacked_tensors.write_unpacked(folder, plain)
    before, after = unpacked_tensors.stored_tensors(source)[key], unpacked_tensors.stored_tensors(plain)[key]
    least = before.float().abs().amax(1, keepdim=True) / 448 * 2**-9
    assert bool(((after - before).float().abs() <= before.float().abs() * 0.0675 + least).all())
    assert not torch.equal(after, before)
    of_plain = decoder_logits(plain, range(30))
    torch.testing.assert_close(decoder_logits(folder, range(30)), of_plain, rtol=1e-3, atol=1e-3)


def _grouped(values: Tensor, num_groups: int) -> Tensor:
    return values.double().view(len(values), num_groups, -1)


def test_small_weights_in_float16_have_scales_that_are_small_enough() -> None:
    """And a row of zeros has a scale that is none."""
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(2)).mul_(1e-3).half()
    weight[3] = 0
    rounded = NearestRounder(QuantizationTarget.of("int8")).rounded("", weight, torch.float16)
    found = rounded.codes.double() * rounded.scales.double()
    assert bool((rounded.scales > 0).all())
    assert float((found - weight.double()).abs().max()) <= 0.51 * float(weight.abs().max()) / 127
    assert not bool(found[3].any())


def test_codes_are_packed_as_the_specification_says(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """The first code in the lowest bits, each as its distance from the smallest: by hand for one row."""
    source = make_checkpoint("qwen3", **SHAPE)
    folder = _quantized(source, tmp_path / "out", "int4")
    key = "model.layers.0.mlp.down_proj.weight"
    stored, weight = unpacked_tensors.stored_tensors(folder), unpacked_tensors.stored_tensors(source)[key]
    packed, scales = stored[f"{key}_packed"], stored[f"{key}_scale"]
    assert packed.dtype == torch.int32
    assert stored[f"{key}_shape"].tolist() == list(weight.shape)
    assert packed.shape == (weight.shape[0], weight.shape[1] // 8)
    codes = [max(-8, min(7, round(float(weight[3, i]) / float(scales[3, 0])))) + 8 for i in range(8)]
    assert int(packed[3, 0]) & 0xFFFFFFFF == sum(code << 4 * place for place, code in enumerate(codes))


@pytest.mark.parametrize("name", TARGETS)
def test_the_configuration_says_how_to_read_it(
    name: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint("qwen3", **SHAPE)
    folder = _quantized(source, tmp_path / "out", name)
    scheme = _scheme(folder)
    group = scheme["config_groups"]["group_0"]
    weights = group["weights"]
    assert scheme["quant_method"] == "compressed-tensors"
    formats = {"w8a8": "int-quantized", "fp8": "float-quantized"}
    assert scheme["format"] == formats.get(name, "pack-quantized")
    assert group["targets"] == ["Linear"]
    assert (weights["num_bits"], weights["type"], weights["symmetric"]) == (
        4 if name == "int4" else 8,
        "float" if name == "fp8" else "int",
        True,
    )
    assert (weights["strategy"], weights["group_size"]) == (
        ("group", 32) if name == "int4" else ("channel", None)
    )
    if name == "w8a8":
        inputs = group["input_activations"]
        assert (inputs["num_bits"], inputs["strategy"], inputs["dynamic"]) == (8, "token", True)
    else:
        assert group["input_activations"] is None
    assert scheme["ignore"] == ["lm_head"]
    unchanged = json.loads((folder / "config.json").read_text())
    del unchanged["quantization_config"]
    assert unchanged == json.loads((source / "config.json").read_text())


def test_experts_are_quantized_and_their_router_is_not(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = _quantized(make_checkpoint("qwen3_moe", **SHAPE), tmp_path / "out", "int8")
    names = unpacked_tensors.stored_tensors(folder).keys()
    assert any(".mlp.experts.0.down_proj.weight_packed" in name for name in names)
    ignored = _scheme(folder)["ignore"]
    assert "model.layers.0.mlp.gate" in ignored
    assert not any("proj" in name for name in ignored)


class _Stopped(Exception):
    pass


class _StoppedRounder(NearestRounder):
    """Is interrupted at a layer."""

    def __init__(self, target: QuantizationTarget, stop_at: int) -> None:
        super().__init__(target)
        self._stop_at = stop_at
        self.layers: list[int] = []

    def begin_layer(self, layer: int) -> None:
        self.layers.append(layer)

    def rounded(self, name: str, weight: Tensor, dtype: torch.dtype) -> Rounded:
        if self.layers[-1] == self._stop_at and "v_proj" in name:
            raise _Stopped
        return super().rounded(name, weight, dtype)


def test_an_interrupted_run_continues_and_ends_with_the_same_bytes(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _one_shard_per_layer(monkeypatch)
    source, target = make_checkpoint("qwen3", **SHAPE, num_hidden_layers=4), QuantizationTarget.of("int4")
    expected = _files(_quantized(source, tmp_path / "whole", "int4"))
    assert len([name for name in expected if name.endswith(".safetensors")]) == 6
    job = QuantizationJob(source, tmp_path / "out", target)
    with pytest.raises(_Stopped):
        job.run(_StoppedRounder(target, stop_at=2))
    assert not (tmp_path / "out" / "config.json").exists()
    rounder = _StoppedRounder(target, stop_at=-1)
    written = job.run(rounder)
    assert rounder.layers == [2, 3]
    assert _files(tmp_path / "out") == expected
    assert list(written.layer_to_error) == [0, 1, 2, 3]
    again = _StoppedRounder(target, stop_at=-1)
    assert job.run(again) == written
    assert again.layers == []


def test_errors_are_those_of_the_weights(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source, target = make_checkpoint("qwen3", **SHAPE), QuantizationTarget.of("int4")
    written = QuantizationJob(source, tmp_path / "out", target).run(NearestRounder(target))
    before, after = unpacked_tensors.stored_tensors(source), unpacked_tensors.unpacked(tmp_path / "out")
    keys = [key for key in before if "layers.1." in key and "_proj.weight" in key]
    error = sum(float((after[key].double() - before[key].double()).square().sum()) for key in keys)
    weight = sum(float(before[key].double().square().sum()) for key in keys)
    assert written.layer_to_error[1] == pytest.approx((error / weight) ** 0.5, rel=1e-3)
    assert 0.02 < written.layer_to_error[1] < 0.2
    assert written.num_bytes == sum(
        it.nbytes for it in unpacked_tensors.stored_tensors(tmp_path / "out").values()
    )


def test_other_folders_are_refused(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source, out = make_checkpoint("qwen3", **SHAPE), tmp_path / "out"
    _quantized(source, out, "int4")
    with pytest.raises(QuantizationError, match="with other settings; name another folder"):
        _quantized(source, out, "int4", group=16)
    with pytest.raises(QuantizationError, match="quantized already"):
        _quantized(out, tmp_path / "twice", "int8")
    other = tmp_path / "other"
    shutil.copytree(source, other)
    os.utime(next(other.glob("*.safetensors")), (1, 1))
    with pytest.raises(QuantizationError, match="from another model"):
        _quantized(other, out, "int4")
    (out / RECORD).unlink()
    with pytest.raises(QuantizationError, match="is there, with other files"):
        _quantized(source, out, "int4")


def test_a_disk_that_is_too_small_is_found_before(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(QuantizationError, match="free some, or name a folder elsewhere"):
        _quantized(make_checkpoint("qwen3", **SHAPE), tmp_path / "out", "int8")


def test_a_disk_that_fills_up_ends_with_a_reason_and_continues(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, expected = make_checkpoint("qwen3", **SHAPE), tmp_path / "whole"
    _quantized(source, expected, "int8")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(QuantizationError, match=r"out: cannot be written: No space left on device$"):
            _quantized(source, tmp_path / "out", "int8")
    assert not (tmp_path / "out" / "config.json").exists()
    assert _files(_quantized(source, tmp_path / "out", "int8")) == _files(expected)


def test_folders_that_cannot_be_written_are_refused(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """One that another process writes, and a path that is a file."""
    source, busy = make_checkpoint("qwen3", **SHAPE), tmp_path / "busy"
    busy.mkdir()
    descriptor = os.open(busy, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(QuantizationError, match="busy: another process writes it; wait"):
            _quantized(source, busy, "int8")
    finally:
        os.close(descriptor)
    (tmp_path / "file").touch()
    with pytest.raises(QuantizationError, match=r"file: cannot be written: File exists$"):
        _quantized(source, tmp_path / "file", "int8")


class _Refused(NamedTuple):
    name: str
    group: int | None
    words: str
    is_asymmetric: bool = False


@pytest.mark.parametrize(
    "case",
    [
        _Refused("fp4", None, "is none of int8, w8a8, int4, fp8"),
        _Refused("int4", 12, "is no multiple of 8"),
        _Refused("w8a8", 32, "leave the group out"),
        _Refused("fp8", 32, "leave the group out"),
        _Refused("int8", None, "zero points are for int4", is_asymmetric=True),
    ],
)
def test_settings_that_nothing_reads_are_refused(case: _Refused) -> None:
    with pytest.raises(QuantizationError, match=case.words):
        QuantizationTarget.of(case.name, case.group, is_asymmetric=case.is_asymmetric)


def test_weights_without_whole_groups_stay(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Here those of the second product of the feed-forward, of 96 inputs; the plan says so to readers."""
    source = make_checkpoint("qwen3", **SHAPE)
    folder = _quantized(source, tmp_path / "out", "int4", group=64)
    assert [name for name in _scheme(folder)["ignore"] if "layers.0." in name] == [
        "model.layers.0.mlp.down_proj"
    ]
    with SourceTensors(source) as tensors, pytest.raises(QuantizationError, match="choose another group"):
        CheckpointPlan.of(tensors, QuantizationTarget.of("int4", 128))
