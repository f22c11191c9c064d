"""Can a tenant tell from the time to the first token that another tenant has cached its prompt?

    python -m benchmarks.isolation ADDRESS [--pairs 200] [--tokens 500]

Against a running cluster that takes the tenant from the request (`auth.mode: none`), such as `tandem serve`.
Each pair is two prompts of tenant B: one that tenant A has just sent, and a fresh one, in alternating order.
The ratios of their TTFT are tested for equivalence within 10 % by two one-sided tests (TOST) on their
logarithms. Prints JSON lines: one a pair, then the result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
from collections.abc import Sequence
from statistics import NormalDist, mean, median, stdev
from typing import Any

from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.host import cpu_name

MARGIN = 0.10
ALPHA = 0.05
_CLOCK = SystemClock()


def equivalence(ratios: Sequence[float], margin: float = MARGIN) -> dict[str, Any]:
    """Test by TOST that the ratios are within the margin of 1, by the normal distribution: there are many."""
    logs = [math.log(ratio) for ratio in ratios]
    error = stdev(logs) / math.sqrt(len(logs))
    bound, middle, normal = math.log1p(margin), mean(logs), NormalDist()
    p_value = max(1 - normal.cdf((middle + bound) / error), normal.cdf((middle - bound) / error))
    half = normal.inv_cdf(1 - ALPHA) * error
    return {
        "num_pairs": len(ratios),
        "mean_ratio": math.exp(middle),
        "interval_90": [math.exp(middle - half), math.exp(middle + half)],
        "margin": margin,
        "p_value": p_value,
        "equivalent": p_value < ALPHA,
    }


async def ttft_ms(client: Client, prompt: list[int], tenant: str) -> float:
    """Return the time to the first token of a prompt, as the client sees it."""
    began_at = _CLOCK.now()
    options = GenerateOptions(max_tokens=1, seed=1, ignore_eos=True, tenant=tenant)
    await client.complete(prompt, options)
    return 1e3 * (_CLOCK.now() - began_at)


async def measure(address: str, num_pairs: int, num_tokens: int, vocab_size: int) -> None:
    draw = random.Random(0)

    def fresh() -> list[int]:
        return [draw.randrange(4, vocab_size) for _ in range(num_tokens)]

    ratios: list[float] = []
    cached: list[float] = []
    async with Client(address) as client:
        for _ in range(4):
            await ttft_ms(client, fresh(), "a")
            await ttft_ms(client, fresh(), "b")
        for number in range(num_pairs):
            shared, new = fresh(), fresh()
            await ttft_ms(client, shared, "a")
            order = [shared, new] if number % 2 else [new, shared]
            times = [await ttft_ms(client, prompt, "b") for prompt in order]
            known, unknown = times if number % 2 else times[::-1]
            own = await ttft_ms(client, shared, "a")
            ratios.append(known / unknown)
            cached.append(own / unknown)
            line = {"pair": number, "known_ms": known, "fresh_ms": unknown, "own_cached_ms": own}
            print(json.dumps(line), flush=True)
    result = {"result": "isolation", "cpu": cpu_name(), "num_tokens": num_tokens, **equivalence(ratios)}
    # The visible difference, if there were one: the prompt of a tenant that has cached it itself.
    print(json.dumps({**result, "median_ratio_of_own_cached": median(cached)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("address", help="host:port of a gateway")
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--vocab", type=int, default=4000, help="token ids are drawn below this")
    asked = parser.parse_args()
    asyncio.run(measure(asked.address, asked.pairs, asked.tokens, asked.vocab))


if __name__ == "__main__":
    main()
