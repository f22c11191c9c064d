"""The benchmark's peers: their options, the protocol over real pipes with a scripted child, and the GGUF
file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import SystemClock
from workers.engine_bench import peer_child
from workers.engine_bench.peer_process import PeerProcess, PeerSpec, parse_peers
from workers.engine_bench.rounds import Measure, OthersMeter, measure_s
from workers.errors import PeerError

# Says that it is ready, then answers each command with the number of its words; "prefill 7" burns CPU after
# its answer, as a thread pool does that spins for work.
ECHO = """
import json, sys
print(json.dumps({"ready": "1.2", "detail": "echo"}), flush=True)
for line in sys.stdin:
    words = line.split()
    print(json.dumps({"seconds": float(len(words))}), flush=True)
    if words == ["prefill", "7"]:
        while True:
            pass
"""

Start = Callable[..., PeerProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[PeerProcess] = []

    def run(script: str, **limits: float) -> PeerProcess:
        started.append(PeerProcess([sys.executable, "-c", script], SystemClock(), **limits))
        return started[-1]

    yield run
    for process in started:
        process.close()


def test_commands_and_answers(start: Start) -> None:
    process = start(ECHO)
    assert process.wait_ready() == ("1.2", "echo")
    assert measure_s(process, Measure("prefill", 512)) == 2.0
    assert measure_s(process, Measure("decode", 64, 4, 128, 16)) == 4.0


def test_a_peer_uses_no_cpu_between_its_turns(start: Start) -> None:
    process = start(ECHO)
    process.wait_ready()
    process.prefill_s(7)
    assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    before_s = process.cpu_s()
    sum(index for index in range(3_000_000))  # time in which it would spin
    assert process.cpu_s() == before_s


def test_a_missing_package_is_no_failure(start: Start) -> None:
    assert start('print(\'{"missing": "vllm"}\')').wait_ready() is None


@pytest.mark.parametrize(
    ("after_ready", "reason"),
    [
        ("sys.stdin.readline(); sys.exit('out of memory')", "decode 1 2 3: it ended with exit status 1"),
        ("sys.stdin.readline(); os.kill(os.getpid(), 11)", "decode 1 2 3: it ended with exit status -11"),
        ("sys.stdin.readline(); print('hello', flush=True)", "instead of JSON"),
        ("sys.stdin.readline(); print('{}', flush=True)", "it answered None instead of seconds"),
        ("sys.stdin.readline(); sys.stdin.readline()", "decode 1 2 3: no answer within 0.5 s"),
    ],
)
def test_a_peer_that_dies_or_hangs_is_reported_with_its_last_words(
    start: Start, after_ready: str, reason: str
) -> None:
    ready = "print('{\"ready\": \"1\"}', flush=True); print('some warning', file=sys.stderr, flush=True)"
    process = start(f"import os, sys; {ready}; {after_ready}", command_limit_s=0.5)
    assert process.wait_ready() == ("1", "")
    with pytest.raises(PeerError) as caught:
        process.decode_s(1, 2, 3)
    assert reason in str(caught.value)
    assert "some warning" in str(caught.value)
    if "out of memory" in after_ready:
        assert "out of memory" in str(caught.value)


def test_a_peer_that_does_not_load_is_reported(start: Start) -> None:
    with pytest.raises(PeerError, match=r"load: it ended with exit status 1(.|\n)*no module"):
        start("raise SystemExit('no module')").wait_ready()
    with pytest.raises(PeerError, match=r"load: no answer within 0\.2 s"):
        start("import sys; sys.stdin.read()", load_limit_s=0.2).wait_ready()


def test_closing_ends_the_process_and_its_children(start: Start) -> None:
    process = start(
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'input()']);"
        'print(\'{"ready": "1"}\', flush=True); input()'
    )
    process.wait_ready()
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(family) == 2
    process.close()
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_others_are_what_neither_we_nor_the_measured_child_used() -> None:
    """With everything counted as our own nobody else is there; with nothing counted, our own work is
    theirs."""
    meters = [OthersMeter(own, SystemClock()) for own in (lambda: 0.0, _everything_s)]
    for meter in meters:
        meter.start()
    total = 0
    until = SystemClock().now() + 0.5
    while SystemClock().now() < until:
        total += sum(range(1000))
    shares = [meter.share() for meter in meters]
    assert shares[0] > 0.2 / (psutil.cpu_count() or 1)
    assert shares[1] < 0.04


def _everything_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


# ------------------------------------------------------------------------------------------ options


def test_peers_are_read_from_their_options(tmp_path: Path) -> None:
    assert parse_peers("", []) == ()
    assert parse_peers("transformers, vllm:fp32", [f"vllm={sys.executable}"]) == (
        PeerSpec("transformers", "", sys.executable),
        PeerSpec("vllm", "fp32", sys.executable),
    )
    forms = parse_peers("llama.cpp:q8_0,llama.cpp:q4_k_m,llama.cpp", ["llama.cpp=/bin/sh"])
    assert [(spec.label, spec.python) for spec in forms] == [
        (label, "/bin/sh") for label in ("llama.cpp q8_0", "llama.cpp q4_k_m", "llama.cpp")
    ]


@pytest.mark.parametrize(
    ("names", "pythons", "reason"),
    [
        ("ollama", [], r"--peer takes names of transformers, llama\.cpp, vllm .* not 'ollama'"),
        ("vllm:int8", [], "--peer vllm: takes a dtype of bf16, fp16, fp32 after the colon, not 'int8'"),
        ("vllm:", [], "takes a dtype"),
        ("vllm", ["python3"], "--peer-python takes NAME=PATH .* not 'python3'"),
        ("vllm", ["sglang=/bin/sh"], "--peer-python takes NAME=PATH .* not 'sglang=/bin/sh'"),
        ("vllm", ["vllm=/nonexistent/python"], "--peer-python vllm: /nonexistent/python is not a program"),
        ("vllm", ["llama.cpp=/bin/sh"], r"--peer-python llama\.cpp: add llama\.cpp to --peer"),
    ],
)
def test_a_mistake_is_answered_with_the_option_and_the_remedy(
    names: str, pythons: list[str], reason: str
) -> None:
    with pytest.raises(PeerError, match=reason):
        parse_peers(names, pythons)


# ------------------------------------------------------------------------------------------ the child


def test_the_child_needs_nothing_but_the_standard_library() -> None:
    """It runs in interpreters that have none of our packages."""
    lines = Path(peer_child.__file__).read_text().splitlines()
    imported = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imported <= set(sys.stdlib_module_names) | {"__future__"}


def test_the_child_says_what_is_missing(start: Start, tmp_path: Path) -> None:
    settings = {
        "peer": "llama.cpp", "model_dir": str(tmp_path), "dtype": "bf16", "threads": 1, "max_tokens": 1,
        "max_batch": 1, "max_batch_tokens": 1, "cache_dir": str(tmp_path),
    }  # fmt: skip
    command = [sys.executable, "-S", "-I", peer_child.__file__, json.dumps(settings)]
    process = PeerProcess(command, SystemClock())
    assert process.wait_ready() is None
    process.close()


def test_numbers_are_rounded_to_bf16_as_torch_does() -> None:
    numbers = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    expected = numbers.bfloat16().view(torch.uint16).numpy()
    found = peer_child.bf16_bits(numbers.numpy().view(np.uint8), "F32")
    np.testing.assert_array_equal(found, expected)
    half = numbers.half()
    from_half = peer_child.bf16_bits(half.numpy().view(np.uint8), "F16")
    np.testing.assert_array_equal(from_half, half.float().bfloat16().view(torch.uint16).numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_are_read_without_their_library(tmp_path: Path, dtype: str) -> None:
    write_random_checkpoint(tmp_path, "qwen3", seed=5, dtype=dtype)
    expected = load_file(tmp_path / "model.safetensors")
    found = {}
    for name, code, shape, raw in peer_child.read_safetensors(tmp_path / "model.safetensors"):
        found[name] = peer_child.bf16_bits(raw, code).reshape(shape)
        assert peer_child.gguf_name(name).endswith((".weight", ".bias"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor.bfloat16().view(torch.uint16).numpy())
    assert len({peer_child.gguf_name(name) for name in found}) == len(found)


def test_rotated_dimensions_are_paired_for_llama() -> None:
    """Row i of a head's first half is followed by row i of its second."""
    rows = np.arange(2 * 8)[:, None] + np.zeros((1, 3), dtype=np.int64)
    order = peer_child.interleave_halves(rows, 2)[:, 0].tolist()
    assert order == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "qwen2", seed=5)
    with pytest.raises(SystemExit, match="not Qwen2ForCausalLM"):
        peer_child.gguf_file(tmp_path, tmp_path / "cache")
    assert not os.path.exists(tmp_path / "cache")
