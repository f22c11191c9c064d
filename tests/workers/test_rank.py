"""A rank process against a test that plays its engine core over the real connection."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_processes import killed_on_error
from family_checkpoints import CASES, write_family_checkpoint
from import_path import import_path
from msgspec.structs import replace
from patience import SLACK_S, START_S
from rank_processes import ForkedRank
from trust_files import FILES, TRUST

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.faults import FaultRule
from kvtransfer.errors import PeerGoneError
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.handshake import prove_as_server, receive_frame, send_frame
from kvtransfer.rpc.trust import Trust
from kvtransfer.transfer_orders import CloseLanding, OpenLanding, TransferSettings
from kvtransfer.transfer_reports import LandingClosed
from workers.messages.rank_channel import (
    RANK_DOWN_CODEC,
    RANK_UP_CODEC,
    BatchEntry,
    FailedEntry,
    FormGroup,
    RankDown,
    RankFailed,
    RankJoined,
    RankProgress,
    RankReady,
    RankSpec,
    RankTicket,
    RankUp,
    Shutdown,
    SlotSample,
    SlotStart,
    StageCost,
    StepPace,
    StepPlan,
    StepProgress,
    StepReport,
    TableChange,
)
from workers.messages.sampling import SamplingParams
from workers.model.model_config import read_model_config
from workers.model.rank_memory import RankShape, activation_bytes
from workers.replica.rank_group import RankCommand

IDENTITY = ReplicaIdentity("replica", 1)
START_TIMEOUT_S = START_S


END_OF_A_TRANSFER_THREAD = """
import threading
from workers.rank import process as rank

class Channel:
    def send(self, message):
        print(message.reason, flush=True)

rank._end_with_other_threads(Channel(), 0)
for name in ("another", "kv-verify"):
    thread = threading.Thread(target=lambda: 1 / 0, name=name)
    thread.start()
    thread.join()
    print("survived", name, flush=True)
