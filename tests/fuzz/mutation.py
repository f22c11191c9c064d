"""Mutation of bytes, text and trees. Everything is drawn from one `random.Random`, so that a seed repeats a
case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

EDGE_INTS = (
    *(0, 1, 2, 3, 4, 15, 16, 17, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 1 << 20),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
    *(-1, -2, -16, -128, -(1 << 31), -(1 << 63)),
)
EDGE_FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1e-45,
    1e-300,
    1e300,
    -1e300,
    float("inf"),
    float("-inf"),
    float("nan"),
)
EDGE_TEXTS = (
    *("", " ", "a", "0", "-1", "null", "true", "none", "~", "*", "..", "../../etc/passwd", "/dev/zero"),
    *(
        "\0",
        "\x1b[31m",
        "\n",
        "\r\n",
        "\t",
        "a\0b",
        "%s%n%d",
        "{0.__class__}",
        "{{ 7*7 }}",
        "${HOME}",
        "`id`",
    ),
    *("ä", "\u202e", "\u2028", "\ufeff", "\U0001f600", "e\u0301" * 8, "ﷺ", "\u0000x", "İ", "ß"),
    *("x" * 300, "9" * 400, "1e999", "NaN", "-inf", "0x_", "2020-13-45", "1:2:3", "'", '"', "\\", ";--"),
)
_WIDTHS = (1, 2, 4, 8)

_Mutation = Callable[[Random, bytearray, Sequence[bytes]], None]


def mutate_bytes(rng: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Return `data` after one to eight mutations; some put in parts of `others`."""
    buffer = bytearray(data)
    for _ in range(1 << rng.randrange(4)):
        rng.choice(_BYTE_MUTATIONS)(rng, buffer, others)
    return bytes(buffer)


def _flip_bit(rng: Random, buffer: bytearray, others: Sequence[bytes]) -> None:
    if buffer:
        buffer[rng.randrange(len(buffer))] ^= 1 << rng.randrange(8)


def _set_byte(rng: Random, buffer: bytearray, others: Sequence[bytes]) -> None:
    if buffer:
        buffer[rng.randrange(len(buffer))] = rng.choice((0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xFE, 0xFF))


def _set_int(rng: Random, buffer: bytearray, others: Sequence[bytes]) -> None:
    width = rng.choice(_WIDTHS)
    if len(buffer) >= width:
        start = rng.randrange(len(buffer) - width + 1)
        value = rng.choice(EDGE_INTS) % (1 << 8 * width)
        buffer[start : start + width] = value.to_bytes(width, rng.choice(("little", "big")))


def _add_to_byte(rng: Random, buffer: bytearray, others: Sequence[bytes]) -> None:
    if buffer:
        at = rng.randrange(len(buffer))
        buffer[at] = (buffer[at] + rng.randint(-8, 8)) % 256


def _cut(rng: Random, buffer: bytearray, others: Sequence[bytes]) -> None:
    start, end = _span(rng, buffer)
    del buffer[start:end]


def _cut_end(rng: Random, buffer: bytearray, others: Sequence[bytes]) -> None:
    del buffer[rng.randint(0, len(buffer)) :]


def _insert(rng: Random, buffer: bytearray, others: Sequence[bytes]) -> None:
    at = rng.randint(0, len(buffer))
    buffer[at:at] = rng.randbytes(1 << rng.randrange(6))


def _repeat(rng: Random, buffer: bytearray, others: Sequence[bytes]) -> None:
    start, end = _span(rng, buffer)
    buffer[end:end] = bytes(buffer[start:end][:256]) * rng.randint(1, 8)


def _swap(rng: Random, buffer: bytearray, others: Sequence[bytes]) -> None:
    start, end = _span(rng, buffer)
    part = bytes(buffer[start:end])
    del buffer[start:end]
    at = rng.randint(0, len(buffer))
    buffer[at:at] = part


