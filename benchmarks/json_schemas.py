"""Whether answers by 1,000 JSON schemas are complete and valid: `python -m benchmarks.json_schemas`.

A gateway, a prefill replica and two decode replicas of the bundled model answer each schema of
`benchmarks.drawn_schemas` once, greedily and at temperature 1 by turns, in at most 512 tokens. An answer is
complete when it ends by itself, and valid when `jsonschema` finds nothing. Then the longest are asked
again: while they are written, one decode replica is killed, or drained so that its streams move. Both
must give the same answers.

JSON lines: one for each answer that is not as it should be, for each keyword, for each source, and for
kills and moves; `limit` is what the figure beside it must reach or not exceed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import decimal
import json
import os
import signal
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any, Self

import jsonschema

from benchmarks.drawn_schemas import SchemaCase, drawn_cases, kubernetes_cases
from benchmarks.drawn_trust import draw_trust
from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.config import parse_config
from cluster.errors import CallError
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.roster.messages import ReplicaRecord
from cluster.roster.state import LocalRoster
from cluster.serve.gateway_server import ControlPlane, Gateway
from kvtransfer.common.clock import SystemClock
from kvtransfer.config import TransferConfig
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.trust import Trust
from workers.config import EngineConfig, Parallel
from workers.errors import RankDiedError
from workers.messages.link import HandOverTarget
from workers.replica.engine_core import EngineCore
from workers.replica.partition import ReplicaSpec
from workers.replica.rank_group import ProcessLauncher

Line = dict[str, Any]
Lines = AsyncGenerator[Line, None]

CLOCK = SystemClock()
TINY = Path(__file__).resolve().parent.parent / "models" / "tiny"
MAX_TOKENS = 512
MIN_COMPLETE = 0.95
MAX_REFUSED = 0.10
# The tokens of each answer that is asked again when a replica leaves.
NUM_BEGUN_TOKENS = 8
_PERIOD_S = 0.02


@dataclass(frozen=True)
class SchemaAnswer:
    """The answer to a schema: a text and its end, or the reason of a refusal."""

    case: SchemaCase
    text: str = ""
    num_tokens: int = 0
    finish_reason: int = pb.FINISH_REASON_UNSPECIFIED
    num_attempts: int = 0
    refusal: str = ""

    @property
    def is_complete(self) -> bool:
        return self.finish_reason == pb.FINISH_REASON_STOP

    def find_problem(self) -> str:
        """Return the fault of a complete answer, by a validator that knows nothing of grammars."""
        return find_problem(self.text, self.case.text)


def find_problem(text: str, schema_text: str) -> str:
    """Return why a text is not JSON by the schema; "": it is. Numbers are decimal: products of floats are
    not exact, and multiples of 0.01 would be none."""
    try:
        value = json.loads(text, parse_float=Decimal)
        with decimal.localcontext(decimal.Context(prec=2000)):
            schema = json.loads(schema_text, parse_float=Decimal)
            _VALIDATOR(schema, format_checker=_FORMATS).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).partition("\n")[0]
    return ""


def _is_date(text: object) -> bool:
    # RFC 3339 has a year 0, Python has none.
    return not isinstance(text, str) or bool(date.fromisoformat(text.replace("0000-", "2000-", 1)))


def _is_time(text: object) -> bool:
    if not isinstance(text, str):
        return True
    # Python has no leap seconds, and no z.
    return time.fromisoformat(text.upper().replace(":60", ":59")).tzinfo is not None


def _is_date_time(text: object) -> bool:
    if not isinstance(text, str):
        return True
    day, _, clock = text.upper().partition("T")
    return _is_date(day) and _is_time(clock)


_VALIDATOR = jsonschema.Draft202012Validator
_FORMATS = jsonschema.FormatChecker(("ipv4", "ipv6", "email", "uuid"))
for _name, _check in (("date", _is_date), ("time", _is_time), ("date-time", _is_date_time)):
    _FORMATS.checks(_name, raises=ValueError)(_check)


# ---------------------------------------------------------------------------------------------- answers


async def answer(
    client: Client,
    case: SchemaCase,
    seed: int,
    *,
    max_tokens: int = MAX_TOKENS,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> SchemaAnswer:
    """Ask for JSON by the schema; `on_tokens` takes how many tokens there are whenever more have come."""
    user = pb.ChatMessage(role=pb.ROLE_USER, content=[pb.ContentPart(text="Write the JSON.")])
    options = GenerateOptions(
        constraint=pb.Constraint(json_schema=case.text),
        max_tokens=max_tokens,
        temperature=float(seed % 2),
        seed=seed,
    )
    found = SchemaAnswer(case)
    try:
        async for event in client.generate(pb.ChatPrompt(messages=[user]), options):
            if isinstance(event, pb.Delta):
                num_tokens = found.num_tokens + len(event.token_ids)
                found = replace(found, text=found.text + event.text, num_tokens=num_tokens)
                if event.finish_reason:
                    found = replace(found, finish_reason=event.finish_reason)
                on_tokens(num_tokens)
            elif isinstance(event, pb.Finished):
                found = replace(found, num_attempts=event.timing.attempts)
    except CallError as error:
        if error.reason != "GRAMMAR":
            raise
        return replace(found, refusal=str(error))
    return found


async def answer_all(client: Client, cases: Sequence[SchemaCase], concurrency: int) -> list[SchemaAnswer]:
    """Answer every case, a limited number at a time; the number of a case is its seed."""
    places = asyncio.Semaphore(concurrency)

    async def one(number: int, case: SchemaCase) -> SchemaAnswer:
        async with places:
            return await answer(client, case, number)

    return await asyncio.gather(*(one(number, case) for number, case in enumerate(cases)))


@dataclass(frozen=True)
class SchemaCounts:
    """The number of schemas that were refused, and of the others whose answers are complete and valid."""

    schemas: int
    refused: int
    complete: int
    valid: int

    @classmethod
    def of(cls, answers: Iterable[SchemaAnswer]) -> Self:
        every = list(answers)
        complete = [it for it in every if it.is_complete]
        valid = sum(not it.find_problem() for it in complete)
        return cls(len(every), sum(bool(it.refusal) for it in every), len(complete), valid)

    @property
    def share_refused(self) -> float:
        return self.refused / max(1, self.schemas)

    @property
    def share_complete(self) -> float:
        return self.complete / max(1, self.schemas - self.refused)

    def line(self) -> Line:
        return {
            "schemas": self.schemas,
            "refused": self.refused,
            "complete": self.complete,
            "valid": self.valid,
            "share_refused": round(self.share_refused, 4),
            "share_complete": round(self.share_complete, 4),
            "share_valid": round(self.valid / max(1, self.complete), 4),
        }


def report(answers: Sequence[SchemaAnswer]) -> list[Line]:
    """Return the lines of a run: the faults, then by keyword, then by source."""
    lines: list[Line] = []
    for it in answers:
        problem = ""
        if bool(it.refusal) != bool(it.case.unsupported):
            problem = it.refusal or f"{it.case.unsupported!r} was not refused"
        elif not it.refusal:
            problem = it.find_problem() if it.is_complete else f"no end within {it.num_tokens} tokens"
        if problem:
            end = it.text[-80:]
            lines.append({"problem": problem[:200], "schema": it.case.name, "seen": end})
    for keyword in sorted(set().union(*(it.case.keywords for it in answers))):
        counts = SchemaCounts.of(it for it in answers if keyword in it.case.keywords)
        lines.append({"keyword": keyword, **counts.line()})
    sources = sorted({it.case.source for it in answers})
    for source in sources:
        lines.append(
            {"source": source, **SchemaCounts.of(it for it in answers if it.case.source == source).line()}
        )
    limits = {"limit_complete": MIN_COMPLETE, "limit_refused": MAX_REFUSED}
    lengths = sorted(it.num_tokens for it in answers if it.is_complete)
    tokens = {"tokens_p50": lengths[len(lengths) // 2], "tokens_p90": lengths[len(lengths) * 9 // 10]}
    return [*lines, {"source": "all", **SchemaCounts.of(answers).line(), **tokens, **limits}]


# ------------------------------------------------------------------------------ replicas that come and go


class SchemaCluster:
    """A gateway before one prefill replica and decode replicas that may be killed or drained."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._trust = draw_trust()
        self._roster = LocalRoster(CLOCK)
        self._cores: dict[str, EngineCore] = {}
        self._num_started = 0

    async def __aenter__(self) -> Self:
        engine = {"block_tokens": 16}
        config = parse_config(
            {
                "model": str(self._model_dir),
                "pools": [{"name": role, "role": role, "engine": engine} for role in ("prefill", "decode")],
                "gateway": {"port": 0, "drain_s": 0},
                "router": {"policy": "round_robin", "skip_prefill_tokens": 0},
            },
            "json_schemas",
        )
        trust = Trust.read(self._trust)
        self._gateway = Gateway(
            gateway_id="g",
            epoch=1,
            config=config,
            control=ControlPlane(self._roster),
            trust=trust,
            clock=CLOCK,
        )
        self._port = await self._gateway.start()
        self.client = Client(f"127.0.0.1:{self._port}")
        await self.add("prefill")
        await asyncio.gather(self.add("decode"), self.add("decode"))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self._gateway.stop()
        for core in self._cores.values():
            await core.stop()

    async def add(self, role: str) -> None:
        """Start a replica, and return when requests can be placed on it."""
        self._num_started += 1
        spec = ReplicaSpec(
            identity=ReplicaIdentity(f"{role}-{self._num_started}", 1),
            pool=role,
            role=role,
            model_dir=str(self._model_dir),
            dtype="float32",
            parallel=Parallel(),
            engine=EngineConfig(block_tokens=16, kv_tokens=32768, max_sequences=32, num_threads=1),
            transfer=TransferConfig(),
            trust=self._trust,
            host="127.0.0.1",
        )
        core = await EngineCore.launch(spec, ProcessLauncher(), CLOCK)
        self._cores[core.identity.replica_id] = core
        record = ReplicaRecord(
            identity=core.identity,
            pool=role,
            role=role,
            address=core.address,
            model="tiny",
            compatibility=core.compatibility,
            process_id=0,
            rank_process_ids=core.rank_process_ids,
        )
        await self._roster.register(record)
        self._join()
        while not self._is_known(core.identity.replica_id):
            await CLOCK.sleep(_PERIOD_S)

    def _join(self) -> None:
        targets = [HandOverTarget(it.identity, it.address) for it in self._cores.values()]
        decode = [it for it in targets if it.identity.replica_id.startswith("decode")]
        for core in self._cores.values():
            core.join_peers(decode)

    def _is_known(self, replica_id: str) -> bool:
        num_decode = sum(core.role == "decode" for core in self._cores.values())
        views = {view.record.identity.replica_id: view for view in self._gateway.connections.views()}
        has_paths = all(len(it.paths) >= num_decode for it in views.values() if it.record.role == "prefill")
        return replica_id in views and views[replica_id].takes_requests and has_paths

    def oldest_decode(self) -> EngineCore:
        return next(core for core in self._cores.values() if core.role == "decode")

    async def kill(self, core: EngineCore) -> None:
        """Kill the replica's rank, and act as the cluster does then."""
        os.kill(core.rank_process_ids[0], signal.SIGKILL)
        while True:
            try:
                core.check_health()
            except RankDiedError:
                break
            await CLOCK.sleep(_PERIOD_S)
        await self._remove(core)

    async def drain(self, core: EngineCore) -> int:
        """Drain the replica and end it. Return how many streams have moved."""
        await core.drain(60.0)
        num_moved = core.migration.num_migrated
        await self._remove(core)
        return num_moved

    async def _remove(self, core: EngineCore) -> None:
        await self._roster.remove(core.identity.replica_id, core.identity.epoch)
        await core.stop()
        del self._cores[core.identity.replica_id]


