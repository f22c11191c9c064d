"""Take values out of a config.json: every refusal names the file, the key and the value."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from workers.errors import CheckpointError

_MAX_COUNT = 1 << 40
_MAX_NUMBER = 1e30
# What an error shows of a value.
MAX_SHOWN_CHARS = 200


def shown(value: object) -> str:
    """Return the value as an error shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def is_positive(value: Any) -> bool:
    """Whether the value is a positive number, of a size that means something."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MAX_NUMBER


class ConfigValues:
    """The keys `raw` of the config.json `file`, of the text model where it describes several."""

    def __init__(self, file: Path, raw: dict[str, Any]) -> None:
        self.file, self.raw = file, raw

    def refuse(self, key: str, why: str) -> NoReturn:
        """Raise `CheckpointError` for the value of the key."""
        raise CheckpointError(f"{self.file}: {key} {shown(self.raw.get(key))} {why}")

    def count(self, key: str, default: int | None = None, most: int = _MAX_COUNT) -> int:
        """Return the whole number of the key, from 1 to `most`; the default where it is missing or null."""
        value = self.raw.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            self.refuse(key, f"is not a positive integer up to {most}")
        return value

    def number(self, key: str, where: dict[str, Any], default: float | None = None) -> float:
        """Return the positive number of the key in `where`; the default where it is missing or null."""
        value = where.get(key)
        if value is None:
            value = default
        if value is None or not is_positive(value):
            raise CheckpointError(f"{self.file}: {key} {shown(value)} is not a positive number")
        return float(value)
