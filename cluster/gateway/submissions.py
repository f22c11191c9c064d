"""Make the messages by which a request is routed and its samples are submitted to replicas."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from cluster.gateway.sample_output import PromptProgress, SampleOutput
from cluster.text.preprocess import PreparedRequest
from router.messages import RouteRequest
from workers.messages.link import HandOverTarget, SampleState, Submission


def by_submission(unfinished: Sequence[SampleOutput]) -> list[list[SampleOutput]]:
    """Group samples without any output together, each other one by itself."""
    fresh = [sample for sample in unfinished if not sample.tokens]
    groups = [[sample] for sample in unfinished if sample.tokens]
    return [fresh, *groups] if fresh else groups


def route_request(
    prepared: PreparedRequest,
    unfinished: Sequence[SampleOutput],
    excluded: tuple[str, ...],
    *,
    is_scored: bool = True,
) -> RouteRequest:
    """Build the router's request for the rest of the work. A prompt that is not yet `is_scored`, though its
    log-probabilities are requested, is computed whole wherever it is cached."""
    shortest = min(sample.num_tokens for sample in unfinished)
    return RouteRequest(
        request_id=prepared.request_id,
        facts=prepared.facts,
        block_keys=prepared.block_keys if is_scored else (),
        num_tokens=prepared.num_prompt_tokens + max(sample.num_tokens for sample in unfinished),
        max_new_tokens=max(1, prepared.sampling.max_tokens - shortest),
        num_samples=len(unfinished),
        excluded=excluded,
        pinned_prefill=prepared.pinned_prefill,
        pinned_decode=prepared.pinned_decode,
    )


def first_route_request(prepared: PreparedRequest) -> RouteRequest:
    """Build the router's request for all of a request that begins."""
    return RouteRequest(
        request_id=prepared.request_id,
        facts=prepared.facts,
        block_keys=prepared.block_keys if PromptProgress(prepared).is_whole else (),
        num_tokens=prepared.num_prompt_tokens,
        max_new_tokens=max(1, prepared.sampling.max_tokens),
        num_samples=len(prepared.samples),
        pinned_prefill=prepared.pinned_prefill,
        pinned_decode=prepared.pinned_decode,
    )


def submission(
    prepared: PreparedRequest,
    group: Sequence[SampleOutput],
    number: int,
    target: HandOverTarget | None,
    now: float,
    *,
    suspect: bool = False,
    is_scored: bool = True,
    most_backlog_tokens: int | None = None,
    due_at: float | None = None,
) -> Submission:
    """Begin an attempt of the samples of `group`, as they are now. The log-probabilities of a prompt that
    `is_scored` are not requested again. A replica with more than `most_backlog_tokens` sends it back. At
    `due_at` it has waited for the time that its class may."""
    for sample in group:
        sample.begin_attempt()
    facts, deadline_at, sampling = prepared.facts, prepared.deadline_at, prepared.sampling
    if is_scored and sampling.num_prompt_logprobs is not None:
        sampling = replace(sampling, num_prompt_logprobs=None)
    return Submission(
        request_id=prepared.request_id,
        attempt=number,
        tenant=facts.tenant,
        sharing_group=facts.sharing_group,
        priority=facts.priority,
        prompt=prepared.prompt,
        root_key=prepared.root_key,
        block_keys=prepared.block_keys,
        samples=tuple(
            SampleState(sample.index, sample.seed, bytes(sample.tokens), sample.mask_digest)
            for sample in group
        ),
        sampling=sampling,
        decode=target,
        deadline_s=None if deadline_at is None else max(0.0, deadline_at - now),
        due_s=None if due_at is None else due_at - now,
        suspect=suspect,
        service_class=facts.service_class,
        grammar=prepared.grammar,
        is_private=facts.is_private,
        pooling=facts.pooling,
        most_backlog_tokens=most_backlog_tokens,
        standing=facts,
        message_ends=prepared.message_ends,
    )
