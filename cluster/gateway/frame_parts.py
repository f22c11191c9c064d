"""The frames of replicas, divided so that the event loop of a gateway does other work in between."""

from __future__ import annotations

from msgspec.structs import replace

from workers.messages.link import StepFrame

# The deltas of a part, which take about a millisecond.
PART_DELTAS = 32


def step_parts(frame: StepFrame) -> list[StepFrame]:
    """Divide a frame into parts of at most `PART_DELTAS` deltas. What a request must hear before its tokens
    is in the first part, and what it must hear behind them in the last."""
    deltas = frame.deltas
    if len(deltas) <= PART_DELTAS:
        return [frame]
    first = StepFrame(
        deltas=deltas[:PART_DELTAS],
        prefills=frame.prefills,
        hand_overs=frame.hand_overs,
        prompt_logprobs=frame.prompt_logprobs,
    )
    middle = [
        StepFrame(deltas=deltas[start : start + PART_DELTAS])
        for start in range(PART_DELTAS, len(deltas), PART_DELTAS)
    ]
    return [first, *middle, replace(frame, deltas=(), prefills=(), hand_overs=(), prompt_logprobs=())]
