"""Log lines as text and JSON, and the access log of a gateway over real gRPC."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import PROMPT, GatewayHarness, Pair, until, write_model
from http_harness import HttpFrontHarness

from cluster.api.generate_options import GenerateOptions, Turn
from cluster.errors import CallError
from cluster.identity.audit import AuditEntry, AuditLog
from cluster.identity.config import AuditConfig
from cluster.log_fields import about
from cluster.metrics.config import LogConfig
from cluster.metrics.logs import ACCESS_LOGGER, log_to_stderr
from cluster.proto.tandem.v1 import inference_pb2 as pb
from kvtransfer.common.clock import ManualClock
from workers.messages.link import RequestFailed

_NAMES = ("tandem", "cluster", "router", "workers", "kvtransfer", "opentelemetry", ACCESS_LOGGER)


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """What a process that called `log_to_stderr` wrote there; the loggers are put back afterwards."""
    loggers = [logging.getLogger(name) for name in _NAMES]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield lambda: capsys.readouterr().err
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of every line of the access log."""
    return [
        {"request_id": record.__dict__["request_id"], **record.__dict__["more_fields"]}
        for record in caplog.records
        if record.name == ACCESS_LOGGER
    ]


def test_a_json_line_says_when_who_what_and_about_which_request(stderr: Callable[[], str]) -> None:
    log_to_stderr(LogConfig(format="json"), "decode-a1/0", "decode")
    log = logging.getLogger("workers.disagg.kv_receiver")
    log.info("landing of %s ended: %s", "r~1", 'lost "peer"\nand more', extra={"request_id": "r~1"})
    log.warning("no ids")
    first, second = lines(stderr())
    assert datetime.fromisoformat(first.pop("ts")).utcoffset() is not None
    assert first == {
        "level": "info",
        "logger": "workers.disagg.kv_receiver",
        "message": 'landing of r~1 ended: lost "peer"\nand more',
        "process": "decode-a1/0",
        "pool": "decode",
        "request_id": "r~1",
    }
    assert second["level"] == "warning"
    assert "request_id" not in second


def test_a_json_line_has_the_traceback_of_an_error(stderr: Callable[[], str]) -> None:
    log_to_stderr(LogConfig(format="json"), "gateway-1")
    try:
        raise ValueError("of this")
    except ValueError:
        logging.getLogger("cluster.serve.app").exception("it broke")
    (line,) = lines(stderr())
    assert "pool" not in line
    assert line["error"].startswith("Traceback")
    assert line["error"].endswith("ValueError: of this")


def test_text_names_a_request_once(stderr: Callable[[], str]) -> None:
    log_to_stderr(LogConfig(), "gateway-1")
    log = logging.getLogger("cluster.gateway.request_manager")
    log.info("request %s failed", "abc", extra={"request_id": "abc"})
    log.info("it failed", extra=about("abc", {"tenant": "t"}))
    log.info("nothing of a request")
    told = [line.split(" ", 3)[3] for line in stderr().splitlines()]
    assert told == [
        "cluster.gateway.request_manager: request abc failed",
        "cluster.gateway.request_manager: it failed [request abc]",
        "cluster.gateway.request_manager: nothing of a request",
    ]


def test_the_level_is_not_that_of_the_access_log(stderr: Callable[[], str]) -> None:
    log_to_stderr(LogConfig(format="json", level="error"), "gateway-1")
    logging.getLogger("cluster.serve.app").warning("not told")
    logging.getLogger(ACCESS_LOGGER).info("told", extra=about("r", {"state": "finished"}))
    (line,) = lines(stderr())
    assert (line["message"], line["request_id"], line["state"]) == ("told", "r", "finished")


