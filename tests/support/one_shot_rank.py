"""A rank that does one-shot exchanges with another process; see `test_one_shot_sums`.

    python one_shot_rank.py FOLDER RANK DEVICE

It prints "ready", then for each number of elements on standard input exchanges so many and prints "done". The
ranks take cards in turn, so that they may share one. On the CPU they share files of the folder, and kernels
are interpreted.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from shared_buffers import file_buffers
from torch import Tensor

from benchmarks.rank_cards import card_of
from kvtransfer.transports.cuda_driver import cuda_driver
from workers.model.cuda.one_shot_sums import buffer_bytes
from workers.rank.one_shot_group import OneShotGroup, OneShotSums
from workers.rank.peer_buffers import PeerBuffers

TP = 2
DTYPES = (torch.float32, torch.bfloat16, torch.int32)


def form(folder: Path, rank: int, device: torch.device) -> OneShotGroup:
    """Form the group with the other rank, over a socket of the folder."""
    path = str(folder / "socket")
    if rank == 0:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{path} of rank 0")
            listener.listen()
            Path(f"{path} of rank 0").rename(path)  # now it can be reached
            sock, _ = listener.accept()
    else:
        pause = threading.Event()
        while not Path(path).exists():
            pause.wait(0.01)
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
    sockets = {1 - rank: sock}
    if device.type == "cuda":
        own = torch.zeros(buffer_bytes(TP), dtype=torch.uint8, device=device)
        buffers = PeerBuffers.form(cuda_driver(device.index), sockets, own, rank)
        assert isinstance(buffers, PeerBuffers), buffers
    else:
        buffers = file_buffers(folder, sockets, buffer_bytes(TP), rank)
    unused: Any = None  # nothing goes through host memory
    return OneShotGroup(OneShotSums(buffers, rank), None, unused, sockets, is_ordered=True)


def parts(num_elements: int, device: torch.device) -> Iterator[list[Tensor]]:
    """Yield what the ranks exchange in a round, the same at each, in every dtype."""
    draw = torch.Generator().manual_seed(num_elements)
    for dtype in DTYPES:
        drawn = [torch.randint(-99, 99, (num_elements,), generator=draw) / 8 for _ in range(TP)]
        yield [each.to(dtype).to(device) for each in drawn]


def main(folder: Path, rank: int, device: torch.device) -> None:
    if device.type == "cuda":
        device = card_of(rank)
        torch.cuda.set_device(device)
    group = form(folder, rank, device)
    print("ready", flush=True)
    for line in sys.stdin:
        for given in parts(int(line), device):
            group.all_reduce(given[rank])
        group.check()
        print("done", flush=True)
    group.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), torch.device(sys.argv[3]))
