"""Logs of the service's processes: the packages log to standard error, which Ray keeps.

Text for people, or one JSON object a line. A line about a request carries its id in a field of its own: the
call says `extra={"request_id": ...}`, because one task of a process carries many requests at once.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from cluster.log_fields import MORE, SUMMARY, about
from cluster.metrics.config import LogConfig
from cluster.metrics.ended_request import EndedRequest, RelayedRequest

# The name of the access log.
ACCESS_LOGGER = "tandem.access"

_ROOTS = ("tandem", "cluster", "router", "workers", "kvtransfer", "opentelemetry")


def log_to_stderr(config: LogConfig, who: str, pool: str = "") -> None:
    """Log as configured, in an actor's process. `who`: the replica, gateway or other process; every line of
    JSON names it. Without this only warnings would be seen, without their time."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(who, pool) if config.format == "json" else TextFormatter())
    for name in _ROOTS:
        logger = logging.getLogger(name)
        logger.setLevel(config.level.upper())
        logger.handlers = [handler]
        logger.propagate = False
    logging.getLogger(ACCESS_LOGGER).setLevel(logging.INFO)  # `access` decides over its lines, not `level`


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00,123 INFO cluster.gateway.request_manager: message`; an id that the message does
    not name follows it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        request_id = str(getattr(record, "request_id", ""))
        return line if request_id in line else f"{line} [request {request_id}]"


class JsonFormatter(logging.Formatter):
    """One object a line: `ts` (UTC, RFC 3339), `level`, `logger`, `message`, `process` (who), `pool` where it
    belongs to one, `request_id` and more where the line is about a request, `error` with a traceback."""

    def __init__(self, who: str, pool: str = "") -> None:
        super().__init__()
        self._always = {"process": who, **({"pool": pool} if pool else {})}

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "ts": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": getattr(record, SUMMARY, None) or record.getMessage(),
            **self._always,
        }
        if request_id := getattr(record, "request_id", ""):
            line["request_id"] = request_id
        line.update(getattr(record, MORE, {}))
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


# ----------------------------------------------------------------------------------------------
# The access log: one line for every request that ends, refused ones included.

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
