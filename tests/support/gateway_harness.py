"""A gateway on loopback and scripted replicas: real Links and real gRPC, a small tokenizer and chat
template, and tokens that a hash decides."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from patience import WAIT_S
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cluster.api.admin_client import AdminClient
from cluster.api.channel import ClientCredentials
from cluster.api.client import Client
from cluster.config import ClusterConfig, parse_config
from cluster.identity.identity import LOCAL
from cluster.identity.resume_tokens import ResumeTokens, resume_digest
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.roster.messages import GatewayRecord, ReplicaRecord
from cluster.roster.state import LocalRoster
from cluster.scaling.orders import Operations
from cluster.serve.gateway_server import ControlPlane, Gateway, Randomness
from kvtransfer.blocks.keys import extend_keys, root_key
from kvtransfer.common.clock import SystemClock
from kvtransfer.kv_events import BlocksRemoved, BlocksStored, KvEvents, KvSnapshot, KvSnapshotRequest
from kvtransfer.messages import PROTOCOL_VERSION, CompatibilityRecord, ReplicaIdentity
from kvtransfer.rpc.stream import FrameStream, LinkServer
from kvtransfer.rpc.trust import Trust
from workers.messages.link import (
    LINK_DOWN_CODEC,
    LINK_UP_CODEC,
    Announce,
    CachePurged,
    Cancel,
    GatewayHello,
    HandOverReport,
    Leaving,
    LinkUp,
    LoadReport,
    Move,
    MoveEnded,
    PrefillReport,
    PurgeCache,
    ReplicaHello,
    RequestFailed,
    SampleState,
    StageTimes,
    StepFrame,
    Submission,
    TokenDelta,
)
from workers.messages.sampling import TokenLogprob
from workers.replica.gateway_links import LOAD_PERIOD_S
from workers.stats_record import PathMeasure


async def until(condition: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
    """Return when `condition` holds; fail with `what` after `wait_s`."""
    clock = SystemClock()
    end = clock.now() + wait_s
    while not condition():
        assert clock.now() < end, f"not within {wait_s} s: {what}"
        await clock.sleep(0.005)


@dataclass
class Script:
    """The misbehavior of a replica. Counts are of future events."""

    num_refusals: int = 0
    # Sent once in place of an answer; its ids are filled in.
    failure: RequestFailed | None = None
    # Send no token beyond this output index until `resume` is set.
    stop_after: int | None = None
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    token_s: float = 0.0
    # Why a stream cannot move away.
    moves_fail: str = ""
    # The tokens given in place of the truth.
    tokens: list[int] | None = None
    # End with the end token at this output index.
    eos_at: int | None = None
    # Whether a prefill replica hands over before the first token is sent.
    hand_over_first: bool = False
    # The prompt's cached tokens that the store's tiers gave.
    loaded: dict[str, int] = field(default_factory=dict)
    # Stand still: read nothing, send nothing, until it is cleared.
    is_stopped: bool = False
    # Take submissions and never begin with them; what decodes does not progress.
    stalled_s: float = 0.0
    # The backlog of others, by its reports.
    num_backlog_tokens: int = 0


class ScriptedReplica:
    """Answers Submissions as an engine core would, with `truth`."""

    def __init__(self, harness: GatewayHarness, replica_id: str, role: str, epoch: int = 1) -> None:
        self.harness = harness
        self.identity = ReplicaIdentity(replica_id, epoch)
        self.role = role
        self.num_blocks = 1000
        self.prefill_tok_s = 1000.0  # as it reports it
        self.script = Script()
        self.submissions: list[Submission] = []
        self.announces: list[Announce] = []
        self.cancels: list[Cancel] = []
        self.moves: list[Move] = []
        self.snapshot_requests: list[str] = []
        self.purged: tuple[int, int, int] | None = (0, 0, 0)
        self.address = ""
        self._server = LinkServer(harness.trust, self._on_link, self._on_peer)
        self._streams: dict[str, FrameStream] = {}
        self._reporting: asyncio.Task[None] | None = None
        self._running: dict[tuple[str, int], list[asyncio.Task[None]]] = defaultdict(list)
        # The submissions, with the output index that comes next of each sample.
        self.decoding: dict[tuple[str, int], tuple[Submission, dict[int, int]]] = {}
        self._sequence = 0
        self._load_sequence = 1
        self._paths: tuple[PathMeasure, ...] = ()

    async def start(self) -> None:
        self.address = f"127.0.0.1:{await self._server.start('127.0.0.1')}"
        self._reporting = asyncio.create_task(self._report_forever())
        await self.harness.roster.register(self.record())

    async def die(self) -> None:
        """As by SIGKILL: every Link breaks; the roster learns of it later."""
        if self._reporting is not None:
            self._reporting.cancel()
        for tasks in self._running.values():
            for task in tasks:
                task.cancel()
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        await self._server.stop()

    def record(self) -> ReplicaRecord:
        return ReplicaRecord(
            identity=self.identity,
            pool=self.role,
            role=self.role,
            address=self.address,
            model="m",
            compatibility=self.compatibility(),
            process_id=1,
            rank_process_ids=(2,),
        )

    def compatibility(self) -> CompatibilityRecord:
        return CompatibilityRecord(PROTOCOL_VERSION, FINGERPRINT, "float32", "float32", BLOCK_TOKENS, 2, 2, 8)

    def hold(self, prompt: bytes, tenant: str) -> None:
        """Tell the gateways that the prompt's blocks are cached here."""
        keys = extend_keys(root_key(bytes(32), FINGERPRINT, tenant), prompt, BLOCK_TOKENS)
        self._sequence += 1
        self.broadcast(KvSnapshot(self.identity, self._sequence, (BlocksStored(b"", keys),)))

    def publish(self, stored: tuple[BlocksStored, ...] = (), removed: tuple[BlocksRemoved, ...] = ()) -> None:
        """Tell the gateways of changes of the prefix cache."""
        self._sequence += 1
        self.broadcast(KvEvents(self.identity, self._sequence, stored, removed))

    def leave(self) -> None:
        self.broadcast(Leaving(1.0))

    def broadcast(self, message: LinkUp) -> None:
        if self.script.is_stopped:
            return
        for stream in self._streams.values():
            stream.send(LINK_UP_CODEC.encode(message))

    def is_idle(self) -> bool:
        return all(task.done() for tasks in self._running.values() for task in tasks)

    # ---------------------------------------------------------------------------------------- Link

    async def _on_peer(self, stream: FrameStream) -> None:
        stream.close()

    async def _on_link(self, stream: FrameStream) -> None:
        frame = await stream.receive()
        await self._awake()
        if frame is None:
            return
        hello = LINK_DOWN_CODEC.decode(frame)
        assert isinstance(hello, GatewayHello)
        stream.send(LINK_UP_CODEC.encode(self._hello()))
        self._streams[hello.gateway_id] = stream
        while (frame := await stream.receive()) is not None:
            await self._awake()
            message = LINK_DOWN_CODEC.decode_known(frame)
            if isinstance(message, Submission):
                self.submissions.append(message)
                self._run(message, self._prefill(message, hello.gateway_id))
            elif isinstance(message, Announce):
                self.announces.append(message)
            elif isinstance(message, Cancel):
                self.cancels.append(message)
                for task in self._running.pop((message.request_id, message.attempt), []):
                    task.cancel()
            elif isinstance(message, Move):
                self.moves.append(message)
                self._move(message, hello.gateway_id)
            elif isinstance(message, PurgeCache) and self.purged is not None:
                stream.send(LINK_UP_CODEC.encode(CachePurged(message.number, *self.purged)))
            elif isinstance(message, KvSnapshotRequest):
                if not message.part:
                    self.snapshot_requests.append(message.reason)
                # Two parts, which are empty, or the whole for a gateway of an older version.
                next_part = 1 - message.part if message.takes_parts else 0
                part = KvSnapshot(self.identity, self._sequence, (), part=message.part, next_part=next_part)
                stream.send(LINK_UP_CODEC.encode(part))

    def report(self, paths: Sequence[PathMeasure]) -> None:
        """Tell the gateways of these paths from now on."""
        self._paths = tuple(paths)
        self._load_sequence += 1
        self.broadcast(StepFrame(load=self._load()))

    async def _report_forever(self) -> None:
        """Report for ever, as an engine core does, whatever its ranks do."""
        while True:
            await self.harness.clock.sleep(LOAD_PERIOD_S)
            self.report(self._paths)

    async def _awake(self) -> None:
        while self.script.is_stopped:
            await self.harness.clock.sleep(0.01)

    async def _progressing(self) -> None:
        while self.script.is_stopped or self.script.stalled_s:
            await self.harness.clock.sleep(0.01)

    def _hello(self) -> ReplicaHello:
        load = self._load()
        context = min(MAX_CONTEXT, self.num_blocks * BLOCK_TOKENS)
        return ReplicaHello(self.identity, self.role, self.role, self.compatibility(), context, load)

    def _load(self) -> LoadReport:
        return LoadReport(
            identity=self.identity,
            sequence=self._load_sequence,
            num_free_blocks=self.num_blocks,
            num_total_blocks=self.num_blocks,
            prefill_tok_s=self.prefill_tok_s,
            decode_step_s=0.01,
            num_steps=1,
            transfer_gb_s=1.0,
            paths=self._paths,
            stalled_s=self.script.stalled_s,
            num_backlog_tokens=self.script.num_backlog_tokens,
        )

    def _run(self, submission: Submission, work: Any) -> None:
        self._running[submission.request_id, submission.attempt].append(asyncio.create_task(work))

    def _send(self, gateway_id: str, frame: StepFrame) -> None:
        if gateway_id in self._streams:
            self._streams[gateway_id].send(LINK_UP_CODEC.encode(frame))

    async def _prefill(self, submission: Submission, gateway_id: str) -> None:
        """Send the first token of each sample and, where it is to be, the hand-over."""
        request_id, attempt = submission.request_id, submission.attempt
        await self._progressing()
        if self.script.num_refusals > 0 or self.script.failure is not None:
            self.script.num_refusals -= 1
            failure = self.script.failure or RequestFailed("", 0, "refused", "full", 0.01)
            self.script.failure = None
            failed = RequestFailed(request_id, attempt, failure.code, failure.reason, failure.retry_after_s)
            self._send(gateway_id, StepFrame(failures=(failed,)))
            return
        num_tokens = len(submission.prompt) // 4
        times = StageTimes(arrived=1.0, scheduled=1.25, prefilled=2.0)
        num_cached = min(16, num_tokens - 1)
        report = PrefillReport(
            request_id, attempt, num_tokens, num_cached, times, num_loaded_tokens=self.script.loaded
        )
        first = {state.index: len(state.output) // 4 for state in submission.samples}
        deltas = tuple(self._delta(submission, state, first[state.index]) for state in submission.samples)
        if submission.decode is None:
            self._send(gateway_id, StepFrame(prefills=(report,), deltas=deltas))
            await self._decode(submission, gateway_id)
            return
        decode = self.harness.replicas[submission.decode.identity.replica_id]
        goes_on = any(not delta.finish for delta in deltas)
        if self.script.hand_over_first and goes_on:
            decode._run(submission, decode.join(submission, gateway_id))
            await self.script.resume.wait()
        self._send(gateway_id, StepFrame(prefills=(report,), deltas=deltas))
        if not self.script.hand_over_first and goes_on:
            decode._run(submission, decode.join(submission, gateway_id))

    def _move(self, order: Move, gateway_id: str) -> None:
        """Let the target continue where this one is, or report why not."""
        key = order.request_id, order.attempt
        error = self.script.moves_fail
        if not error:
            target = self.harness.replicas[order.target.identity.replica_id]
            for task in self._running.pop(key):
                task.cancel()
            submission, next_index = self.decoding.pop(key)
            target._run(submission, target.join(submission, gateway_id, next_index))
        self._send(gateway_id, StepFrame(moves=(MoveEnded(*key, order.target.identity, error),)))

    async def join(
        self, submission: Submission, gateway_id: str, next_index: dict[int, int] | None = None
    ) -> None:
        """As the decode side of a hand-over, or of a move."""
        await self._progressing()
        report = HandOverReport(
            request_id=submission.request_id,
            attempt=submission.attempt,
            num_held_tokens=0,
            num_moved_bytes=4096,
            num_bad_pieces=0,
            transport="shm",
            transfer_gb_s=4096 / 0.5 / 1e9,
            times=StageTimes(transfer_start=5.0, transfer_end=5.5, joined=5.5),
            first_index=min(next_index.values()) if next_index else 1,
        )
        self._send(gateway_id, StepFrame(hand_overs=(report,)))
        await self._decode(submission, gateway_id, next_index)

    async def _decode(
        self, submission: Submission, gateway_id: str, next_index: dict[int, int] | None = None
    ) -> None:
        """Send all tokens from `next_index` on (all after the first), one frame a step."""
        first = {state.index: len(state.output) // 4 + 1 for state in submission.samples}
        next_index = dict(next_index or first)
        self.decoding[submission.request_id, submission.attempt] = submission, next_index
        running = [state for state in submission.samples if not self._finish(submission, state, -1)]
        while running:
            if self.script.stop_after is not None and max(next_index.values()) > self.script.stop_after:
                await self.script.resume.wait()
            await self.harness.clock.sleep(self.script.token_s)
            await self._progressing()
            deltas = [self._delta(submission, state, next_index[state.index]) for state in running]
            self._send(gateway_id, StepFrame(deltas=tuple(deltas)))
            for delta in deltas:
                next_index[delta.sample] += 1
            ended = {delta.sample for delta in deltas if delta.finish}
            running = [state for state in running if state.index not in ended]

    def _finish(self, submission: Submission, state: SampleState, index: int) -> str:
        """Return how the sample ends with output `index` (-1: with its first one here)."""
        index = len(state.output) // 4 if index < 0 else index
        if self.script.eos_at == index:
            return "stop"
        return "length" if index + 1 >= submission.sampling.max_tokens else ""

    def _delta(self, submission: Submission, state: SampleState, index: int) -> TokenDelta:
        tokens = self.script.tokens or truth(submission.prompt, state.seed, index + 1)
        token = 0 if self.script.eos_at == index else tokens[index]
        num_logprobs = submission.sampling.num_logprobs
        logprobs: tuple[TokenLogprob, ...] = ()
        if num_logprobs is not None:
            logprobs = (TokenLogprob(-0.5, tuple((rank, -1.0 - rank) for rank in range(num_logprobs))),)
        return TokenDelta(
            request_id=submission.request_id,
            attempt=submission.attempt,
            sample=state.index,
            first_index=index,
            tokens=raw([token]),
            logprobs=logprobs,
            finish=self._finish(submission, state, index),
        )


class GatewayHarness:
    """One roster, any number of scripted replicas, gateways and clients."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.trust = Trust.draw()
        self.clock = SystemClock()
        self.roster = LocalRoster(self.clock)
        self.replicas: dict[str, ScriptedReplica] = {}
        self.gateways: list[Gateway] = []
        self.clients: list[Client | AdminClient] = []

    def config(self, *, auth: dict[str, Any] | None = None, **gateway: Any) -> ClusterConfig:
        engine = {"block_tokens": BLOCK_TOKENS}
        return parse_config(
            {
                "model": str(self.model_dir),
                "pools": [
                    {"name": "prefill", "role": "prefill", "engine": engine},
                    {"name": "decode", "role": "decode", "engine": engine},
                ],
                "gateway": {"port": 0, "console_port": None, "drain_s": 0, "model_name": "m", **gateway},
                "router": {"skip_prefill_tokens": 0},
                "debug": {"allow_pins": True},
                "auth": auth or {},
            },
            "test",
        )

    async def add_replica(
        self, replica_id: str, role: str, epoch: int = 1, num_blocks: int = 1000
    ) -> ScriptedReplica:
        replica = self.replicas[replica_id] = ScriptedReplica(self, replica_id, role, epoch)
        replica.num_blocks = num_blocks
        await replica.start()
        return replica

    def gateway(
        self, gateway_id: str, config: ClusterConfig, operations: Operations | None = None
    ) -> Gateway:
        """Return a gateway that is not yet started, and that the harness does not close."""
        return Gateway(
            gateway_id=gateway_id,
            epoch=1,
            config=config,
            control=ControlPlane(self.roster, operations),
            trust=self.trust,
            clock=self.clock,
            randomness=Randomness(draw_bytes=bytes),
        )

    async def add_gateway(
        self, config: ClusterConfig | None = None, operations: Operations | None = None
    ) -> tuple[Gateway, str]:
        """Add a gateway and return it with its address when every replica is connected."""
        gateway = self.gateway(f"g{len(self.gateways)}", config or self.config(), operations)
        self.gateways.append(gateway)
        address = f"127.0.0.1:{await gateway.start()}"
        await until(lambda: self.is_connected(gateway), "all replicas are connected")
        return gateway, address

    async def add_known_gateway(
        self, config: ClusterConfig | None = None, operations: Operations | None = None
    ) -> tuple[Gateway, str]:
        """As `add_gateway`, and registered: returns when all gateways that run know it."""
        gateway, address = await self.add_gateway(config, operations)
        await self.register(gateway, address)
        return gateway, address

    async def register(self, gateway: Gateway, address: str) -> None:
        """Register the gateway as its process would, and wait until all gateways that run know it."""
        gateway_id = f"g{self.gateways.index(gateway)}"
        record = GatewayRecord(
            gateway_id=gateway_id,
            epoch=1,
            address=address,
            process_id=os.getpid(),
            console=f"127.0.0.1:{gateway.console_port}" if gateway.console_port else "",
            admin=f"127.0.0.1:{gateway.admin_port}",
            fleet=f"127.0.0.1:{gateway.fleet_port}",
            http=f"127.0.0.1:{gateway.http_port}",
        )
        await self.roster.register(record)
        await until(
            lambda: all(record in it.connections.gateways for it in self.gateways if it.fleet_port),
            f"everybody knows {gateway_id}",
        )

    def is_connected(self, gateway: Gateway) -> bool:
        connected = [view for view in gateway.connections.views() if view.takes_requests]
        return len(connected) == len(self.replicas)

    def busy(self) -> list[ScriptedReplica]:
        """Return the replicas that were given work and have not finished it."""
        return [it for it in self.replicas.values() if not it.is_idle()]

    def client(self, *addresses: str, credentials: ClientCredentials | None = None) -> Client:
        client = Client(addresses, credentials=credentials)
        self.clients.append(client)
        return client

    def admin(
        self,
        gateway: Gateway | None = None,
        *,
        credentials: ClientCredentials | None = None,
        scheme: str = "",
    ) -> AdminClient:
        """Return an operator's client of this gateway, by default of the latest."""
        port = (gateway or self.gateways[-1]).admin_port
        client = AdminClient(f"{scheme}127.0.0.1:{port}", credentials=credentials)
        self.clients.append(client)
        return client

    def allow_resume(self, request: pb.GenerateRequest) -> pb.GenerateRequest:
        """Give the request an id, where it has none, and the token that a gateway would have given for it."""
        request.request_id = request.request_id or "resumed"
        request.resume_token = ResumeTokens(self.trust, self.clock, 60.0).issue(
            LOCAL, request.tenant, request.request_id, request.seed, resume_digest(request)
        )
        return request

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        for gateway in self.gateways:
            await gateway.stop()
        for replica in self.replicas.values():
            await replica.die()


class Pair:
    """One prefill and one decode replica, a gateway and a client."""

    def __init__(self, harness: GatewayHarness, gateway: Gateway, client: Client) -> None:
        self.harness, self.gateway, self.client = harness, gateway, client
        self.admin = harness.admin(gateway)
        self.prefill, self.decode = harness.replicas["p0"], harness.replicas["d0"]


BLOCK_TOKENS = 16
MAX_CONTEXT = 512
# The model's vocabulary; the tokenizer has fewer tokens.
VOCAB = 400
FINGERPRINT = bytes(range(16))
_PAD = {"__type": "AddedToken", "content": "<|pad|>", "special": True}
PROMPT = "def main(): return the answer, the quick brown fox"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def raw(ids: list[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def truth(prompt: bytes, seed: int, count: int) -> list[int]:
    """Return the first `count` tokens that every replica gives for this prompt and sample seed."""
    ids = []
    for index in range(count):
        digest = hashlib.sha256(prompt + seed.to_bytes(8, "little") + index.to_bytes(4, "little")).digest()
        ids.append(4 + int.from_bytes(digest[:4], "little") % 250)
    return ids


def train_tokenizer() -> Tokenizer:
    """Train a small byte-level BPE, with four special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["def main(): return the answer", "the quick brown fox, äöü €"]
    tokenizer.train_from_iterator(texts * 4, trainer)
    return tokenizer


_TOKENIZER = train_tokenizer()


def encode(text: str) -> list[int]:
    return list(_TOKENIZER.encode(text).ids)


def decode(ids: Sequence[int]) -> str:
    return str(_TOKENIZER.decode(list(ids)))


def expected(seed: int, count: int, prompt: str = PROMPT) -> list[int]:
    return truth(raw(encode(prompt)), seed, count)


def write_model(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Write the files of a model that a gateway reads: config, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    _TOKENIZER.save(str(folder / "tokenizer.json"))
    tokens: dict[str, Any] = {"bos_token": None, "eos_token": "<|end|>", "pad_token": _PAD}
    if template is not None:
        tokens["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return folder
