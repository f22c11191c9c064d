"""KV of 8 bits: what is written, what attention makes of it, and where its scales lie."""

from __future__ import annotations

import math

import pytest
import torch
from compiled_kernels import BACKENDS, KERNELS, TILED_KERNELS, backend_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_steps import (
    KV_DTYPES,
    Context,
    Heads,
    backend_of,
    draw_qkv,
    error_of_norm,
    run,
    stale_kv,
    written_bytes,
)

from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.messages import Shard
from workers.errors import WorkerError
from workers.messages.rank_channel import BlockCopy
from workers.model.attention.choice import choose_attention
from workers.model.attention.interface import SequenceSpan
from workers.model.attention.quantized_kv import Quantized, quantized_parts
from workers.model.host_kv import MODES, HostKv, OffloadMode
from workers.model.kv_form import KvForm

# Of results, by their rounding: to bfloat16 it is 0.0017; the reference rounds what it reads to bfloat16 too.
MOST_ERROR = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
# Between KV of 8 bits and of the activations' dtype, of random numbers.
MOST_LOSS = {"int8": 0.015, "fp8": 0.05}
HEADS = Heads(num_kv_heads=2, group=2, head_dim=64)
by_kv_dtype = pytest.mark.parametrize("kv_dtype", KV_DTYPES)


