"""Answers by JSON schemas of Kubernetes and drawn ones, from the bundled model through the real gateway:
complete, and valid for a validator that knows nothing of grammars."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from e2e_front import Front, copy_tiny
from e2e_harness import E2eHarness

from benchmarks.drawn_schemas import PARTS, UNSUPPORTED, drawn_cases, kubernetes_cases
from benchmarks.json_schemas import (
    MAX_REFUSED,
    MIN_COMPLETE,
    SchemaCounts,
    answer_all,
    find_problem,
    measure,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_SCHEMAS = 1000
NUM_LEAVING = 48
ENGINE = {"kv_tokens": 1 << 14, "max_sequences": 32}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    """p0 (prefill) and d0 (decode) behind a gateway."""
    folder: Path = copy_tiny(tmp_path_factory.mktemp("schemas"))
    async with AsyncExitStack() as ends:
        harness = await ends.enter_async_context(E2eHarness(folder))
        p0, d0 = await harness.add_all({"p0": "prefill", "d0": "decode"}, engine=ENGINE)
        built = Front(harness, folder)
        await built.open()
        ends.push_async_callback(built.close)
        await built.register(p0, d0)
        yield built


async def test_answers_by_a_sample_of_schemas_are_complete_and_valid(front: Front) -> None:
    cases = [*kubernetes_cases(10), *drawn_cases(34)]
    answers = await answer_all(front.client, cases, concurrency=16)
    assert {it.case.name for it in answers if it.refusal} == {it.name for it in cases if it.unsupported}
    found = SchemaCounts.of(answers)
    assert found.share_complete >= MIN_COMPLETE, [it.case.name for it in answers if not it.is_complete]
    assert found.valid == found.complete, [it.find_problem() for it in answers]
    assert 0 < found.share_refused <= MAX_REFUSED


async def test_a_refusal_names_the_keyword(front: Front) -> None:
    cases = {it.unsupported: it for it in drawn_cases(12 * len(UNSUPPORTED)) if it.unsupported}
    assert cases.keys() == UNSUPPORTED.keys()
    for answer in await answer_all(front.client, list(cases.values()), concurrency=4):
        assert f'"{answer.case.unsupported}"' in answer.refusal


async def test_schemas_differ_and_cover_every_keyword() -> None:
    cases = [*kubernetes_cases(NUM_SCHEMAS // 2), *drawn_cases(NUM_SCHEMAS // 2)]
    assert len({it.text for it in cases}) == NUM_SCHEMAS
    seen = set[str]().union(*(it.keywords for it in cases))
    assert {*UNSUPPORTED, *(name for name in PARTS if " " not in name)} - seen == {"integer", "number"}
    assert sum(bool(it.unsupported) for it in cases) <= MAX_REFUSED * NUM_SCHEMAS


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "cut": ('{"a": 1', {}),
    "a type": ("1", {"type": "string"}),
    "a name too many": ('{"a": 1}', {"properties": {}, "additionalProperties": False}),
    "no multiple": ("0.075", {"multipleOf": 0.01}),
    "two of one": ("null", {"oneOf": [{"type": ["null", "string"]}, {"type": ["null", "integer"]}]}),
    "no such day": ('"2023-02-30"', {"format": "date"}),
    "no zone": ('"10:00:00"', {"format": "time"}),
    "no address": ('"1.2.3"', {"format": "ipv4"}),
}
RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "a multiple": ("0.07", {"multipleOf": 0.01}),
    "a small z": ('"10:00:00.5z"', {"format": "time"}),
    "a leap second": ('"2016-12-31T23:59:60Z"', {"format": "date-time"}),
    "a leap day": ('"0000-02-29"', {"format": "date"}),
}


@pytest.mark.parametrize("what", [*WRONG, *RIGHT])
async def test_the_validator_finds_what_is_wrong(what: str) -> None:
    text, schema = (WRONG | RIGHT)[what]
    assert (find_problem(text, json.dumps(schema)) != "") == (what in WRONG)


@pytest.mark.slow
async def test_a_thousand_schemas_also_while_decode_replicas_leave() -> None:
    async with aclosing(measure(NUM_SCHEMAS, NUM_LEAVING, concurrency=16)) as lines:
        found = [line async for line in lines]
    (total,) = (line for line in found if line.get("source") == "all")
    assert total["schemas"] == NUM_SCHEMAS
    assert total["share_complete"] >= MIN_COMPLETE
    assert total["share_valid"] == 1.0
    assert 0 < total["share_refused"] <= MAX_REFUSED
    leaving = [line for line in found if "while" in line]
    assert [line["while"] for line in leaving] == ["kill", "move"]
    for line in leaving:
        assert line["complete"] == line["valid"] == line["same"] == line["schemas"] == NUM_LEAVING
        assert line["elsewhere"] >= NUM_LEAVING // 4
