"""What the benchmark of the device makes of a profile: kernels of a step by name and kind."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_kernels
from benchmarks.device_time import profile_of
from benchmarks.gpu_kernels import (
    KernelTime,
    few_rows_lines,
    kernel_times,
    kind_of,
    of_one_step,
    step_lines,
)


def event(name: str, start: float, end: float, device: str = "CUDA") -> Any:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, device_type=SimpleNamespace(name=device), time_range=span)


def test_events_of_the_device_are_added_up_by_name() -> None:
    events = [event("a", 0, 2), event("b", 1, 4), event("a", 5, 6), event("aten::mm", 0, 9, "CPU")]
    assert kernel_times(events) == {"a": (2, 3.0), "b": (1, 3.0)}


def test_a_profile_of_this_torch_has_what_is_read() -> None:
    with profile_of(torch.profiler.ProfilerActivity.CPU) as profile:
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    found = next(it for it in profile.events() if it.name == "aten::mm")
    assert found.device_type.name == "CPU"
    assert found.time_range.end > found.time_range.start
    assert kernel_times(profile.events()) == {}


def test_what_begins_and_ends_a_run_is_not_of_a_step() -> None:
    few = {"product": KernelTime(8, 80.0), "upload": KernelTime(3, 9.0)}
    many = {"product": KernelTime(24, 280.0), "upload": KernelTime(3, 9.0), "norm": KernelTime(8, 400.0)}
    step = of_one_step(few, many, 8)
    assert list(step.items()) == [("norm", (1, 50.0)), ("product", (2, 25.0))]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "products"),
        ("_segmented_product_kernel", "products"),
        ("_thin_product_kernel", "products"),
        ("_add_segments_kernel", "products"),
        ("_attend_pieces", "attention"),
        ("_combine_pieces", "attention"),
        ("_rows_kernel", "sampling"),
        ("_token_kernel", "states"),
        ("_convolve_kernel", "states"),
        ("_rms_norm_kernel", "other"),
        ("_rotate_and_write_kernel", "other"),
    ],
)
def test_kinds_follow_from_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_step_has_lines_of_kinds_and_of_kernels() -> None:
    step = {"gemm": KernelTime(4, 100.0), "_attend_pieces": KernelTime(2, 40.0), "norm": KernelTime(3, 6.0)}
    lines = list(step_lines(step, "batch 1", {"products": 80e6, "attention": 20e6}, 1e12))
    attention, other, products = lines[:3]
    assert attention["figure"] == "attention_us of a step at batch 1"
    assert (attention["limit"], attention["ratio"], attention["launches"]) == (20.0, 0.5, 2)
    assert (products["limit"], products["ratio"], products["launches"]) == (80.0, 0.8, 4)
    assert "limit" not in other
    assert [(line["kernel"], line["value"]) for line in lines[3:]] == [
        ("gemm", 100.0), ("_attend_pieces", 40.0), ("norm", 6.0),
    ]  # fmt: skip


def test_products_of_few_rows_have_lines_with_bytes_and_limits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is computed, here in a model with 32 hidden columns, and beside it by the former kernels."""
    pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")
    kinds = {
        "norm, gate_up and silu": (48, 32, 2, "silu", True),
        "down and addition": (32, 48, 1, "add", False),
    }
    monkeypatch.setattr(gpu_kernels, "_NAME_TO_FEW", kinds)
    monkeypatch.setattr(gpu_kernels, "_NUM_WEIGHTS", 2)
    monkeypatch.setattr(gpu_kernels, "graph_of", lambda steps: [step() for step in steps])
    times = itertools.cycle([20e-6, 30e-6])
    monkeypatch.setattr(gpu_kernels, "best_s", lambda *_: next(times))
    bench: Any = SimpleNamespace(device=device, limits=SimpleNamespace(byte_s=1e9))
    lines: list[Any] = list(few_rows_lines(bench))
    assert len(lines) == 6
    first, last = lines[0], lines[-1]
    assert first["figure"] == "norm, gate_up and silu us of 1 rows"
    # The weight, a row, its results, and the norm in float32.
    assert first["bytes"] == 2 * 96 * 32 + 2 * 32 + 2 * 48 + 4 * 32
    assert last["bytes"] == 2 * 32 * 48 + 32 * 2 * (48 + 2 * 32), "what is added to is read and written"
    assert last["limit"] == pytest.approx(last["bytes"] / 1e3)
    assert (first["value"], first["torch_ratio"]) == (pytest.approx(10), pytest.approx(1.5))
    assert first["ratio"] == pytest.approx(first["limit"] / 10)
    assert first["target"] == 0.88
