"""The usage of a request, as answers state it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import UNSET, UnsetType

from cluster.proto.tandem.v1 import inference_pb2 as pb


class PromptDetails(msgspec.Struct):
    # Not computed: the caches of all tiers had them.
    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    """OpenAI's."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
    # What the maximum of tokens was cut to, by the room in the context or because of the cluster's load.
    capped_max_tokens: int | UnsetType = UNSET


def capped_max_tokens(usage: pb.Usage) -> int | UnsetType:
    """Return the value to which `max_tokens` was cut; `UNSET`: it was not."""
    return usage.capped_max_tokens or UNSET


def num_cached(usage: pb.Usage) -> int:
    """Return the prompt's tokens that were not computed."""
    cached = usage.cached
    return int(cached.device + cached.dram + cached.nvme + cached.remote)


def openai_usage(usages: Iterable[pb.Usage]) -> Usage:
    """Return the usage of all calls together."""
    listed = list(usages)
    prompt = sum(it.prompt_tokens for it in listed)
    completion = sum(it.completion_tokens for it in listed)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(sum(map(num_cached, listed))),
        completion_tokens_details=CompletionDetails(sum(it.reasoning_tokens for it in listed)),
        capped_max_tokens=next((it.capped_max_tokens for it in listed if it.capped_max_tokens), UNSET),
    )
