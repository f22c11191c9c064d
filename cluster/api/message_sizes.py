"""The largest requests that a gateway reads where its configuration does not say: those that the model's
context has use for."""

from __future__ import annotations

from cluster.config import ClusterConfig
from cluster.text.validation import MAX_BYTES_PER_TOKEN

# Everything besides the prompt: tools, a grammar, and other fields of a request, also where a list has
# several prompts.
_OTHER_BYTES = 4 << 20
# The factor by which JSON enlarges text where all that is not ASCII is escaped, as Python's `json` does.
_JSON_GROWTH = 3
# A token id of the output so far, in a call that resumes a request.
_TOKEN_BYTES = 5
# The part that one request may have of what one caller may have read at once.
_CALLER_PART = 0.5


def max_body_bytes(config: ClusterConfig, context_tokens: int) -> int:
    """Return the bytes of the largest body over HTTP. `context_tokens` is the model's context."""
    given = config.gateway.http.max_body_bytes
    return _bounded(config, context_tokens * MAX_BYTES_PER_TOKEN * _JSON_GROWTH) if given == "auto" else given


def max_message_bytes(config: ClusterConfig, context_tokens: int) -> int:
    """Return the bytes of the largest message over gRPC."""
    given = config.gateway.max_message_bytes
    per_token = MAX_BYTES_PER_TOKEN + config.gateway.max_samples * _TOKEN_BYTES
    return _bounded(config, context_tokens * per_token) if given == "auto" else given


def _bounded(config: ClusterConfig, num_bytes: int) -> int:
    """Return the bytes with those of everything besides the prompt, as far as one caller may have them
    read."""
    admission = config.admission
    most = min(admission.max_caller_reading_mb, admission.max_reading_mb) * 1e6 * _CALLER_PART
    return min(num_bytes + _OTHER_BYTES, int(most))
