"""Attention by Triton kernels against torch: drawn shapes, pieces, host memory, and what a result depends
on."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from drawn_attention import TOLERANCE, DrawnStep, assert_equal, make_step
from launch_recorder import recorded_launches

from workers.messages.rank_channel import BlockCopy
from workers.model import cuda, native
from workers.model.attention.choice import candidate_backends, choose_attention
from workers.model.attention.interface import (
    AttentionShape,
    DeviceStep,
    Rotation,
    SequenceSpan,
    StepInput,
)
from workers.model.attention.torch_backend import TorchAttention
from workers.model.host_kv import MODES, HostKv, OffloadMode

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

from workers.model.attention.triton_backend import TritonAttention

# A device compiles each shape for some seconds, then computes it at once; the interpreter takes seconds.
NUM_DRAWN = 20 if torch.cuda.is_available() else 4


def draw_step(device: torch.device, seed: int, kind: str) -> DrawnStep:
    draw = np.random.default_rng(seed)

    def one(*values: int) -> int:
        return int(draw.choice(values))

    num_new = {
        "decode": [1, 1, 1],
        "prefill": [one(2, 5), one(17, 33)],
        "mixed": [1, one(2, 5), 1, one(9, 20)],
    }
    work = [(one(0, int(draw.integers(1, 90)), 15, 63, 64), count) for count in num_new[kind]]
    dtypes = [torch.float16, torch.float32] + [torch.bfloat16] * (device.type == "cuda")
    return make_step(
        device,
        work,
        seed=seed,
        dtype=dtypes[seed % len(dtypes)],
        head_dim=one(8, 24, 64, 80, 96, 128),
        num_kv_heads=one(1, 2, 3),
        group=int(draw.integers(1, 9)),
        windows=(one(0, 1, 70), one(16, 19, 33)),
        block_tokens=one(16, 32, 64, 128),
        has_norm=bool(one(0, 1)),
        is_rounded_first=bool(one(0, 1)),
        score_scale=0.4 if one(0, 1) else None,
        softcap=float(draw.choice([0.0, 0.0, 1.5, 20.0])),
        has_sinks=bool(one(0, 1)),
    )


def uploaded(step: StepInput, device: torch.device) -> DeviceStep:
    tables, slots, starts, lengths = (
        torch.from_numpy(array).to(device, copy=True)
        for array in (step.tables, step.slots, step.starts, step.lengths)
    )
    return DeviceStep(tables, slots, starts, lengths, max_context_tokens=1024)


@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
@pytest.mark.parametrize("seed", range(NUM_DRAWN))
def test_a_drawn_step_equals_torch(device: torch.device, seed: int, kind: str) -> None:
    """Odd head sizes, 1 to 8 query heads a key-value head, windows, ragged batches, tables with holes."""
    case = draw_step(device, seed, kind)
    backend = case.triton()
    assert_equal(case.run(backend), case.expected())
    reference = TorchAttention(case.shape, case.kv.nan_to_num(0))
    case.run(reference)
    written = ~backend.kv.isnan() & case.kv.isnan()
    tolerance = TOLERANCE[case.kv.dtype]
    torch.testing.assert_close(backend.kv[written], reference.kv[written], rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_heads_above_256_have_tiles_of_their_own(device: torch.device, dtype: torch.dtype) -> None:
    case = make_step(
        device, [(40, 1), (9, 21)], dtype=dtype, head_dim=512, windows=(0, 19), has_norm=True, score_scale=0.1
    )
    assert_equal(case.run(case.triton()), case.expected())


@pytest.mark.parametrize("max_pieces", [32, 2])
def test_rows_are_computed_in_pieces(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, max_pieces: int
) -> None:
    """Contexts of one to three pieces of 512 keys or, where three are too many, of 1,024."""
    monkeypatch.setattr("workers.model.cuda.attention.MAX_PIECES", max_pieces)
    case = make_step(
        device, [(1300, 1), (511, 1), (512, 1), (3, 1)], group=8, windows=(0, 600), block_tokens=64
    )
    assert_equal(case.run(case.triton()), case.expected())
    sinks = torch.linspace(-8, 12, 8, device=device)
    with_sinks = [dataclasses.replace(layer, sinks=sinks) for layer in case.layers]
    case = dataclasses.replace(case, layers=with_sinks)
    assert_equal(case.run(case.triton()), case.expected())


@pytest.mark.parametrize(
    ("dtype", "most"),
    [
        (torch.float32, 1e-6),
        (torch.float16, 4e-4),
        pytest.param(torch.bfloat16, 3e-3, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    ("score_scale", "softcap", "sinks"),
    [
        (None, 0.0, None),
        (0.2, 0.0, None),
        (0.2, 5.0, None),
        (0.125, 50.0, None),
        (None, 0.0, (9.0, -torch.inf)),
        (0.2, 5.0, (3.0, 8.0)),
    ],
)
def test_scores_and_probabilities_are_float32(
    device: torch.device,
    dtype: torch.dtype,
    most: float,
    score_scale: float | None,
    softcap: float,
    sinks: tuple[float, float] | None,
) -> None:
    """Of peaked scores, against float64. The result alone rounds by 2e-4 in float16 and by 1.7e-3 in
    bfloat16; scores rounded to bfloat16 err by more than 4.5e-3."""
    step = make_step(
        device, [(300, 1), (100, 40)], dtype=dtype, head_dim=64, block_tokens=64, score_scale=score_scale,
        softcap=softcap,
    )  # fmt: skip
    still = Rotation(torch.zeros(32, device=device))
    step.qkv[0][:, : 2 * 64] *= 8
    if sinks is not None:
        step.layers[0] = dataclasses.replace(step.layers[0], sinks=torch.tensor(sinks, device=device))
    backend = TritonAttention(dataclasses.replace(step.shape, rotations=(still, still)), step.kv)
    actual, _ = step.run(backend)
    row = 0
    for span in step.spans:
        rows, end = slice(row, row + span.num_tokens), span.start + span.num_tokens
        blocks = step.kv[list(span.block_ids[: -(-end // 64)]), 0, :, 0].double()
        keys, values = blocks.transpose(0, 1).flatten(1, 2)[:, :end]
        queries = step.qkv[0][rows].double().view(span.num_tokens, -1, 64)[:, :2]
        scores = torch.einsum("thd,kd->thk", queries, keys) * (score_scale or 1 / 8)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        positions = torch.arange(span.start, end, device=device)
        is_hidden = torch.arange(end, device=device) > positions[:, None, None]
        powers = torch.exp(scores.masked_fill(is_hidden, -torch.inf))
        total = powers.sum(-1, keepdim=True)
        if sinks is not None:
            total += torch.tensor(sinks, dtype=torch.float64, device=device).exp()[:, None]
        right = (powers / total @ values).flatten(1)
        assert float((actual[rows].double() - right).norm() / right.norm()) < most
        row = rows.stop


@pytest.mark.parametrize("mode", MODES)
def test_blocks_in_host_memory_are_read(device: torch.device, mode: OffloadMode) -> None:
    case = make_step(device, [(70, 1), (40, 9), (20, 1), (5, 3)], windows=(0, 30), group=3)
    expected = case.expected()
    host = HostKv(case.kv, 8)
    spans = []
    next_id = host.first_id
    for span in case.spans[:2]:
        ids = list(span.block_ids)
        for index in (0, 1):
            host.copy([BlockCopy(ids[index], next_id)])
            ids[index], next_id = next_id, next_id + 1
        spans.append(span._replace(block_ids=ids))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    host.use(mode)
    step = StepInput.of([*spans, *case.spans[2:]], 16, host.reader)
    backend = TritonAttention(case.shape, case.kv)
    assert_equal(case.run(backend, step), expected)
    host.close()


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_row_depends_on_no_other_sequence(device: torch.device, is_deterministic: bool) -> None:
    """Rows that decode do, without the mode: alone they have shorter pieces than beside chunks."""
    work = [(600, 1), (30, 20), (7, 1), (90, 50)]
    case = make_step(device, work, windows=(0, 40), softcap=3.0, has_sinks=True)

    def make(step: DrawnStep) -> TritonAttention:
        return step.triton(is_deterministic=is_deterministic)

    together = [torch.split(result, [1, 20, 1, 50]) for result in case.run(make(case))]
    for index in range(4) if is_deterministic else (1, 3):
        alone = case.only([index])
        for result, parts in zip(alone.run(make(alone)), together, strict=True):
            assert torch.equal(result, parts[index])


@pytest.mark.parametrize(("sizes", "is_deterministic"), [((21, 2, 37), False), ((30, 1, 29), True)])
def test_a_row_depends_on_no_chunk(
    device: torch.device, sizes: tuple[int, ...], is_deterministic: bool
) -> None:
    """A prompt is computed at once and in chunks; in deterministic mode, also token by token."""
    case = make_step(device, [(0, 60)], windows=(25, 0), group=3, softcap=3.0, has_sinks=True)
    at_once = case.run(case.triton(is_deterministic=is_deterministic))
    backend = case.triton(is_deterministic=is_deterministic)
    table = case.spans[0].block_ids
    row = 0
    for size in sizes:
        rows = slice(row, row + size)
        chunk = dataclasses.replace(
            case, spans=[SequenceSpan(row, size, table)], qkv=[qkv[rows] for qkv in case.qkv]
        )
        for result, whole in zip(chunk.run(backend), at_once, strict=True):
            assert torch.equal(result, whole[rows])
        row += size


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_decode_of_an_uploaded_step_reads_nothing_on_the_host(
    device: torch.device, is_deterministic: bool
) -> None:
    case = make_step(device, [(600, 1), (0, 1), (33, 1)])
    step = case.step()
    there = uploaded(step, device)
    unknown = np.full_like(step.slots, 1 << 30)
    step = dataclasses.replace(
        step, tables=np.full_like(step.tables, 1 << 30), slots=unknown, starts=unknown, device=there
    )
    assert_equal(case.run(case.triton(is_deterministic=is_deterministic), step), case.expected())


def test_a_mixed_uploaded_step_uses_the_tables_of_the_device(device: torch.device) -> None:
    case = make_step(device, [(60, 1), (0, 5)])
    step = case.step()
    there = uploaded(step, device)
    step = dataclasses.replace(step, tables=np.full_like(step.tables, 1 << 30), device=there)
    assert_equal(case.run(case.triton(), step), case.expected())


def test_the_attention_of_a_layer_that_decodes_is_three_launches(device: torch.device) -> None:
    case = make_step(device, [(40, 1), (0, 1)], has_norm=True)
    plan = case.triton().plan(case.step())
    with recorded_launches() as launches:
        plan.run(case.layers[0], case.qkv[0])
    assert launches == ["_rotate_and_write_kernel", "_attend_pieces", "_reduce_pieces"]


def test_the_attention_of_a_layer_of_a_mixed_step_is_four_launches(device: torch.device) -> None:
    case = make_step(device, [(20, 1), (0, 5), (8, 2)])
    plan = case.triton().plan(case.step())
    with recorded_launches() as launches:
        plan.run(case.layers[0], case.qkv[0])
    assert launches[1:] == ["_attend_pieces", "_reduce_pieces", "_attend_tiles"]


def test_a_deterministic_decode_is_split_over_its_keys(device: torch.device) -> None:
    step = make_step(device, [(20, 1), (0, 1)])
    plan = step.triton(is_deterministic=True).plan(step.step())
    with recorded_launches() as launches:
        plan.run(step.layers[0], step.qkv[0])
    assert launches == ["_rotate_and_write_kernel", "_attend_split", "_combine_pieces"]


@pytest.mark.gpu
def test_one_graph_serves_steps_at_other_positions(device: torch.device) -> None:
    case = make_step(device, [(40, 1), (5, 1)], block_tokens=64)
    step = case.step()
    there = uploaded(step, device)
    step = dataclasses.replace(step, device=there)
    backend = case.triton()
    there.starts.zero_()
    case.run(backend, step)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = case.run(backend, step)
    there.starts.copy_(torch.tensor([40, 5], dtype=torch.int32))
    backend.kv.copy_(case.kv)
    graph.replay()
    torch.cuda.synchronize(device)
    assert_equal(results, case.expected())


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_it_is_chosen_where_kernels_serve_the_device(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, is_deterministic: bool
) -> None:
    monkeypatch.setattr(cuda, "DEVICE_TYPES", {device.type})
    monkeypatch.setattr(native, "load", lambda: None)
    kv = torch.zeros(8, 1, 2, 2, 64, 64, device=device)
    shape = AttentionShape(4, (0,), (Rotation(torch.zeros(32, device=device)),), softcap=30.0)
    assert [it.name for it in candidate_backends(shape, kv)] == ["triton", "torch"]
    chosen = choose_attention(shape, kv, is_deterministic=is_deterministic)
    assert (chosen.name, chosen.is_deterministic) == ("triton", is_deterministic)
