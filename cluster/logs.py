"""The log of a process of the service: what our packages tell goes to standard error, which Ray keeps."""

from __future__ import annotations

import logging

_ROOTS = ("tandem", "cluster", "router", "workers", "kvtransfer")
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_stderr() -> None:
    """From INFO up, in an actor's process; without it only warnings would be seen, without their time."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    for name in _ROOTS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.handlers = [handler]
        logger.propagate = False
