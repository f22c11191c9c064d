"""How long a rank takes from the launch of its process until it can serve: `python -m benchmarks.start_up`.

The weights lie in the page cache. Each round starts a rank without the cached digests of the weight files
("cold") and another with them ("warm"). The limit is what no rank can do without: importing torch, and
reading the weights once at the rate of a plain loop over the same files, both measured in the same round.

A virtual machine may have given memory that nobody uses back to its host, and taking it again can cost more
than all else, seconds a GB on some hosts. Each round therefore takes and frees as much memory as the rank
needs immediately before the rank starts; `--as-found` leaves that out.

JSON lines; `ratio` is the time over the limit, `phases` are seconds, `cpu_s` the seconds of cores that the
start took, which says more than the time does when other work uses the machine.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.random_checkpoint import QWEN3_06B, write_random_checkpoint
from benchmarks.rank_process import RankProcess
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.host import private_folder
from workers.model.model_config import weight_files

CLOCK = SystemClock()
_PIECE_BYTES = 4 << 20
_KV_BYTES_PER_TOKEN = 2 * 28 * 8 * 128 * 2


def import_s() -> float:
    """Return the seconds in which a process starts and has imported torch."""
    began_at = CLOCK.now()
    command = [sys.executable, "-c", "import torch; print(flush=True)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        elapsed_s = CLOCK.now() - began_at
    return elapsed_s


def read_s(files: Sequence[Path]) -> float:
    """Return the seconds of a loop of one thread that copies all bytes out of the page cache."""
    buffer = mmap.mmap(-1, _PIECE_BYTES)
    began_at = CLOCK.now()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    return CLOCK.now() - began_at


def take_and_free(num_bytes: int) -> None:
    """Touch so much memory in a process that ends at once."""
    code = f"import mmap; m = mmap.mmap(-1, {num_bytes}); m.madvise(mmap.MADV_HUGEPAGE); m.madvise(23)"
    subprocess.run([sys.executable, "-c", code], check=True)


def measure(arguments: argparse.Namespace, model_dir: Path, folder: Path) -> None:
    files = weight_files(model_dir)
    num_bytes = sum(file.stat().st_size for file in files)
    # Digests are kept below the temporary folder, compiled kernels too.
    (folder / private_folder("tandem-digests").name).mkdir(mode=0o700)
    kernels = private_folder("tandem-kernels")
    shutil.copytree(kernels, folder / kernels.name)
    results: dict[str, list[float]] = {"cold": [], "warm": []}
    for round_number in range(arguments.rounds + 1):
        limit_s = import_s() + read_s(files)
        for digests in results:
            cached = folder / private_folder("tandem-digests").name
            if digests == "cold":
                shutil.rmtree(cached)
            if not arguments.as_found:
                take_and_free(num_bytes + arguments.kv_tokens * _KV_BYTES_PER_TOKEN)
            rank = RankProcess(
                model_dir,
                arguments.dtype,
                {"TMPDIR": str(folder)},
                num_threads=arguments.threads,
                num_kv_tokens=arguments.kv_tokens,
            )
            with rank:
                resident_bytes = rank.resident_bytes()
            if round_number == 0:  # compiles, and reads the files
                continue
            results[digests].append(rank.start_s)
            line = {
                "what": "start_up",
                "digests": digests,
                "weights_mib": round(num_bytes / 2**20, 1),
                "kv_tokens": arguments.kv_tokens,
                "phases": {name: round(phase_s, 3) for name, phase_s in rank.phase_s().items()},
                "load_s": round(rank.ready.load_s, 3),
                "warm_up_s": round(rank.ready.warm_up_s, 3),
                "resident_mib": round(resident_bytes / 2**20, 1),
                "start_s": round(rank.start_s, 3),
                "cpu_s": round(rank.start_cpu_s, 3),
                "limit_s": round(limit_s, 3),
                "ratio": round(rank.start_s / limit_s, 3),
            }
            print(json.dumps(line), flush=True)
    for digests, times in results.items():
        median_s = round(statistics.median(times), 3)
        print(json.dumps({"what": "start_up", "digests": digests, "median_s": median_s}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="default: random weights in the shape of Qwen3-0.6B")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--kv-tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as-found", action="store_true", help="do not take the rank's memory beforehand")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tandem-start-"))
    try:
        model_dir = arguments.model
        if model_dir is None:
            model_dir = folder / "model"
            write_random_checkpoint(model_dir, "qwen3", seed=1, dtype="bfloat16", **QWEN3_06B)
        measure(arguments, model_dir, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