"""


class EngineCore:
    """Listens, starts one rank (a fork, or else as the product does), and speaks with it."""

    def __init__(self) -> None:
        self.is_forked = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(START_TIMEOUT_S)
        self.port = self._listener.getsockname()[1]
        self.process: subprocess.Popen[bytes] | ForkedRank | None = None
        self.sock: socket.socket | None = None
        self.phases: list[str] = []

    def start_process(self, spec: RankSpec) -> subprocess.Popen[bytes] | ForkedRank:
        self.process = ForkedRank(spec) if self.is_forked else start_alone(spec)
        return self.process

    def accept(self, trust: Trust = TRUST) -> str:
        self.sock, _ = self._listener.accept()
        name = prove_as_server(self.sock, trust)
        self.sock.settimeout(START_TIMEOUT_S)
        return name

    def send(self, message: RankDown) -> None:
        assert self.sock is not None
        send_frame(self.sock, RANK_DOWN_CODEC.encode(message))

    def receive(self) -> RankUp:
        """The next message that is neither a hello nor news of how far the start has come."""
        assert self.sock is not None
        while isinstance(
            message := RANK_UP_CODEC.decode(receive_frame(self.sock)), RankTicket | RankProgress
        ):
            if isinstance(message, RankProgress):
                self.phases.append(message.phase)
        return message

    def report(self) -> StepReport:
        """The next report of a step."""
        message = self.after_progress()
        assert isinstance(message, StepReport), message
        return message

    def after_progress(self) -> RankUp:
        """The next message that does not say how far a step has come."""
        while isinstance(message := self.receive(), StepProgress):
            pass
        return message

    def ready(self, spec: RankSpec) -> RankReady:
        self.start_process(spec)
        self.accept()
        self.form()
        message = self.receive()
        assert isinstance(message, RankReady), message
        return message

    def form(self) -> None:
        """Wait for the rank to join, and order it to load both layers of the model."""
        assert self.process is not None
        assert self.receive() == RankJoined(0, self.process.pid, "", StageCost(), 0.0)
        self.send(FormGroup("", ((0, 2),)))

    def failure(self, spec: RankSpec) -> str:
        """The reason that the rank gives, after which it has ended with status 1."""
        process = self.start_process(spec)
        self.accept()
        message = self.receive()
        assert isinstance(message, RankFailed), message
        assert process.wait(START_TIMEOUT_S) == 1
        return message.reason

    def close(self) -> None:
        for sock in (self.sock, self._listener):
            if sock is not None:
                sock.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            if isinstance(self.process, subprocess.Popen) and self.process.stderr is not None:
                self.process.stderr.close()


def start_alone(spec: RankSpec) -> subprocess.Popen[bytes]:
    """Start the rank as the product does, with its standard error in a pipe."""
    command = RankCommand.of(spec)
    process = subprocess.Popen(
        command.arguments,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": import_path(Path(__file__).parents[2])},
    )
    assert process.stdin is not None
    with killed_on_error(process), process.stdin:
        process.stdin.write(command.spec_frame)
    return process


@pytest.fixture
def core() -> Iterator[EngineCore]:
    with closing(EngineCore()) as made:
        yield made


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "llama", seed=3)
    return path


def make_spec(
    core: EngineCore,
    model_dir: Path,
    *,
    rank: int = 0,
    tp: int = 1,
    pp: int = 1,
    dtype: str = "float32",
    device: str = "cpu",
    faults: tuple[FaultRule, ...] = (),
) -> RankSpec:
    return RankSpec(
        replica=IDENTITY,
        rank=rank,
        tp=tp,
        pp=pp,
        engine_core_address=f"127.0.0.1:{core.port}",
        trust=FILES,
        model_dir=str(model_dir),
        dtype=dtype,
        device=device,
        num_threads=1,
        block_tokens=16,
        num_kv_tokens=512,
        max_batch_tokens=128,
        max_sequences=8,
        transfer=TransferSettings("127.0.0.1", ("tcp",)),
        faults=faults,
    )


PROMPT = np.arange(20, dtype="<u4").tobytes()


def prefill(step: int, slot: int = 0) -> StepPlan:
    start = SlotStart(SamplingParams(), (SlotSample(slot, seed=0, last_token=19),))
    table = TableChange(slot, 0, bytes(4) + (1).to_bytes(4, "little"))
    entry = BatchEntry(slot, 0, 20, PROMPT, (slot,))
    return StepPlan(step, starts=(start,), entries=(entry,), tables=(table,))


def decode(step: int) -> StepPlan:
    return StepPlan(step, decodes=bytes(4))


def test_a_rank_reports_its_memory_and_its_experts_tokens_now_and_then(
    core: EngineCore, tmp_path: Path
) -> None:
    """The first report has those of its step, not those of the warm-up, and the next one has none yet."""
    write_family_checkpoint(tmp_path, **(CASES["qwen3_moe-1"] | {"num_hidden_layers": 2}))
    core.ready(make_spec(core, tmp_path))
    for plan in (prefill(1), decode(2)):
        core.send(plan)
    first, second = core.report(), core.report()
    assert first.memory is not None
    assert first.experts is not None
    assert (first.experts.layers, first.experts.num_chosen) == ((0, 1), 3)
    counts = np.frombuffer(first.experts.counts, "<u4").reshape(2, 7)
    assert counts.sum(1).tolist() == [20 * 3] * 2
    assert (second.memory, second.experts) == (None, None)


@pytest.mark.parametrize("is_forked", [True, False], ids=["forked", "alone"])
def test_a_rank_serves_and_shuts_down(core: EngineCore, model_dir: Path, is_forked: bool) -> None:
    """Plans may be sent ahead; reports come in order; transfer orders are answered between them."""
    core.is_forked = is_forked
    ready = core.ready(make_spec(core, model_dir))
    assert core.process is not None
    assert (ready.rank, ready.process_id, ready.num_blocks) == (0, core.process.pid, 32)
    assert (ready.vocab_size, ready.max_context_tokens, ready.eos_token_ids) == (256, 512, (1,))
    assert ready.host_id == ready.endpoints.host_id
    assert [endpoint.transport for endpoint in ready.endpoints.endpoints] == ["tcp"]
    assert ready.load_s > 0
    assert ready.warm_up_s > 0
    plans = [prefill(1), *map(decode, range(2, 6)), StepPlan(6, free_slots=(0,))]
    for plan in plans:
        core.send(plan)
    reports = [core.report() for _ in plans]
    for plan, report in zip(plans, reports, strict=True):
        assert report.step == plan.step
        assert len(report.tokens) == 4 * plan.num_sequences
        assert report.started_at <= report.finished_at
    landing_id = b"l" * 16
    core.send(OpenLanding(landing_id, ReplicaIdentity("writer", 1), (3, 4)))
    core.send(CloseLanding(landing_id))
    assert core.receive() == LandingClosed(landing_id, connections=())
    core.send(Shutdown("the test is over"))
    assert core.process.wait(START_TIMEOUT_S) == 0


def test_the_steps_of_a_paced_rank_take_their_time_and_compute_the_same(
    core: EngineCore, model_dir: Path
) -> None:
    """A canary is not paced, and the report's times are those of the paced step."""
    plans = [prefill(1), decode(2), StepPlan(3)]
    pace = StepPace(base_s=0.2, sequence_s=0.1, token_s=0.01)
    tokens = []
    for spec in (make_spec(core, model_dir), replace(make_spec(core, model_dir), pace=pace)):
        core.ready(spec)
        for plan in plans:
            core.send(plan)
        reports = [core.report() for _ in plans]
        tokens.append([it.tokens for it in reports])
        times_s = [it.finished_at - it.started_at for it in reports]
        core.send(Shutdown("the test is over"))
        assert core.process is not None
        assert core.process.wait(START_TIMEOUT_S) == 0
        assert core.sock is not None
        core.sock.close()
    assert tokens[0] == tokens[1]
    assert len(times_s) == 3
    assert times_s[0] >= 0.4
    assert times_s[1] >= 0.3
    assert times_s[2] < 0.2


