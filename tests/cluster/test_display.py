"""What people are shown: progress without a terminal, tables in 80 columns, notes of what should not be."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from cluster.display import DemoRow, demo_table, stages, status_view
from cluster.proto import tandem_pb2 as pb


def shown(what: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(what)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_without_a_terminal_every_stage_is_one_line() -> None:
    console = Console(file=io.StringIO(), width=20, force_terminal=False)
    with stages(console, "starting") as tell:
        for stage in ("loading: decode 0 of 2", "loading: decode 0 of 2", "loading: decode 1 of 2"):
            tell(stage)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines == ["starting", "loading: decode 0 of 2", "loading: decode 1 of 2"]


@pytest.mark.parametrize("alone", [False, True])
def test_the_demos_table_is_whole_in_80_columns(alone: bool) -> None:
    prefill = "decode-abcd1234" if alone else "prefill-abcd1234"
    table = shown(demo_table([DemoRow(prefill, "decode-abcd1234", 1488, 1352, 1053.2, 105.4, 12.38, "shm")]))
    for cell in (prefill, "decode-abcd1234", "1352 of 1488", "1053.2", "105.4", "12.38 shm", "GB/s"):
        assert cell in table
    assert ("the same replica twice" in table) == alone


def status(age_s: float) -> pb.StatusResponse:
    load = pb.Load(num_free_blocks=1024, num_total_blocks=1024, age_s=age_s)
    replica = pb.Replica(replica_id="prefill-abcd1234", role="prefill", state="connecting", load=load)
    return pb.StatusResponse(model=pb.Model(name="m"), replicas=[replica], num_cancelled_requests=7)


def test_status_notes_a_replica_that_does_not_report() -> None:
    assert "prefill-abcd1234: its last report is 9 s old" in shown(status_view(status(9.1)))
    quiet = shown(status_view(status(0.2)))
    assert "report" not in quiet
    assert "7 cancelled" in quiet
    assert "prefill-abcd1234 prefill connecting" in quiet
