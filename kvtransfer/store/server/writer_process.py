"""Whether a process that mapped the arena still lives: by its id and its start time, from procfs."""

from __future__ import annotations

from pathlib import Path

from kvtransfer.store.record import Writer

_STATE = 0
# Fields of /proc/<pid>/stat after the name, which is the only one that may hold spaces.
_STARTED_AT = 19
_DEAD = "ZX"


def writer_of(process_id: int, session: bytes = b"") -> Writer | None:
    """Return the living process with this id as a `Writer` for `session`; None when there is none."""
    fields = _fields(process_id)
    if fields is None or fields[_STATE] in _DEAD:
        return None
    return Writer(process_id, int(fields[_STARTED_AT]), session)


def is_running(writer: Writer) -> bool:
    """Whether that very process lives. A zombie does not: its memory is gone."""
    found = writer_of(writer.process_id)
    return found is not None and found.started_at == writer.started_at


def _fields(process_id: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()
