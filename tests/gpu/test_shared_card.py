"""Two ranks of a replica as processes that share a card, which NCCL refuses, or have one each where there are
two: their results are those of one rank. Without a card, sums run through files by the interpreted kernel,
and stages through shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from import_path import import_path

pytest.importorskip("triton", reason="triton is not installed (the extra gpu-tests)")

from shared_card_rank import ReportedStep, SharedCardCase, make_runner, run

from benchmarks.random_checkpoint import write_random_checkpoint
from benchmarks.rank_cards import own_card

ROOT = Path(__file__).resolve().parent.parent.parent
Batches = list[list[ReportedStep]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "llama", seed=3, vocab_size=129, num_hidden_layers=2)
    return path


def results(case: SharedCardCase, *, sees_others: bool = True) -> Batches:
    """The sampler's reports. Ranks of a replica of several have processes of their own, which see all cards,
    or each its own alone, as under Ray."""
    if case.tp * case.pp == 1:
        runner = make_runner(case)
        batches = run(case, runner)
        runner.close()
        return batches
    env = {**os.environ, "PYTHONPATH": import_path(ROOT, ROOT / "tests" / "support")}
    script = str(ROOT / "tests" / "support" / "shared_card_rank.py")
    cases = [msgspec.structs.replace(case, rank=rank) for rank in range(case.tp * case.pp)]
    ranks = [
        subprocess.Popen(
            [sys.executable, script, json.dumps(msgspec.to_builtins(each))],
            env={**env, **({} if sees_others else own_card(each.rank))},
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in cases
    ]
    try:
        errors = [rank.communicate(timeout=150)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), errors
    return msgspec.json.decode((Path(case.folder) / "results.json").read_bytes(), type=Batches)


def assert_close(found: Batches, expected: Batches, tolerance: float) -> None:
    """Tokens are equal, and log-probabilities within `tolerance`."""
    assert len(found) == len(expected)
    for batch, other in zip(found, expected, strict=True):
        assert [step.tokens for step in batch] == [step.tokens for step in other]
        for step, same in zip(batch, other, strict=True):
            assert step.logprobs == pytest.approx(same.logprobs, abs=tolerance)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.gpu)])
def test_two_ranks_give_the_results_of_one_in_float32(
    device: torch.device, model_dir: Path, tmp_path: Path, tp: int, pp: int
) -> None:
    """Before and, with tp, after decoding is recorded as graphs."""
    case = SharedCardCase(str(model_dir), str(tmp_path), str(device), "float32", (2, 2))
    expected = results(case)
    assert [len(step.logprobs) for step in expected[0]] == [2, 2, 2]
    assert_close(results(msgspec.structs.replace(case, tp=tp, pp=pp)), expected, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_two_ranks_that_see_their_own_card_alone(
    device: torch.device, model_dir: Path, tmp_path: Path, tp: int, pp: int
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is only one card")
    case = SharedCardCase(str(model_dir), str(tmp_path), str(device), "float32", (2, 2))
    several = results(msgspec.structs.replace(case, tp=tp, pp=pp), sees_others=False)
    assert_close(several, results(case), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_deterministic_ranks_in_bfloat16(
    device: torch.device, model_dir: Path, tmp_path: Path, tp: int, pp: int
) -> None:
    """A sequence has the same bits alone and among others, in graphs and without; stages change none."""
    alone = SharedCardCase(str(model_dir), str(tmp_path), str(device), "bfloat16", (1, 1, 3, 2))
    alone = msgspec.structs.replace(alone, is_deterministic=True)
    one = results(alone)
    several = results(msgspec.structs.replace(alone, tp=tp, pp=pp))
    for batches in (one, several):
        first = [(step.tokens[0], step.logprobs[0]) for step in batches[0]]
        for batch in batches[1:]:
            assert [(step.tokens[0], step.logprobs[0]) for step in batch] == first
    if tp == 1:
        assert several == one
    else:
        assert several[0][0].logprobs == pytest.approx(one[0][0].logprobs, abs=0.1)
