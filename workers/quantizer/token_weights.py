"""Keep single tokens from outweighing all others in what is summed up of their inputs."""

from __future__ import annotations

from torch import Tensor

_LONGEST = 4.0


def token_weights(inputs: Tensor, longest: float = _LONGEST) -> Tensor:
    """Return by what inputs [num_tokens, num_inputs] are multiplied, float32 [num_tokens, 1]: less than 1
    where they are more than `longest` times as long as the median of a window. In some layers those of the
    first token are a thousand times as long, and all sums would be theirs alone, although the norm that
    follows makes an error of theirs small."""
    lengths = inputs.float().norm(dim=1, keepdim=True)
    found: Tensor = (longest * lengths.median() / lengths).nan_to_num(1.0, 1.0).clamp(max=1.0)
    return found
