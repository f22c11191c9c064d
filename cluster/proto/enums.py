"""Values of the API's enums by the short names that the program uses: "stop" for FINISH_REASON_STOP."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any


def name_of(kind: Any, value: int) -> str:
    """Return the short name; "" for the unspecified value, and the number of one that the enum lacks."""
    return names_of(kind.DESCRIPTOR).get(value, str(value))


def value_of(kind: Any, name: str) -> Any:
    """Return the value of a short name, as `name_of` gives it."""
    return _values_of(kind.DESCRIPTOR)[name]


@functools.cache
def names_of(descriptor: Any) -> Mapping[int, str]:
    """Return the short names of an enum's values."""
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", descriptor.name).upper() + "_"
    names = {value.number: value.name.removeprefix(prefix).lower() for value in descriptor.values}
    return {number: "" if name == "unspecified" else name for number, name in names.items()}


@functools.cache
def _values_of(descriptor: Any) -> Mapping[str, int]:
    return {name: number for number, name in names_of(descriptor).items()}
