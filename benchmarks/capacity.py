"""What the policy predicts of a replica from its reports, against what it then does, as JSON lines.

A cluster of one prefill and one decode replica (the bundled model, one thread a rank) is started. *prefill*:
prompts of 512 random tokens, always 8 in flight; predicted is the rate that the policy plans with, measured
is what was computed. *decode*: outputs of 192 tokens at 1, 2 and 4 streams teach the step time; predicted is
the rate at 12 streams, measured is what came.

    python -m benchmarks.capacity
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import numpy as np

from benchmarks.served import Service, serving
from cluster.api.admin_client import AdminClient
from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.metrics.demand import Demand
from cluster.scaling.config import ScalingConfig
from cluster.scaling.gateway_reports import GatewayReports
from cluster.scaling.measured_rates import MeasuredRates, measured_rates
from cluster.scaling.samples import History
from kvtransfer.common.clock import Clock

# Tokens are drawn below this.
VOCABULARY = 500
LOOK_S = 0.5
PHASE_S = 12.0
TAUGHT = (1, 2, 4)
STREAMS = 12
CONFIG = ScalingConfig()


class Observer:
    """Looks at the cluster as the scaler does."""

    def __init__(self, client: AdminClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._reports = GatewayReports()
        self.history = History(600.0)

    async def look(self) -> Demand:
        """Take one more sample; return the demand since the last."""
        clock = self._clock
        self._reports.add("gateway", await self._client.status(), clock.now())
        desired = {"prefill": 1, "decode": 1}
        sample = self._reports.sample(desired, now=clock.now(), wall=clock.wall(), max_age_s=10.0)
        self.history.add(sample)
        return sample.demand

    def rates(self) -> MeasuredRates:
        return measured_rates(self.history, CONFIG, 64, self._clock.wall(), has_prefill=True)


async def load(client: Client, prompt_tokens: int, output_tokens: int, seed: int) -> None:
    """Run one stream after the other, for ever."""
    generator = np.random.default_rng(seed)
    options = GenerateOptions(max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True)
    while True:
        prompt = generator.integers(10, VOCABULARY, prompt_tokens).tolist()
        await client.complete(prompt, options)


@contextlib.asynccontextmanager
async def streams(client: Client, num: int, prompt_tokens: int, output_tokens: int) -> AsyncIterator[None]:
    """Keep `num` streams in flight all the time."""
    tasks = [
        asyncio.create_task(load(client, prompt_tokens, output_tokens, seed=1000 * num + index))
        for index in range(num)
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def watch(observer: Observer, client: Client, seconds: float) -> tuple[Demand, float]:
    """Return the demand that came in during this time, and how long the time was."""
    start, total = client.clock.now(), Demand()
    while client.clock.now() < start + seconds:
        await client.clock.sleep(LOOK_S)
        total = total.plus(await observer.look())
    return total, client.clock.now() - start


async def measure(service: Service) -> None:
    async with Client(service.address) as client, AdminClient(service.admin_address) as admin:
        observer = Observer(admin, client.clock)
        await observer.look()
        async with streams(client, 8, 512, 2):
            await watch(observer, client, 4.0)
            demand, seconds = await watch(observer, client, PHASE_S)
        report("prefill", 8, observer.rates().prefill_tok_s, demand.num_computed_tokens / seconds)
        observer = Observer(admin, client.clock)
        for num in TAUGHT:
            async with streams(client, num, 16, 192):
                await watch(observer, client, PHASE_S / 2)
        step = observer.rates().step
        assert step is not None, "no decode step was reported"
        async with streams(client, STREAMS, 16, 192):
            await watch(observer, client, 4.0)
            demand, seconds = await watch(observer, client, PHASE_S)
        report("decode", STREAMS, STREAMS / step.step_s(STREAMS), demand.num_gaps / seconds)


def report(what: str, num_streams: int, predicted_tok_s: float, measured_tok_s: float) -> None:
    row = {
        "what": what,
        "streams": num_streams,
        "predicted_tok_s": round(predicted_tok_s, 1),
        "measured_tok_s": round(measured_tok_s, 1),
        "ratio": round(measured_tok_s / predicted_tok_s, 3),
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    with serving() as service:
        asyncio.run(measure(service))


if __name__ == "__main__":
    main()
