"""The store of a node breaks while its replicas serve: every token is right, no request fails, it shows in
the store's figures, and all is well again after.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from e2e_harness import SHAPES, SINGLE, E2eHarness, Heard, Replica, until
from patience import WAIT_S
from store_harness import StoreHarness

from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import FaultRule
from kvtransfer.errors import TransferError
from kvtransfer.store.messages.admin_requests import (
    PurgeRequest,
    PurgeResult,
    StatRequest,
    StoreStat,
    TierStat,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLING: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.1, "seed": 77, "max_tokens": 8}
NUM_PREFIXES, NUM_REQUESTS = 3, 12
PREFIX_TOKENS, NUM_TOKENS = 96, 168
SEGMENT_BYTES = 256 << 10
NUM_SEGMENTS, NUM_ROUNDS = 12, 6
MAX_ROUNDS = 20


def some_tokens(draw: random.Random, num: int) -> list[int]:
    return [draw.randrange(3, 190) for _ in range(num)]


def prompts(seed: int) -> list[list[int]]:
    """Twelve, each of which shares its beginning with three others."""
    draw = random.Random(seed)
    prefixes = [some_tokens(draw, PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    return [
        prefixes[number % NUM_PREFIXES] + some_tokens(draw, NUM_TOKENS - PREFIX_TOKENS)
        for number in range(NUM_REQUESTS)
    ]


@dataclass
class Node:
    """Two replicas at one store that holds less than what they compute: in DRAM, and in both tiers."""

    harness: E2eHarness
    store: StoreHarness
    replicas: list[Replica]
    # Prompts and the tokens that must follow.
    rounds: list[tuple[list[list[int]], list[list[int]]]]
    draw: random.Random = field(default_factory=lambda: random.Random(5))
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def start(self, *faults: FaultRule, nvme_path: str = "") -> None:
        """A new life of the owner; returns when both replicas use it."""
        await self.store.start(*faults, nvme_path=nvme_path or self.store.settings.nvme_path)
        await self.is_open()

    async def is_open(self) -> None:
        for replica in self.replicas:
            tiers = replica.core.connector
            assert tiers is not None
            await until(lambda: tiers.is_open, "the store is open", WAIT_S)  # noqa: B023

    async def serve(self) -> dict[str, int]:
        """Twelve requests at once; tokens that were loaded for them, by tier. Loading is always worth it
        here: how long computing takes instead is not known."""
        number = next(self.numbers)
        tokens, wanted = self.draw.choice(self.rounds)
        submissions = [
            self.harness.submission(f"{number}-{index}", each, **SAMPLING)
            for index, each in enumerate(tokens)
        ]
        for index, submission in enumerate(submissions):
            replica = self.replicas[(index + number) % len(self.replicas)]
            replica.core.steps.rates.prefill_tok_s = 0.0
            replica.send(submission)
        heard = [await self.harness.ended(submission) for submission in submissions]
        assert [each.failure for each in heard] == [None] * NUM_REQUESTS
        assert [each.sequence() for each in heard] == wanted
        return loaded(heard)

    async def serve_until(self, condition: Callable[[], bool], what: str) -> None:
        for _ in range(MAX_ROUNDS):
            if condition():
                return
            await self.serve()
        assert condition(), f"not in {MAX_ROUNDS} rounds: {what}"

    async def stat(self) -> StoreStat:
        return await self.store.ask(StatRequest(), StoreStat)

    async def serve_until_stat(self, condition: Callable[[TierStat], bool], what: str) -> TierStat:
        """Serve until NVMe's figures are so."""
        clock = SystemClock()
        deadline = clock.now() + WAIT_S
        while not condition(nvme := await self.store.stat("nvme")):
            assert clock.now() < deadline, f"not in time: {what}; {nvme}"
            await self.serve()
        return nvme

    async def is_whole(self) -> None:
        """The store takes and gives again, from both of its tiers, and nothing was left behind."""
        await self.is_open()
        before = await self.stat()
        for _ in range(MAX_ROUNDS):
            given = await self.serve()
            if given.get("dram") and given.get("nvme"):
                break
        else:
            raise AssertionError(f"nothing is loaded; {await self.stat()}")
        await self.serve_until_stat(
            lambda stat: stat.num_written_bytes > before.tiers[1].num_written_bytes and not stat.note,
            "NVMe is written",
        )
        await self.harness.quiet()
        await self.store.check_nothing_leaked()
        assert (await self.stat()).num_sessions == len(self.replicas)


