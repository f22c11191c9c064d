"""Run the suite of this folder on a card, in the layout that fits eight minutes, and print a table.

`tests/gpu/run` calls it. It needs nothing beside Python and what the tests need. Each file has a process of
its own, since an error of the device spoils all that follows in its process; eight of them compile kernels
at a time. What measures or fills the device runs alone afterwards, then a cluster, then figures.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# By how long their compilation takes, longest first.
SIDE_BY_SIDE = (
    "attention", "decoder", "experts", "latents", "engine", "products", "graphs", "warm_up", "quantized_kv",
    "sampling", "layer_ops", "checksum", "kernel_noise", "layer_launches", "compiled_attention",
    "compiled_layer_kernels", "compiled_experts", "compiled_quantized_products", "host_experts",
    "gated_delta", "state_layers", "compiled_states", "quantized_products", "quantized_experts",
    "compiled_quantized_experts", "quantized_records", "piece_tables", "pieced_attention",
    "segmented_products", "thin_products", "card_tiles", "compiled_cards", "kernel_times",
    "kernel_compiler", "kernel_rehearsal", "mixed_graphs",
)  # fmt: skip
# Files that compile for longer than a file may take: their tests are divided between so many processes.
PARTS_OF = {"attention": 3, "decoder": 2, "experts": 2}
ALONE = ("memory", "offload", "device_transfer", "one_shot_sums", "shared_card", "two_ranks")
FIGURES = ("cuda_ipc", "hand_over", "rank_sums", "decode", "prefill", "experts", "hybrid")
# All parts, those first that say the most of a whole cluster and of a decode step.
ALL_FIGURES = (
    "served", "decode", "prefill", "kernels", "deterministic", "cuda_ipc", "hand_over", "start", "mixed",
    "products", "idle", "host", "long_context", "hybrid", "experts", "engine_int4", "engine_fp8",
    "quantized", "quantized_experts", "sampling", "offload", "rank_sums", "nccl_pair",
)  # fmt: skip
NUM_AT_ONCE = 8
TOTAL_S = 480.0
FILE_S = 170.0
CLUSTER_S = 120.0
# How long a command that ran out of time may take to end.
END_S = 15.0
# What of TOTAL_S a stage must find left, or it is not begun.
_LEAST_S = 15.0


class Row(NamedTuple):
    """A line of the table."""

    name: str
    result: str
    seconds: float
    detail: str


class Figure(NamedTuple):
    """A line of `benchmarks.gpu` that has a target, or an error instead ("" none)."""

    part: str
    name: str
    ratio: float
    target: float
    error: str = ""

    @property
    def text(self) -> str:
        if self.error:
            return f"not measured  {self.part}: {self.error[:100]}"
        verdict = "met" if self.ratio >= self.target else "MISSED"
        return (
            f"{verdict:12}  {self.part}: {self.name}, {self.ratio:.3g} of the limit, target {self.target:g}"
        )


class Stages:
    """Runs commands within the time that is left, and keeps what they print in a folder."""

    def __init__(self, out: Path, env: Mapping[str, str], total_s: float = TOTAL_S) -> None:
        self._out = out
        self._env = dict(env)
        self._end = time.monotonic() + total_s
        self.rows: list[Row] = []
        self.figures: list[Figure] = []

    @property
    def left_s(self) -> float:
        return self._end - time.monotonic()

    def run(self, name: str, command: Sequence[str], limit_s: float) -> Row:
        """Run one command and note its row."""
        limit_s = min(limit_s, self.left_s)
        if limit_s < _LEAST_S:
            row = Row(name, "not run", 0.0, "no time was left")
            self.rows.append(row)
            return row
        started_at = time.monotonic()
        log = self._out / f"{name}.txt"
        with log.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self._env,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
                process.send_signal(signal.SIGINT)  # so that it ends what it has started in other groups
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = time.monotonic() - started_at
        row = Row(name, *_outcome(status, log.read_text(errors="replace"), limit_s, seconds))
        self.rows.append(row)
        print(f"{row.name}: {row.result} ({row.seconds:.0f} s)", flush=True)
        return row

    def run_files(self, names: Sequence[str], num_at_once: int) -> None:
        """Run test files, so many at a time, in this order."""
        with concurrent.futures.ThreadPoolExecutor(num_at_once) as pool:
            list(pool.map(lambda name: self.run(name, pytest_command(name), FILE_S), names))

    def run_figures(self, part: str, limit_s: float) -> None:
        """Run a part of `benchmarks.gpu`, and note which of its figures reach their targets."""
        name = f"figures of {part}"
        row = self.run(name, [sys.executable, "-m", "benchmarks.gpu", part], limit_s)
        log = self._out / f"{name}.txt"
        text = log.read_text(errors="replace") if row.result != "not run" else ""
        found = list(figures_in(text))
        if row.result != "ok":
            found.append(Figure(part, "", 0.0, 0.0, f"{row.result}, {row.detail}"))
        self.figures += found


def figures_in(text: str) -> Iterator[Figure]:
    """Yield the figures with a target, and the errors, of what `benchmarks.gpu` has printed."""
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:  # a library's
            continue
        if not isinstance(found, dict):
            continue
        if error := found.get("error"):
            yield Figure(found["part"], "", 0.0, 0.0, error)
        elif "target" in found:
            yield Figure(found["part"], found["figure"], found["ratio"], found["target"])


def _outcome(status: int | None, text: str, limit_s: float, seconds: float) -> tuple[str, float, str]:
    """Return result, seconds and detail of what a command printed."""
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", last)
    if status is None:
        return "timeout", seconds, f"ended after {limit_s:.0f} s"
    return ("ok" if status == 0 else "FAILED"), seconds, ", ".join(counts) or last[:80]


def parts(names: Sequence[str]) -> list[str]:
    """Return what runs in a process each: files, or `attention-2of3`, their parts."""
    return [
        f"{name}-{part}of{num_parts}" if num_parts > 1 else name
        for name in names
        for num_parts in [PARTS_OF.get(name, 1)]
        for part in range(1, num_parts + 1)
    ]


def pytest_command(name: str) -> list[str]:
    """Return the command that runs a file or a part of it."""
    file, _, part = name.partition("-")
    options = ["-c", "tests/gpu/pytest.ini", "-q", "-rs", *(["--part", part] if part else [])]
    return [sys.executable, "-m", "pytest", *options, f"tests/gpu/test_{file}.py"]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text, failures first."""
    order = {"FAILED": 0, "timeout": 1, "not run": 2}
    ordered = sorted(rows, key=lambda row: order.get(row.result, 3))
    return "\n".join(f"{row.name:24} {row.result:8} {row.seconds:6.1f} s  {row.detail}" for row in ordered)


