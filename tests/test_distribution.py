"""What is published: wheel, sdist, packaged chart, images."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import helm_python
import pytest
import yaml
from serving import ROOT

SITE_PACKAGES = Path(pytest.__file__).parent.parent


def script(name: str, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": os.environ["PATH"] if path is None else path}
    command = [sys.executable, str(ROOT / ".ci" / name), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_wheel_and_sdist_hold_what_they_should_and_the_readme_renders(tmp_path: Path) -> None:
    done = script("dist", "--no-install", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "README.md renders" in done.stdout
    assert "the sdist makes the same" in done.stdout
    assert len(list(tmp_path.glob("*.whl"))) == len(list(tmp_path.glob("*.tar.gz"))) == 1


@pytest.mark.slow
def test_the_installed_wheel_runs_the_demo(tmp_path: Path) -> None:
    """In an environment that has the dependencies, but no file of the sources. `make dist` installs those,
    too."""
    assert script("dist", "--no-install", "--folder", str(tmp_path)).returncode == 0
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    (own,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # A .pth that is found through another one is not followed: the editable installation stays unseen.
    (own / "dependencies.pth").write_text(f"{SITE_PACKAGES}\n")
    install = [str(binaries / "python"), "-m", "pip", "install", "--no-deps", "--ignore-installed"]
    subprocess.run([*install, "--no-index", str(wheel)], check=True, capture_output=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    where = [str(binaries / "python"), "-c", "import cluster; print(cluster.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(own)
    demo = [str(binaries / "tandem"), "demo"]
    done = subprocess.run(demo, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prefix" in done.stdout


def test_the_packaged_chart_renders_and_has_an_index(tmp_path: Path) -> None:
    done = script("chart", "--folder", str(tmp_path), "--url", "https://charts.example")
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tgz")
    (entry,) = yaml.safe_load((tmp_path / "index.yaml").read_text())["entries"]["tandem"]
    assert entry["urls"] == [f"https://charts.example/{archive.name}"]
    assert helm_python.digest(str(archive)) == f"sha256:{entry['digest']}"
    with helm_python.Chart.load_archive(archive.read_bytes()) as chart:
        assert chart.name == "tandem"
        names = {template["name"] for template in chart.templates}
    assert "templates/rayservice.yaml" in names


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (None, "make image needs docker or podman on PATH"),
        ("exit 1", "docker is installed, but its engine does not answer"),
    ],
)
def test_where_no_engine_answers_the_image_says_what_to_do(
    program: str | None, said: str, tmp_path: Path
) -> None:
    if program is not None:
        (tmp_path / "docker").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "docker").chmod(0o755)
    done = script("image", path=str(tmp_path))
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr


def test_both_images_are_built_by_name_and_version(tmp_path: Path) -> None:
    (tmp_path / "docker").write_text('#!/bin/sh\necho "$@" >> "$0.log"\n')
    (tmp_path / "docker").chmod(0o755)
    arguments = ("--name", "registry.example/tandem", "--", "--build-arg", "RELEASE=yes")
    assert script("image", *arguments, path=str(tmp_path)).returncode == 0
    built = [line for line in (tmp_path / "docker.log").read_text().splitlines() if line.startswith("build")]
    for line, target in zip(built, ("cpu", "cuda"), strict=True):
        assert (
            f"--target {target} -t registry.example/tandem:0.1.0-{target} --build-arg RELEASE=yes ." in line
        )
