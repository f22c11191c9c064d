"""What is wrong with a submission, whoever sends it: the field is named, and nothing of it is kept."""

from __future__ import annotations

import re
from typing import Any

import pytest
from msgspec.structs import replace
from replica_harness import GATEWAY, PEER, ReplicaHarness
from staged_engine import VOCABULARY, pack

from kvtransfer.peer_messages import LandingAbort, LandingGrant, LandingRequest
from workers.disagg.submission_check import find_problem
from workers.messages.link import HandOverTarget, SampleState, Submission
from workers.messages.peer_link import HandOver

PROMPT = (1, 2, 3)
INF, NAN = float("inf"), float("nan")


def submission(**fields: Any) -> Submission:
    return replace(ReplicaHarness().submission("a", PROMPT, outputs=((4,),)), **fields)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prompt": b"123"}, "prompt: 3 bytes are no token ids"),
        ({"prompt": pack([VOCABULARY])}, "prompt: a token id is not below"),
        ({"samples": (SampleState(0, 0, b"1"),)}, r"samples\[0\].output: 1 bytes"),
        ({"samples": (SampleState(0, -1),)}, r"samples\[0\].seed: -1"),
        ({"samples": (SampleState(0, 1 << 64),)}, r"samples\[0\].seed"),
        ({"samples": (SampleState(1, 0), SampleState(1, 0))}, "samples: an index comes twice"),
        ({"samples": (SampleState(-1, 0),)}, "samples: an index is negative"),
        ({"samples": (SampleState(0, 0), SampleState(1, 0, pack([1])))}, "samples: their outputs differ"),
        ({"priority": -(1 << 40)}, "priority: -"),
        ({"deadline_s": NAN}, "deadline_s: nan"),
        ({"message_ends": (len(PROMPT) + 1,)}, "message_ends: "),
        ({"message_ends": (1,) * 17}, "message_ends: "),
        ({"pooling": "last"}, "pooling: a prompt that is embedded has one sample, without output"),
        (
            {"pooling": "last", "samples": (SampleState(0, 1), SampleState(1, 2))},
            "pooling: a prompt that is embedded has one sample, without output",
        ),
        (
            {"pooling": "last", "samples": (SampleState(0, 1),), "decode": HandOverTarget(PEER, "a")},
            "pooling: a prompt that is embedded is not handed over",
        ),
    ],
)
async def test_a_wrong_field_is_named(fields: dict[str, Any], problem: str) -> None:
    assert find_problem(submission(), VOCABULARY) == ""
    assert re.match(problem, find_problem(submission(**fields), VOCABULARY))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", NAN),
        ("temperature", 1e300),
        ("top_k", -1),
        ("top_k", 1 << 31),
        ("top_p", 1.1),
        ("min_p", NAN),
        ("repetition_penalty", 0.0),
        ("presence_penalty", INF),
        ("frequency_penalty", -INF),
        ("min_tokens", 1 << 40),
        ("num_logprobs", -1),
        ("num_logprobs", VOCABULARY + 1),
        ("num_prompt_logprobs", -1),
        ("num_prompt_logprobs", VOCABULARY + 1),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: NAN}),
        ("stop_token_ids", (1 << 32,)),
    ],
)
async def test_a_wrong_way_of_sampling_is_named(name: str, value: Any) -> None:
    wrong = submission(sampling=replace(submission().sampling, **{name: value}))
    assert find_problem(wrong, VOCABULARY).startswith(f"sampling.{name}: ")


async def test_several_samples_have_no_output_yet_when_a_gateway_submits_them() -> None:
    """Their prompt is computed once, and the sequences fork at its end."""
    harness = ReplicaHarness()
    harness.requests.submit(GATEWAY, harness.submission("a", PROMPT, outputs=((4,), (5,))))
    harness.pump()
    (failure,) = harness.failures
    assert (failure.code, failure.reason) == ("invalid", "samples: only one may have output already")
    harness.scheduler.check()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prompt": pack([1, 2, VOCABULARY])}, "prompt: a token id is not below"),
        ({"block_keys": (bytes(32),) * 9}, "9 block keys for 3 tokens"),
        (
            {"samples": tuple(SampleState(index, 0, pack([1, 2])) for index in range(2))},
            "samples: several have more than their first token",
        ),
        ({"samples": tuple(SampleState(index, 0, pack([1])) for index in range(5))}, "5 samples, 4 fit"),
    ],
)
async def test_a_hand_over_that_cannot_be_run_ends_its_landing_and_nothing_else(
    fields: dict[str, Any], problem: str
) -> None:
    harness = ReplicaHarness()
    asked = LandingRequest(bytes(16), "a", 1, "", 0, (), len(PROMPT), 1, None)
    harness.kv_receiver.message(PEER, asked)
    assert isinstance(harness.peers.to_writer[-1], LandingGrant)
    hand_over = HandOver(bytes(16), submission(**fields), *GATEWAY, 0, "", 0.0, 0.0)
    harness.kv_receiver.message(PEER, hand_over)
    abort = harness.peers.to_writer[-1]
    assert isinstance(abort, LandingAbort)
    assert abort.reason.startswith(problem)
    assert (harness.kv_receiver.landings.num_open, harness.pool.num_quarantined) == (0, 1)
    assert not harness.scheduler.is_here("a", 1)
