"""The wire image of this version: every message that processes of neighboring versions exchange or store for
each other, with its fields and the bytes of one instance. `make wire-image` (or running this file) records it
in tests/cluster/wire; `tests/cluster/test_wire_image.py` compares what is recorded with the code."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from kvtransfer.codec import Codec
from kvtransfer.messages import Shard
from kvtransfer.store.index.values import NodeRecord, encode_change, encode_node

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "tests" / "cluster" / "wire"
_PACKAGES = ("cluster", "kvtransfer", "router", "workers")
# Between a process and the children that it starts itself, which are of its own version.
OF_ONE_VERSION = frozenset(
    {
        "cluster.text.chat_template",
        "cluster.text.grammar_orders",
        "kvtransfer.store.server.store_process",
        "workers.messages.rank_channel",
    }
)
# The types that are encoded without a `Codec`.
_OTHERS = ("cluster.identity.relay_tokens:RelayedCaller", "kvtransfer.store.nvme.segment:Directory")
_MAKES_CODEC = re.compile(r"^\w+(: Codec\[.*\])? = Codec\(", re.MULTILINE)

# Parts of the values that the index of the store has in Redis.
_SHARD = Shard(1, 2, 3, 4)
_NODE = NodeRecord(epoch=5, sequence=6, address="host:7", node_id="node")

Fields = dict[str, Any]


def version() -> str:
    """Return the version of this tree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return str(project["project"]["version"])


def recorded_images() -> list[Path]:
    """Return the files of all recorded images, the newest last."""
    return sorted(FOLDER.glob("*.json"), key=lambda path: [int(it) for it in path.stem.split(".")])


def codecs() -> dict[str, Codec[Any]]:
    """Return the codecs of messages between processes that may be of two versions, by module and name."""
    found: dict[str, Codec[Any]] = {}
    for path in sorted(path for name in _PACKAGES for path in (ROOT / name).rglob("*.py")):
        module_name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if module_name not in OF_ONE_VERSION and _MAKES_CODEC.search(path.read_text()):
            module = importlib.import_module(module_name)
            made = {name: it for name, it in vars(module).items() if isinstance(it, Codec)}
            found |= {f"{module_name}.{name}": it for name, it in made.items() if _is_made_in(path, name)}
    return found


def _is_made_in(path: Path, name: str) -> bool:
    return re.search(rf"^{name}(: Codec\[.*\])? = Codec\(", path.read_text(), re.MULTILINE) is not None


def structs() -> dict[str, type[msgspec.Struct]]:
    """Return every message, and every part of one, by its name; of several with one name by module, too."""
    pending: list[Any] = [codec.union for codec in codecs().values()]
    for place in _OTHERS:
        module_name, name = place.split(":")
        pending.append(getattr(importlib.import_module(module_name), name))
    found: set[type[msgspec.Struct]] = set()
    while pending:
        kind = pending.pop()
        if _is_struct(kind) and kind not in found:
            found.add(kind)
            pending += hints(kind).values()
        elif _is_named_tuple(kind):
            pending += hints(kind).values()
        pending += [it for it in get_args(kind) if not isinstance(it, str | int | float | bool | None)]
    names = [it.__name__ for it in found]
    named = {}
    for kind in found:
        is_alone = names.count(kind.__name__) == 1
        named[kind.__name__ if is_alone else f"{kind.__module__}.{kind.__name__}"] = kind
    return dict(sorted(named.items()))


def hints(kind: Any) -> Fields:
    """Return the types of the fields, in the order in which they are sent."""
    names = kind._fields if _is_named_tuple(kind) else kind.__struct_fields__
    resolved = get_type_hints(kind, include_extras=True)
    return {name: resolved[name] for name in names}


def num_required(kind: type[msgspec.Struct]) -> int:
    """Return the number of fields without a default, which are the first ones."""
    return len(kind.__struct_fields__) - len(kind.__struct_defaults__)


def written(kind: Any) -> str:
    """Return how a type is written in an image: all that decides which values are accepted."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return f"{written(arguments[0])} {' '.join(map(repr, arguments[1:]))}"
    if origin is Literal:
        return f"Literal[{', '.join(sorted(map(repr, arguments)))}]"
    if origin in (Union, types.UnionType):
        return " | ".join(sorted(map(written, arguments)))
    if _is_named_tuple(kind):
        return f"{kind.__name__}({', '.join(f'{name}: {written(it)}' for name, it in hints(kind).items())})"
    if origin is not None:
        inner = ", ".join("..." if it is Ellipsis else written(it) for it in arguments)
        return f"{origin.__name__}[{inner}]"
    return "None" if kind is type(None) else str(kind.__name__)


def example(kind: Any, name: str = "value") -> Any:
    """Return a value of the type in which no field has its default, as far as its type allows."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return example(arguments[0], name)
    if origin is Literal:
        return arguments[-1]
    if origin in (Union, types.UnionType):
        return example(next(it for it in arguments if it is not type(None)), name)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(example(it, f"{name}_{index}") for index, it in enumerate(arguments))
    if origin is dict:
        return {example(arguments[0], name): example(arguments[1], name)}
    if origin is not None:  # a list, a tuple of any length: one of each type that it may hold
        inner = get_args(arguments[0]) if get_origin(arguments[0]) in (Union, types.UnionType) else ()
        items = [example(it, name) for it in inner or arguments[:1] if it is not type(None)]
        return items if origin is list else tuple(items)
    if _is_struct(kind) or _is_named_tuple(kind):
        return kind(**{field: example(it, field) for field, it in hints(kind).items()})
    plain: dict[Any, Any] = {int: 3, float: 1.5, bool: True, str: name, bytes: name.encode()}
    return plain[kind]


def image() -> Fields:
    """Return the recording of this version."""
    return {
        "version": version(),
        "messages": {name: _described(kind) for name, kind in structs().items()},
        "codecs": {
            name: sorted(it.__name__ for it in get_args(codec.union) or (codec.union,))
            for name, codec in codecs().items()
        },
        "index": {"entry": encode_change(_SHARD, "nvme").hex(), "node": encode_node(_NODE).decode()},
    }


def _described(kind: type[msgspec.Struct]) -> Fields:
    return {
        "tag": kind.__struct_config__.tag or "",
        "num_required": num_required(kind),
        "fields": {name: written(it) for name, it in hints(kind).items()},
        "frame": msgspec.msgpack.encode(example(kind)).hex(),
    }


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def main() -> None:
    """Record the image of this version."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{version()}.json"
    path.write_text(json.dumps(image(), indent=1) + "\n")
    print(f"{path.relative_to(ROOT)}: {len(structs())} messages and parts")


if __name__ == "__main__":
    main()
