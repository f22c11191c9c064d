"""The kernels between a layer's products, against the same operations in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model.attention.interface import Rotation
from workers.model.attention.rotary import rope_table, rotate
from workers.model.norm import Norm

EPS = 1e-6
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-6}
# Triton's interpreter does not round to bfloat16 as devices do.
DTYPES = [torch.float32, torch.float16]
if torch.cuda.is_available():
    DTYPES.append(torch.bfloat16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
norm_kinds = pytest.mark.parametrize("is_rounded_first", [True, False])


def check(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def values(rng: np.random.Generator, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(device, dtype)


@dtypes
@pytest.mark.parametrize("size", [1, 24, 64, 100, 1030])
@pytest.mark.parametrize("has_rest", [False, True])
@norm_kinds
def test_rms_norm(
    device: torch.device, dtype: torch.dtype, size: int, has_rest: bool, is_rounded_first: bool
) -> None:
    from workers.model.cuda.layer_ops import rms_norm

    rng = np.random.default_rng(size)
    wide = values(rng, 3, size + 9, dtype=dtype, device=device)
    weight = values(rng, size, dtype=torch.float32, device=device)
    norm = Norm(weight, EPS, is_rounded_first)
    rest = values(rng, 3, size, dtype=dtype, device=device) if has_rest else None
    hidden = wide[:, 4 : 4 + size]
    total = hidden + rest if rest is not None else hidden.clone()
    around = wide.clone()
    out = torch.full((3, size), 7.0, dtype=dtype, device=device)
    assert rms_norm(hidden, norm, out, rest) is out
    check(out, normed(total, norm))
    assert torch.equal(hidden, total), "the sum stays"
    around[:, 4 : 4 + size] = total
    assert torch.equal(wide, around), "nothing beside it was written"
    assert torch.equal(rms_norm(total, norm), out)


@dtypes
@norm_kinds
def test_a_norm_is_added_where_two_kernels_would_round(
    device: torch.device, dtype: torch.dtype, is_rounded_first: bool
) -> None:
    from workers.model.cuda.layer_ops import add_normed, rms_norm

    rng = np.random.default_rng(5)
    wide, rows = (values(rng, 3, size, dtype=dtype, device=device) for size in (120, 100))
    norm = Norm(values(rng, 100, dtype=torch.float32, device=device), EPS, is_rounded_first)
    hidden = wide[:, 7:107]
    expected = hidden + rms_norm(rows, norm)
    around = wide.clone()
    around[:, 7:107] = expected
    add_normed(hidden, rows, norm)
    assert torch.equal(wide, around)


@dtypes
def test_a_row_of_zeros_is_normalized_to_zeros(device: torch.device, dtype: torch.dtype) -> None:
    from workers.model.cuda.layer_ops import rms_norm

    rows = torch.zeros(2, 16, dtype=dtype, device=device)
    assert torch.equal(rms_norm(rows, Norm(torch.ones(16, device=device), EPS)), rows)


@norm_kinds
def test_a_norm_rounds_where_its_family_does(device: torch.device, is_rounded_first: bool) -> None:
    """In float16 the two kinds differ in a fifth of the values: each is its own to the bit, but for ties."""
    from workers.model.cuda.layer_ops import rms_norm

    rng = np.random.default_rng(1)
    rows = values(rng, 4, 1024, dtype=torch.float16, device=device)
    weight = values(rng, 1024, dtype=torch.float32, device=device)
    right, wrong = (
        normed(rows, Norm(weight, EPS, kind)) for kind in (is_rounded_first, not is_rounded_first)
    )
    actual = rms_norm(rows, Norm(weight, EPS, is_rounded_first))
    assert (actual == right).float().mean() > 0.995
    assert (actual == wrong).float().mean() < 0.9


@dtypes
@pytest.mark.parametrize("size", [1, 33, 1024, 1100])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate_mul(device: torch.device, dtype: torch.dtype, size: int, activation: str) -> None:
    from workers.model.cuda.layer_ops import gate_mul

    gate_up = values(np.random.default_rng(size), 3, 2 * size, dtype=dtype, device=device) * 6
    gate_up[0, 0], gate_up[1, 0] = -200.0, 200.0
    gate, up = gate_up.chunk(2, -1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    check(gate_mul(gate_up, activation), activated * up)


def normed(rows: Tensor, norm: Norm) -> Tensor:
    """Normalize in float32, rounding where the norm says."""
    wide = rows.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.is_rounded_first:
        scaled = scaled.to(rows.dtype).float()
    return (scaled * norm.weight).to(rows.dtype)


def drawn_shape(seed: int) -> tuple[int, int, int, int, bool]:
    """Draw num_kv_heads, group, head_dim, block_tokens and whether there are norms."""
    rng = np.random.default_rng(seed)
    group = int(rng.integers(1, 9))
    head_dim = 2 * int(rng.integers(4, 41))
    return int(rng.integers(1, 4)), group, head_dim, int(rng.choice([1, 4, 16])), bool(rng.integers(2))


@dtypes
@pytest.mark.parametrize("seed", range(8))
@norm_kinds
def test_rotate_and_write(
    device: torch.device, dtype: torch.dtype, seed: int, is_rounded_first: bool
) -> None:
    """Tokens of several sequences whose tables have blocks in any order, as attention in torch does it."""
    from workers.model.cuda.layer_ops import rotate_and_write

    num_kv, group, head_dim, block_tokens, has_norm = drawn_shape(seed)
    rng = np.random.default_rng(seed)
    num_heads = num_kv * group
    num_tokens, num_blocks, layer = 5, 12, 1
    tables = torch.from_numpy(rng.permutation(num_blocks).reshape(3, 4).astype(np.int32)).to(device)
    places = rng.choice(3 * 4 * block_tokens, num_tokens, replace=False)
    slots, positions = np.divmod(places, 4 * block_tokens)
    drawn = [values(rng, head_dim, dtype=torch.float32, device=device) for _ in range(2)]
    q_norm, k_norm = (Norm(weight, EPS, is_rounded_first) if has_norm else None for weight in drawn)
    kv = torch.full((num_blocks, 3, 2, num_kv, block_tokens, head_dim), 7.0, dtype=dtype, device=device)
    qkv = values(rng, num_tokens, (num_heads + 2 * num_kv) * head_dim, dtype=dtype, device=device)
    frequencies = torch.from_numpy(rng.random(head_dim // 2, dtype=np.float32)).to(device)
    positions_gpu = torch.from_numpy(positions).to(device)
    frequencies[-1] = 0  # a pair that is not rotated keeps its length too
    cos, sin = rope_table(positions_gpu, Rotation(frequencies, 1.2 if seed % 2 else 1.0), dtype)

    heads = qkv.clone().view(num_tokens, -1, head_dim)
    queries, keys, written = torch.split(heads, [num_heads, num_kv, num_kv], 1)
    if q_norm is not None and k_norm is not None:
        queries, keys = normed(queries, q_norm), normed(keys, k_norm)
    expected_kv = kv.clone()
    for token, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        block, offset = int(tables[slot, position // block_tokens]), position % block_tokens
        expected_kv[block, layer, 0, :, offset] = rotate(keys, cos, sin)[token]
        expected_kv[block, layer, 1, :, offset] = written[token]

    slots_gpu = torch.from_numpy(slots.astype(np.int32)).to(device)
    actual = rotate_and_write(
        qkv, kv[:, layer], tables, slots_gpu, positions_gpu, cos, sin, q_norm=q_norm, k_norm=k_norm
    )  # fmt: skip
    assert actual.shape == (num_tokens, num_heads, head_dim)
    assert actual.data_ptr() == qkv.data_ptr(), "queries are rotated in place"
    check(actual, rotate(queries, cos, sin))
    check(kv, expected_kv)
    is_value = torch.zeros_like(kv, dtype=torch.bool)
    is_value[:, layer, 1] = True
    assert torch.equal(kv[is_value], expected_kv[is_value]), "values are copied"
