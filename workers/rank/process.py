"""A rank process: one executor and one transfer agent, driven by the engine core over a framed connection.

    start:          --RankJoined--> engine core --FormGroup--> load, warm up together --RankReady--> engine core
                    (and RankProgress wherever it has come further)
    reader thread:  engine core --StepPlan--> queue      engine core --transfer order--> TransferAgent.handle
    main thread:    queue --> ModelRunner.run --StepReport--> engine core
    agent's threads:                               TransferReport--> engine core

`python -m workers.rank.process` reads its `RankSpec` frame from standard input.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from msgspec.structs import replace
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # the type stubs leave it out
from torch.distributed.distributed_c10d import Store

from kvtransfer.agent.agent import TRANSFER_THREADS, TransferAgent
from kvtransfer.common.clock import Clock, SystemClock
from kvtransfer.common.faults import Faults
from kvtransfer.common.host import host_id
from kvtransfer.errors import PeerGoneError, TransferError
from kvtransfer.messages import RankEndpoints
from kvtransfer.rpc.framing import prove_as_client, receive_frame, send_frame
from kvtransfer.store.messages import StoreOrder
from kvtransfer.store.worker import StoreWorker
from workers.errors import RankDiedError, WorkerError
from workers.messages import (
    RANK_DOWN_CODEC,
    RANK_SPEC_CODEC,
    RANK_UP_CODEC,
    FormGroup,
    RankFailed,
    RankJoined,
    RankProgress,
    RankReady,
    RankSpec,
    RankUp,
    Shutdown,
    StageCost,
    StepPlan,
    StepProgress,
    StepReport,
)
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.sizes import refuse_empty_parts
from workers.model.weights import ShardSpec
from workers.rank.collectives import RankGroups
from workers.rank.model_runner import ModelRunner, read_dtype
from workers.rank.probe import AT_START, DeviceLimits, Probe, ProbeResult, device_memory, measure_limits
from workers.rank.progress import Progress

_CONNECT_TIMEOUT_S = 10.0
_LENGTH = struct.Struct("<I")
_MEMORY_S = 2.0
# How often a rank looks whether a long step has progressed.
PROGRESS_S = 0.25


def run_rank(spec: RankSpec) -> None:
    """Serve the engine core at `spec.engine_core_address` until it says `Shutdown`.

    The process ends with status 0 when the connection to the engine core ends, and with status 1, after a
    `RankFailed`, on any exception. Raises `TransferError` when the engine core cannot be reached at all.
    """
    channel = _EngineCoreChannel(_connect(spec))
    _end_with_transfer_threads(channel, spec.rank)
    with _FailureReport(channel, spec.rank):
        _Rank(spec, channel, SystemClock()).serve()


class _Rank:
    """The life of a rank: join the others, load, warm up with them, announce, then run plans in order."""

    def __init__(self, spec: RankSpec, channel: _EngineCoreChannel, clock: Clock) -> None:
        self._spec = spec
        self._channel = channel
        self._clock = clock
        self._faults = Faults(spec.faults)
        self._limits = DeviceLimits(0.0, 0.0)
        self._memory_told_at = 0.0
        self._formed: queue.SimpleQueue[FormGroup] = queue.SimpleQueue()
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._agent: TransferAgent | None = None
        self._hands: StoreWorker | None = None
        self._leaving = False

    def serve(self) -> None:
        # From the start, although orders come only after RankReady: the engine core's end is noticed while loading.
        threading.Thread(target=self._read_orders, name="orders", daemon=True).start()
        torch.set_num_threads(self._spec.num_threads)
        self._enter("probing the device")
        joined, store = join(self._spec, self._clock)
        self._channel.send(joined)
        device = torch.device(self._spec.device)
        dtype = read_dtype(self._spec.dtype)
        self._limits = measure_limits(device, dtype, self._clock, AT_START[device.type])
        form = self._formed.get()
        started_at = self._clock.now()
        executor = _load(self._spec, form, store, self._clock, self._faults, self._enter)
        loaded_at = self._clock.now()
        self._enter("warming up")
        executor.warm_up()
        agent = self._agent = self._transfer_agent(executor)
        hands = self._hands = StoreWorker(
            executor.pool,
            self._spec.rank,
            agent.governor,
            self._spec.secret,
            self._faults,
            self._clock,
            self._channel.send,
        )
        load_s, warm_up_s = loaded_at - started_at, self._clock.now() - loaded_at
        ready = _ready(self._spec.rank, executor, agent.endpoints(), load_s, warm_up_s)
        self._channel.send(replace(ready, flop_s=self._limits.flop_s, byte_s=self._limits.byte_s))
        ended = threading.Event()
        reporter = threading.Thread(
            target=self._report_progress, args=(executor.progress, ended), daemon=True
        )
        reporter.start()
        self._run_plans(executor)
        ended.set()
        reporter.join()
        hands.close()
        agent.close()
        executor.close()
        self._channel.leave()

    def _enter(self, phase: str) -> None:
        """Report how far the start has come; its first word names a fault point."""
        self._channel.send(RankProgress(self._spec.rank, phase))
        self._faults.at(f"rank.start.{phase.partition(' ')[0]}")

    def _run_plans(self, executor: ModelRunner) -> None:
        try:
            while (plan := self._plans.get()) is not None:
                _pass_fault_points(self._faults, plan)
                self._channel.send(self._with_memory(executor.run(plan)))
        except RankDiedError:
            if not self._leaving:  # else the others leave too, and nobody waits for what was under way
                raise

    def _report_progress(self, progress: Progress, ended: threading.Event) -> None:
        """Report, until the rank ends, that steps of more than `PROGRESS_S` progress; shorter ones cost no
        frame. A thread of its own, so that what it reports is measured and not promised: of a step's thread
        that hangs there is nothing to report."""
        with _FailureReport(self._channel, self._spec.rank):
            last = progress.read()
            while not ended.wait(PROGRESS_S):
                reading = progress.read()
                if reading.step == last.step and reading.num_pieces > last.num_pieces:
                    self._channel.send(StepProgress(reading.step))
                last = reading

    def _with_memory(self, report: StepReport) -> StepReport:
        """The report, every few seconds with what the device's memory holds."""
        now = self._clock.now()
        if now < self._memory_told_at + _MEMORY_S:
            return report
        self._memory_told_at = now
        return replace(report, memory=device_memory(torch.device(self._spec.device)))

    def _read_orders(self) -> None:
        with _FailureReport(self._channel, self._spec.rank):
            while (frame := self._channel.receive()) is not None:
                message = RANK_DOWN_CODEC.decode(frame)
                if self._leaving:
                    continue
                if isinstance(message, StepPlan):
                    self._plans.put(message)
                elif isinstance(message, FormGroup):
                    self._formed.put(message)
                elif isinstance(message, Shutdown):
                    # Reads on: a rank that still waits for another must not outlive the engine core.
                    self._leaving = True
                    self._plans.put(None)
                elif isinstance(message, StoreOrder):
                    assert self._hands is not None, "a store order came before RankReady"
                    self._hands.handle(message)
                else:
                    assert self._agent is not None, "a transfer order came before RankReady"
                    self._agent.handle(message)

    def _transfer_agent(self, executor: ModelRunner) -> TransferAgent:
        return TransferAgent(
            identity=self._spec.replica,
            rank=self._spec.rank,
            pool=executor.pool,
            secret=self._spec.secret,
            clock=self._clock,
            faults=self._faults,
            report=self._channel.send,
            settings=self._spec.transfer,
        )


