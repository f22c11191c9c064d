"""Fields of a configuration that match a pattern, and say in words what they may hold where they do not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True, slots=True)
class Matches:
    """Annotates a text that must match `pattern` as a whole; `words` complete "must be", with an example."""

    pattern: str
    words: str

    def check(self, text: str) -> str:
        """Return the text; raise `ValueError` where it does not match."""
        if re.fullmatch(self.pattern, text) is None:
            raise ValueError(f"{text[:100]!r} must be {self.words}")
        return text

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "pattern": self.pattern}
