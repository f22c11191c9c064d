"""The compiled kernels against the torch code that they stand for, and life without a compiler."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from optional_programs import needs_compiler, uses_compiler

from workers.model import native
from workers.model.attention.torch_backend import rotate


@pytest.fixture
def kernels() -> native.Kernels:
    loaded = native.load()
    assert loaded is not None, "there is a C++ compiler, but the kernels could not be built"
    return loaded


@pytest.fixture
def forget_kernels() -> Iterator[None]:
    native.load.cache_clear()
    native.compiled.cache_clear()
    yield
    native.load.cache_clear()
    native.compiled.cache_clear()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_like_torch(kernels: native.Kernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(37, 6, 24, generator=generator).to(dtype) * 9
    weight = torch.randn(4, 24, generator=generator).to(dtype)
    expected = F.rms_norm(x[:, :4], (24,), None, 1e-6).mul(weight)
    actual = x.clone()
    kernels.rms_norm(actual[:, :4], weight, 1e-6, out=actual[:, :4])
    assert torch.equal(actual[:, 4:], x[:, 4:]), "what lies between the rows is not touched"
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(actual[:, :4], expected, rtol=tolerance, atol=1e-6)
    if dtype == torch.bfloat16:
        assert (actual[:, :4] == expected).float().mean() > 0.99, "only ties of rounding may differ"


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_rotated_and_lie_in_their_blocks(kernels: native.Kernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(5, 8, 16, generator=generator).to(dtype)  # 4 query heads, 2 keys, 2 values
    cos, sin = torch.randn(2, 5, 1, 16, generator=generator).to(dtype)
    kv = torch.full((3, 2, 2, 2, 4, 16), 7.0, dtype=dtype)
    blocks, offsets = torch.tensor([2, 2, 0, 0, 0]), torch.tensor([2, 3, 0, 1, 2])
    query = kernels.rotate_and_write(qkv, cos, sin, blocks, offsets, kv, 1)
    expected = rotate(qkv[:, :6], cos, sin)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(query, expected[:, :4], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(kv[blocks, 1, 0, :, offsets], expected[:, 4:], rtol=tolerance, atol=tolerance)
    assert torch.equal(kv[blocks, 1, 1, :, offsets], qkv[:, 6:])
    kv[blocks, 1, :, :, offsets] = 7.0
    assert bool((kv == 7.0).all()), "nothing else was written"


@needs_compiler
def test_a_nan_stays_a_nan(kernels: native.Kernels) -> None:
    x = torch.tensor([[float("nan"), 1.0]], dtype=torch.bfloat16)
    assert bool(kernels.rms_norm(x, torch.ones(2, dtype=torch.bfloat16), 1e-6).isnan().all())


@uses_compiler
@pytest.mark.usefixtures("forget_kernels")
def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert native.load() is None
    assert not native.serves(torch.device("cpu"), torch.float32)


@needs_compiler
@pytest.mark.usefixtures("forget_kernels")
def test_a_compiler_that_fails_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_FLAGS", ("--no-such-flag",))
    assert native.load() is None
    assert "the torch code is used" in caplog.text


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