def _splice(rng: Random, buffer: bytearray, others: Sequence[bytes]) -> None:
    if others:
        other = rng.choice(others)
        start, end = _span(rng, other)
        at = rng.randint(0, len(buffer))
        buffer[at : at + rng.choice((0, end - start))] = other[start:end]


def _span(rng: Random, data: bytes | bytearray) -> tuple[int, int]:
    start = rng.randint(0, len(data))
    return start, rng.randint(start, min(len(data), start + (1 << rng.randrange(10))))


_BYTE_MUTATIONS: tuple[_Mutation, ...] = (
    _flip_bit,
    _set_byte,
    _set_int,
    _add_to_byte,
    _cut,
    _cut_end,
    _insert,
    _repeat,
    _swap,
    _splice,
)


def any_text(rng: Random) -> str:
    """Draw an odd text."""
    if rng.random() < 0.7:
        return rng.choice(EDGE_TEXTS)
    return "".join(chr(_code_point(rng)) for _ in range(rng.randrange(12)))


def _code_point(rng: Random) -> int:
    """Draw a code point that UTF-8 can encode, half of the time from ASCII."""
    point = rng.randrange(128) if rng.random() < 0.5 else rng.randrange(0x110000 - 0x800)
    return point if point < 0xD800 else point + 0x800


def mutate_text(rng: Random, text: str, others: Sequence[str] = ()) -> str:
    """Return `text` after one to four mutations; some put in parts of `others`."""
    for _ in range(1 << rng.randrange(3)):
        start = rng.randint(0, len(text))
        end = rng.randint(start, min(len(text), start + (1 << rng.randrange(6))))
        choice = rng.randrange(5)
        if choice == 0:
            text = text[:start] + text[end:]
        elif choice == 1:
            text = text[:start] + any_text(rng) + text[start:]
        elif choice == 2:
            text = text[:start] + any_text(rng) + text[end:]
        elif choice == 3:
            text = text[:end] + text[start:end] * rng.randint(1, 4) + text[end:]
        elif others:
            other = rng.choice(others)
            at = rng.randint(0, len(other))
            text = text[:start] + other[at : at + 40] + text[end:]
    return text


def any_scalar(rng: Random) -> Any:
    """Draw an odd value of JSON, without containers."""
    kind = rng.randrange(5)
    if kind == 0:
        return rng.choice(EDGE_INTS)
    if kind == 1:
        return rng.choice(EDGE_FLOATS)
    if kind == 2:
        return any_text(rng)
    return rng.choice((None, True, False, 10**400))


def any_tree(rng: Random, depth: int = 0) -> Any:
    """Draw an odd value of JSON."""
    kind = rng.randrange(6) if depth < 3 else 0
    if kind == 4:
        return [any_tree(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 5:
        return {any_text(rng): any_tree(rng, depth + 1) for _ in range(rng.randrange(4))}
    return any_scalar(rng)


def mutate_tree(rng: Random, tree: Any) -> Any:
    """Return a copy of a tree of dicts, lists and scalars, of which one to four nodes were changed."""
    for _ in range(1 << rng.randrange(3)):
        tree = _mutated_once(rng, tree)
    return tree


def _mutated_once(rng: Random, tree: Any) -> Any:
    if isinstance(tree, dict) and tree and rng.random() < 0.95:
        changed = dict(tree)
        key = rng.choice(list(changed))
        choice = rng.randrange(8)
        if choice == 0:
            del changed[key]
        elif choice == 1:
            changed[any_text(rng)] = changed[key]
        else:
            changed[key] = _mutated_once(rng, changed[key])
        return changed
    if isinstance(tree, list) and tree and rng.random() < 0.95:
        items = list(tree)
        at = rng.randrange(len(items))
        choice = rng.randrange(8)
        if choice == 0:
            del items[at]
        elif choice == 1:
            items.insert(at, items[rng.randrange(len(items))])
        else:
            items[at] = _mutated_once(rng, items[at])
        return items
    if isinstance(tree, str) and rng.random() < 0.5:
        return mutate_text(rng, tree)
    return any_tree(rng)
