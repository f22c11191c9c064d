"""Requests over Links, Peer links, rank channels and KV connections with a certificate at every end; they are
renewed meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from authority import Authority
from e2e_harness import E2eHarness, prompt
from inner_tls import certified
from optional_programs import uses_compiler
from trust_files import FILES

from kvtransfer.errors import ProofError
from kvtransfer.rpc.stream import open_link
from kvtransfer.rpc.trust import Trust

pytestmark = uses_compiler

OVER_TCP = {"transports": ["tcp"]}


async def test_certificates_are_renewed_while_requests_move_over_every_kind_of_connection(
    model_dir: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The authority is replaced too; a replica that joins afterwards knows the new one only."""
    first, second = Authority("first"), Authority("second")
    async with E2eHarness(model_dir) as harness:
        harness.trust = certified(tmp_path, signed_by=first, accepts=first)
        p0, d0 = await harness.add_all({"p0": "prefill", "d0": "decode"}, transfer=OVER_TCP)
        alone = await harness.add("b0", "both")
        wanted = await harness.run(alone, harness.submission("alone", prompt(1)))
        with pytest.raises(ProofError, match="speaks TLS and this side does not"):
            await open_link(p0.target.address, "link", Trust.read(FILES), "bare")

        stop = asyncio.Event()
        num_done = 0

        async def ask() -> None:
            nonlocal num_done
            while not stop.is_set():
                split = harness.submission(f"split {num_done}", prompt(1), decode=d0)
                heard = await harness.run(p0, split)
                assert heard.failure is None, heard.failure
                assert heard.sequence() == wanted.sequence()
                num_done += 1

        asking = asyncio.create_task(ask())
        try:
            both = b"".join(
                each.write(tmp_path_factory.mktemp("ca")).read_bytes() for each in (first, second)
            )
            (tmp_path / "ca.crt").write_bytes(both)
            second.issue(tmp_path, "process")
            second.write(tmp_path)
            d1 = await harness.add("d1", "decode", transfer=OVER_TCP)
            moved = await harness.run(p0, harness.submission("late", prompt(1), decode=d1))
        finally:
            stop.set()
            await asyncio.wait([asking])
        asking.result()
        assert num_done > 0
        assert moved.failure is None
        assert moved.sequence() == wanted.sequence()
        assert {path.transport for path in p0.core.peers.paths()} == {"tcp"}
        await harness.quiet()
