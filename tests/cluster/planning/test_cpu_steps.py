"""Predicted times of steps on CPUs, against those of the engine's tables in benchmarks/README.md."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from cluster.planning.device_profile import AMX_EFFICIENCY, AVX512_EFFICIENCY, DeviceProfile, device_profile
from cluster.planning.device_split import DeviceSplit
from cluster.planning.planned_model import planned_model
from cluster.planning.step_times import StepTimes

# Batch and context of decode steps, tokens a second, of Qwen3-0.6B's shape in bf16 on two threads.
ZEN5 = {(1, 128): 39.8, (4, 128): 147, (8, 128): 262, (16, 128): 509, (16, 2048): 122}
ZEN4 = {(1, 128): 18.4, (4, 128): 70.3, (8, 128): 124, (16, 128): 202, (16, 2048): 61.6}
AMX = {(1, 128): 16.9, (4, 128): 59.8, (8, 128): 110.7, (16, 128): 176.7, (16, 2048): 49.9}


def times(read_gb_s: float, bf16_tflop_s: float, efficiency: Mapping[str, float]) -> StepTimes:
    two_threads = DeviceProfile("two threads", 16, read_gb_s, bf16_tflop_s, kind="cpu", threads=2)
    profile = msgspec.structs.replace(two_threads, **efficiency)
    return StepTimes(planned_model("qwen3-0.6b", "auto", "auto"), profile, DeviceSplit(1))


# The limit of one sequence (1,192 MB a token) is that of reading, and that of 512 tokens (0.88 GFLOP each,
# with attention 0.94) that of products.
_ZEN5 = times(41.6 * 1.192, 1205 * 0.88e-3, AVX512_EFFICIENCY)
_ZEN4 = times(25.0, 351 / 0.79 * 0.88e-3, AVX512_EFFICIENCY)
_AMX = times(22.1 * 1.192, 2251 * 0.94e-3, AMX_EFFICIENCY)


@pytest.mark.parametrize(
    ("of_cpu", "rows", "error"),
    [(_ZEN5, ZEN5, 0.15), (_ZEN4, ZEN4, 0.12), (_AMX, AMX, 0.2)],
    ids=["Zen 5", "Zen 4, not fitted", "AMX"],
)
def test_decode(of_cpu: StepTimes, rows: dict[tuple[int, int], float], error: float) -> None:
    for (batch, context), tok_s in rows.items():
        assert batch / of_cpu.decode_s(batch, context) == pytest.approx(tok_s, rel=error)


@pytest.mark.parametrize(
    ("of_cpu", "short", "long", "error"),
    [(_ZEN5, 1008, 845, 0.05), (_ZEN4, 351, 286, 0.12), (_AMX, 1464, 1038, 0.2)],
    ids=["Zen 5", "Zen 4, not fitted", "AMX"],
)
def test_prefill(of_cpu: StepTimes, short: float, long: float, error: float) -> None:
    for num_tokens, tok_s in ((512, short), (2048, long)):
        assert num_tokens / of_cpu.prefill(num_tokens).latency_s == pytest.approx(tok_s, rel=error)


def test_sockets_are_named() -> None:
    socket = device_profile("EPYC 9755")
    assert (socket.kind, socket.threads, socket.devices_per_node) == ("cpu", 128, 2)
    # A core of Zen 5 multiplied 0.53 TFLOP/s at 4.1 GHz, and has 2.7 GHz where all are busy.
    assert socket.bf16_tflop_s / 128 == pytest.approx(1205 * 0.88e-3 / 2 * 2.7 / 4.1, rel=0.02)