def environment(packages: Path | None) -> dict[str, str]:
    """Return the environment of the children: the repository, then the brought packages, come before what the
    interpreter finds by itself."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT), *([str(packages)] if packages else []), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return env


def unpack(archive: Path, folder: Path) -> None:
    """Unpack the packages of `pack.py` into a plain folder. A virtual environment with the packages of the
    system would see none of these where the machine's Python is itself one."""
    folder.mkdir(parents=True)
    subprocess.run(["tar", "-xJf", str(archive), "-C", str(folder)], check=True)


def card(env: Mapping[str, str]) -> str:
    """Return what the card, torch and triton are; "" where torch finds no card."""
    script = (
        "import torch, platform, importlib.metadata as m\n"
        "assert torch.cuda.is_available()\n"
        "print(torch.cuda.get_device_name(0), '| torch', torch.__version__, '| triton', m.version('triton'),"
        " '| Python', platform.python_version())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=dict(env), capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--packages", type=Path, help="an archive of packages made by pack.py, where there is no registry"
    )
    parser.add_argument("--out", type=Path, help="where the output of each file goes; default: a new folder")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--only", help="names of files (attention,memory) instead of all and the rest")
    what.add_argument("--figures", help="parts of benchmarks.gpu (served,start, or all) instead of the tests")
    parser.add_argument(
        "--minutes", type=float, default=TOTAL_S / 60, help="what no longer fits is not run; default: 8"
    )
    parser.add_argument("--cpu", action="store_true", help="run the files also without a card, interpreted")
    args = parser.parse_args()
    if args.packages and not args.packages.is_file():
        parser.error(f"--packages {args.packages}: no such file; make one with tests/gpu/pack.py")
    out: Path = args.out or Path(tempfile.mkdtemp(prefix="tandem-gpu-"))
    out.mkdir(parents=True, exist_ok=True)
    packages = out / "packages" if args.packages else None
    if packages is not None:
        unpack(args.packages, packages)
    env = environment(packages)
    found = card(env)
    if not found and not args.cpu:
        print(f"{sys.executable} finds no CUDA device (or no torch and triton): nothing was run")
        return 2
    print(found or "no CUDA device: kernels are interpreted", flush=True)
    stages = Stages(out, env, 60 * args.minutes)
    if args.only:
        stages.run_files(parts(args.only.split(",")), NUM_AT_ONCE)
    elif args.figures:
        for part in ALL_FIGURES if args.figures == "all" else args.figures.split(","):
            stages.run_figures(part, stages.left_s)
    else:
        has_ray = packages is not None and (packages / "ray").is_dir()
        run_all(stages, has_ray=has_ray or importlib.util.find_spec("ray") is not None)
    print(f"\n{found}\n{table(stages.rows)}\n")
    if stages.figures:
        print("\n".join(figure.text for figure in stages.figures), end="\n\n")
    print(f"output of each: {out}")
    return int(any(row.result != "ok" for row in stages.rows if row.result != "not run"))


def run_all(stages: Stages, *, has_ray: bool) -> None:
    """Run everything, the cluster only where there is Ray."""
    stages.run_files(parts(SIDE_BY_SIDE), NUM_AT_ONCE)
    stages.run_files(ALONE, 1)
    if not has_ray:
        stages.rows.append(Row("cluster", "not run", 0.0, "ray is not installed"))
    else:
        cluster = [sys.executable, str(HERE / "one_card_cluster.py")]
        stages.run("cluster", cluster, CLUSTER_S + 30)
        stages.run("cluster with tp 2", [*cluster, "--tp", "2"], CLUSTER_S + 30)
    for part in FIGURES:
        stages.run_figures(part, 90)


if __name__ == "__main__":
    sys.exit(main())