def test_the_rank_ends_with_its_engine_core(core: EngineCore, model_dir: Path) -> None:
    core.ready(make_spec(core, model_dir))
    assert core.sock is not None
    assert core.process is not None
    core.sock.close()
    assert core.process.wait(1.0 + SLACK_S) == 0  # promised within 1 s


def test_the_rank_ends_with_its_engine_core_before_the_others_have_joined(
    core: EngineCore, model_dir: Path
) -> None:
    process = core.start_process(make_spec(core, model_dir, rank=1, tp=2))
    core.accept()
    assert isinstance(core.receive(), RankJoined)
    assert core.sock is not None
    core.sock.close()
    assert process.wait(START_TIMEOUT_S) == 0


def test_a_leaving_rank_that_waits_for_others_ends_with_its_engine_core(
    core: EngineCore, model_dir: Path
) -> None:
    process = core.start_process(make_spec(core, model_dir, rank=1, tp=2))
    core.accept()
    assert isinstance(core.receive(), RankJoined)
    core.send(Shutdown("the test is over"))
    assert core.sock is not None
    core.sock.close()
    assert process.wait(START_TIMEOUT_S) == 0


def test_the_rank_ends_with_its_engine_core_while_loading(core: EngineCore, model_dir: Path) -> None:
    process = core.start_process(make_spec(core, model_dir))
    core.accept()
    core.form()
    assert core.sock is not None
    core.sock.close()
    assert process.wait(START_TIMEOUT_S) == 0


def test_a_failed_step_is_reported(core: EngineCore, model_dir: Path) -> None:
    core.ready(make_spec(core, model_dir))
    core.send(StepPlan(1, free_slots=(77,)))
    message = core.after_progress()
    assert message == RankFailed(0, "AssertionError: slot 77 is freed but was never started")
    assert core.process is not None
    assert core.process.wait(START_TIMEOUT_S) == 1


