"""Upper bounds of histogram buckets, in seconds where the name says so."""

from __future__ import annotations

from workers.replica.stats import BATCH_BOUNDS

TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
E2E_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
STAGE_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

# By metric: what gateways measure of requests.
REQUEST_TIMES = {
    "ttft_seconds": TTFT_S,
    "tpot_seconds": ITL_S,
    "itl_seconds": ITL_S,
    "e2e_seconds": E2E_S,
    "queue_seconds": STAGE_S,
    "prefill_seconds": TTFT_S,
    "hand_over_seconds": STAGE_S,
}

# Sequences of a step.
BATCH_SIZE = tuple(float(bound) for bound in BATCH_BOUNDS)
