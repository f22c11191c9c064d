"""What a step costs beyond its computation when two ranks share every layer: `python -m benchmarks.parallel`.

Three kinds of lines, `figure` and `limit` in microseconds, `ratio` the first over the second.

*plan*: from before the plan is encoded in one process until the slower of two ranks has decoded it, for a
plan that decodes 1 and 16 sequences. The limit is to wake a process that has slept for a while.

*all-reduce*: the sum of [rows, hidden size] over two ranks, as a rank does it (`rank`), by gloo's own
all-reduce, and over a plain socket between the two. The limit is to wake a process that has just fallen
asleep, and the bytes once over the memory's bandwidth.

*step*: the time between two tokens of a replica of two ranks. The limit is half of what one rank alone
computes for a step, the plan's delivery and two all-reduces a layer, all as measured here.

To wake a process is half a round trip of a byte over two pipes, between two cores. The replica's two ranks
and its engine core need cores of their own; what else runs shows most in the step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from threading import Event
from typing import Any

import numpy as np
import torch

from benchmarks.delivery import (
    BroadcastSender,
    RingSender,
    Sender,
    SocketSender,
    find_store,
    gloo_group,
    open_store,
    receiver,
)
from benchmarks.random_checkpoint import write_random_checkpoint
from benchmarks.replica import CLOCK, bare_replica
from kvtransfer.rpc.trust import Trust
from workers.config import EngineConfig, Parallel
from workers.messages.rank_channel import RANK_DOWN_CODEC, StepPlan
from workers.rank.collectives import RankGroups

NUM_RANKS = 2
BLOCK_TOKENS = 16
# The context of each sequence of a plan that is delivered: its block table is in the plan.
CONTEXT_TOKENS = 1024
# Between plans, so that the receivers sleep.
PAUSE_S = 0.003
MODEL: dict[str, Any] = {
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
_NEVER = Event()


# ---------------------------------------------------------------------------------- processes beside this


@contextmanager
def part(
    kind: str, order: dict[str, Any], inherited: tuple[int, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """Start a process of this program that plays one part, with one thread."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.parallel", "--part", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=inherited,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    print(json.dumps(order), file=process.stdin, flush=True)
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait()


def answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a part of the benchmark ended early")
    return json.loads(line)


def play_receiver(order: dict[str, Any]) -> None:
    """Tell when each plan was decoded."""
    end = receiver(order)
    print("true", flush=True)
    times = []
    for step in range(order["plans"]):
        plan = RANK_DOWN_CODEC.decode(end.receive())
        times.append(CLOCK.now())
        assert isinstance(plan, StepPlan)
        assert plan.step == step
    print(json.dumps(times), flush=True)


