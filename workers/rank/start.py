"""The entry of a rank process: what needs no torch begins while torch is being imported, on other cores: the
hash of the weights, and on CUDA the compiler of kernels.

`python -m workers.rank.start` reads its `RankSpec` frame from standard input."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from pathlib import Path
from typing import BinaryIO

from kvtransfer.codec import read_frame
from kvtransfer.common.clock import SystemClock
from kvtransfer.errors import PeerGoneError
from workers.errors import CheckpointError
from workers.messages.rank_channel import RANK_SPEC_CODEC, RankSpec
from workers.model.fingerprint import FingerprintTask
from workers.rank.began_tasks import BeganTasks
from workers.rank.kernel_task import KernelTask, has_task


def start_rank(spec: RankSpec) -> None:
    """Import torch and serve as this rank, as `workers.rank.process.run_rank` describes.

    What the imports make stays out of garbage collection: to look through it again and again takes a fifth of
    the imports' time, and later pauses of the serving rank."""
    clock, fingerprint = SystemClock(), None
    began_at = clock.now()
    with contextlib.ExitStack() as at_the_end:
        kernels = at_the_end.enter_context(KernelTask(spec, clock)) if has_task(spec) else None
        with contextlib.suppress(CheckpointError):  # found again, and reported, when the rank loads
            fingerprint = FingerprintTask(Path(spec.model_dir), clock)
        gc.disable()
        from workers.rank.process import run_rank  # here: it imports torch

        gc.freeze()
        gc.enable()
        run_rank(spec, BeganTasks(fingerprint, kernels, began_at))


def read_spec(stream: BinaryIO) -> RankSpec:
    """Read the one frame on `stream`. Raises `TransferError` if it is cut short or no RankSpec."""
    frame = read_frame(stream)
    if frame is None:
        raise PeerGoneError("standard input ended before the rank's specification")
    return RANK_SPEC_CODEC.decode(frame)


def main() -> None:
    """Run a rank by the `RankSpec` on standard input."""
    # Control-C reaches the whole process group; the engine core decides when its ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start_rank(read_spec(sys.stdin.buffer))
    # NIXL's libraries crash in the interpreter's own end; everything of value is closed by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
