"""The standing facts of a request travel whole: a new one is named where it comes from and is used."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from msgspec.structs import replace

from cluster.gateway.sample_output import SampleOutput
from cluster.gateway.submissions import first_route_request, route_request, submission
from cluster.text.preprocess import PreparedRequest, SampleStart
from cluster.text.sample_text import SampleText
from kvtransfer.codec import Codec
from kvtransfer.peer_messages import LandingRequest
from kvtransfer.request_facts import RequestFacts
from workers.messages.link import Submission
from workers.messages.sampling import SamplingParams

FACTS = RequestFacts("t", "g", 3, "batch", "t talk", 0.5, is_private=True)
# Sent flat as well, for neighbors of the version that knows no facts.
FLAT = {"tenant", "sharing_group", "priority", "service_class", "is_private", "pooling"}
# The way of a request from its acceptance to the scheduler and the hand-over.
WAY = (
    "cluster/gateway",
    "cluster/admission",
    "cluster/text/preprocess.py",
    "router",
    "workers/messages/link.py",
    "workers/scheduler",
    "workers/disagg",
    "kvtransfer/peer_messages.py",
    "kvtransfer/request_facts.py",
    "kvtransfer/protocol",
)
ROOT = Path(__file__).parents[3]


class Nothing:
    """A detokenizer that shows nothing."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def prepared() -> PreparedRequest:
    sample = SampleStart(0, 1)
    return PreparedRequest("r", FACTS, b"\1\0\0\0" * 4, b"", (), SamplingParams(), (sample,), None)


def files_that_pass_on(fact: str) -> set[str]:
    """Where a part of the way gives the fact to another by its name, or declares a field for it."""
    found = set()
    for folder in WAY:
        path = ROOT / folder
        for file in [path] if path.is_file() else path.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                is_passed = isinstance(node, ast.keyword) and node.arg == fact
                is_field = (
                    isinstance(node, ast.AnnAssign)
                    and isinstance(node.target, ast.Name)
                    and node.target.id == fact
                )
                if is_passed or is_field:
                    found.add(file.relative_to(ROOT).as_posix())
    return found


def test_all_parts_of_the_way_carry_them_whole() -> None:
    request = prepared()
    sample = SampleOutput(request.samples[0], SampleText(Nothing()))
    assert first_route_request(request).facts is FACTS
    assert route_request(request, [sample], ()).facts is FACTS
    sent = submission(request, [sample], 1, None, 0.0)
    codec = Codec[Submission](Submission)
    assert codec.decode(codec.encode(sent)).facts == FACTS


def test_a_neighbor_that_sends_them_flat_is_understood() -> None:
    request = prepared()
    sample = SampleOutput(request.samples[0], SampleText(Nothing()))
    sent = submission(request, [sample], 1, None, 0.0)
    flat = replace(sent, standing=None)
    assert flat.standing is None
    assert flat.facts == RequestFacts(**{name: getattr(FACTS, name) for name in FLAT})
    landing = LandingRequest(b"", "r", 1, "g", 3, (), 4, 1, None)
    assert (landing.facts.sharing_group, landing.facts.priority) == ("g", 3)


def test_a_private_request_stays_so() -> None:
    sent = submission(prepared(), [], 1, None, 0.0)
    public = replace(sent, standing=None)
    assert public.made_private().facts.is_private
    assert public.made_private().is_private


@pytest.mark.parametrize("fact", sorted({*RequestFacts.__struct_fields__} - FLAT))
def test_a_new_fact_is_named_in_few_files(fact: str) -> None:
    """One that is not sent flat, as each that comes from now on: at most five."""
    assert 1 <= len(files_that_pass_on(fact)) <= 5, files_that_pass_on(fact)
