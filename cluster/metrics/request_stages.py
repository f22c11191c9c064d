"""Cut an ended request into the stages of its trace, on the gateway's clock. No OpenTelemetry here."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.metrics.ended_request import EndedRequest, Summary, TimelineEntry

_LEAST_S = 1e-9
_ENDS = ("finished", "failed")


@dataclass(slots=True)
class Stage:
    """A span of time [start, end] in seconds of the gateway's monotonic clock, and those within it."""

    name: str
    start: float
    end: float
    attributes: dict[str, str | int | float] = field(default_factory=dict)
    # (name, detail, when)
    events: list[tuple[str, str, float]] = field(default_factory=list)
    # Why it failed; "" when it did not.
    error: str = ""
    stages: list[Stage] = field(default_factory=list)


def request_stages(ended: EndedRequest) -> Stage:
    """Return the stage of the whole request, with `accept`, and for each attempt `route` and `attempt`;
    within an attempt `queue`, `prefill`, `transfer` and `decode`, as far as it came.

    Other hosts' times are comparable with nothing but times of the same host, so only their differences are
    used: the prefill ends when its report reaches the gateway, and queue, prefill and the transfer's begin
    lie before or after that by what the prefill replica measured. Of earlier attempts, whose reports are
    not kept, the gateway's own times alone are known.
    """
    root = Stage("generate", ended.started_at, ended.ended_at)
    root.attributes |= _request_attributes(ended)
    if ended.state in ("failed", "refused"):
        root.error = ended.reason or ended.code
    first = next((entry.at for entry in ended.timeline if entry.name == "accepted"), ended.ended_at)
    root.stages.append(Stage("accept", ended.started_at, first))
    if ended.state == "refused":
        root.stages[0].error = root.error
        return root
    for number, attempt in enumerate(_attempts(ended), 1):
        root.stages.append(attempt.route)
        if attempt.ran is not None:
            root.stages.append(attempt.ran)
            is_last = ended.summary is not None and number == ended.summary.num_attempts
            _fill(attempt, ended.summary if is_last else None)
    return root


@dataclass(slots=True)
class _Attempt:
    """The events of one attempt in the timeline; `ran` is None while it looked for a place."""

    route: Stage
    ran: Stage | None = None
    entries: list[TimelineEntry] = field(default_factory=list)

    def when(self, name: str) -> float | None:
        return next((entry.at for entry in self.entries if entry.name == name), None)


def _attempts(ended: EndedRequest) -> list[_Attempt]:
    """Return the attempts, each from one end of routing to the next."""
    attempts: list[_Attempt] = []
    now: _Attempt | None = None
    for entry in ended.timeline:
        if entry.name == "accepted":
            now = _Attempt(Stage("route", entry.at, ended.ended_at))
            attempts.append(now)
        elif now is None:
            continue
        elif entry.name == "routed":
            now.route.end = entry.at
            now.ran = Stage("attempt", entry.at, ended.ended_at)
            now.ran.attributes["tandem.attempt"] = len(attempts)
        elif entry.name == "attempt failed" and now.ran is not None:
            now.ran.end, now.ran.error = entry.at, entry.detail
            now = _Attempt(Stage("route", entry.at, ended.ended_at))
            attempts.append(now)
        else:
            now.entries.append(entry)
            place = now.ran or now.route
            if entry.name in _ENDS:
                place.end = entry.at
            place.events.append((entry.name, entry.detail, entry.at))
    if now is not None and ended.state == "failed":
        (now.ran or now.route).error = ended.reason
    if now is not None and now.ran is None and now.route.end - now.route.start < _LEAST_S:
        attempts.pop()  # the last attempt that there might be had failed: nothing was looked for
    for number, decision in enumerate(ended.decisions):
        if number < len(attempts) and (ran := attempts[number].ran) is not None:
            ran.attributes["tandem.prefill_replica"] = decision.decision.compute_id
            ran.attributes["tandem.decode_replica"] = decision.decision.decode
            ran.attributes["tandem.policy"] = decision.decision.policy
    return attempts


