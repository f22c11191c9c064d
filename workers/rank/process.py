"""A rank process: a model runner and a transfer agent, driven by the engine core over a framed connection.

    main thread:    --RankJoined--> engine core --FormGroup--> load, warm up --RankReady--> engine core
                    queue --> StepRunner.launch, collect --StepReport--> engine core
    reader thread:  engine core --StepPlan--> queue      engine core --transfer order--> TransferAgent.handle
    agent's threads:                                     TransferReport--> engine core

`workers.rank.start` begins the process.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch.distributed.distributed_c10d import Store

from kvtransfer.agent.agent import TRANSFER_THREADS, TransferAgent
from kvtransfer.codec import MAX_FRAME_BYTES
from kvtransfer.common.clock import Clock, SystemClock
from kvtransfer.common.faults import Faults
from kvtransfer.common.host import host_id
from kvtransfer.errors import PeerGoneError, TransferError
from kvtransfer.messages import RankEndpoints
from kvtransfer.rpc.handshake import prove_as_client, receive_frame, send_frame
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages.store_orders import StoreOrder
from kvtransfer.store.worker import StoreWorker
from kvtransfer.transfer_orders import TransferOrder
from workers.errors import RankDiedError, WorkerError
from workers.messages.rank_channel import (
    RANK_DOWN_CODEC,
    RANK_UP_CODEC,
    FormGroup,
    GrammarOrder,
    RankFailed,
    RankJoined,
    RankProgress,
    RankReady,
    RankSpec,
    RankTicket,
    RankUp,
    Shutdown,
    StageCost,
    StepPace,
    StepPlan,
    StepProgress,
    StepReport,
)
from workers.model.kv_form import refuse_kv_dtype
from workers.model.latent_split import refuse_latent_split
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.model_folder import described_folder, weights_folder
from workers.model.quantization.weight_form import WeightForm
from workers.model.sizes import refuse_expert_copies, refuse_expert_offload, refuse_split, refuse_stages
from workers.model.weights import ShardSpec
from workers.rank.began_tasks import BeganTasks
from workers.rank.collectives import RankGroups, find_store, open_store
from workers.rank.compiled_grammars import GRAMMAR_THREAD, CompiledGrammars, CompileThread
from workers.rank.device_queue import take_device
from workers.rank.expert_reports import ExpertReports
from workers.rank.kernel_task import naming_kernels
from workers.rank.model_runner import ModelRunner, ReadyFields
from workers.rank.probe import AT_START, DeviceLimits, Probe, ProbeResult, device_memory, measure_limits
from workers.rank.progress import Progress
from workers.rank.runner_settings import (
    CheckpointFolder,
    ComputeSettings,
    RankCapacity,
    RankPlace,
    read_dtype,
)
from workers.rank.start_phases import StartPhases
from workers.rank.step_runner import StepRunner
from workers.rank.tickets import MOST_LAUNCHED, Ticket, launched

_CONNECT_TIMEOUT_S = 10.0
_NOTHING_BEGUN = BeganTasks()
# The period in which a rank reports its device's memory and its experts' tokens.
_ACCOUNT_S = 2.0
# The period in which a rank looks whether a long step has progressed.
PROGRESS_S = 0.25


def run_rank(spec: RankSpec, began: BeganTasks = _NOTHING_BEGUN) -> None:
    """Serve the engine core at `spec.engine_core_address` until it sends `Shutdown`. `began` is what the
    process does already for this rank.

    The process ends with status 0 when the connection to the engine core ends, and with status 1, after a
    `RankFailed`, on any exception. Raises `TransferError` if the engine core cannot be reached at all, or the
    files of `spec.trust` cannot be used.
    """
    trust = Trust.read(spec.trust)
    channel = _EngineCoreChannel(_connect(spec, trust))
    _end_with_other_threads(channel, spec.rank)
    channel.send(RankTicket(spec.rank, spec.ticket))
    with _reporting_failure(channel, spec.rank):
        _Rank(spec, trust, channel, SystemClock(), began).serve()


class _OrderHandlers(NamedTuple):
    """Takes the orders that may come once the rank is ready."""

    agent: TransferAgent
    store_worker: StoreWorker
    # The compiler, at the rank that samples.
    compiler: CompileThread | None

    def handle(self, order: TransferOrder | StoreOrder | GrammarOrder) -> None:
        """Pass an order on."""
        if isinstance(order, GrammarOrder):
            assert self.compiler is not None, "grammars are compiled where tokens are sampled"
            self.compiler.handle(order)
        elif isinstance(order, StoreOrder):
            self.store_worker.handle(order)
        else:
            self.agent.handle(order)


class _Rank:
    """One rank from start to end: join the others, load, warm up with them, announce, then run plans in
    order."""

    def __init__(
        self,
        spec: RankSpec,
        trust: Trust,
        channel: _EngineCoreChannel,
        clock: Clock,
        began: BeganTasks,
    ) -> None:
        self._spec = spec
        self._trust = trust
        self._began = began
        self._phases = StartPhases(clock, clock.now() if began.began_at is None else began.began_at)
        self._channel = channel
        self._clock = clock
        self._faults = Faults(spec.faults)
        self._device = torch.device(spec.device)
        self._accounted_at = 0.0
        # An event that is never set: waits for it are those of a paced rank.
        self._paused = threading.Event()
        self._formed: queue.SimpleQueue[FormGroup] = queue.SimpleQueue()
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._handlers: _OrderHandlers | None = None
        self._leaving = False

    def serve(self) -> None:
        """Run the rank to its end."""
        # The reader runs from the start, although orders come only after RankReady: loading ends when the
        # engine core does.
        threading.Thread(target=self._read_orders, name="orders", daemon=True).start()
        torch.set_num_threads(self._spec.num_threads)
        self._spec = _with_local_model(self._spec, self._enter)
        self._enter("probing the device")
        joined, store, self._device = _join(self._spec, self._clock)
        self._channel.send(joined)
        self._phases.begin("waiting for the other ranks")
        form = self._formed.get()
        started_at = self._clock.now()
        compiler = self._make_compiler()
        with naming_kernels(self._began.kernels):
            runner = self._load(form, store, None if compiler is None else compiler.grammars)
            if compiler is not None:
                compiler.is_loaded.wait()  # now nobody waits for Python
            loaded_at = self._clock.now()
            self._enter("warming up")
            runner.warm_up(self._spec.max_batch_tokens)
        handlers = self._handlers = self._make_handlers(runner, compiler)
        load_s, warm_up_s = loaded_at - started_at, self._clock.now() - loaded_at
        fields = runner.ready_fields
        self._enter("measuring the device")  # now nothing else of this rank computes
        dtype = read_dtype(self._spec.dtype)
        limits = measure_limits(self._device, dtype, self._clock, AT_START[self._device.type])
        self._phases.begin("ready")
        ready = _ready(self._spec.rank, fields, handlers.agent.endpoints(), limits, load_s, warm_up_s)
        kernels_s = 0.0 if self._began.kernels is None else self._began.kernels.wait().seconds
        self._channel.send(replace(ready, phase_to_s=self._phases.seconds(), kernels_s=kernels_s))
        ended = threading.Event()
        progress = runner.steps.progress
        reporter = threading.Thread(target=self._report_progress, args=(progress, ended), daemon=True)
        reporter.start()
        self._run_plans(runner.steps, runner.expert_reports())
        ended.set()
        reporter.join()
        if compiler is not None:
            compiler.close()
        handlers.store_worker.close()
        handlers.agent.close()
        runner.close()
        self._channel.leave()

    def _enter(self, phase: str) -> None:
        """Report a phase of the start; its first word names a fault point."""
        self._phases.begin(phase)
        self._channel.send(RankProgress(self._spec.rank, phase))
        self._faults.at(f"rank.start.{phase.partition(' ')[0]}")

    def _make_compiler(self) -> CompileThread | None:
        """Begin to read the tokenizer at the rank that samples, while the model loads."""
        spec = self._spec
        if (spec.stage, spec.tp_rank) != (spec.pp - 1, 0):
            return None
        model_dir = Path(spec.model_dir)
        config = read_model_config(model_dir)
        folder = described_folder(model_dir, _model_cache(spec))
        grammars = CompiledGrammars(folder, config.vocab_size, config.eos_token_ids)
        return CompileThread(grammars, self._channel.send)

    def _load(self, form: FormGroup, store: Store | None, grammars: CompiledGrammars | None) -> ModelRunner:
        spec = self._spec
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what the probe had
        self._enter("forming groups")
        if store is None and spec.num_ranks > 1:
            store = find_store(form.store_address)
        groups = RankGroups(
            store,
            tp=spec.tp,
            pp=spec.pp,
            rank=spec.rank,
            device=self._device,
            host=spec.transfer.data_host,
            host_id=host_id(),
            trust=self._trust,
            is_deterministic=spec.deterministic,
        )
        first_layer, end_layer = form.stages[spec.stage]
        return ModelRunner(
            CheckpointFolder(Path(spec.model_dir), self._began.fingerprint),
            ComputeSettings.of(spec, self._device),
            RankCapacity.of(spec),
            self._clock,
            place=RankPlace(ShardSpec(first_layer, end_layer, spec.tp_rank, spec.tp, spec.ep), groups),
            faults=self._faults,
            progress=self._enter,
            grammars=grammars,
            kernels=self._began.kernels,
        )

    def _make_handlers(self, runner: ModelRunner, compiler: CompileThread | None) -> _OrderHandlers:
        spec, send = self._spec, self._channel.send
        agent = TransferAgent(
            identity=spec.replica,
            rank=spec.rank,
            pools=runner.pools,
            trust=self._trust,
            clock=self._clock,
            faults=self._faults,
            report=send,
            settings=spec.transfer,
        )
        store_worker = StoreWorker(
            runner.record_pools, spec.rank, agent.governor, self._trust, self._faults, self._clock, send
        )
        return _OrderHandlers(agent, store_worker, compiler)

    def _run_plans(self, steps: StepRunner, experts: ExpertReports) -> None:
        def launch(plan: StepPlan) -> Ticket:
            _pass_fault_points(self._faults, plan)
            paces_s.append(_pace_s(self._spec.pace, plan))
            return steps.launch(plan)

        most = MOST_LAUNCHED if steps.runs_ahead else 1
        paces_s: deque[float] = deque()
        try:
            for ticket in launched(self._plans, launch, most):
                report = self._paced(steps.collect(ticket), paces_s.popleft())
                self._channel.send(self._with_accounts(report, experts))
        except RankDiedError:
            if not self._leaving:  # else the others leave too, and nobody waits for what was under way
                raise

    def _report_progress(self, progress: Progress, ended: threading.Event) -> None:
        """Report, until the rank ends, that steps of more than `PROGRESS_S` progress; shorter steps cost no
        frame. Runs on a thread of its own, so that it reports what was measured: while the step's thread
        hangs, there is nothing to report."""
        with _reporting_failure(self._channel, self._spec.rank):
            last = progress.read()
            while not ended.wait(PROGRESS_S):
                reading = progress.read()
                if reading.step == last.step and reading.num_pieces > last.num_pieces:
                    self._channel.send(StepProgress(reading.step))
                last = reading

    def _paced(self, report: StepReport, pace_s: float) -> StepReport:
        """Return the report when its step has taken `pace_s`."""
        rest_s = report.started_at + pace_s - self._clock.now()
        if rest_s <= 0:
            return report
        self._paused.wait(rest_s)
        return replace(report, finished_at=self._clock.now())

    def _with_accounts(self, report: StepReport, experts: ExpertReports) -> StepReport:
        """Add to the report, every few seconds, how full the device's memory is, and the tokens that its
        experts have had since."""
        now = self._clock.now()
        if now < self._accounted_at + _ACCOUNT_S:
            return report
        self._accounted_at = now
        return replace(report, memory=device_memory(self._device), experts=experts.take())

    def _read_orders(self) -> None:
        with _reporting_failure(self._channel, self._spec.rank):
            while (frame := self._channel.receive()) is not None:
                message = RANK_DOWN_CODEC.decode(frame)
                if self._leaving:
                    continue
                if isinstance(message, StepPlan):
                    self._plans.put(message)
                elif isinstance(message, FormGroup):
                    self._formed.put(message)
                elif isinstance(message, Shutdown):
                    # Reading continues: a rank that still waits for another must not outlive the engine core.
                    self._leaving = True
                    self._plans.put(None)
                else:
                    assert self._handlers is not None, "an order came before RankReady"
                    self._handlers.handle(message)


def _with_local_model(spec: RankSpec, progress: Callable[[str], None]) -> RankSpec:
    """Return the specification with the model's folder on this host, which is made of its GGUF file if that
    was not done. Raises `CheckpointError`."""
    if not spec.gguf_file:
        return spec
    keeps_quantized = WeightForm(spec.weight_dtype).keeps_stored
    folder = weights_folder(
        Path(spec.gguf_file), spec.dtype, _model_cache(spec), progress, keeps_quantized=keeps_quantized
    )
    return replace(spec, model_dir=str(folder))


def _model_cache(spec: RankSpec) -> Path | None:
    """Return where folders are kept that are made of a model; None: the default of this host."""
    return Path(spec.model_cache) if spec.model_cache else None


def _join(spec: RankSpec, clock: Clock) -> tuple[RankJoined, Store | None, torch.device]:
    """Take the rank's device and measure it, before anything is loaded. Returns the rank's first message, at
    rank 0 of several ranks their store, and the device.

    Raises `WorkerError`, naming the field, for what cannot be served.
    """
    config = read_model_config(Path(spec.model_dir))
    dtype = read_dtype(spec.dtype)
    device = torch.device(spec.device)
    _check(spec, config, device)
    device = take_device(device)  # after its check, which names one that is not there
    measured = ProbeResult(StageCost(), 0.0)
    if spec.probe_rows > 0:
        probe = Probe(
            config,
            tp=spec.tp,
            tp_rank=spec.tp_rank,
            ep=spec.ep,
            dtype=dtype,
            device=device,
            block_tokens=spec.block_tokens,
            clock=clock,
            form=WeightForm(spec.weight_dtype),
        )
        measured = probe.measure(spec.probe_rows, spec.probe_sampled_rows or spec.probe_rows)
    store: Store | None = None
    address = ""
    if spec.rank == 0 and spec.num_ranks > 1:
        store, address = open_store(spec.transfer.data_host)
    joined = RankJoined(spec.rank, os.getpid(), address, measured.cost, measured.attention_ratio)
    return joined, store, device


def _check(spec: RankSpec, config: ModelConfig, device: torch.device) -> None:
    refuse_split(config, spec.tp, spec.ep)
    refuse_stages(config, spec.pp)
    refuse_kv_dtype(config, spec.kv_dtype)
    refuse_latent_split(
        config,
        spec.latent_kv,
        (spec.device,),
        tp=spec.tp,
        block_tokens=spec.block_tokens,
        kv_dtype=spec.kv_dtype,
        num_offload_tokens=spec.num_offload_tokens,
        is_deterministic=spec.deterministic,
    )
    refuse_expert_offload(
        config, spec.expert_offload, (spec.device,), tp=spec.tp, is_deterministic=spec.deterministic
    )
    refuse_expert_copies(
        config,
        spec.expert_copies,
        ep=spec.ep,
        has_offload=spec.expert_offload > 0,
        is_deterministic=spec.deterministic,
    )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise WorkerError(f"device {spec.device!r} is wanted, but torch finds {found} CUDA devices")


def _ready(
    rank: int,
    fields: ReadyFields,
    endpoints: RankEndpoints,
    limits: DeviceLimits,
    load_s: float,
    warm_up_s: float,
) -> RankReady:
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
        num_window_blocks=fields.num_window_blocks,
        flop_s=limits.flop_s,
        byte_s=limits.byte_s,
        backend=fields.backend,
    )


def _pass_fault_points(faults: Faults, plan: StepPlan) -> None:
    if not plan.num_sequences or not faults.armed:
        return
    for sample in (sample for start in plan.starts for sample in start.samples):
        faults.at(f"rank.start.{sample.seed}")
    faults.at("rank.step")
    if plan.expert_copies:
        faults.at("rank.step.copies")
    if any(entry.num_tokens > 1 for entry in plan.entries):
        faults.at("rank.step.prefill")
    if plan.decodes or any(entry.num_tokens == 1 for entry in plan.entries):
        faults.at("rank.step.decode")


def _pace_s(pace: StepPace | None, plan: StepPlan) -> float:
    """Return the least time that the step takes. A canary has none."""
    if pace is None or not plan.num_sequences:
        return 0.0
    num_decodes = len(plan.decodes) // 4
    num_prompt_tokens = plan.num_tokens - num_decodes
    return pace.base_s + num_decodes * pace.sequence_s + num_prompt_tokens * pace.token_s


class _EngineCoreChannel:
    """The framed connection to the engine core. `send` may be called from any thread.

    A rank has no purpose without its engine core: when the connection ends, the process ends at once. It ends
    with `os._exit`, because the interpreter's orderly exit would wait for threads, and a transfer thread in
    the middle of a copy must not write KV for a replica that is gone."""

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
        """Return the next frame, or None when the connection ends after `leave`."""
        try:
            return receive_frame(self._sock, MAX_FRAME_BYTES)
        except PeerGoneError:
            if not self._left:
                os._exit(0)
            return None

    def leave(self) -> None:
        """Note that the rank is done: from now on its owner ends the process."""
        self._left = True


@contextlib.contextmanager
def _reporting_failure(channel: _EngineCoreChannel, rank: int) -> Iterator[None]:
    """Report any exception that leaves the block to the engine core, then end the process with status 1."""
    try:
        yield
    except BaseException as error:
        named = isinstance(error, WorkerError | TransferError)
        reason = str(error) if named else f"{type(error).__name__}: {error}"
        is_victim = isinstance(error, RankDiedError)
        if is_victim:  # a line: every neighbour of the culprit prints one
            sys.stderr.write(f"rank {rank} lost another rank: {reason}\n")
        else:
            traceback.print_exception(error)
        sys.stderr.flush()
        channel.send(RankFailed(rank, reason, lost_peer=is_victim))
        os._exit(1)


def _end_with_other_threads(channel: _EngineCoreChannel, rank: int) -> None:
    """End the rank when a thread of transfers or grammars fails: it would accept what it never finishes."""
    of_others = threading.excepthook

    def on_failure(failure: threading.ExceptHookArgs) -> None:
        error, thread = failure.exc_value, failure.thread
        if error is None or thread is None or not thread.name.startswith((TRANSFER_THREADS, GRAMMAR_THREAD)):
            of_others(failure)
            return
        with _reporting_failure(channel, rank):
            raise error

    threading.excepthook = on_failure


def _connect(spec: RankSpec, trust: Trust) -> socket.socket:
    host, _, port = spec.engine_core_address.rpartition(":")
    try:
        sock = socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S)
    except OSError as error:
        raise PeerGoneError(
            f"the engine core at {spec.engine_core_address} is unreachable: {error}"
        ) from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return prove_as_client(sock, trust, f"rank {spec.rank}")
