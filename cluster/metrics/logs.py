"""Logs of the service's processes: the packages log to standard error, which Ray keeps.

Text for people, or one JSON object a line. A line about a request carries its id in a field of its own: the
call says `extra={"request_id": ...}`, because one task of a process carries many requests at once.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from cluster.log_fields import MORE, SUMMARY
from cluster.metrics.config import LogConfig

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
