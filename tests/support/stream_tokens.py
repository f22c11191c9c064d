"""A client in a process of its own: long streams at once, each with its tokens and attempts.

    python stream_tokens.py GATEWAY NUM_STREAMS MAX_TOKENS

Prints "begun" when every stream has some tokens, and then one JSON line: for each stream its token ids, how
many attempts the gateway made, and the events of its timeline.
"""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster.api.blocking_client import BlockingClient
from cluster.api.client import Collector
from cluster.api.generate_options import GenerateOptions

_BEGUN_TOKENS = 32


def run(address: str, number: int, max_tokens: int, begun: threading.Barrier) -> dict[str, Any]:
    """Run one stream that the client never resumes: the cluster has to mend whatever breaks it."""
    options = GenerateOptions(max_tokens=max_tokens, seed=number, temperature=0.8, ignore_eos=True)
    prompt, collector, has_begun = list(range(7 + number, 71 + number)), Collector(), False
    with BlockingClient(address) as client:
        for event in client.generate(prompt, options, timeout_s=120, resume=False):
            collector.add(event)
            if collector.num_tokens >= _BEGUN_TOKENS and not has_begun:
                has_begun = True
                begun.wait(60)
        done = collector.completion()
        timeline = client.explain(done.request_id).timeline
    return {
        "token_ids": done.token_ids[0],
        "num_attempts": done.finished.timing.attempts,
        "events": [f"{event.name}: {event.detail}" for event in timeline],
    }


def main() -> None:
    address, num_streams, max_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    begun = threading.Barrier(num_streams, action=lambda: print("begun", flush=True))
    with ThreadPoolExecutor(num_streams) as threads:
        calls = [threads.submit(run, address, number, max_tokens, begun) for number in range(num_streams)]
        print(json.dumps([call.result() for call in calls]), flush=True)


if __name__ == "__main__":
    main()
