"""The Dockerfile says what the chart expects of the image; it is not built here."""

from __future__ import annotations

import re
import subprocess
from pathlib import PurePosixPath
from typing import NamedTuple

import pytest
from chart_schema import values
from serving import ROOT

LINES = (ROOT / "helm" / "docker" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()


class Stage(NamedTuple):
    base: str
    steps: list[tuple[str, str]]


def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    for line in LINES:
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = Stage(base, [])
        elif found and re.fullmatch("[A-Z]+", word):
            found[name].steps.append((word, rest.strip()))
    return found


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_image_runs_as_the_user_of_the_chart_and_has_its_model(target: str) -> None:
    steps = stages()[target].steps
    context = values()["podSecurityContext"]
    assert [rest for word, rest in steps if word == "USER"] == [
        f"{context['runAsUser']}:{context['runAsGroup']}"
    ]
    copied = {rest.split()[-1]: rest.split()[-2] for word, rest in steps if word == "COPY"}
    assert copied[values()["model"]["path"]] == "models/tiny"


def test_everything_that_is_copied_is_there_and_let_through() -> None:
    let_through = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    sources = [
        source
        for stage in stages().values()
        for word, rest in stage.steps
        if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    ]
    assert "cluster" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(PurePosixPath(source).is_relative_to(known) for known in let_through), source


def test_kuberay_finds_the_tools_that_its_probes_and_scripts_call() -> None:
    installed = next(rest for word, rest in stages()["base"].steps if "apt-get install" in rest)
    assert {"bash", "wget", "g++"} <= set(installed.split())
    login = [rest for _, rest in stages()["base"].steps if "/etc/profile.d" in rest]
    assert login, "KubeRay starts login shells, which forget PATH"


@pytest.mark.parametrize(
    ("release", "base", "is_built"),
    [
        ("no", "python:3.11-slim-bookworm", True),
        ("yes", "python:3.11-slim-bookworm", False),
        ("yes", "python@sha256:" + 64 * "0", True),
        ("maybe", "python:3.11-slim-bookworm", False),
    ],
)
def test_a_release_has_a_base_by_digest(release: str, base: str, is_built: bool) -> None:
    assert stages()["base"].base == "${BASE_IMAGE}"
    check = next(rest for word, rest in stages()["base"].steps if word == "RUN" and "RELEASE" in rest)
    done = subprocess.run(
        ["sh", "-c", check],
        env={"RELEASE": release, "BASE_IMAGE": base},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == is_built, done.stderr
    assert is_built or "by digest" in done.stderr


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_packages_are_installed_by_hash_and_torch_alone_without(target: str) -> None:
    steps = [*stages()["wheel"].steps, *stages()[target].steps]
    extras = next(rest for word, rest in steps if word == "ARG" and rest.startswith("EXTRAS="))
    for name in ["build", "runtime", *extras.removeprefix("EXTRAS=").strip('"').split()]:
        assert (ROOT / ".ci/locks" / f"{name}.txt").exists()
    installs = [rest for word, rest in steps if word == "RUN" and "pip install" in rest]
    without = [rest for rest in installs if "--require-hashes" not in rest]
    torch, ours = without
    assert torch.endswith(" torch")
    assert "--constraint /locks/constraints.txt" in torch
    assert ours.startswith("pip install --no-cache-dir --no-deps /tmp/wheels/*.whl")
