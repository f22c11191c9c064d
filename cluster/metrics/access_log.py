"""The access log: one line for every request that ends, refused ones included."""

from __future__ import annotations

import logging

from cluster.log_fields import about
from cluster.metrics.ended_request import EndedRequest, RelayedRequest
from cluster.metrics.logs import ACCESS_LOGGER

_access_log = logging.getLogger(ACCESS_LOGGER)


def log_access(ended: EndedRequest) -> None:
    """Log the line of an ended request, as an `Observer`: the text of the fields that `access_fields` gives
    as JSON."""
    fields = access_fields(ended)
    path = f" {fields['prefill_replica']} -> {fields['decode_replica']}" if fields["decode_replica"] else ""
    ttft = f"{fields['ttft_ms']} ms" if fields["ttft_ms"] is not None else "none"
    _access_log.info(
        "%s %s %s tenant=%s peer=%s prompt=%d cached=%d output=%d ttft=%s e2e=%s ms attempts=%d%s%s",
        ended.request_id or "-",
        ended.state,
        ended.code,
        ended.tenant or "-",
        ended.caller.peer or "-",
        fields["prompt_tokens"],
        fields["cached_tokens"],
        fields["output_tokens"],
        ttft,
        fields["e2e_ms"],
        fields["attempts"],
        path,
        f": {ended.reason}" if ended.reason else "",
        extra=about(ended.request_id, fields),
    )


def log_relayed(relayed: RelayedRequest) -> None:
    """Log the line of a request that another application has answered, whose gateway logs the rest of it."""
    fields = {"state": "relayed", **relayed._asdict()}
    del fields["request_id"]
    _access_log.info(
        "%s relayed to %s %s tenant=%s peer=%s e2e=%s ms",
        relayed.request_id,
        relayed.application,
        relayed.code,
        relayed.tenant or "-",
        relayed.peer or "-",
        relayed.e2e_ms,
        extra=about(relayed.request_id, fields),
    )


def access_fields(ended: EndedRequest) -> dict[str, object]:
    """Return the fields of a request's line, by the names that JSON lines use. Counts are 0 and replicas ""
    where the request ended before; `ttft_ms` is None without a token."""
    summary = ended.summary
    moved = summary.hand_over if summary else None
    return {
        "wire_id": ended.wire_id,
        "state": ended.state,
        "code": ended.code,
        "reason": ended.reason,
        "tenant": ended.tenant,
        "peer": ended.caller.peer,
        "prompt_tokens": summary.num_prompt_tokens if summary else 0,
        "cached_tokens": summary.num_cached_tokens if summary else 0,
        "output_tokens": ended.num_output_tokens,
        "ttft_ms": None if ended.ttft_s is None else round(1e3 * ended.ttft_s, 3),
        "e2e_ms": round(1e3 * (ended.ended_at - ended.started_at), 3),
        "prefill_replica": summary.prefill_replica if summary else "",
        "decode_replica": summary.decode_replica if summary else "",
        "attempts": summary.num_attempts if summary else 0,
        "moves": summary.num_moves if summary else 0,
        "transport": moved.transport if moved else "",
        "moved_bytes": moved.num_moved_bytes if moved else 0,
    }
