"""A real gateway in front of an `e2e_harness.E2eHarness`: a roster, replicas that live in it as
`cluster.serve.replica_actor` lets them, and clients whose streams are recorded. A stage keeps its
replicas for a module of tests; guests stay for one test."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from e2e_harness import BLOCK_TOKENS, SINGLE, E2eHarness, Replica, until

from cluster.api.admin_client import AdminClient
from cluster.api.client import Client, GenerateStream
from cluster.api.generate_options import GenerateOptions, Prompt
from cluster.config import ClusterConfig, parse_config
from cluster.errors import CallError
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.roster.messages import ReplicaRecord
from cluster.roster.state import LocalRoster
from cluster.serve.gateway_server import ControlPlane, Gateway, Randomness
from cluster.text.preprocess import sample_seed
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import FaultRule
from kvtransfer.rpc.trust import Trust
from workers.config import Parallel
from workers.errors import RankDiedError
from workers.messages.link import HandOverTarget

TINY = Path(__file__).resolve().parent.parent.parent / "models" / "tiny"
HEALTH_PERIOD_S = 0.05
_FRONT_NUMBERS = itertools.count()
_ALONE_NUMBERS = itertools.count()


def copy_tiny(folder: Path) -> Path:
    """Copy the bundled model as it is now: every process of a test must load the same weights."""
    return Path(shutil.copytree(TINY, folder / "tiny"))


def prompt(seed: int, num_tokens: int = 200) -> list[int]:
    """Return token ids with which no other seed begins."""
    draw = random.Random(seed)
    return [draw.randrange(4, 4000) for _ in range(num_tokens)]


@dataclass
class Call:
    """A request of a client, and all that its stream told."""

    stream: GenerateStream
    accepted: pb.Accepted | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    finished: pb.Finished | None = None
    error: CallError | None = None
    task: asyncio.Task[None] = field(init=False)

    @property
    def sequence(self) -> list[int]:
        """The tokens of the first sample."""
        return self.tokens.get(0, [])

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.tokens.values())

    async def ended(self, wait_s: float = 60.0) -> Call:
        """Wait for the one end of the stream."""
        await until(self.task.done, f"end of {self.stream.request_id or 'a stream'}", wait_s)
        self.task.result()
        assert (self.finished is None) != (self.error is None)
        return self

    async def done(self, wait_s: float = 60.0) -> Call:
        """Wait for a good end."""
        await self.ended(wait_s)
        assert self.error is None, self.error
        return self

    async def listen(self) -> None:
        """Take every event; runs as `task`."""
        try:
            async for event in self.stream:
                assert self.finished is None, "an event came after the last one"
                if isinstance(event, pb.Accepted):
                    assert self.accepted is None
                    self.accepted = event
                elif isinstance(event, pb.Delta):
                    tokens = self.tokens.setdefault(event.sample, [])
                    assert event.first_index == len(tokens)
                    tokens.extend(event.token_ids)
                    self.texts[event.sample] = self.texts.get(event.sample, "") + event.text
                    self.logprobs.extend(event.logprobs)
                elif isinstance(event, pb.Finished):
                    self.finished = event
        except CallError as error:
            self.error = error


class Front:
    """One gateway with its own roster over some replicas of a harness; several can share the replicas."""

    def __init__(
        self,
        harness: E2eHarness,
        model_dir: Path,
        tenants: dict[str, dict[str, Any]] | None = None,
        *,
        admission: dict[str, Any] | None = None,
        **router: Any,
    ) -> None:
        """`router`: its settings. By default the policy is plain, and every prompt is handed over. `tenants`
        are the limits of some, `admission` the settings of classes."""
        number = next(_FRONT_NUMBERS)
        self.harness = harness
        self.clock = SystemClock()
        self.roster = LocalRoster(self.clock)
        settings = {"policy": "round_robin", "skip_prefill_tokens": 0, **router}
        self.gateway = Gateway(
            gateway_id=f"front{number}",
            epoch=1,
            config=front_config(model_dir, settings, tenants or {}, admission or {}),
            control=ControlPlane(self.roster),
            trust=Trust.read(harness.trust),
            clock=self.clock,
            # Key roots are all zero: gateways over the same replicas share what is cached there.
            randomness=Randomness(_drawing(number), bytes),
        )
        self.address = ""
        self.client: Client
        self.admin: AdminClient
        self._clients: list[Client] = []
        self._registered: list[Replica] = []
        self._lives: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        self.address = f"127.0.0.1:{await self.gateway.start()}"
        self.client = self.connect(self.address)
        self.admin = AdminClient(f"127.0.0.1:{self.gateway.admin_port}")

    def connect(self, *addresses: str) -> Client:
        """Return a client of these gateways; closed with this front."""
        self._clients.append(Client(addresses))
        return self._clients[-1]

    async def register(self, *replicas: Replica) -> None:
        """Add replicas to the roster, as `ReplicaActor` does; return when all are connected
        and joined."""
        for replica in replicas:
            await self.roster.register(_record(replica))
            self._registered.append(replica)
            self._lives.append(asyncio.create_task(self._live(replica)))
        targets = [
            HandOverTarget(it.core.identity, it.core.address)
            for it in self._registered
            if it.core.role != "prefill"
        ]
        for replica in self._registered:
            if replica.core.role != "decode":
                replica.core.join_peers(targets)
        names = {replica.core.identity.replica_id for replica in replicas}
        await until(lambda: names <= self._connected(), f"{sorted(names)} are connected and joined")

    async def forget(self, replica: Replica) -> None:
        """Tell the roster that the replica is gone."""
        identity = replica.core.identity
        await self.roster.remove(identity.replica_id, identity.epoch)

    def call(
        self,
        asked: Prompt,
        *,
        client: Client | None = None,
        timeout_s: float | None = None,
        resume: bool = True,
        **options: Any,
    ) -> Call:
        """Start a request."""
        wanted = GenerateOptions(**{"max_tokens": 8, "ignore_eos": True, **options})
        call = Call((client or self.client).generate(asked, wanted, timeout_s=timeout_s, resume=resume))
        call.task = asyncio.create_task(call.listen())
        return call

    async def complete(self, asked: Prompt, **options: Any) -> Call:
        """Complete a whole request that must end well."""
        return await self.call(asked, **options).done()

    async def close(self) -> None:
        for client in (*self._clients, self.admin):
            await client.close()
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        await self.gateway.stop()

    def _connected(self) -> set[str]:
        num_targets = sum(it.core.role != "prefill" for it in self._registered)
        return {
            view.record.identity.replica_id
            for view in self.gateway.connections.views()
            if view.takes_requests and (view.record.role != "prefill" or len(view.paths) >= num_targets)
        }

    async def _live(self, replica: Replica) -> None:
        """As `ReplicaActor`: an engine core that cannot go on leaves the roster and
        ends."""
        try:
            while True:
                await self.clock.sleep(HEALTH_PERIOD_S)
                replica.core.check_health()
        except RankDiedError:
            await self.forget(replica)
            await replica.core.stop()


async def tokens_alone(
    replica: Replica,
    harness: E2eHarness,
    asked: list[int],
    seed: int,
    num_tokens: int,
    sample: int = 0,
    **sampling: Any,
) -> list[int]:
    """Return the tokens that one engine gives for a sample of the request with this seed, when nothing else
    runs."""
    submission = harness.submission(
        f"alone{next(_ALONE_NUMBERS)}",
        asked,
        seed=sample_seed(seed, sample),
        max_tokens=num_tokens,
        **sampling,
    )
    heard = await harness.run(replica, submission)
    assert heard.failure is None, heard.failure
    return heard.sequence()


def front_config(
    model_dir: Path,
    router: dict[str, Any],
    tenants: dict[str, dict[str, Any]],
    admission: dict[str, Any],
) -> ClusterConfig:
    """Return a configuration whose pools exist on paper only: the test makes the replicas."""
    engine = {"block_tokens": BLOCK_TOKENS}
    return parse_config(
        {
            "model": str(model_dir),
            "pools": [
                {"name": "prefill", "role": "prefill", "engine": engine},
                {"name": "decode", "role": "decode", "engine": engine},
            ],
            "gateway": {"port": 0, "drain_s": 0},
            "router": router,
            "auth": {"tenants": tenants},
            "admission": admission,
            "debug": {"allow_pins": True},
        },
        "e2e",
    )


def _drawing(seed: int) -> Callable[[], int]:
    draw = random.Random(seed)
    return lambda: draw.getrandbits(63)


def _record(replica: Replica) -> ReplicaRecord:
    core = replica.core
    return ReplicaRecord(
        identity=core.identity,
        pool=core.pool_name,
        role=core.role,
        address=core.address,
        model="tiny",
        compatibility=core.compatibility,
        process_id=core.rank_process_ids[0],
        rank_process_ids=core.rank_process_ids,
    )


SEEDED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1}
SAMPLINGS: tuple[dict[str, Any], ...] = ({}, SEEDED)


class Stage:
    """Replicas that stay (p0 prefill, d0 decode, b0 alone), and guests."""

    def __init__(self, harness: E2eHarness, model_dir: Path, engine: dict[str, Any]) -> None:
        self.harness = harness
        self.model_dir = model_dir
        self._engine = engine
        self._num_guests = 0

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, folder: Path, engine: dict[str, Any], parallel: Parallel = SINGLE
    ) -> AsyncIterator[Self]:
        """Open a stage whose replicas have these settings of the engine, and this shape; b0 has one rank."""
        model_dir = copy_tiny(folder)
        async with E2eHarness(model_dir, parallel) as harness:
            async with asyncio.TaskGroup() as starts:
                starts.create_task(harness.add("p0", "prefill", engine=engine))
                starts.create_task(harness.add("d0", "decode", engine=engine))
                starts.create_task(harness.add("b0", "both", engine=engine, parallel=SINGLE))
            yield cls(harness, model_dir, engine)

    @property
    def p0(self) -> Replica:
        return self.harness.replicas["p0"]

    @property
    def d0(self) -> Replica:
        return self.harness.replicas["d0"]

    async def guest(
        self, role: str, *faults: FaultRule, transfer: dict[str, Any] | None = None, **engine: Any
    ) -> Replica:
        """Add a new replica, with changed settings."""
        self._num_guests += 1
        name, settings = f"guest{self._num_guests}", {**self._engine, **engine}
        return await self.harness.add(name, role, engine=settings, transfer=transfer or {}, faults=faults)

    @asynccontextmanager
    async def front(self, *replicas: Replica, **router: Any) -> AsyncIterator[Front]:
        """Open a gateway over these replicas, with these settings of its router; guests end with it."""
        front = Front(self.harness, self.model_dir, **router)
        await front.open()
        try:
            await front.register(*replicas)
            yield front
        finally:
            self.harness.wake_all()
            await front.close()
            for name in [name for name in self.harness.replicas if name.startswith("guest")]:
                replica = self.harness.replicas.pop(name)
                await replica.close()
                await replica.core.stop()

    async def wanted(self, tokens: list[int], seed: int, num_tokens: int, **sampling: Any) -> list[int]:
        """Return the tokens that follow on the prompt `tokens`, from one engine without any hand-over."""
        return await tokens_alone(
            self.harness.replicas["b0"], self.harness, tokens, seed, num_tokens, **sampling
        )

    def calls(self, front: Front, seed: int, count: int, num_tokens: int, **options: Any) -> list[Call]:
        """Call `count` streams, greedy and seeded ones by turns."""
        return [
            front.call(
                prompt(seed + i, 40 + 7 * i),
                seed=seed + i,
                max_tokens=num_tokens,
                **SAMPLINGS[i % 2],
                **options,
            )
            for i in range(count)
        ]

    async def all_right(self, calls: list[Call], seed: int, num_tokens: int) -> None:
        """Check that every stream of `calls` ends well, with the tokens that one engine gives."""
        for call in calls:
            await call.done()
        wanted = await asyncio.gather(
            *(
                self.wanted(prompt(seed + i, 40 + 7 * i), seed + i, num_tokens, **SAMPLINGS[i % 2])
                for i in range(len(calls))
            )
        )
        for i, call in enumerate(calls):
            assert call.sequence == wanted[i], f"stream {i}"


def decoding(calls: list[Call], num_tokens: int = 6) -> Callable[[], bool]:
    """Return a test whether all streams have `num_tokens` tokens."""
    return lambda: all(len(call.sequence) >= num_tokens for call in calls)