async def test_each_ended_request_has_one_line_with_its_figures(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, ACCESS_LOGGER)
    options = GenerateOptions(request_id="mine", tenant="acme", max_tokens=5, seed=1)
    done = await pair.client.complete(PROMPT, options)
    (line,) = access_lines(caplog)
    assert line.pop("wire_id").startswith("mine~")
    assert line.pop("peer").startswith("ipv4:127.0.0.1:")
    ttft_ms, e2e_ms = line.pop("ttft_ms"), line.pop("e2e_ms")
    assert 0 < ttft_ms <= e2e_ms
    assert ttft_ms == pytest.approx(done.finished.timing.ttft_ms, abs=0.001)
    assert line == {
        "request_id": "mine",
        "state": "finished",
        "code": "OK",
        "reason": "",
        "tenant": "acme",
        "prompt_tokens": 11,
        "cached_tokens": 10,
        "output_tokens": 5,
        "prefill_replica": "p0",
        "decode_replica": "d0",
        "attempts": 1,
        "moves": 0,
        "transport": "shm",
        "moved_bytes": 4096,
    }
    (text,) = (record.getMessage() for record in caplog.records if record.name == ACCESS_LOGGER)
    assert text.startswith("mine finished OK tenant=acme peer=ipv4:127.0.0.1:")
    assert "prompt=11 cached=10 output=5" in text
    assert text.endswith("attempts=1 p0 -> d0")


async def test_refused_failed_and_cancelled_requests_have_their_line(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, ACCESS_LOGGER)
    with pytest.raises(CallError):
        await pair.client.complete(PROMPT, GenerateOptions(request_id="bad", temperature=-1.0))
    pair.prefill.script.failure = RequestFailed("", 0, "invalid", "no such prompt")
    with pytest.raises(CallError):
        await pair.client.complete(PROMPT, GenerateOptions(request_id="failed"))
    pair.decode.script.stop_after = 2
    stream = pair.client.generate(PROMPT, GenerateOptions(request_id="gone", max_tokens=50))
    events = stream.events()
    for _ in range(2):  # `accepted`, and a delta of one token or of both
        await anext(events)
    await events.aclose()
    await until(lambda: len(access_lines(caplog)) == 3, "all have ended")
    refused, failed, cancelled = access_lines(caplog)
    assert (refused["request_id"], refused["state"], refused["code"]) == (
        "bad",
        "refused",
        "INVALID_ARGUMENT",
    )
    assert (refused["prompt_tokens"], refused["ttft_ms"]) == (0, None)
    assert "temperature" in refused["reason"]
    assert (failed["request_id"], failed["state"], failed["code"]) == ("failed", "failed", "INVALID_ARGUMENT")
    assert (failed["output_tokens"], failed["ttft_ms"], failed["attempts"]) == (0, None, 1)
    assert (cancelled["request_id"], cancelled["state"], cancelled["code"]) == (
        "gone",
        "cancelled",
        "CANCELLED",
    )
    assert cancelled["output_tokens"] >= 1


async def test_the_access_log_can_be_off(harness: GatewayHarness, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, ACCESS_LOGGER)
    await harness.add_replica("d0", "decode")
    config = harness.config().model_copy(update={"logs": LogConfig(access=False)})
    _, address = await harness.add_gateway(config)
    await harness.client(address).complete(PROMPT, GenerateOptions(max_tokens=2))
    assert access_lines(caplog) == []


