"""Errors of the operating system in words for people."""

from __future__ import annotations


def os_reason(error: BaseException, *, has_path: bool = False) -> str:
    """Return `/path: No such file or directory`, without the number that Python puts before it, and without
    the path where the text around it `has_path`; of another error its text."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return error.strerror if has_path or not error.filename else f"{error.filename}: {error.strerror}"
