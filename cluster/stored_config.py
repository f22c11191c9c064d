"""Configurations that one process has written for another, which may be of a neighboring version."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json, to_json

from cluster.config import ClusterConfig

_UNKNOWN = "extra_forbidden"

_log = logging.getLogger(__name__)


def read_stored_config(text: str) -> ClusterConfig:
    """Return the configuration that a process of this or a neighboring version has written.

    Settings that this version does not know are left out, where a user's file would be refused: whoever wrote
    them has checked them. Raises pydantic's `ValidationError` for everything else that is wrong.
    """
    try:
        return ClusterConfig.model_validate_json(text)
    except ValidationError as error:
        unknown = [it["loc"] for it in error.errors(include_url=False) if it["type"] == _UNKNOWN]
        if not unknown:
            raise
    settings = from_json(text)
    for path in unknown:
        _drop(settings, path)
    names = ", ".join(sorted(".".join(map(str, path)) for path in unknown))
    _log.warning("settings of another version are left out: %s", names)
    return ClusterConfig.model_validate_json(to_json(settings))


def _drop(settings: Any, path: tuple[int | str, ...]) -> None:
    """Remove the setting at `path`, of which steps that are no key stand for a choice of types."""
    for step in path[:-1]:
        if isinstance(settings, dict) and step not in settings:
            continue
        settings = settings[step]
    settings.pop(path[-1], None)
