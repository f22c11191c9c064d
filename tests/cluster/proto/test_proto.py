"""The files of the public API, by buf: their style, and that no change breaks a client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from google.protobuf.json_format import MessageToDict

from cluster.proto.tandem.v1 import admin_pb2, inference_pb2

FOLDER = Path(__file__).parents[3] / "cluster/proto"
BUF = Path(sys.executable).with_name("buf")


def buf(*arguments: str, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BUF, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A copy of the API in which the number of a field is another."""
    folder = tmp_path / "proto"
    for path in (*FOLDER.rglob("*.proto"), FOLDER / "buf.yaml"):
        copy = folder / path.relative_to(FOLDER)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text().replace("string request_id = 1;", "string request_id = 91;"))
    return folder


def test_the_files_are_in_style() -> None:
    done = buf("lint")
    assert not done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("module", [inference_pb2, admin_pb2])
def test_the_image_is_that_of_the_files(module: Any) -> None:
    """A field that it lacks could be changed freely."""
    image = FileDescriptorSet.FromString((FOLDER / "tandem.v1.binpb").read_bytes())
    (held,) = (file for file in image.file if file.name == module.DESCRIPTOR.name)
    compiled = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(compiled)
    assert described(held) == described(compiled), "run make proto-image"


def described(file: FileDescriptorProto) -> Any:
    """What the file says, without what compilers derive from it or add to it."""
    file.DiscardUnknownFields()
    found = MessageToDict(file)
    _drop_names(found)
    return found


def _drop_names(value: Any) -> None:
    if isinstance(value, dict):
        value.pop("jsonName", None)
        for inner in value.values():
            _drop_names(inner)
    elif isinstance(value, list):
        for inner in value:
            _drop_names(inner)


def test_no_change_breaks_a_client(changed: Path) -> None:
    done = buf("breaking", "--against", str(FOLDER / "tandem.v1.binpb"))
    assert not done.returncode, done.stdout + done.stderr
    broken = buf("breaking", "--against", str(FOLDER / "tandem.v1.binpb"), folder=changed)
    assert "request_id" in broken.stdout