def _fill(attempt: _Attempt, summary: Summary | None) -> None:
    """Add the stages within an attempt. `summary` has the reports of the last one."""
    ran = attempt.ran
    assert ran is not None
    prefilled_at = attempt.when("prefilled")
    end = ran.end if prefilled_at is None else prefilled_at
    start = ran.start
    prefill = Stage("prefill", start, end)
    report = summary.prefill if summary else None
    if report is not None and prefilled_at is not None and report.times.prefilled:
        times = report.times
        computing = Stage("prefill", prefilled_at - max(0.0, times.prefilled - times.scheduled), prefilled_at)
        computing.start = max(start, computing.start) if times.scheduled else start
        if times.scheduled and times.arrived:
            waited_s = max(0.0, times.scheduled - times.arrived)
            ran.stages.append(Stage("queue", max(start, computing.start - waited_s), computing.start))
        computing.events += [(name, "", prefilled_at + at - times.prefilled) for name, at in report.trace]
        num_loaded = sum(report.num_loaded_tokens.values())
        computing.attributes["tandem.cached_tokens.device"] = max(0, report.num_cached_tokens - num_loaded)
        for tier, num in report.num_loaded_tokens.items():
            computing.attributes[f"tandem.cached_tokens.{tier}"] = num
        prefill = computing
    if prefilled_at is None:
        prefill.error = ran.error
    ran.stages.append(prefill)
    handed_at = attempt.when("handed over")
    if handed_at is not None:
        ran.stages.append(_transfer(summary, prefilled_at, handed_at, start))
    decodes_from = max(
        (at for at in (attempt.when("first token"), handed_at) if at is not None), default=None
    )
    if decodes_from is None:
        decodes_from = prefilled_at
    if decodes_from is not None:
        ran.stages.append(Stage("decode", decodes_from, ran.end, error=ran.error))


def _transfer(summary: Summary | None, prefilled_at: float | None, handed_at: float, start: float) -> Stage:
    """Return the stage of the transfer, which begins while the prompt is still computed: both times are the
    writer's."""
    begin = handed_at if prefilled_at is None else prefilled_at
    moved = summary.hand_over if summary else None
    report = summary.prefill if summary else None
    if (
        moved
        and report
        and prefilled_at is not None
        and moved.times.transfer_start
        and report.times.prefilled
    ):
        begin = prefilled_at + moved.times.transfer_start - report.times.prefilled
    stage = Stage("transfer", min(max(begin, start), handed_at), handed_at)
    if moved is not None:
        stage.attributes |= {
            "tandem.transport": moved.transport,
            "tandem.moved_bytes": moved.num_moved_bytes,
            "tandem.held_tokens": moved.num_held_tokens,
            "tandem.bad_pieces": moved.num_bad_pieces,
        }
    return stage


def _request_attributes(ended: EndedRequest) -> dict[str, str | int | float]:
    summary = ended.summary
    attributes: dict[str, str | int | float] = {
        "tandem.request_id": ended.request_id,
        "tandem.tenant": ended.tenant,
        "tandem.state": ended.state,
        "rpc.grpc.status": ended.code,
        "client.address": ended.caller.peer,
    }
    if summary is not None:
        attributes |= {
            "tandem.wire_id": ended.wire_id,
            "tandem.attempts": summary.num_attempts,
            "tandem.moves": summary.num_moves,
            "tandem.prefill_replica": summary.prefill_replica,
            "tandem.decode_replica": summary.decode_replica,
            "tandem.cached_tokens": summary.num_cached_tokens,
            "gen_ai.usage.input_tokens": summary.num_prompt_tokens,
            "gen_ai.usage.output_tokens": ended.num_output_tokens,
        }
        if ended.ttft_s is not None:
            attributes["tandem.ttft_ms"] = 1e3 * ended.ttft_s
    return attributes
