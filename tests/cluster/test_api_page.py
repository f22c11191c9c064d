"""docs/api.md: its tables are those of the code, and its examples run."""

from __future__ import annotations

import asyncio
import re

import pytest
from api_tables import PAGE, blocks, written
from gateway_harness import GatewayHarness, encode

from cluster.errors import STATUS_TABLE, reason_of
from cluster.http.call import AbortedCall
from cluster.http.errors import HttpProblem

EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
OURS = [example for example in EXAMPLES if "from openai" not in example and "client.embed" not in example]


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
    replica = await harness.add_replica("d0", "decode")
    if "choices=" in example:
        replica.script.tokens = encode("yes")
        example = example.replace("max_tokens=4", f"max_tokens={len(replica.script.tokens)}")
    _, address = await harness.add_gateway(harness.config())
    own = example.replace("127.0.0.1:8780", address)
    assert own != example
    await asyncio.to_thread(exec, compile(own, "docs/api.md", "exec"), {})
    assert capsys.readouterr().out or "assert" in example
