"""How long a rank takes from the launch of its process until it can serve: `python -m benchmarks.start_up`.

The weights lie in the page cache. Each round starts a rank without the cached digests of the weight files
and, on CUDA, without compiled kernels ("cold"), another with them ("warm"), and on CUDA a third one beside
it ("second"), as the second replica of a node. The limit is what no rank can do without: importing torch, and
reading the weights once at the rate of a plain loop over the same files, both measured in the same round.

A virtual machine may have given memory that nobody uses back to its host, and taking it again can cost more
than all else, seconds a GB on some hosts. Each round therefore takes and frees as much memory as the rank
needs immediately before the rank starts; `--as-found` leaves that out.

JSON lines; `ratio` is the time over the limit, `phases` are seconds, as the rank measures them from the begin
of its process, `cpu_s` the seconds of cores that the start took, which says more than the time does when
other work uses the machine. On CUDA kernels are compiled beside the phases for `kernels_s`, of which
`overlap_s` passed before the rank waited for them; `target_s` is that of `tandem serve` for the whole way
from command to ready (Llama 3 8B in bf16: `--shape 8b --device cuda:0 --folder /dev/shm`), of which Ray takes
a part.
"""

from __future__ import annotations

import argparse
import contextlib
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

from benchmarks.random_checkpoint import LLAMA_8B, QWEN3_06B, write_random_checkpoint
from benchmarks.rank_process import RankProcess
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.host import private_folder
from workers.model.model_config import weight_files

CLOCK = SystemClock()
_PIECE_BYTES = 4 << 20
_BLOCK_TOKENS = 64
# The part of a card that each rank may use: two of them run beside each other.
_CUDA_SHARE = 0.4
_KV_BYTES_PER_TOKEN = 2 * 28 * 8 * 128 * 2
_SHAPES = {"0.6b": ("qwen3", QWEN3_06B), "8b": ("llama", LLAMA_8B)}
# The seconds in which `tandem serve` should be ready with 16 GB of weights.
_START_TO_TARGET_S = {"cold": 40.0, "warm": 25.0, "second": 15.0}


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
    """Print a line for each start, and the median of each kind of start."""
    files = weight_files(model_dir)
    num_bytes = sum(file.stat().st_size for file in files)
    # Digests are kept below the temporary folder, compiled kernels too.
    digests, compiled = folder / private_folder("tandem-digests").name, folder / "triton"
    digests.mkdir(mode=0o700)
    kernels = private_folder("tandem-kernels")
    shutil.copytree(kernels, folder / kernels.name)
    is_on_cuda = arguments.device.startswith("cuda")
    starts: dict[str, list[float]] = {"cold": [], "warm": []}
    if is_on_cuda:
        starts["second"] = []
    environment = {"TMPDIR": str(folder), "TRITON_CACHE_DIR": str(compiled)}
    for round_number in range(arguments.rounds + 1):
        limit_s = import_s() + read_s(files)
        with contextlib.ExitStack() as running:
            for start, times in starts.items():
                if start == "cold":
                    shutil.rmtree(digests)
                    shutil.rmtree(compiled, ignore_errors=True)
                if not arguments.as_found:
                    take_and_free(num_bytes + arguments.kv_tokens * _KV_BYTES_PER_TOKEN)
                rank = RankProcess(
                    model_dir,
                    arguments.dtype,
                    environment,
                    device=arguments.device,
                    num_threads=arguments.threads,
                    num_kv_tokens=arguments.kv_tokens,
                    kv_share=_CUDA_SHARE if is_on_cuda else 0.0,
                )
                if start == "warm" and "second" in starts:
                    running.enter_context(rank)
                    resident_bytes = rank.resident_bytes()
                else:
                    with rank:
                        resident_bytes = rank.resident_bytes()
                if round_number == 0 and not is_on_cuda:  # compiles, and reads the files
                    continue
                times.append(rank.start_s)
                print_start(start, rank, limit_s, num_bytes, resident_bytes, is_on_cuda=is_on_cuda)
    for start, times in starts.items():
        median_s = round(statistics.median(times), 3)
        print(json.dumps({"what": "start_up", "start": start, "median_s": median_s}), flush=True)


def print_start(
    start: str, rank: RankProcess, limit_s: float, num_bytes: int, resident_bytes: int, *, is_on_cuda: bool
) -> None:
    """Print the line of one start."""
    ready = rank.ready
    line: dict[str, object] = {
        "what": "start_up",
        "start": start,
        "weights_mib": round(num_bytes / 2**20, 1),
        "kv_tokens": ready.num_blocks * _BLOCK_TOKENS,
        "phases": {name: round(phase_s, 3) for name, phase_s in ready.phase_to_s.items()},
        "load_s": round(ready.load_s, 3),
        "warm_up_s": round(ready.warm_up_s, 3),
        "resident_mib": round(resident_bytes / 2**20, 1),
        "start_s": round(rank.start_s, 3),
        "cpu_s": round(rank.start_cpu_s, 3),
        "limit_s": round(limit_s, 3),
        "ratio": round(rank.start_s / limit_s, 3),
    }
    if is_on_cuda:
        waited_s = ready.phase_to_s.get("compiling kernels", 0.0)
        line |= {
            "kernels_s": round(ready.kernels_s, 3),
            "overlap_s": round(max(0.0, ready.kernels_s - waited_s), 3),
            "target_s": _START_TO_TARGET_S[start],
        }
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="default: random weights in a shape")
    parser.add_argument("--shape", default="0.6b", choices=list(_SHAPES), help="Qwen3-0.6B or Llama 3 8B")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="where the weights and all caches are kept meanwhile")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--kv-tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as-found", action="store_true", help="do not take the rank's memory beforehand")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tandem-start-", dir=arguments.folder))
    try:
        model_dir = arguments.model
        if model_dir is None:
            model_dir = folder / "model"
            family, fields = _SHAPES[arguments.shape]
            device = arguments.device
            write_random_checkpoint(model_dir, family, seed=1, dtype="bfloat16", device=device, **fields)
        measure(arguments, model_dir, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
