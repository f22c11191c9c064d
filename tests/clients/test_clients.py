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
from patience import WAIT_S
from speaking_process import SpeakingGateways, speaking_gateways

from cluster import BlockingClient
from cluster.http.fields import FIELDS
from cluster.proto.tandem.v1 import inference_pb2 as pb

FOLDER = os.environ.get("TANDEM_CLIENTS", "")
HERE = Path(__file__).parent
NUM_MEASURED = 4
# How many streams each client closes before their ends.
NUM_CLOSED = {"openai": 4, "anthropic": 2, "litellm": 1, "langchain": 1}

needs_environments = pytest.mark.skipif(
    not FOLDER, reason="needs the clients' environments; `make test-clients` makes them and runs this"
)


@pytest.fixture(scope="module")
def gateways() -> Iterator[SpeakingGateways]:
    with speaking_gateways() as started:
        yield started


def _served_fields() -> dict[str, list[str]]:
    """By route, all that a request may have."""
    return {
        route: [entry.name for entry in entries if entry.effect != "refused"]
        for route, entries in FIELDS.items()
    }


@needs_environments
@pytest.mark.parametrize("client", NUM_CLOSED)
def test_a_client_is_served(client: str, gateways: SpeakingGateways) -> None:
    python = Path(FOLDER) / client / "bin" / "python"
    command: list[str | Path] = [python, HERE / f"client_{client}.py", f"http://127.0.0.1:{gateways.port}/v1"]
    guarded = {"url": f"http://127.0.0.1:{gateways.guarded_port}/v1", "keys": gateways.keys}
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent / "support"),
        "TANDEM_GUARDED": json.dumps(guarded),
        "TANDEM_FIELDS": json.dumps(_served_fields()),
        # LiteLLM looks on the internet for the prices of models.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        # By default it asks an unknown model for as many tokens as Anthropic's largest writes.
        "DEFAULT_ANTHROPIC_CHAT_MAX_TOKENS": "1000",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=10 * WAIT_S, env=environment)
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    with BlockingClient(gateways.grpc_address) as caller:
        closed = [it for it in caller.requests(1000) if it.request_id.startswith("closed-")]
        while any(it.state == pb.REQUEST_STATE_RUNNING for it in closed):
            closed = [it for it in caller.requests(1000) if it.request_id.startswith("closed-")]
    assert {pb.RequestState.Name(it.state) for it in closed} <= {"REQUEST_STATE_CANCELLED"}
    assert len([it for it in closed if client in it.request_id]) == NUM_CLOSED[client]


@needs_environments
def test_guidellm_measures_it(gateways: SpeakingGateways, tmp_path: Path) -> None:
    guidellm = Path(FOLDER) / "guidellm" / "bin" / "guidellm"
    version = subprocess.run([guidellm, "--version"], capture_output=True, text=True)
    print(version.stdout)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"hello {number}"}) + "\n" for number in range(20)))
    report = tmp_path / "report.json"
    options = {
        "backend": f"kind=openai_http,target=http://127.0.0.1:{gateways.port},model=m",
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
