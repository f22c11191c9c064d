"""URLs for people and logs: without the passwords that they carry."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

HIDDEN = "***"
_SECRET_NAMES = ("password", "passwd", "secret", "token", "key", "auth")


def without_secrets(text: str) -> str:
    """Return a URL with *** in place of its password, and of those in its query; other text as it is."""
    if "://" not in text:
        return text
    try:
        parts = urlsplit(text)
    except ValueError:
        return HIDDEN  # no URL, but perhaps a password in it
    login, at, host = parts.netloc.rpartition("@")
    user, colon, _ = login.partition(":")
    place = f"{user}:{HIDDEN}@{host}" if colon else login + at + host
    query = "&".join(_shown(part) for part in parts.query.split("&"))
    shown = urlunsplit(parts._replace(netloc=place, query=query))
    return text if not colon and query == parts.query else shown


def _shown(part: str) -> str:
    name, equals, value = part.partition("=")
    return f"{name}={HIDDEN}" if equals and value and name.lower().endswith(_SECRET_NAMES) else part


def settings_without_secrets(value: Any) -> Any:
    """Return settings, as JSON has them, with every URL in them as `without_secrets` does."""
    if isinstance(value, dict):
        return {name: settings_without_secrets(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [settings_without_secrets(inner) for inner in value]
    return without_secrets(value) if isinstance(value, str) else value
