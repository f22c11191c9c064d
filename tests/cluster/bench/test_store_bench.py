"""The replay of a trace as `tandem bench store` shows it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from cluster.bench.store_bench import replay_store
from cluster.errors import BenchError

FIELDS = {"policy", "dram_blocks", "nvme_blocks", "hit_rate", "ideal_hit_rate", "written_per_hit"}


def trace_file(path: Path) -> Path:
    """40 prompts of 6 full blocks and a part of one; every second is one of five that come again."""
    lines = []
    for number in range(40):
        first = 10 * (number % 10 if number % 2 else number)
        lines.append(
            {
                "timestamp": number,
                "input_length": 6 * 512 + 5,
                "output_length": 1,
                "hash_ids": [*range(first, first + 6), 10**6 + number],
            }
        )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def run(trace: Path, *, as_json: bool) -> str:
    console = Console(file=io.StringIO(), width=140)
    replay_store(trace, 6, (12,), (0, 64), console, as_json=as_json)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(trace_file(tmp_path / "trace.jsonl"), as_json=True)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row.keys() >= FIELDS for row in rows)
    assert [(row["nvme_blocks"], row["policy"]) for row in rows] == [
        (0, None),
        (64, "lru"),
        (64, "all"),
        (64, "seen_twice"),
        (64, "adaptive"),
    ]
    by_policy = {row["policy"]: row for row in rows}
    assert by_policy[None]["hit_rate"] == 0.0, "every repetition comes after the device and DRAM forgot it"
    assert by_policy["lru"]["ideal_hit_rate"] == 0.375
    assert by_policy["lru"]["hit_rate"] == 0.375
    assert by_policy["lru"]["num_blocks"] == 240, "the parts of blocks do not count"


def test_table(tmp_path: Path) -> None:
    text = run(trace_file(tmp_path / "trace.jsonl"), as_json=False)
    assert "240 blocks of 512 tokens; the device holds 6; ideal hit rate 37.5 %" in text
    for word in ("lru", "all", "seen_twice", "adaptive", "written/hit"):
        assert word in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"timestamp": 0}\n', "line 1"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n', "no full block"),
        ("", "no full block"),
        (None, "cannot read"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BenchError, match=message):
        run(path, as_json=True)