def loaded(heard: list[Heard]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for each in heard:
        assert each.prefill is not None
        for tier, num in each.prefill.num_loaded_tokens.items():
            sums[tier] = sums.get(tier, 0) + num
    return sums


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SHAPES)
async def node(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Node]:
    """One for all tests: each leaves it whole, which shows that it heals."""
    folder = tmp_path_factory.mktemp("node")
    harness = E2eHarness(model_dir, request.param)
    store = StoreHarness(
        folder,
        harness.trust,
        dram_bytes=2 << 20,
        nvme_path=str(folder / "nvme"),
        nvme_bytes=NUM_SEGMENTS * SEGMENT_BYTES,
        segment_bytes=SEGMENT_BYTES,
    )
    try:
        alone = await harness.add("alone", parallel=SINGLE)
        rounds = []
        for seed in range(NUM_ROUNDS):
            tokens = prompts(seed)
            submissions = [
                harness.submission(f"alone-{seed}-{number}", each, **SAMPLING)
                for number, each in enumerate(tokens)
            ]
            for submission in submissions:
                alone.send(submission)
            wanted = [(await harness.ended(submission)).sequence() for submission in submissions]
            rounds.append((tokens, wanted))
        await store.start()
        replicas = [
            await harness.add(name, store=store.settings.name, engine={"kv_tokens": 768})
            for name in ("a", "b")
        ]
        yield Node(harness, store, replicas, rounds)
    finally:
        await harness.close()
        await store.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "after"),
    [
        ("store.put.allocate", 30),
        ("store.put.commit", 30),
        ("store.get", 300),
        ("store.evict", 10),
        ("store.nvme.write", 20),
        ("store.nvme.read", 5),
        ("store.compact", 1),
        ("store.compact", 3),
        ("store.recover", 2),
        ("store.purge", 1),
    ],
)
async def test_the_owner_dies_while_replicas_serve(
    node: Node, tmp_path: Path, point: str, after: int
) -> None:
    marker = tmp_path / "marker"
    await node.serve()
    await node.store.close()
    await node.store.start(FaultRule(point, "kill", str(marker), after))
    asking = asyncio.create_task(_purge(node)) if point == "store.purge" else None
    await node.serve_until(marker.exists, f"{point} is passed")
    assert await node.store.ended() == -signal.SIGKILL
    if asking is not None:
        await asking
    await node.serve()
    await node.start()
    await node.is_whole()


async def _purge(node: Node) -> None:
    with suppress(TransferError):  # the owner dies of it
        await node.store.ask(PurgeRequest("", None), PurgeResult)


# ------------------------------------------------------------------------------------------------- NVMe


@dataclass(frozen=True)
class Damage:
    """What is done to a store's folder, how that shows, and how it is undone."""

    do: Callable[[Path], None]
    shows: Callable[[StoreStat], bool]
    undo: Callable[[Path], None]
    # It stays until it is undone; else what was damaged may be evicted before anybody reads it.
    is_lasting: bool = True


def make_immutable(folder: Path) -> None:
    done = subprocess.run(["chattr", "-R", "+i", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        make_mutable(folder)
        pytest.skip(f"no file can be made immutable here: {done.stderr.strip()}")


def make_mutable(folder: Path) -> None:
    subprocess.run(["chattr", "-R", "-i", str(folder)], check=False)


def grow(folder: Path) -> None:
    """Make room on the small disk for all segments."""
    size = f"remount,size={(NUM_SEGMENTS + 4) * SEGMENT_BYTES}"
    subprocess.run(["mount", "-o", size, str(folder.parent)], check=True)


def flip(folder: Path) -> None:
    """One bit in each page of each file."""
    for path in folder.glob("*.seg"):
        with suppress(FileNotFoundError), path.open("r+b") as file:  # the store may just have removed it
            for offset in range(2048, path.stat().st_size, 4096):
                file.seek(offset)
                byte = file.read(1)
                file.seek(offset)
                file.write(bytes([byte[0] ^ 1]))


def truncate(folder: Path) -> None:
    for path in folder.glob("*.seg"):
        with suppress(FileNotFoundError):
            os.truncate(path, 0)


def has_io_errors(stat: StoreStat) -> bool:
    return stat.tiers[1].num_io_errors > 0 and stat.tiers[1].note != ""


def has_bad_records(stat: StoreStat) -> bool:
    return stat.tiers[0].num_checksum_failures + stat.tiers[1].num_checksum_failures > 0


def nothing(folder: Path) -> None:
    """It breaks, or heals, by itself."""


DAMAGES = {
    "read-only": Damage(make_immutable, has_io_errors, make_mutable),
    "removed": Damage(shutil.rmtree, has_io_errors, lambda folder: folder.mkdir(exist_ok=True)),
    "full": Damage(nothing, has_io_errors, grow),
    "flipped": Damage(flip, has_bad_records, nothing, is_lasting=False),
    "truncated": Damage(truncate, lambda stat: stat.tiers[1].num_io_errors > 0, nothing, is_lasting=False),
}


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGES)
async def test_nvme_breaks_while_replicas_serve(node: Node, tmp_path: Path, kind: str) -> None:
    damage = DAMAGES[kind]
    before = node.store.settings.nvme_path
    await node.store.close()
    with ExitStack() as undoing:
        disk = tmp_path
        if kind == "full":
            # A store that has all its segments would need no more, however full its disk became.
            disk = undoing.enter_context(small_disk(tmp_path / "disk", (NUM_SEGMENTS - 2) * SEGMENT_BYTES))
        folder = disk / "nvme"
        await node.start(nvme_path=str(folder))
        num_bytes = 8 * SEGMENT_BYTES  # more than DRAM holds
        await node.serve_until_stat(lambda stat: stat.num_bytes > num_bytes, "NVMe is in use")
        serving = asyncio.create_task(node.serve())
        damage.do(folder)
        try:
            await serving
            clock = SystemClock()
            deadline = clock.now() + WAIT_S
            while not damage.shows(stat := await node.stat()):
                assert clock.now() < deadline, f"it does not show: {stat}"
                if not damage.is_lasting:
                    damage.do(folder)
                await node.serve()
            assert stat.num_sessions == len(node.replicas)
        finally:
            damage.undo(folder)
        await node.is_whole()
        await node.store.stop()
    await node.start(nvme_path=before)
