"""From the fields that chats and completions of OpenAI have in common to a `GenerateRequest`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from cluster.http.errors import bad_field
from cluster.http.field_names import NAMES
from cluster.http.schemas import SampledRequest
from cluster.http.structured_outputs import set_constraint
from cluster.proto.tandem.v1 import inference_pb2 as pb

# OpenAI's default; the engine's own is 0.
DEFAULT_TEMPERATURE = 1.0
_MASK = (1 << 64) - 1
_SESSION = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Fields that are sent unchanged where they are given.
_SAME = (
    "n",
    "max_tokens",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "truncate_prompt_tokens",
    "prompt_logprobs",
)
_SERVICE_TIERS: Mapping[str, pb.ServiceClass] = {
    "auto": pb.SERVICE_CLASS_UNSPECIFIED,
    "default": pb.SERVICE_CLASS_UNSPECIFIED,
    "flex": pb.SERVICE_CLASS_BATCH,
    "priority": pb.SERVICE_CLASS_INTERACTIVE,
}


def sampled_request(body: SampledRequest) -> tuple[pb.GenerateRequest, dict[str, str]]:
    """Return a request with all that chats and completions have in common, and the names of its fields."""
    request = pb.GenerateRequest(model=body.model or "", request_id=body.request_id or "")
    names = dict(NAMES)
    for name in _SAME:
        if (value := getattr(body, name)) is not None:
            setattr(request, name, value)
    request.temperature = DEFAULT_TEMPERATURE if body.temperature is None else body.temperature
    if body.top_k is not None:
        request.top_k = 0 if body.top_k == -1 else body.top_k  # off, as vLLM says it
    if body.seed is not None:
        if not -(1 << 63) <= body.seed <= _MASK:
            raise bad_field("seed", "does not fit 64 bits; send a smaller one")
        request.seed = body.seed & _MASK
    if isinstance(body.stop, str):
        request.stop.append(body.stop)
        names["stop[0]"] = "stop"
    else:
        request.stop.extend(body.stop or ())
    request.stop_token_ids.extend(body.stop_token_ids or ())
    for token, bias in (body.logit_bias or {}).items():
        request.logit_bias[_token_id(token)] = bias
    request.include_stop = bool(body.include_stop_str_in_output)
    request.keep_special_tokens = body.skip_special_tokens is False
    request.priority = body.priority or 0
    request.service_class = service_class(body.service_tier)
    if body.spaces_between_special_tokens is False:
        raise bad_field("spaces_between_special_tokens", "is served as true only; remove it")
    if body.stream_options is not None:
        if not body.stream:
            raise bad_field("stream_options", "is for streams; set stream: true, or remove it")
        request.include_usage = bool(body.stream_options.continuous_usage_stats)
    set_constraint(request, body, names)
    return request, names


def session_id(key: str | None) -> str:
    """Return OpenAI's `prompt_cache_key`, which is any text, as the name of a session."""
    if not key or _SESSION.fullmatch(key):
        return key or ""
    return hashlib.sha256(key.encode()).hexdigest()


def service_class(tier: str | None) -> pb.ServiceClass:
    """Return the class of OpenAI's `service_tier`."""
    if tier is None:
        return pb.SERVICE_CLASS_UNSPECIFIED
    if tier not in _SERVICE_TIERS:
        raise bad_field("service_tier", f"must be one of {', '.join(_SERVICE_TIERS)}, or absent")
    return _SERVICE_TIERS[tier]


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) < 1 << 32):
        raise bad_field(f"logit_bias[{text[:50]}]", "must be a token id, such as 42")
    return int(text)