async def answer_while_one_leaves(
    cluster: SchemaCluster, before: Sequence[tuple[int, SchemaAnswer]], how: str
) -> tuple[list[SchemaAnswer], int]:
    """Answer again, and let a decode replica leave when all have begun: "kill" or "move". Returns the answers
    in the same order, and how many streams have gone on elsewhere."""
    num_tokens = dict.fromkeys((seed for seed, _ in before), 0)
    begun = asyncio.Event()

    async def again(seed: int, case: SchemaCase) -> SchemaAnswer:
        def on_tokens(number: int) -> None:
            num_tokens[seed] = number
            if min(num_tokens.values()) >= NUM_BEGUN_TOKENS:
                begun.set()

        return await answer(cluster.client, case, seed, on_tokens=on_tokens)

    tasks = [asyncio.create_task(again(seed, it.case)) for seed, it in before]
    every = asyncio.gather(*tasks)
    await begun.wait()
    core = cluster.oldest_decode()
    if how == "kill":
        await cluster.kill(core)
        answers = await every
        return answers, sum(it.num_attempts > 1 for it in answers)
    num_moved = await cluster.drain(core)
    return await every, num_moved


async def measure_leaving(
    cluster: SchemaCluster, answers: Sequence[SchemaAnswer], how: str, num_schemas: int, concurrency: int
) -> Lines:
    """Yield the lines of the schemas with the longest answers, asked again while a replica leaves."""
    started_at = CLOCK.now()
    numbered = [(seed, it) for seed, it in enumerate(answers) if it.is_complete]
    longest = sorted(numbered, key=lambda each: -each[1].num_tokens)[:num_schemas]
    found: list[SchemaAnswer] = []
    num_elsewhere = num_same = 0
    for first in range(0, len(longest), concurrency):
        some = longest[first : first + concurrency]
        now, number = await answer_while_one_leaves(cluster, some, how)
        found += now
        num_elsewhere += number
        for (_, before), after in zip(some, now, strict=True):
            num_same += before.text == after.text
            if before.text != after.text:
                yield {"problem": "another answer", "schema": after.case.name, "seen": after.text[-80:]}
        await cluster.add("decode")
    counts = SchemaCounts.of(found).line()
    seconds = round(CLOCK.now() - started_at, 1)
    yield {"while": how, **counts, "elsewhere": num_elsewhere, "same": num_same, "seconds": seconds}


