"""Prints what the kernels that are chosen by card take of cards of four kinds, as a table; no card is needed.

    python tests/gpu/card_table.py [--capabilities 80,89,90,100] [--dtypes bfloat16,float16]
                                   [--parts products,latents,64,96,128,256]

Each line is a kernel as the compiler makes it: registers and bytes of stack (spilled registers) of a thread,
shared memory of a program beside the most that one can have, and how many programs share a multiprocessor of
Hopper. The exit status is 1 if a kernel spills more than four registers, has too much shared memory, or does
not compile. The whole takes half an hour of one core."""

from __future__ import annotations

import argparse
import collections
import itertools
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parent.parent), str(FOLDER.parent / "support")]
# The compiler spills a few registers of its own accord where two programs can share a multiprocessor then.
MOST_STACK_BYTES = 16
PARTS = "products,latents,64,96,128,256"


class Job(NamedTuple):
    """What one process compiles: a part, in a dtype, for a compute capability."""

    capability: int
    dtype: str
    part: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--capabilities", default="80,89,90,100")
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--parts", default=PARTS, help=f"of {PARTS}, and other sizes of heads")
    args = parser.parse_args()
    capabilities = map(int, args.capabilities.split(","))
    jobs = [Job(*it) for it in itertools.product(capabilities, args.dtypes.split(","), args.parts.split(","))]
    print(f"{'card':>4} {'dtype':8} {'part':9} {'kernel':27} num warps  regs stack  shared    most programs")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        are_good = [print_job(job, lines) for job, lines in zip(jobs, pool.map(compiled, jobs), strict=True)]
    return 0 if all(are_good) else 1


def compiled(job: Job) -> list[dict[str, Any]] | str:
    """Return the kernels of a job, or the error where one does not compile."""
    from hopper_compiler import compile_by_script

    arguments = str(job.capability), job.part, job.dtype
    try:
        with tempfile.TemporaryDirectory() as folder:
            return compile_by_script(FOLDER / "compile_cards.py", Path(folder), *arguments)
    except AssertionError as error:  # with what the process printed
        return str(error)


def print_job(job: Job, found: list[dict[str, Any]] | str) -> bool:
    """Print a line for each kind of kernel that a job made, and return whether all fit."""
    from workers.model.cuda.card import Card

    where = f"{job.capability:4} {job.dtype:8} {job.part:9}"
    if isinstance(found, str):
        print(f"{where} {found.strip().splitlines()[-1]}", flush=True)
        return False
    most = Card(job.capability).shared_bytes
    keys = "name", "num_warps", "num_registers", "stack_bytes", "shared_bytes", "programs"
    for kind, count in collections.Counter(tuple(it[key] for key in keys) for it in found).items():
        name, warps, registers, stack, shared, programs = kind
        sizes = f"{registers:5} {stack:5} {shared:7} {most:7} {programs:8}"
        print(f"{where} {name:27} {count:3} {warps:5} {sizes}", flush=True)
    return all(it["stack_bytes"] <= MOST_STACK_BYTES and it["shared_bytes"] <= most for it in found)


if __name__ == "__main__":
    sys.exit(main())
