"""docs/api.md: its tables are those of the code, and its examples run."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import re
import shlex

import msgspec
import pytest
from api_tables import ANSWERS, PAGE, blocks, written
from gateway_harness import GatewayHarness, encode
from http_harness import SCHEMAS, EmbeddingReplica, HttpFrontHarness
from struct_fields import all_structs, struct_fields

import cluster.http
from cluster.errors import STATUS_TABLE, reason_of
from cluster.http.call import AbortedCall
from cluster.http.errors import HttpProblem
from cluster.http.field_types import Ignored
from cluster.http.fields import FIELDS

EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
# `make test-clients` runs those of OpenAI's client.
OURS = [example for example in EXAMPLES if "from openai" not in example]
CURL = re.findall(r"```sh\n(curl .*?)```", PAGE.read_text(), re.DOTALL)


def test_the_tables_are_those_of_the_api() -> None:
    page = PAGE.read_text()
    assert page == written(page), "run python tests/support/api_tables.py"


def test_the_errors_are_those_of_the_code() -> None:
    """Each with its status and its code over HTTP, in a table without another."""
    table = PAGE.read_text().partition("| status | ErrorInfo.reason |")[2].partition("\n\n")[0]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    found, status = {}, ""
    for name, reason, http_status, code, _ in rows:
        status = name or status
        found[reason] = (status, int(http_status), code)
    expected = {}
    for kind in STATUS_TABLE:
        error = kind.__new__(kind)
        error.__dict__.update(retry_after_s=1.0, violations=(), limit="")
        call = AbortedCall.of(error)
        problem = HttpProblem.of_call(call)
        expected[reason_of(error)] = (call.code.name, problem.status, problem.code)
    assert found == expected
    codes = [code for _, _, code in expected.values()]
    assert len(set(codes)) == len(codes), "a client can tell them apart"


def test_every_answer_is_in_the_tables() -> None:
    """Each struct of the package is a part of a request or of an answer of some route."""
    defined = {
        found
        for module in pkgutil.iter_modules(cluster.http.__path__)
        for found in vars(importlib.import_module(f"cluster.http.{module.name}")).values()
        if isinstance(found, type) and issubclass(found, msgspec.Struct)
    }
    kinds = [kind for route in ANSWERS.values() for some in route.values() for kind in some]
    reached = {it for kind in (*SCHEMAS.values(), *kinds) for it in all_structs(kind)}
    # Bases, and what an answer is made with.
    assert {it.__name__ for it in defined - reached - {msgspec.Struct}} == {"Body", "Maker", "SampledRequest"}
    assert FIELDS.keys() <= ANSWERS.keys()


class Inner(msgspec.Struct):
    # Above.
    name: str
    type: str = "inner"


class Other(msgspec.Struct):
    # Of two.
    size: int
    weight: float
    inner: Other | None = None
    type: str = "other"


class Outer(msgspec.Struct):
    items: list[Inner | Other]
    by_name: dict[str, Inner] | None
    skipped: Ignored = None
    maybe: str | msgspec.UnsetType = msgspec.UNSET


def test_the_fields_of_a_struct_are_read_with_those_within() -> None:
    fields = struct_fields(Outer)
    assert [tuple(it)[:4] for it in fields] == [
        ("items", "list of object", "", ()),
        ("items[].name", "text", "Above", ("inner",)),
        ("items[].type", "text", "`inner`, `other`", ("inner", "other")),
        ("items[].size", "integer", "Of two", ("other",)),
        ("items[].weight", "number", "Of two", ("other",)),
        ("items[].inner", "object or null", "Of two; as `items[]`", ("other",)),
        ("by_name", "object or null", "as `items[]`", ()),
        ("skipped", "any", "ignored", ()),
        ("maybe", "text", "absent if there is none", ()),
    ]
    assert {it.path for it in fields if not it.is_required} == {
        "items[].type",
        "items[].inner",
        "skipped",
        "maybe",
    }


def test_every_field_is_read_with_its_comment() -> None:
    source = """
// What it is.
message Sample {
  // Above.
  optional int32 a = 1;
  oneof kind {
    string b = 2;  // beside
  }
  map<string, uint64> c = 3;
  enum Mode {
    MODE_ONE = 0;
  }
}
message Empty {}
"""
    whole, empty = blocks(source)
    assert (whole.comment, empty.rows) == ("What it is.", ())
    assert [tuple(row) for row in whole.rows] == [
        ("a", "optional int32", "Above."),
        ("b", "string, one of `kind`", "beside"),
        ("c", "map<string, uint64>", ""),
        ("MODE_ONE", "value of `Mode`", ""),
    ]


@pytest.mark.parametrize("example", OURS)
async def test_an_example_runs(
    harness: GatewayHarness, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    replica = harness.replicas["d0"] = EmbeddingReplica(harness, "d0", "decode")
    await replica.start()
    if "choices=" in example:
        replica.script.tokens = encode("yes")
        example = example.replace("max_tokens=4", f"max_tokens={len(replica.script.tokens)}")
    _, address = await harness.add_gateway(harness.config())
    own = example.replace("127.0.0.1:8780", address)
    assert own != example
    await asyncio.to_thread(exec, compile(own, "docs/api.md", "exec"), {})
    assert capsys.readouterr().out or "assert" in example


@pytest.mark.parametrize("example", CURL)
async def test_a_command_line_is_answered(harness: GatewayHarness, example: str) -> None:
    program, url, *options = shlex.split(example.replace("\\\n", ""))
    fields = dict(zip(options[::2], options[1::2], strict=True))
    assert (program, set(fields)) == ("curl", {"-H", "-d"})
    name, _, value = fields["-H"].partition(": ")
    path = url.removeprefix("http://127.0.0.1:8784")
    async with HttpFrontHarness(harness) as front:
        reply = await front.send("POST", path, data=fields["-d"], headers={name: value})
        assert reply.status == 200, reply.body
        assert reply.json["choices"][0]["text"]


def test_every_example_is_run_somewhere() -> None:
    """Also that of the README, which is the same."""
    (theirs,) = [example for example in EXAMPLES if example not in OURS]
    assert theirs in (PAGE.parents[1] / "README.md").read_text()
    assert len(OURS) == 4
    assert len(CURL) == 1
    assert PAGE.read_text().count("```") == 2 * (len(EXAMPLES) + len(CURL))
