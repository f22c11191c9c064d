"""The command line where Ray starts: the demo, and clusters that cannot come up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from optional_programs import uses_compiler, uses_redis_or_valkey
from serving import TINY, tandem

pytestmark = pytest.mark.cluster


@pytest.mark.slow
def test_a_replica_that_cannot_be_placed_is_an_error_that_names_the_resource(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        f"model: {TINY}\npools:\n  - {{name: d, role: decode, device: cuda, gpus_per_rank: 64}}\n"
    )
    done = tandem("serve", "--file", str(file), "--ray-address", "local")
    assert done.returncode == 1
    assert "GPU: 64 wanted" in done.stderr


def test_a_checkpoint_that_is_cut_short_is_refused_before_ray_starts(tmp_path: Path) -> None:
    for file in TINY.iterdir():
        if file.is_file():
            data = file.read_bytes()
            (tmp_path / file.name).write_bytes(data[:100_000] if file.suffix == ".safetensors" else data)
    done = tandem("serve", str(tmp_path), "--ray-address", "local")
    text = "".join(done.stderr.split())
    assert done.returncode == 1
    assert "model.safetensors:cutshort:100000bytes,itsheaderneeds" in text
    assert "starting" not in done.stderr


@uses_compiler
@uses_redis_or_valkey
@pytest.mark.timeout(240)
def test_the_demo_shows_a_cached_prefix_and_leaves_nothing() -> None:
    done = tandem("demo", timeout_s=220)  # it may compile the kernels first
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.lstrip()[:2] in ("1 ", "2 ", "3 ")]
    assert len(rows) == 3
    assert rows[0][1].startswith("prefill-")
    assert rows[0][2].startswith("decode-")
    cached = [int(row[3]) for row in rows]
    assert cached[0] == 0
    assert cached[1] > 100
    assert done.stdout.rstrip().endswith("everything is stopped")
    (command,) = [line for line in done.stdout.splitlines() if line.startswith("curl ")]
    assert "/v1/completions" in command
    (answer,) = [line for line in done.stdout.splitlines() if line.startswith('{"id"')]
    assert json.loads(answer)["choices"][0]["text"]
