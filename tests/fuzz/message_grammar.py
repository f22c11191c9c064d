"""Frames of a codec, drawn from the types of its messages: well formed, wrong in some fields, or damaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec
from msgspec import Raw, inspect

from tests.fuzz.mutation import EDGE_FLOATS, EDGE_INTS, any_text, mutate_bytes

# MessagePack that no encoder of ours writes.
_ODD_MSGPACK = (
    b"\xc1",  # reserved
    b"\xa2\xc3\x28",  # a text that is not UTF-8
    b"\xa3\xed\xa0\x80",  # a surrogate
    b"\xd9\x01\xff",
    b"\xdd\xff\xff\xff\xff",  # arrays, maps, bytes and texts that announce more than there is
    b"\xdc\xff\xff",
    b"\xdd\x00\x10\x00\x00",
    b"\xdf\xff\xff\xff\xff",
    b"\xde\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
    b"\xc7\x0c\xff" + b"\xff" * 12,
    b"\xd4\x01\x00",
    b"\x91" * 3000 + b"\xc0",  # deep nesting
    b"\x81\xc0" * 3000 + b"\xc0",
    b"\x82\xa1a\x01\xa1a\x02",  # the same key twice
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\x00" * 7,
    b"\xcb\x7f\xf8" + b"\x00" * 6,
)
_MAX_ITEMS = 4
_MAX_DEPTH = 6
_LIKELY = 0.9


class MessageGrammar:
    """Draws frames of the messages of `union`, the type of a codec.

    `likely` are values by the name of a field, as MessagePack encodes them: mostly, one of them is drawn for
    a field of that name, so that messages reach what a random id would not.
    """

    def __init__(self, union: Any, likely: Mapping[str, Sequence[Any]] | None = None) -> None:
        kind = inspect.type_info(union)
        self._kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
        self.likely = likely or {}

    def frame(self, rng: Random) -> bytes:
        """Draw a frame; about a quarter of them are well formed."""
        wildness = rng.choice((0.0, 0.0, 0.02, 0.1, 0.4))
        frame = self.message(rng, wildness)
        return mutate_bytes(rng, frame, (self.message(rng),)) if rng.random() < 0.5 else frame

    def message(self, rng: Random, wildness: float = 0.0) -> bytes:
        """Draw a frame of one of the messages. `wildness` is the chance of each value to be of any kind."""
        return msgspec.msgpack.encode(self._value(rng, rng.choice(self._kinds), wildness, 0))

    def _value(self, rng: Random, kind: Any, wildness: float, depth: int) -> Any:
        if rng.random() < wildness:
            return _any_value(rng)
        match kind:
            case inspect.Metadata():
                return self._value(rng, kind.type, wildness, depth)
            case inspect.StructType():
                return self._struct(rng, kind, wildness, depth)
            case inspect.UnionType():
                return self._value(rng, rng.choice(kind.types), wildness, depth)
            case inspect.IntType():
                return rng.choice(EDGE_INTS) if rng.random() < 0.3 else rng.randrange(64)
            case inspect.FloatType():
                return rng.choice(EDGE_FLOATS) if rng.random() < 0.3 else rng.random()
            case inspect.StrType():
                return any_text(rng) if rng.random() < 0.3 else f"name-{rng.randrange(4)}"
            case inspect.BytesType():
                return rng.randbytes(rng.choice((0, 1, 4, 8, 16, 16, 16, 32, 40)))
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.LiteralType():
                return rng.choice(kind.values)
            case inspect.VarTupleType() | inspect.ListType():
                count = rng.randrange(_MAX_ITEMS) if depth < _MAX_DEPTH else 0
                return [self._value(rng, kind.item_type, wildness, depth + 1) for _ in range(count)]
            case inspect.TupleType():
                return [self._value(rng, item, wildness, depth + 1) for item in kind.item_types]
            case inspect.NamedTupleType():
                return [self._value(rng, field.type, wildness, depth + 1) for field in kind.fields]
            case inspect.DictType():
                count = rng.randrange(_MAX_ITEMS) if depth < _MAX_DEPTH else 0
                pairs = [
                    (
                        self._value(rng, kind.key_type, 0.0, depth + 1),
                        self._value(rng, kind.value_type, wildness, depth + 1),
                    )
                    for _ in range(count)
                ]
                return dict(pairs)
            case _:
                raise TypeError(f"messages have no {type(kind).__name__} yet: teach the grammar to draw one")

    def _struct(self, rng: Random, kind: inspect.StructType, wildness: float, depth: int) -> list[Any]:
        assert kind.array_like, f"{kind.cls.__name__} is not encoded as an array"
        values = [self._field(rng, field, wildness, depth + 1) for field in kind.fields]
        num_optional = _num_optional(kind.fields)
        if num_optional and rng.random() < 0.3:  # an older sender leaves out the last fields
            del values[len(values) - rng.randint(1, num_optional) :]
        return values if kind.tag is None else [kind.tag, *values]

    def _field(self, rng: Random, field: inspect.Field, wildness: float, depth: int) -> Any:
        likely = self.likely.get(field.name)
        if likely and rng.random() < _LIKELY:
            return rng.choice(likely)
        return self._value(rng, field.type, wildness, depth)


def _num_optional(fields: Sequence[inspect.Field]) -> int:
    count = 0
    for field in reversed(fields):
        if field.required:
            break
        count += 1
    return count


def _any_value(rng: Random) -> Any:
    choice = rng.randrange(8)
    if choice < 3:
        return Raw(rng.choice(_ODD_MSGPACK))
    if choice == 3:
        return rng.choice(EDGE_INTS)
    if choice == 4:
        return any_text(rng)
    if choice == 5:
        return rng.randbytes(rng.randrange(20))
    if choice == 6:
        return [rng.choice(EDGE_INTS) for _ in range(rng.randrange(6))]
    return rng.choice((None, True, False, 0.5, {}, [], {"a": [1]}, {1: 2}))