async def measure(num_schemas: int, num_leaving: int, concurrency: int) -> Lines:
    """Yield the lines of a run with `num_schemas` schemas, half of them of Kubernetes, and `num_leaving` of
    them asked again for each way to leave."""
    half = num_schemas // 2
    cases = [*kubernetes_cases(half), *drawn_cases(num_schemas - half)]
    async with SchemaCluster(TINY) as cluster:
        started_at = CLOCK.now()
        answers = await answer_all(cluster.client, cases, concurrency)
        seconds = CLOCK.now() - started_at
        *lines, total = report(answers)
        for line in lines:
            yield line
        num_tokens = sum(it.num_tokens for it in answers)
        yield {**total, "tokens": num_tokens, "seconds": round(seconds, 1)}
        for how in ("kill", "move"):
            leaving = measure_leaving(cluster, answers, how, num_leaving, concurrency)
            async with contextlib.aclosing(leaving):
                async for line in leaving:
                    yield line


async def _print(args: argparse.Namespace) -> None:
    async with contextlib.aclosing(measure(args.schemas, args.leaving, args.concurrency)) as lines:
        async for line in lines:
            print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--schemas", type=int, default=1000, help="half of Kubernetes, half drawn")
    parser.add_argument("--leaving", type=int, default=96, help="asked again, for each way to leave")
    parser.add_argument("--concurrency", type=int, default=16)
    asyncio.run(_print(parser.parse_args()))


if __name__ == "__main__":
    main()
