"""Fields of a line of the log besides its text, which only JSON lines contain (`cluster.metrics.logs`)."""

from __future__ import annotations

from collections.abc import Mapping

# The attributes of a record that hold more fields, and the message of a JSON line where the text repeats the
# fields.
MORE = "more_fields"
SUMMARY = "summary"


def about(request_id: str, more: Mapping[str, object]) -> dict[str, object]:
    """Return the argument `extra` of a logging call: the request that the line is about, and more fields,
    which only JSON lines contain; the message has the part for people."""
    return {"request_id": request_id, MORE: more}


def instead(summary: str, fields: Mapping[str, object]) -> dict[str, object]:
    """Return the argument `extra` of a logging call whose text is all fields: a JSON line has them at its top
    level, and this summary as its message."""
    return {SUMMARY: summary, MORE: fields}