def play_reducer(order: dict[str, Any]) -> None:
    """Tell the microseconds of each all-reduce, by both ways and all numbers of rows."""
    torch.set_num_threads(1)
    rank, device = order["rank"], torch.device("cpu")
    store = find_store(order["port"])
    groups = RankGroups(
        store,
        tp=NUM_RANKS,
        pp=1,
        rank=rank,
        device=device,
        host="127.0.0.1",
        host_id="here",
        trust=Trust.of(b"between the ranks of this benchmark"),
    )
    gloo = gloo_group(store, "gloo", rank, NUM_RANKS)
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "rank": groups.all_reduce,
        "gloo": lambda tensor: gloo.allreduce([tensor]).wait(),
        "plain socket": lambda tensor: _sum_over_socket(connection, tensor),
    }
    connection = socket.socket(fileno=order["socket"])
    for num_rows in order["rows"]:
        for way, reduce in ways.items():
            tensor = torch.zeros(num_rows, order["hidden"])
            times = []
            for _ in range(order["repeat"]):
                began_at = CLOCK.now()
                reduce(tensor)
                times.append(1e6 * (CLOCK.now() - began_at))
            print(json.dumps([way, num_rows, times[order["repeat"] // 10 :]]), flush=True)


def _sum_over_socket(connection: socket.socket, tensor: torch.Tensor) -> None:
    """Sum a tensor over both processes, each of which sends as the other's buffers allow, and receives, until
    nothing is left."""
    other = torch.empty_like(tensor)
    to_send, to_receive = (memoryview(each.numpy().data).cast("B") for each in (tensor, other))
    while to_send or to_receive:
        if to_send:
            with suppress(BlockingIOError):
                to_send = to_send[connection.send(to_send, socket.MSG_DONTWAIT) :]
        if to_receive:
            with suppress(BlockingIOError):
                flags = socket.MSG_DONTWAIT if to_send else 0
                to_receive = to_receive[connection.recv_into(to_receive, 0, flags) :]
    tensor += other


def play_echo(order: dict[str, Any]) -> None:
    os.sched_setaffinity(0, {order["core"]})
    for _ in range(order["repeat"]):
        os.write(order["out"], os.read(order["in"], 1))


# ------------------------------------------------------------------------------------------- the measures


def wake_up_us(repeat: int, pause_s: float) -> float:
    """Return half a round trip of a byte between two processes on two cores. Each sleeps until the byte
    comes, the second for `pause_s` at least."""
    there, back = os.pipe(), os.pipe()
    cores = os.sched_getaffinity(0)
    order = {"in": there[0], "out": back[1], "repeat": repeat, "core": max(cores)}
    times = []
    os.sched_setaffinity(0, {min(cores)})
    with part("echo", order, (there[0], back[1])):
        for _ in range(repeat):
            _NEVER.wait(pause_s)
            began_at = CLOCK.now()
            os.write(there[1], b".")
            os.read(back[0], 1)
            times.append(1e6 * (CLOCK.now() - began_at))
    os.sched_setaffinity(0, cores)
    for fd in (*there, *back):
        os.close(fd)
    return median(times[repeat // 10 :]) / 2


def memory_gb_s() -> float:
    """Return the GB a second read and written by a copy that fits no cache; the best of several."""
    source = np.ones(64 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    rates = []
    for _ in range(5):
        began_at = CLOCK.now()
        np.copyto(target, source)
        rates.append(2 * source.nbytes / (CLOCK.now() - began_at) / 1e9)
    return max(rates)


def decode_plan(step: int, batch: int) -> StepPlan:
    """Return a plan in which every slot decodes."""
    return StepPlan(step, decodes=np.arange(batch, dtype="<u4").tobytes())


def deliver(sender: Sender, batch: int, repeat: int) -> list[float]:
    """Return the microseconds of each plan until both ranks have it."""
    sent = []
    with ExitStack() as parts:
        processes = [
            parts.enter_context(part("receiver", {**order, "plans": repeat}, sender.inherited()))
            for order in sender.orders()
        ]
        sender.ready()
        for process in processes:
            answer(process)
        for step in range(repeat):
            _NEVER.wait(PAUSE_S)
            sent.append(CLOCK.now())
            sender.send(RANK_DOWN_CODEC.encode(decode_plan(step, batch)))
        received = [answer(process) for process in processes]
    delays = [1e6 * (max(at) - began) for began, *at in zip(sent, *received, strict=True)]
    return delays[repeat // 10 :]  # the first ones warm up


def measure_plans(batches: list[int], repeat: int, wake_us: float) -> dict[int, float]:
    """Print every way; return how long the one that is used takes, by batch."""
    batch_to_us = {}
    for batch in batches:
        frame = RANK_DOWN_CODEC.encode(decode_plan(0, batch))
        # Steps below 128 are one byte, and all frames of a group then have one length.
        num_bytes, num_plans = len(frame), min(repeat, 128)
        ways: dict[str, tuple[Callable[[], Sender], int]] = {
            "tcp": (lambda: SocketSender("tcp", NUM_RANKS), repeat),
            "unix socket": (lambda: SocketSender("unix", NUM_RANKS), repeat),
            "ring, woken": (lambda: RingSender(NUM_RANKS, spins=False), repeat),
            "ring, spinning": (lambda: RingSender(NUM_RANKS, spins=True), repeat),
            "gloo broadcast": (lambda size=num_bytes: BroadcastSender(NUM_RANKS, size), num_plans),  # type: ignore[misc]
        }
        for how, (make, count) in ways.items():
            delays = deliver(make(), batch, count)
            emit("plan", median(delays), wake_us, how=how, batch=batch, p95_us=_p95(delays), bytes=num_bytes)
            if how == "tcp":
                batch_to_us[batch] = median(delays)
    return batch_to_us


def measure_sums(
    rows: list[int], hidden: int, num_layers: int, repeat: int, limits: tuple[float, float]
) -> dict[int, float]:
    """Print all ways; return how long the one that is used takes, by number of rows. `limits`: to wake a
    process (microseconds), and the memory's bandwidth (GB/s)."""
    wake_us, gb_s = limits
    store = open_store()
    rows_to_us = {}
    common = {"port": store.port, "rows": rows, "hidden": hidden, "repeat": repeat}
    with ExitStack() as parts:
        fds = [parts.enter_context(end).fileno() for end in socket.socketpair()]
        processes = [
            parts.enter_context(part("reducer", {**common, "rank": rank, "socket": fd}, (fd,)))
            for rank, fd in enumerate(fds)
        ]
        for _ in range(3 * len(rows)):
            (how, num_rows, times), *_ = [answer(process) for process in processes]
            num_bytes = 4 * num_rows * hidden
            limit_us = wake_us + num_bytes / gb_s / 1e3
            step_us = 2 * num_layers * median(times)
            fields = {"how": how, "rows": num_rows, "bytes": num_bytes}
            emit(
                "all-reduce", median(times), limit_us, **fields, p95_us=_p95(times), step_us=round(step_us, 1)
            )
            if how == "rank":
                rows_to_us[num_rows] = median(times)
    return rows_to_us


async def step_times(
    model_dir: Path, dtype: str, tp: int, batch: int, num_tokens: int
) -> tuple[float, float]:
    """Return (between two tokens, a rank's own time for a step), microseconds, while `batch` sequences
    decode."""
    engine = EngineConfig(block_tokens=BLOCK_TOKENS, kv_tokens=(num_tokens + 64) * batch + 256)
    async with bare_replica(model_dir, dtype, Parallel(tp=tp), engine) as replica:
        names = [replica.submit(8, num_tokens) for _ in range(batch)]
        await replica.until(lambda: replica.finished.issuperset(names))
        whole = {step for step, plan in replica.plans.items() if plan.num_sequences == batch}
        busy = [span.finished_at - span.started_at for span in replica.spans if span.step in whole]
        gaps = [after - before for name in names for before, after in pairwise(replica.token_times[name][4:])]
    return 1e6 * median(gaps), 1e6 * median(busy[len(busy) // 10 :])


def measure_steps(
    args: argparse.Namespace, batch_to_plan_us: dict[int, float], rows_to_sum_us: dict[int, float]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder)
        shape = {**MODEL, "hidden_size": args.hidden, "num_hidden_layers": args.layers}
        write_random_checkpoint(model_dir, "llama", seed=0, **shape)
        for batch in args.batch:
            alone: list[tuple[float, float]] = []
            shared: list[tuple[float, float]] = []
            for _ in range(args.rounds):
                for tp, times in ((1, alone), (NUM_RANKS, shared)):
                    times.append(asyncio.run(step_times(model_dir, args.dtype, tp, batch, args.tokens)))
            gap_us, busy_us = (median(each) for each in zip(*alone, strict=True))
            shared_us, shared_busy_us = (median(each) for each in zip(*shared, strict=True))
            sums_us = 2 * args.layers * rows_to_sum_us[batch]
            limit_us = busy_us / NUM_RANKS + batch_to_plan_us[batch] + sums_us
            parts = {"half_us": busy_us / NUM_RANKS, "plan_us": batch_to_plan_us[batch], "sums_us": sums_us}
            parts |= {"one_rank_us": gap_us, "rank_busy_us": shared_busy_us}
            rounded = {key: round(value, 1) for key, value in parts.items()}
            shape = {"layers": args.layers, "hidden": args.hidden, "dtype": args.dtype}
            emit(
                "step",
                shared_us,
                limit_us,
                batch=batch,
                **rounded,
                speed_up=round(gap_us / shared_us, 3),
                **shape,
            )


def emit(what: str, figure: float, limit: float, **fields: Any) -> None:
    line = {"benchmark": "parallel", "what": what, "figure": round(figure, 1), "limit": round(limit, 1)}
    print(json.dumps({**line, "ratio": round(figure / limit, 3), **fields}), flush=True)


def _p95(values: list[float]) -> float:
    return round(quantiles(values, n=20)[-1], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dtype", default="fp32", help="bf16, fp16 or fp32")
    parser.add_argument("--batch", type=lambda text: [int(it) for it in text.split(",")], default="1,16")
    parser.add_argument("--tokens", type=int, default=96, help="of each sequence, for the step")
    parser.add_argument("--repeat", type=int, default=400, help="plans, sums and wake-ups")
    parser.add_argument("--rounds", type=int, default=3, help="of the step, one rank and two by turns")
    parser.add_argument("--part", choices=["receiver", "reducer", "echo"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        play = {"receiver": play_receiver, "reducer": play_reducer, "echo": play_echo}[args.part]
        play(json.loads(sys.stdin.readline()))
        sys.stdout.flush()
        os._exit(0)  # gloo's threads may outlive the interpreter
    idle_wake_us, wake_us = wake_up_us(args.repeat, PAUSE_S), wake_up_us(10 * args.repeat, 0.0)
    plans = measure_plans(args.batch, args.repeat, idle_wake_us)
    limits = wake_us, memory_gb_s()
    sums = measure_sums([*args.batch, 256], args.hidden, args.layers, args.repeat, limits)
    measure_steps(args, plans, sums)


if __name__ == "__main__":
    main()
