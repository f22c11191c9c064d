"""The sizes of the part `served` of `benchmarks.gpu`, which starts whole clusters on one card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from benchmarks.gpu import Bench

# Output tokens a second of Llama 3 8B on one H100 80GB, 1,000 ShareGPT prompts at once: what the best engines
# have published is 16,215 (SGLang) and 16,132 (LMDeploy), in AIMultiple's benchmark of inference engines.
TARGET_TOK_S = 16_000


class ServedLoad(NamedTuple):
    """Requests of which so many are at once; their lengths are drawn around these where they are `drawn`."""

    num_requests: int
    num_at_once: int
    input_tokens: int
    output_tokens: int
    are_drawn: bool = False
    # For the whole load on one replica; 0: none.
    target_tok_s: float = 0.0

    @property
    def described(self) -> str:
        """The load in words."""
        lengths = f"{self.input_tokens} + {self.output_tokens} tokens"
        return f"{self.num_at_once} at once, {lengths}{' on average' if self.are_drawn else ''}"


class ServedSizes(NamedTuple):
    """What is served to whom: the loads, and the settings of engines."""

    loads: tuple[ServedLoad, ...]
    engine: dict[str, Any]


MODEL_TO_SERVED = {
    "8b": ServedSizes(
        (
            ServedLoad(16, 1, 64, 16),
            ServedLoad(96, 32, 512, 128),
            ServedLoad(384, 128, 512, 128),
            ServedLoad(1000, 1000, 220, 200, are_drawn=True, target_tok_s=TARGET_TOK_S),
        ),
        {"max_sequences": 512, "max_waiting": 1024},
    ),
    "tiny": ServedSizes(
        (ServedLoad(3, 1, 64, 4), ServedLoad(10, 10, 20, 8, are_drawn=True, target_tok_s=TARGET_TOK_S)),
        {"max_sequences": 8, "kv_tokens": 8192},
    ),
}


def served(bench: Bench) -> Iterator[dict[str, object]]:
    """A cluster on the card: its start, TTFT, TPOT and tokens a second with 1 to 1,000 requests at once."""
    from benchmarks.served_card import cluster_lines  # which needs Ray and gRPC, as no other part does

    yield from cluster_lines(bench)
