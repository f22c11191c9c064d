"""What a gateway tells its router of a replica's hand-overs: bytes by groups of layers."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from cluster.gateway.reported_load import transfer_of
from kvtransfer.messages import STATE_WINDOW, CompatibilityRecord, KvGroup, ReplicaIdentity
from workers.messages.link import LoadReport, ReplicaHello

HERE = ReplicaIdentity("here", 1)
PLAIN = CompatibilityRecord(8, b"model", "bfloat16", "bfloat16", 16, 6, 4, 32)
LAYER_BYTES = 2 * 4 * 32 * 2
WINDOWED = replace(PLAIN, groups=(KvGroup((1, 4), 0), KvGroup((0, 2, 3, 5), 100)))
STATEFUL = replace(PLAIN, groups=(KvGroup((1, 4), 0), KvGroup((0, 2, 3, 5), STATE_WINDOW, 50)))


def test_a_gateway_prices_a_hand_over_by_groups() -> None:
    load = LoadReport(identity=HERE, sequence=1, transfer_gb_s=2.0)

    def prices(compatibility: CompatibilityRecord) -> dict[str, Any]:
        return transfer_of(load, ReplicaHello(HERE, "p", "both", compatibility, 4096, load))

    assert prices(PLAIN)["transfer_tok_s"] == 2e9 / (6 * LAYER_BYTES)
    assert prices(PLAIN)["window_tokens"] == prices(PLAIN)["state_tokens"] == 0
    windowed, stateful = prices(WINDOWED), prices(STATEFUL)
    assert windowed["transfer_tok_s"] == stateful["transfer_tok_s"] == 2e9 / (2 * LAYER_BYTES)
    assert (windowed["window_tokens"], windowed["window_token_ratio"]) == (100, 2.0)
    assert stateful["state_tokens"] == 4 * 4 * 50 * 4 / (2 * LAYER_BYTES)
    assert transfer_of(load, None) == {"transfer_tok_s": 0.0}