@by_kv_dtype
@given(st.data())
def test_an_element_is_the_nearest(kv_dtype: str, data: st.DataObject) -> None:
    size, exponent = data.draw(st.integers(1, 40)), data.draw(st.integers(-60, 60))
    seed = data.draw(st.integers(0, 1000))
    vector = torch.randn((3, size), generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    found = Quantized.of(vector, KV_DTYPES[kv_dtype])
    largest = {"int8": 127, "fp8": 448}[kv_dtype]
    torch.testing.assert_close(found.scales * largest, vector.abs().amax(-1), rtol=1e-6, atol=0)
    numbers = torch.arange(-127, 128) if kv_dtype == "int8" else torch.arange(256).to(torch.uint8)
    every = numbers.float() if kv_dtype == "int8" else numbers.view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    best = ((vector / found.scales[:, None])[..., None] - every).abs().amin(-1)
    error = ((found.floats() - vector) / found.scales[:, None]).abs()
    assert bool((error <= best + largest * 1e-6).all())


@by_kv_dtype
def test_zeros_stay_and_what_is_not_finite_is_nan(kv_dtype: str) -> None:
    vectors = torch.ones(5, 16)
    vectors[0], vectors[1] = 0, 1e-38
    vectors[2, 3], vectors[3, 3] = math.nan, math.inf
    found = Quantized.of(vectors, KV_DTYPES[kv_dtype])
    assert found.elements.float().isfinite().all()
    floats = found.floats()
    assert not floats[:2].any()
    assert floats[2:4].isnan().all()
    assert (floats[4] == 1).all()


@by_kv_dtype
def test_scales_lie_behind_their_head(kv_dtype: str) -> None:
    """Where the transfer's layout has the head's slice."""
    layout = BlockLayout(Shard(0, 3, 0, 2), 64, 16, 1, scale_bytes=4)
    kv = stale_kv(kv_dtype, HEADS, 5, num_layers=3)
    assert kv[0].nbytes == layout.block_bytes
    parts = quantized_parts(kv)
    parts.scales[3, 2, 1, 1, 7] = 0.5
    parts.elements.view(torch.uint8)[3, 2, 1, 1, 7, 9] = 33
    block = kv[3].flatten().view(torch.uint8)
    slices = block[layout.offset(2, 1, 1) :][: layout.head_bytes]
    assert slices[7 * 64 + 9] == 33
    assert slices[16 * 64 :].view(torch.float32)[7] == 0.5
    assert int((block != 0x7F).sum()) == 1 + 4


@pytest.mark.parametrize(("head_dim", "share"), [(128, 0.516), (64, 0.531), (256, 0.508)])
def test_its_size_is_half(head_dim: int, share: float) -> None:
    sizes = [KvForm.of(name, 2).head_bytes(head_dim) for name in ("int8", "fp8", "auto")]
    assert sizes[0] == sizes[1]
    assert sizes[0] / sizes[2] == pytest.approx(share, abs=1e-3)


@by_kv_dtype
@pytest.mark.parametrize("name", KERNELS)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_kernels_write_the_reference_s_bits(name: str, kv_dtype: str, data: st.DataObject) -> None:
    """Of heads and blocks of any size, and of vectors of any."""
    heads = Heads(
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 5)),
        16 * data.draw(st.integers(1, 9)),
        data.draw(st.sampled_from([16, 32, 64])),
    )
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    num_tokens = data.draw(st.integers(1, 40))
    qkv = draw_qkv(heads, num_tokens, dtype, seed=data.draw(st.integers(0, 100)))
    odd = data.draw(st.sampled_from([1.0, 0.0, 1e-38, 1e-30, 1e30, math.inf, math.nan]))
    qkv[num_tokens // 2, heads.num_heads * heads.head_dim :] *= odd
    table = (2, 0, 3)
    found = []
    for each in (name, "torch"):
        kv = stale_kv(kv_dtype, heads, 4)
        run(backend_of(each, kv, heads, dtype), [SequenceSpan(0, num_tokens, table)], qkv)
        found.append(written_bytes(kv, table, num_tokens))
    (elements, scales), (of_torch, scales_of_torch) = found
    assert torch.equal(elements, of_torch)
    are_nan = scales.view(torch.float32).isnan()
    assert torch.equal(are_nan, scales_of_torch.view(torch.float32).isnan())
    assert torch.equal(scales[~are_nan], scales_of_torch[~are_nan])


def served(dtypes: list[torch.dtype]) -> list[tuple[torch.dtype, Heads]]:
    sizes = [Heads(2, 2, 64), Heads(1, 4, 128, 32), Heads(2, 5, 64), Heads(2, 1, 128), Heads(1, 3, 80)]
    return [(dtype, heads) for dtype in dtypes for heads in sizes]


@by_kv_dtype
@pytest.mark.parametrize(
    ("name", "dtype", "heads"),
    backend_cases(
        served([torch.float32, torch.bfloat16, torch.float16]), served([torch.float32, torch.bfloat16])
    ),
)
def test_attention_is_that_to_what_was_written(
    name: str, dtype: torch.dtype, heads: Heads, kv_dtype: str
) -> None:
    """Prompts, chunks after them, and tokens that decode, across pieces of keys; and that is near attention
    to what was not quantized."""
    lengths = (700, 40, 3)
    tables, first = [], 1
    for length in lengths:
        tables.append(tuple(range(first, first + -(-length // heads.block_tokens))))
        first = tables[-1][-1] + 1
    backend = backend_of(name, stale_kv(kv_dtype, heads, first + 1), heads, dtype)
    qkv = [draw_qkv(heads, length, dtype, seed=length) for length in lengths]
    parts: list[list[torch.Tensor]] = [[] for _ in lengths]
    for ends in ((600, 20, 1), (697, 38, 2), (698, 39, 3), (699, 40, 3), (700, 40, 3)):
        starts = [sum(map(len, done)) for done in parts]
        work = [it for it in range(3) if ends[it] > starts[it]]
        spans = [SequenceSpan(starts[it], ends[it] - starts[it], tables[it]) for it in work]
        mixed = run(backend, spans, torch.cat([qkv[it][starts[it] : ends[it]] for it in work]))
        for number, part in zip(work, torch.split(mixed, [span.num_tokens for span in spans]), strict=True):
            parts[number].append(part)
    for given_qkv, done in zip(qkv, parts, strict=True):
        actual = torch.cat(done)
        assert error_of_norm(actual, Context.of(given_qkv, heads, kv_dtype).attended()) < MOST_ERROR.get(
            dtype, 1e-3
        )
        assert error_of_norm(actual, Context.of(given_qkv, heads, None).attended()) < MOST_LOSS[kv_dtype]


@by_kv_dtype
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("window", [0, 90])
def test_so_it_is_with_caps_sinks_and_windows(name: str, window: int, kv_dtype: str) -> None:
    heads, sinks = HEADS, torch.linspace(-4.0, 4.0, HEADS.num_heads)
    kv, table = stale_kv(kv_dtype, heads, 50), range(45)
    backend = backend_of(name, kv, heads, torch.float32, (window,), 5.0)
    qkv = draw_qkv(heads, 701, torch.float32)
    whole = run(backend, [SequenceSpan(0, 700, table)], qkv[:700], sinks=sinks)
    last = run(backend, [SequenceSpan(700, 1, table)], qkv[700:], sinks=sinks)
    exact = Context.of(qkv, heads, kv_dtype).attended(window, 5.0, sinks)
    assert error_of_norm(torch.cat((whole, last)), exact) < 2e-6


@by_kv_dtype
@pytest.mark.parametrize("name", BACKENDS)
def test_a_poisoned_sequence_is_seen_and_alone(name: str, kv_dtype: str) -> None:
    """What is not finite in keys or values makes the later results of its sequence NaN, and no other's."""
    for place in (HEADS.num_heads, HEADS.num_heads + HEADS.num_kv_heads):
        backend = backend_of(name, stale_kv(kv_dtype, HEADS, 8), HEADS, torch.float32)
        qkv = draw_qkv(HEADS, 60, torch.float32)
        qkv[10, place * HEADS.head_dim + 5] = math.inf
        spans = [SequenceSpan(0, 30, (0, 3)), SequenceSpan(0, 30, (1, 2))]
        mixed = run(backend, spans, qkv)
        of_head = slice(0, HEADS.group * HEADS.head_dim)
        assert mixed[10:30, of_head].isnan().all()
        assert mixed[30:].isfinite().all()
        decodes = [SequenceSpan(30, 1, (0, 3)), SequenceSpan(30, 1, (1, 2))]
        decoded = run(backend, decodes, draw_qkv(HEADS, 2, torch.float32, seed=1))
        assert decoded[0, of_head].isnan().all()
        assert decoded[1].isfinite().all()


@by_kv_dtype
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", TILED_KERNELS)
def test_decoding_equals_prefill_bit_for_bit(name: str, dtype: torch.dtype, kv_dtype: str) -> None:
    """In deterministic mode, alone and beside others, whatever the chunks are."""
    heads = Heads(1, 2, 64)
    table, other = tuple(range(45)), (45, 46, 47)
    qkv, beside = draw_qkv(heads, 640, dtype), draw_qkv(heads, 40, dtype, seed=1)

    backend = backend_of(name, stale_kv(kv_dtype, heads, 50), heads, dtype, is_deterministic=True)
    whole = run(backend, [SequenceSpan(0, 640, table)], qkv)
    run(backend, [SequenceSpan(0, 39, other)], beside[:39])
    for position in (0, 15, 31, 32, 127, 511, 512, 575, 639):
        alone = run(backend, [SequenceSpan(position, 1, table)], qkv[position : position + 1])
        assert torch.equal(alone[0], whole[position]), position
        rows = torch.cat((beside[39:], qkv[position : position + 1]))
        both = run(backend, [SequenceSpan(39, 1, other), SequenceSpan(position, 1, table)], rows)
        assert torch.equal(both[1], whole[position]), position
    for begin, end in ((0, 5), (30, 97), (500, 640)):
        part = run(backend, [SequenceSpan(begin, end - begin, table)], qkv[begin:end])
        assert torch.equal(part, whole[begin:end]), (begin, end)


@by_kv_dtype
@pytest.mark.parametrize(("name", "mode"), backend_cases([(mode,) for mode in MODES], [("in_place",)]))
def test_blocks_in_host_memory_are_read_alike(name: str, mode: OffloadMode, kv_dtype: str) -> None:
    qkv, query = draw_qkv(HEADS, 70, torch.float32), draw_qkv(HEADS, 1, torch.float32, seed=1)
    kv = stale_kv(kv_dtype, HEADS, 6)
    backend = backend_of(name, kv, HEADS, torch.float32)
    run(backend, [SequenceSpan(0, 70, range(5))], qkv)
    expected = run(backend, [SequenceSpan(70, 1, range(5))], query)
    host = HostKv(kv, 4)
    host.copy([BlockCopy(1, 8), BlockCopy(2, 6)])
    kv.view(torch.uint8)[1:3] = 0x7F
    host.use(mode)
    found = run(backend, [SequenceSpan(70, 1, (0, 8, 6, 3, 4))], query, host.reader)
    assert torch.equal(found, expected)
    host.close()


@by_kv_dtype
def test_a_backend_is_chosen_for_it(kv_dtype: str) -> None:
    kv = stale_kv(kv_dtype, HEADS, 8)
    shape = backend_of("torch", kv, HEADS, torch.bfloat16).shape
    assert choose_attention(shape, kv).dtype == torch.bfloat16
    uneven = Heads(2, 2, 24)
    kv = stale_kv(kv_dtype, uneven, 8)
    shape = backend_of("torch", kv, uneven, torch.bfloat16).shape
    assert choose_attention(shape, kv).name == "torch"
    with pytest.raises(WorkerError, match="deterministic attention needs"):
        choose_attention(shape, kv, is_deterministic=True)
