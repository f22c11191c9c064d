"""What `tests/gpu/pack.py` takes along for a machine without a package registry."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

from tests.gpu.pack import locked, programs, requirements, unpack


def test_what_is_packed_has_the_versions_of_the_locks() -> None:
    with_cluster, without = requirements(has_cluster=True), requirements(has_cluster=False)
    known = {*locked("build", "development", "runtime").values()}
    assert set(without) < set(with_cluster) <= known
    names = {requirement.partition("==")[0] for requirement in with_cluster}
    assert names >= {"ray", "grpcio", "pytest", "msgspec"}
    assert names.isdisjoint({"numpy", "torch"}), "the machine's own"
    assert not any(requirement.startswith("ray==") for requirement in without)


def test_wheels_lie_side_by_side_without_what_is_not_needed(tmp_path: Path) -> None:
    wheels, folder = tmp_path / "wheels", tmp_path / "packages"
    wheels.mkdir()
    program = Path(os.path.realpath(sys.executable)).read_bytes()
    with zipfile.ZipFile(wheels / "ray-2-cp312-cp312-linux_x86_64.whl", "w") as wheel:
        wheel.writestr("ray/jars/large.jar", b"")
        wheel.writestr("ray/core/raylet", program)
        wheel.writestr("ray-2.data/purelib/ray/apart.py", b"")
    unpack(wheels, folder)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {"ray/core/raylet", "ray/apart.py", "ray/dashboard/client/build/index.html"}
    (found,) = programs(folder)
    assert os.access(found, os.X_OK)
