"""Parts of `benchmarks.gpu` about quantized weights: single products, experts, and the engine with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.expert_layers import RandomExperts, graph_of
from benchmarks.gpu_kernels import needs_cuda
from benchmarks.random_checkpoint import LLAMA_8B
from benchmarks.random_quantized import QUANTIZED_FORMS, QuantizedForm, draw_quantized
from kvtransfer.common.clock import SystemClock
from workers.model.make_linear import make_linear
from workers.model.products import Linear
from workers.rank.probe import best_s

if TYPE_CHECKING:
    from benchmarks.gpu import Bench, Line

CLOCK = SystemClock()
# As many weights of products as caches do not hold.
_NUM_WEIGHTS = 8
# The batches in which experts decode.
EXPERT_BATCHES = (1, 32)
# As many layers of experts as caches do not hold of those that a token chooses.
_NUM_EXPERT_LAYERS = 8


def quantized(bench: Bench) -> Iterator[Line]:
    """Products with quantized weights: the time to copy their bytes, or of their operations, over theirs."""
    needs_cuda(bench)
    num_outputs, num_inputs = 2 * LLAMA_8B["intermediate_size"], LLAMA_8B["hidden_size"]
    for name, form in QUANTIZED_FORMS.items():
        weights = [draw_quantized(form, num_outputs, num_inputs, bench.device) for _ in range(_NUM_WEIGHTS)]
        linears = [make_linear(weight) for weight in weights]
        for num_rows in (1, 16, 64, bench.sizes.prefill_tokens):
            x = torch.randn(num_rows, num_inputs, device=bench.device).to(torch.bfloat16)
            work = partial(_multiply_all, linears, x)
            seconds = best_s(work, CLOCK, bench.device, 10) / len(linears)
            read_s = weights[0].num_bytes / bench.limits.byte_s
            limit_s = max(read_s, 2 * num_rows * num_outputs * num_inputs / bench.limits.flop_s)
            yield {
                "figure": f"{name} product_us of {num_rows} rows",
                "value": seconds * 1e6,
                "limit": limit_s * 1e6,
                "ratio": limit_s / seconds,
                "target": 0.7,
            }


def _multiply_all(linears: Sequence[Linear], x: Tensor) -> None:
    for linear in linears:
        linear(x)


def engine_fp8(bench: Bench) -> Iterator[Line]:
    """The engine with float8 weights and inputs: times in 16 bits over its own."""
    yield from _engine_lines(bench, QUANTIZED_FORMS["fp8"], decode_target=1.6, prefill_target=1.5)


def engine_int4(bench: Bench) -> Iterator[Line]:
    """The engine with weights of AWQ: times in 16 bits over its own."""
    yield from _engine_lines(bench, QUANTIZED_FORMS["awq"], decode_target=2.4)


def _engine_lines(
    bench: Bench, form: QuantizedForm, *, decode_target: float, prefill_target: float | None = None
) -> Iterator[Line]:
    """Compare engines. The target of decoding is that of one sequence, which reads hardly any KV."""
    quantized_bench = bench.with_weights(form)
    pairs: list[tuple[str, Callable[[Bench], float], float | None]] = [
        (
            f"decode_ms at batch {batch}",
            partial(Bench.decode_step_s, batch=batch),
            decode_target if batch == 1 else None,
        )
        for batch in bench.batches
    ]
    pairs.append((f"prefill_ms of {bench.sizes.prefill_tokens} tokens", Bench.prefill_s, prefill_target))
    plain = [time(bench) * 1e3 for _, time, _ in pairs]
    bench.close()  # its memory is needed
    for (figure, time, target), limit in zip(pairs, plain, strict=True):
        value = time(quantized_bench) * 1e3
        line: Line = {"figure": figure, "value": value, "limit": limit, "ratio": limit / value}
        yield line if target is None else line | {"target": target}


def quantized_experts(bench: Bench) -> Iterator[Line]:
    """Experts of Qwen3-30B-A3B in a step that decodes: the time to copy those chosen, over their own."""
    needs_cuda(bench)
    batch_to_plain_s: dict[int, float] = {}
    forms = {"bf16": None, **{name: QUANTIZED_FORMS[name] for name in ("awq", "mxfp4", "fp8", "block fp8")}}
    for name, form in forms.items():
        layers = [RandomExperts(bench.sizes.experts, form, bench.device) for _ in range(_NUM_EXPERT_LAYERS)]
        for batch in EXPERT_BATCHES:
            rows = [layer.draw_rows(batch) for layer in layers]
            steps = [partial(layer.experts, *of) for layer, of in zip(layers, rows, strict=True)]
            seconds = best_s(graph_of(steps), CLOCK, bench.device, 20) / len(layers)
            num_read = sum(len(set(routing.experts.flatten().tolist())) for _, routing in rows) / len(layers)
            limit_s = num_read * layers[0].expert_bytes / bench.limits.byte_s
            yield {
                "figure": f"{name} experts_us of a layer at batch {batch}",
                "value": seconds * 1e6,
                "limit": limit_s * 1e6,
                "ratio": limit_s / seconds,
                "target": 0.6,
                "over_bf16": batch_to_plain_s.setdefault(batch, seconds) / seconds,
            }
