"""Clients of other people at their newest releases, each in a virtual environment of its own, against a
gateway in a process. `make test-clients` makes the environments and names their folder; without them the
tests skip."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_process import http_process
from patience import WAIT_S

FOLDER = os.environ.get("TANDEM_CLIENTS", "")
HERE = Path(__file__).parent
NUM_MEASURED = 4
CLIENTS = ("openai", "anthropic", "litellm", "langchain")

needs_environments = pytest.mark.skipif(
    not FOLDER, reason="needs the clients' environments; `make test-clients` makes them and runs this"
)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with http_process(token_s=0.001, speaks=True) as (_, number):
        yield number


@needs_environments
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_is_served(client: str, port: int) -> None:
    python = Path(FOLDER) / client / "bin" / "python"
    command: list[str | Path] = [python, HERE / f"client_{client}.py", f"http://127.0.0.1:{port}/v1"]
    # LiteLLM looks on the internet for the prices of models.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=10 * WAIT_S, env=environment)
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"


@needs_environments
def test_guidellm_measures_it(port: int, tmp_path: Path) -> None:
    guidellm = Path(FOLDER) / "guidellm" / "bin" / "guidellm"
    version = subprocess.run([guidellm, "--version"], capture_output=True, text=True)
    print(version.stdout)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"hello {number}"}) + "\n" for number in range(20)))
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target=http://127.0.0.1:{port},model=m",
        "profile": "kind=synchronous",
        "constraint": f"kind=max_requests,count={NUM_MEASURED}",
        "data": f"kind=json_file,path={prompts}",
        "output": f"kind=json,path={report}",
    }
    command: list[str | Path] = [guidellm, "run", "--disable-console"]
    for name, value in options.items():
        command += [f"--{name}", value]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10 * WAIT_S)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert totals == {"successful": NUM_MEASURED, "errored": 0, "incomplete": 0, "total": NUM_MEASURED}