def test_a_step_without_memory_is_reported_and_the_rank_serves_on(
    core: EngineCore, model_dir: Path, tmp_path: Path
) -> None:
    rule = FaultRule("rank.layers.decode.0.0", "raise", str(tmp_path / "marker"))
    core.ready(make_spec(core, model_dir, faults=(rule,)))
    plans = [prefill(1), decode(2), decode(3), StepPlan(4, free_slots=(0,)), prefill(5)]
    for plan in plans:
        core.send(plan)
    reports = [core.report() for _ in plans]
    failed = [report.failed for report in reports]
    reason = "MemoryError: a fault was injected at rank.layers.decode.0.0"
    assert failed == [(), (FailedEntry(0, reason),), (FailedEntry(0, ""),), (), ()]
    assert [report.tokens for report in reports][1:4] == [bytes(4), bytes(4), b""]


def test_a_bad_frame_is_reported(core: EngineCore, model_dir: Path) -> None:
    core.ready(make_spec(core, model_dir))
    assert core.sock is not None
    send_frame(core.sock, b"\xc1 no message")
    message = core.receive()
    assert isinstance(message, RankFailed)
    assert "frame refused" in message.reason


BAD_SPECS: dict[str, tuple[Callable[[EngineCore, Path], RankSpec], str]] = {
    "no such folder": (lambda core, path: make_spec(core, path / "nowhere"), "no such folder"),
    "too many heads": (
        lambda core, path: make_spec(core, path, rank=4, tp=5),
        "tp 5 is more than num_attention_heads 4",
    ),
    "too many stages": (
        lambda core, path: make_spec(core, path, pp=3),
        "pp 3 is more than num_hidden_layers 2",
    ),
    "no such device": (lambda core, path: make_spec(core, path, device="cuda:9"), "device 'cuda:9'"),
    "unknown dtype": (lambda core, path: make_spec(core, path, dtype="int3"), "dtype 'int3' is not one of"),
}


@pytest.mark.parametrize("name", BAD_SPECS)
def test_what_cannot_be_served_is_reported(core: EngineCore, model_dir: Path, name: str) -> None:
    make, text = BAD_SPECS[name]
    assert text in core.failure(make(core, model_dir))


@pytest.mark.parametrize(
    ("point", "num_reports"), [("rank.step", 1), ("rank.step.prefill", 1), ("rank.step.decode", 2)]
)
def test_fault_points(
    core: EngineCore, model_dir: Path, tmp_path: Path, point: str, num_reports: int
) -> None:
    """Empty plans pass no point; a prefill and a decode plan pass their own."""
    marker = tmp_path / "marker"
    core.ready(make_spec(core, model_dir, faults=(FaultRule(point, "kill", str(marker)),)))
    for plan in (StepPlan(0), prefill(1), decode(2)):
        core.send(plan)
    reports = [core.report() for _ in range(num_reports)]
    assert [report.step for report in reports] == list(range(num_reports))
    assert core.process is not None
    assert core.process.wait(START_TIMEOUT_S) == -signal.SIGKILL
    assert marker.read_text() == str(core.process.pid)


def test_a_long_step_progresses_and_a_stopped_rank_does_not(core: EngineCore, tmp_path: Path) -> None:
    """The step is one chunk of 5,120 tokens, some 1.4e11 operations: many times the reports' interval."""
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 64}
    sizes["num_attention_heads"] = 8
    write_random_checkpoint(tmp_path, "llama", seed=3, max_position_embeddings=8192, **sizes)
    core.ready(replace(make_spec(core, tmp_path), num_kv_tokens=8192, max_batch_tokens=5120))
    assert core.process is not None
    assert core.sock is not None
    prompt = np.tile(np.arange(256, dtype="<u4"), 20).tobytes()
    start = SlotStart(SamplingParams(), (SlotSample(0, seed=0, last_token=255),))
    table = TableChange(0, 0, np.arange(320, dtype="<u4").tobytes())
    core.send(StepPlan(1, starts=(start,), entries=(BatchEntry(0, 0, 5120, prompt, (0,)),), tables=(table,)))
    assert core.receive() == StepProgress(1)
    os.kill(core.process.pid, signal.SIGSTOP)
    while select.select([core.sock], [], [], 1.0)[0]:
        assert core.receive() == StepProgress(1), "it was on its way"
    os.kill(core.process.pid, signal.SIGCONT)
    assert core.report().step == 1