async def test_nothing_that_is_sent_over_http_is_logged(
    harness: GatewayHarness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    canary = "canaryquux"
    chat = {"messages": [{"role": "user", "content": canary}], "max_tokens": 3}
    tool = {"type": "function", "function": {"name": "f", "description": canary}}
    bad_schema = {"type": "object", "properties": {"a": {"type": canary}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": bad_schema}}
    bodies: list[tuple[str, Any]] = [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "temperature": -1}),
        ("/v1/chat/completions", {**chat, "stop": [canary], "tools": [tool], "stream": True}),
        ("/v1/chat/completions", {**chat, "response_format": wanted}),
        ("/v1/chat/completions", {**chat, "guided_grammar": f"start: {canary}"}),
        ("/v1/chat/completions", {**chat, "messages": [{"role": canary, "content": canary}]}),
        ("/v1/chat/completions", {**chat, "chat_template_kwargs": {"messages": canary}}),
        ("/v1/chat/completions", f'{{"messages": [{{"content": "{canary}"'.encode()),
        ("/v1/completions", {"prompt": canary, "max_tokens": 2, "echo": True}),
        ("/v1/responses", {"input": canary, "instructions": canary, "max_output_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": canary}], "max_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": canary}]}], "max_tokens": 2}),
        ("/v1/embeddings", {"input": [canary, ""]}),
        ("/tokenize", {"prompt": canary}),
    ]

    def sent(body: Any) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        return {"data": body, "headers": headers} if isinstance(body, bytes) else {"json": body}

    async with HttpFrontHarness(harness) as front:
        statuses = [(await front.send("POST", path, **sent(body))).status for path, body in bodies]
        listed = str(await harness.admin(front.gateway).requests())
    assert sorted(set(statuses)) == [200, 400]
    shown = [listed, *(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)]
    assert len(access_lines(caplog)) >= 9
    assert not [text for text in shown if canary in text]


QUOTING = "{{ raise_exception('not allowed: ' + messages[0]['content']) }}"


async def test_neither_logs_nor_explanations_show_what_a_prompt_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    canary = "canaryquux"
    prompt, options = f"{canary} {PROMPT}", GenerateOptions(max_tokens=3)
    harness = GatewayHarness(write_model(tmp_path, QUOTING))
    try:
        replica = await harness.add_replica("d0", "decode")
        gateway, address = await harness.add_gateway()
        client = harness.client(address)
        done = await client.complete(prompt, options)
        with pytest.raises(CallError, match=f"not allowed: {canary}"):  # its own words, to the caller alone
            await client.complete([Turn("user", canary)], options)
        with pytest.raises(CallError, match="temperature"):
            await client.complete(prompt, GenerateOptions(temperature=-1.0))
        with pytest.raises(CallError, match="tokens"):
            await client.complete(f"{canary} " * 4000, options)
        replica.script.failure = RequestFailed("", 0, "invalid", "made up")
        with pytest.raises(CallError, match="made up"):
            await client.complete(prompt, options)
        replica.script.failure = RequestFailed("", 0, "grammar", f"a rank's words: {canary}")
        regex = pb.Constraint(regex="[a-z]+")
        with pytest.raises(CallError, match=canary) as refused:  # what the library quotes of a schema
            await client.complete(prompt, replace(options, constraint=regex))
        assert [it.field for it in refused.value.fields] == ["constraint"]
        with pytest.raises(CallError):
            await client.complete(
                prompt, replace(options, constraint=pb.Constraint(grammar=f"start: {canary}"))
            )
        shown = [str(await client.explain(done.request_id))]
        shown += [str(await harness.admin(gateway).requests())]
    finally:
        await harness.close()
    assert len(access_lines(caplog)) == 7
    shown += [f"{record.getMessage()} {record.__dict__}" for record in caplog.records]
    assert not [text for text in shown if canary in text]


def test_a_line_of_the_audit_log_has_its_fields_at_the_top_level(stderr: Callable[[], str]) -> None:
    log_to_stderr(LogConfig(format="json"), "gateway-1")
    log = AuditLog(AuditConfig(), "gateway-1", ManualClock())
    log.record(AuditEntry(who="ops", method="keys/reload", result="OK", what={"added": 2}, detail="by hand"))
    (line,) = lines(stderr())
    del line["ts"]
    assert line == {
        "level": "info",
        "logger": "tandem.audit",
        "message": "ops keys/reload OK",
        "process": "gateway-1",
        "who": "ops",
        "tenant": "",
        "method": "keys/reload",
        "what": {"added": 2},
        "peer": "",
        "result": "OK",
        "detail": "by hand",
    }
