"""The tools that an answer may call, as grammars read them."""

from __future__ import annotations

import json
from typing import Any

from kvtransfer.codec import Part


class ToolSchemaError(ValueError):
    """The arguments of a tool cannot be what its schema demands; the text has the reason."""

    def __init__(self, tool: str, reason: str) -> None:
        super().__init__(reason)
        self.tool = tool


class CallableTool(Part, frozen=True):
    """A function, and the JSON schema of its arguments ("": any object). Where that `is_strict`, keywords
    that are not supported are refused, else ignored."""

    name: str
    schema_json: str = ""
    is_strict: bool = False

    def arguments_schema(self) -> dict[str, Any]:
        """Return the schema of the arguments; raise `ToolSchemaError` where that is not one of objects."""
        schema = json.loads(self.schema_json or "{}")
        if schema is True:
            schema = {}
        kinds = schema.get("type", "object") if isinstance(schema, dict) else None
        if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
            raise ToolSchemaError(self.name, "arguments are an object; give the schema this type")
        assert isinstance(schema, dict)
        return schema
