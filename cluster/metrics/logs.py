"""The log of a process of the service: what our packages tell goes to standard error, which Ray keeps.

Text for people, or one JSON object a line. A line about a request carries its id in a field of its own: the
call says `extra={"request_id": ...}`, because one task of a process carries many requests at once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime

from cluster.metrics.config import LogConfig

# Of the access log (`cluster.metrics.access_log`).
ACCESS_LOGGER = "tandem.access"

_ROOTS = ("tandem", "cluster", "router", "workers", "kvtransfer", "opentelemetry")
_MORE = "more_fields"


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


def about(request_id: str, more: Mapping[str, object]) -> dict[str, object]:
    """For the argument `extra` of a logging call: the request that the line is about, and more fields, which
    only JSON lines tell; the message says what people need."""
    return {"request_id": request_id, _MORE: more}


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00,123 INFO cluster.gateway.request_manager: message`; an id that the message does not name
    follows it."""

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
            "message": record.getMessage(),
            **self._always,
        }
        if request_id := getattr(record, "request_id", ""):
            line["request_id"] = request_id
        line.update(getattr(record, _MORE, {}))
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
