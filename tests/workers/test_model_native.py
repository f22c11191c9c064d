"""The compiled kernels against the torch code that they stand for, and life without a compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from compiled_kernels import ISAS, kernels_of
from optional_programs import needs_compiler, uses_compiler

from workers.model import native
from workers.model.native.isa import Isa, available_isas
from workers.model.norm import Norm

isas = pytest.mark.parametrize("isa", ISAS)


@pytest.fixture
def forget_kernels() -> Iterator[None]:
    native.load.cache_clear()
    native.compiled.cache_clear()
    yield
    native.load.cache_clear()
    native.compiled.cache_clear()


@needs_compiler
@isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [24, 64, 1024, 1])
@pytest.mark.parametrize("is_rounded_first", [True, False])
def test_rms_norm_rounds_like_torch(isa: Isa, dtype: torch.dtype, size: int, is_rounded_first: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(37, size + 8, generator=generator).to(dtype) * 9
    norm = Norm(torch.randn(size, generator=generator), 1e-6, is_rounded_first)
    expected = norm.normed(x[:, :size])
    actual = x.clone()
    kernels_of(isa).rms_norm(actual[:, :size], norm, out=actual[:, :size])
    assert torch.equal(actual[:, size:], x[:, size:]), "what lies between the rows is not touched"
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(actual[:, :size], expected, rtol=tolerance, atol=1e-6)
    if dtype == torch.bfloat16:
        assert (actual[:, :size] == expected).float().mean() > 0.99, "only ties of rounding may differ"


@needs_compiler
@isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("size", [16, 24, 64, 128])
def test_keys_are_rotated_and_lie_in_their_blocks(
    isa: Isa, dtype: torch.dtype, has_norms: bool, size: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(5, 8, size, generator=generator).to(dtype)  # 4 query heads, 2 keys, 2 values
    cos, sin = torch.randn(2, 5, size // 2, generator=generator).to(dtype).float()
    kv = torch.full((3, 2, 2, 2, 4, size), 7.0, dtype=dtype)
    blocks, offsets = torch.tensor([2, 2, 0, 0, 0]), torch.tensor([2, 3, 0, 1, 2])
    q_norm, k_norm = (Norm(it, 1e-6) for it in torch.randn(2, size, generator=generator))
    normed = qkv[:, :6]
    if has_norms:
        parts = zip((qkv[:, :4], qkv[:, 4:6]), (q_norm, k_norm), strict=True)
        normed = torch.cat([norm.normed(part) for part, norm in parts], 1)
    low, high = normed.float().chunk(2, -1)
    c, s = cos[:, None], sin[:, None]

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype).float()

    expected = torch.cat((rounded(low * c) - rounded(high * s), rounded(high * c) + rounded(low * s)), -1).to(
        dtype
    )
    layer = native.RotatedLayer.of(kv, 1, 4, *((q_norm, k_norm) if has_norms else (None, None)))
    ends = blocks.int(), offsets.int()
    actual = qkv.clone()
    kernels_of(isa).rotate_and_write(layer, native.RotatedTokens.of(cos, sin, *ends), actual.view(5, -1))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-5}[dtype]
    torch.testing.assert_close(actual[:, :4], expected[:, :4], rtol=tolerance, atol=tolerance)
    keys = kv[blocks, 1, 0, :, offsets]
    torch.testing.assert_close(keys, expected[:, 4:], rtol=tolerance, atol=tolerance)
    if dtype == torch.bfloat16:
        assert (keys == expected[:, 4:]).float().mean() > 0.98, "only ties of rounding may differ"
    assert torch.equal(kv[blocks, 1, 1, :, offsets], qkv[:, 6:])
    kv[blocks, 1, :, :, offsets] = 7.0
    assert bool((kv == 7.0).all()), "nothing else was written"


@needs_compiler
@isas
def test_a_nan_stays_a_nan(isa: Isa) -> None:
    x = torch.tensor([[float("nan"), 1.0]], dtype=torch.bfloat16)
    assert bool(kernels_of(isa).rms_norm(x, Norm(torch.ones(2), 1e-6)).isnan().all())


@uses_compiler
@pytest.mark.usefixtures("forget_kernels")
def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert native.load() is None
    assert not native.serves(torch.device("cpu"), torch.float32)


@needs_compiler
@pytest.mark.skipif(len(available_isas()) < 2, reason="this CPU has one instruction set with kernels")
@pytest.mark.usefixtures("forget_kernels")
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.slow
def test_an_instruction_set_whose_products_are_slower_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, forced: bool
) -> None:
    best, second = available_isas()[:2]
    monkeypatch.setattr(native.Kernels, "floats_are_faster", lambda kernels: kernels.isa is best)
    monkeypatch.delenv("TANDEM_CPU_ISA", raising=False)
    if forced:
        monkeypatch.setenv("TANDEM_CPU_ISA", best.value)
    kernels = native.load()
    assert kernels is not None
    assert kernels.isa is (best if forced else second)


@needs_compiler
@isas
def test_operands_are_timed_where_there_is_a_choice(isa: Isa) -> None:
    times = ctypes.c_double(-1), ctypes.c_double(-1)
    kernels_of(isa).library.tandem_time_operands(*(ctypes.byref(time) for time in times))
    bf16_ns, float_ns = (time.value for time in times)
    if isa is Isa.AVX512_BF16:
        assert 0 < bf16_ns < float("inf")
        assert 0 < float_ns < float("inf")
    else:
        assert bf16_ns == float_ns == 0


@needs_compiler
@pytest.mark.usefixtures("forget_kernels")
def test_a_compiler_that_fails_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_FLAGS", ("--no-such-flag",))
    assert native.load() is None
    assert "could not be built" in caplog.text


@needs_compiler
@pytest.mark.usefixtures("forget_kernels")
def test_code_from_a_folder_that_others_can_write_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    assert native.load() is not None
    native.load.cache_clear()
    native.compiled.cache_clear()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / f"tandem-kernels-{os.getuid()}").mkdir()
    (tmp_path / f"tandem-kernels-{os.getuid()}").chmod(0o777)
    assert native.load() is None
    assert "only this user" in caplog.text