def test_the_largest_step_takes_no_more_memory_than_was_counted(core: EngineCore, tmp_path: Path) -> None:
    """A full batch of rows of which as many sample as may, with the dearest sampling, after smaller steps."""
    num_rows, num_sequences, vocab_size = 1024, 32, 50_000
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 64}
    sizes |= {"num_attention_heads": 8, "vocab_size": vocab_size, "num_hidden_layers": 2}
    write_random_checkpoint(tmp_path, "llama", seed=3, tie_word_embeddings=True, **sizes)
    # The warm-up is of a small step, so that all memory is taken by the step that is watched.
    limits = {"num_kv_tokens": 2 * num_rows, "max_batch_tokens": 16, "max_sequences": num_sequences}
    core.ready(replace(make_spec(core, tmp_path), **limits))
    assert core.process is not None
    core.send(prefill(1))
    core.send(StepPlan(2, free_slots=(0,)))
    for _ in range(2):
        core.report()
    status = Path(f"/proc/{core.process.pid}/status")
    before = status_bytes(status, "VmRSS")
    Path(f"/proc/{core.process.pid}/clear_refs").write_text("5")  # the peak begins anew
    length, num_blocks = num_rows // num_sequences, num_rows // num_sequences // 16
    sampling = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, num_logprobs=2)
    prompt = np.arange(length, dtype="<u4").tobytes()
    starts = tuple(
        SlotStart(sampling, (SlotSample(slot, seed=slot, last_token=7),), prompt)
        for slot in range(num_sequences)
    )
    entries = tuple(BatchEntry(slot, 0, length, prompt, (slot,)) for slot in range(num_sequences))
    tables = tuple(
        TableChange(slot, 0, np.arange(slot * num_blocks, (slot + 1) * num_blocks, dtype="<u4").tobytes())
        for slot in range(num_sequences)
    )
    core.send(StepPlan(3, starts=starts, entries=entries, tables=tables))
    report = core.report()
    assert len(report.tokens) == 4 * num_sequences
    config = read_model_config(tmp_path)
    shape = RankShape(config, 0, config.num_layers)
    counted = activation_bytes(shape, 4, num_rows, num_sequences)
    kv_bytes = num_rows * shape.kv_token_bytes(4)  # its pages may be taken now
    taken = status_bytes(status, "VmHWM") - before
    assert counted / 4 <= taken <= counted + kv_bytes, (counted, taken)


def status_bytes(status: Path, name: str) -> int:
    (line,) = (line for line in status.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def test_a_rank_does_not_serve_a_stranger(core: EngineCore, model_dir: Path) -> None:
    core.is_forked = False
    process = core.start_process(make_spec(core, model_dir))
    with pytest.raises(PeerGoneError):
        core.accept(trust=Trust.draw())
    assert process.wait(START_TIMEOUT_S) == 1
    assert isinstance(process, subprocess.Popen)
    assert process.stderr is not None
    assert b"does not know the cluster secret" in process.stderr.read()


def test_a_rank_ends_with_its_transfer_threads() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", END_OF_A_TRANSFER_THREAD],
        capture_output=True,
        text=True,
        check=False,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": import_path(Path(__file__).parents[2])},
    )
    assert ended.stdout.splitlines() == ["survived another", "ZeroDivisionError: division by zero"]
    assert ended.returncode == 1