def _ready(
    rank: int, executor: ModelRunner, endpoints: RankEndpoints, load_s: float, warm_up_s: float
) -> RankReady:
    fields = executor.ready_fields
    return RankReady(
        rank=rank,
        process_id=os.getpid(),
        host_id=endpoints.host_id,
        num_blocks=fields.num_blocks,
        vocab_size=fields.vocab_size,
        max_context_tokens=fields.max_context_tokens,
        eos_token_ids=fields.eos_token_ids,
        compatibility=fields.compatibility,
        endpoints=endpoints,
        load_s=load_s,
        warm_up_s=warm_up_s,
        num_offload_blocks=fields.num_offload_blocks,
    )


def _load(
    spec: RankSpec,
    form: FormGroup,
    store: Store | None,
    clock: Clock,
    faults: Faults,
    enter: Callable[[str], None],
) -> ModelRunner:
    enter("forming groups")
    device = torch.device(spec.device)
    if store is None and spec.num_ranks > 1:
        store = find_store(form.store_address)
    groups = RankGroups(
        store,
        tp=spec.tp,
        pp=spec.pp,
        rank=spec.rank,
        device=device,
        host=spec.transfer.data_host,
        host_id=host_id(),
        secret=spec.secret,
    )
    first_layer, end_layer = form.stages[spec.stage]
    return ModelRunner(
        model_dir=Path(spec.model_dir),
        dtype=read_dtype(spec.dtype),
        device=device,
        block_tokens=spec.block_tokens,
        num_kv_tokens=spec.num_kv_tokens,
        num_offload_tokens=spec.num_offload_tokens,
        num_threads=spec.num_threads,
        clock=clock,
        shard=ShardSpec(first_layer, end_layer, spec.tp_rank, spec.tp),
        groups=groups,
        faults=faults,
        progress=enter,
    )


def _pass_fault_points(faults: Faults, plan: StepPlan) -> None:
    if not plan.entries or not faults.armed:
        return
    for sample in (sample for start in plan.starts for sample in start.samples):
        faults.at(f"rank.start.{sample.seed}")
    faults.at("rank.step")
    if any(entry.num_tokens > 1 for entry in plan.entries):
        faults.at("rank.step.prefill")
    if any(entry.num_tokens == 1 for entry in plan.entries):
        faults.at("rank.step.decode")


# ------------------------------------------------------------------------------------ the connection


