"""A process, or this one, that sends what another version of Tandem would send.

A newer neighbor adds fields to the end of every message and every part of one, and sends messages between the
others that nobody knows. An older one sends the fields that a recorded image has, without those at the end
that have their defaults, which it may not have had yet. Reading is left as it is.

For processes that others start, such as Ray: `folder_for` makes a folder that comes first in `PYTHONPATH`.
Each Python process that imports the codec then speaks as `set_version` said last, and leaves a file
`<process id>.<version>`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from kvtransfer.codec import Codec
from kvtransfer.rpc.stream import FrameStream

Version = Literal["older", "newer"]
_UNKNOWN_FIELDS = [{"added": [1, "two", None]}, 7]
_UNKNOWN_MESSAGE = msgspec.msgpack.encode(["AddedByTheNextVersion", 1, ["x"]])
# A message is sent before each of these that its stream skips: Links, Peer links, placements, the store.
_ACCOMPANIED = {
    b"StepFrame",
    b"KvEvents",
    b"Submission",
    b"Announce",
    b"LandingRequest",
    b"LandingGrant",
    b"Manifest",
    b"PlacementDelta",
    b"FindRequest",
    b"TierEvents",
}
_SITE = """
import sys
sys.path[0:0] = {paths!r}
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "kvtransfer.rpc.stream":
            return None
        spec = PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            sys.modules[name] = module
            import neighbor_version
            neighbor_version.speak_as_told({folder!r})
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


class Patching(Protocol):
    """`pytest.MonkeyPatch`, or something that lasts as long as the process."""

    def setattr(self, target: Any, name: str, value: Any) -> None: ...


class _Lasting:
    def setattr(self, target: Any, name: str, value: Any) -> None:
        setattr(target, name, value)


def speak(version: Version, patching: Patching, image: Path | None = None) -> None:
    """Make this process send what a neighbor of that version sends; an older one as recorded in `image`."""
    if version == "older":
        assert image is not None
        messages = json.loads(image.read_text())["messages"]
        known = {name.rpartition(".")[2]: len(it["fields"]) for name, it in messages.items()}
        patching.setattr(Codec, "encode", lambda codec, message: _encoded(message, known))
        return
    patching.setattr(Codec, "encode", lambda codec, message: _encoded(message, None))
    send = FrameStream.send

    def send_with_others(stream: FrameStream, frame: bytes) -> None:
        if any(name in frame[:24] for name in _ACCOMPANIED):
            send(stream, _UNKNOWN_MESSAGE)
        send(stream, frame)

    patching.setattr(FrameStream, "send", send_with_others)


def folder_for(folder: Path, image: Path) -> Path:
    """Make the folder for `PYTHONPATH`; until a version is set, processes speak their own."""
    root = Path(__file__).resolve().parent.parent.parent
    paths = [str(root), str(Path(__file__).resolve().parent)]
    (folder / "sitecustomize.py").write_text(_SITE.format(paths=paths, folder=str(folder)))
    (folder / "image").write_text(str(image))
    return folder


def set_version(folder: Path, version: Version) -> None:
    """Make processes that import the codec from now on speak this version."""
    (folder / "version").write_text(version)


def processes_of(folder: Path, version: Version) -> set[int]:
    """Return the ids of the processes that speak this version, or did."""
    return {int(path.stem) for path in folder.glob(f"*.{version}")}


def speak_as_told(folder_name: str) -> None:
    """Speak the version that the folder holds; called in each process when it has imported the streams."""
    folder = Path(folder_name)
    if not (folder / "version").exists():
        return
    version: Version = "older" if (folder / "version").read_text() == "older" else "newer"
    speak(version, _Lasting(), Path((folder / "image").read_text()))
    (folder / f"{os.getpid()}.{version}").touch()


def _encoded(message: Any, known: dict[str, int] | None) -> bytes:
    return msgspec.msgpack.encode(_unpacked(message, known))


def _unpacked(value: Any, known: dict[str, int] | None) -> Any:
    """Return a message as it is sent: `known` None by a newer version, else by one that has `known` fields of
    each."""
    if isinstance(value, msgspec.Struct):
        kind = type(value)
        tag = kind.__struct_config__.tag
        values = [getattr(value, name) for name in kind.__struct_fields__]
        if known is None:
            return [*([tag] if tag else []), *(_unpacked(it, known) for it in values), *_UNKNOWN_FIELDS]
        defaults = [
            it.default if it.default_factory is msgspec.NODEFAULT else it.default_factory()
            for it in msgspec.structs.fields(kind)
        ]
        num_fields = min(known.get(kind.__name__, len(values)), len(values))
        while num_fields and values[num_fields - 1] == defaults[num_fields - 1]:
            num_fields -= 1
        return [*([tag] if tag else []), *(_unpacked(it, known) for it in values[:num_fields])]
    if isinstance(value, dict):
        return {key: _unpacked(it, known) for key, it in value.items()}
    if isinstance(value, str | bytes | bytearray | memoryview) or not hasattr(value, "__iter__"):
        return value
    return [_unpacked(it, known) for it in value]