class _EngineCoreChannel:
    """The framed connection to the engine core; `send` may be called from any thread.

    A rank has no purpose without its engine core: when the connection ends, the process ends at once. It does
    so with `os._exit`, because the interpreter's orderly exit would wait for threads, and a transfer
    thread in the middle of a copy must not write KV for a replica that is gone.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send_lock = threading.Lock()
        self._left = False

    def send(self, message: RankUp) -> None:
        frame = RANK_UP_CODEC.encode(message)
        try:
            with self._send_lock:
                send_frame(self._sock, frame)
        except PeerGoneError:
            os._exit(0)

    def receive(self) -> bytes | None:
        """The next frame; None when the connection ends after `leave`."""
        try:
            return receive_frame(self._sock)
        except PeerGoneError:
            if not self._left:
                os._exit(0)
            return None

    def leave(self) -> None:
        """The rank is done: its process is its owner's to end."""
        self._left = True


class _FailureReport:
    """Whatever exception leaves the block is told to the engine core; then the process ends with status 1."""

    def __init__(self, channel: _EngineCoreChannel, rank: int) -> None:
        self._channel = channel
        self._rank = rank

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        named = isinstance(error, WorkerError | TransferError)
        reason = str(error) if named else f"{type(error).__name__}: {error}"
        is_victim = isinstance(error, RankDiedError)
        if is_victim:  # a line: every neighbour of the culprit prints one
            sys.stderr.write(f"rank {self._rank} lost another rank: {reason}\n")
        else:
            traceback.print_exception(kind, error, trace)
        sys.stderr.flush()
        self._channel.send(RankFailed(self._rank, reason, lost_peer=is_victim))
        os._exit(1)


def _end_with_transfer_threads(channel: _EngineCoreChannel, rank: int) -> None:
    """A rank whose transfer threads are gone would take hand-overs and never finish one."""
    of_others = threading.excepthook

    def on_failure(failure: threading.ExceptHookArgs) -> None:
        error, thread = failure.exc_value, failure.thread
        if error is None or thread is None or not thread.name.startswith(TRANSFER_THREADS):
            of_others(failure)
            return
        with _FailureReport(channel, rank):
            raise error

    threading.excepthook = on_failure


def _connect(spec: RankSpec) -> socket.socket:
    host, _, port = spec.engine_core_address.rpartition(":")
    try:
        sock = socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S)
    except OSError as error:
        raise PeerGoneError(
            f"the engine core at {spec.engine_core_address} cannot be reached: {error}"
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    prove_as_client(sock, spec.secret, f"rank {spec.rank}")
    return sock


# --------------------------------------------------------------------------------------- the program


def read_spec(stream: BinaryIO) -> RankSpec:
    """The one frame on `stream`; `TransferError` when it is cut short or no RankSpec."""
    header = stream.read(_LENGTH.size)
    if len(header) != _LENGTH.size:
        raise PeerGoneError("standard input ended before the rank's specification")
    (num_bytes,) = _LENGTH.unpack(header)
    return RANK_SPEC_CODEC.decode(stream.read(num_bytes))


def main() -> None:
    """Entry point of the process."""
    # Control-C reaches the whole process group; the engine core decides when its ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_rank(read_spec(sys.stdin.buffer))
    # NIXL's libraries crash in the interpreter's own end; everything of value is closed by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# ----------------------------------------------------------------------------------------------
# How a rank joins its replica: refuse what cannot be, measure the device, open or find the ranks' store.
#
# Called by `workers.rank.process` before anything is loaded.


def join(spec: RankSpec, clock: Clock) -> tuple[RankJoined, TCPStore | None]:
    """What the rank tells its engine core first, and at rank 0 of several the ranks' store. `WorkerError`, naming
    the field, for what cannot be served."""
    config = read_model_config(Path(spec.model_dir))
    dtype = read_dtype(spec.dtype)
    device = torch.device(spec.device)
    _check(spec, config, device)
    measured = ProbeResult(StageCost(), 0.0)
    if spec.probe_rows > 0:
        probe = Probe(
            config,
            tp=spec.tp,
            tp_rank=spec.tp_rank,
            dtype=dtype,
            device=device,
            block_tokens=spec.block_tokens,
            clock=clock,
        )
        measured = probe.measure(spec.probe_rows, spec.probe_sampled_rows or spec.probe_rows)
    store: TCPStore | None = None
    address = ""
    if spec.rank == 0 and spec.num_ranks > 1:
        store, address = open_store(spec.transfer.data_host)
    return RankJoined(spec.rank, os.getpid(), address, measured.cost, measured.attention_ratio), store


def _check(spec: RankSpec, config: ModelConfig, device: torch.device) -> None:
    refuse_empty_parts(config.num_heads, config.intermediate_size, config.vocab_size, spec.tp)
    if spec.pp > config.num_layers:
        raise WorkerError(
            f"pp {spec.pp} is more than num_hidden_layers {config.num_layers}: a stage would be empty"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise WorkerError(f"device {spec.device!r} is wanted, but torch finds {found} CUDA devices")


def open_store(host: str) -> tuple[TCPStore, str]:
    """A store on a free port of this interface alone, and its address. It lives as long as the object."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    # The store owns the descriptor from here on.
    store = TCPStore(
        host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )
    return store, f"{host}:{port}"


def find_store(address: str) -> TCPStore:
    """The store that rank 0 has opened there."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), None, False)


if __name__ == "__main__":
    main()
