"""What a model generates where the KV of the first tokens was rounded to 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from paged_model import BLOCK_TOKENS, PagedModel
from torch import Tensor

from workers.model.attention.groups_backend import GroupsAttention
from workers.model.decoder import load_decoder

_ELEMENTS = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


def rounded(kv: Tensor, kv_dtype: str) -> Tensor:
    """Round vectors [..., size] to 8 bits and back."""
    dtype, largest = _ELEMENTS[kv_dtype]
    most = kv.abs().amax(-1, keepdim=True)
    numbers = kv * (largest / most)
    if kv_dtype == "int8":
        numbers = numbers.round()
    return numbers.to(dtype).to(kv.dtype) * (most / largest)


@torch.inference_mode()
def continued_behind(
    model_dir: Path,
    prompt: list[int],
    num_rounded: int,
    kv_dtype: str | None,
    num_tokens: int,
    parts: Sequence[int] = (),
) -> tuple[list[int], Tensor]:
    """Return the greedy tokens behind a prompt whose first `num_rounded` tokens have rounded KV (None: not
    rounded), and the log-probabilities of each place [num_tokens, vocab_size]. A vector of KV has one scale,
    or one for each of its `parts`."""
    model = PagedModel(load_decoder(model_dir, torch.float32, torch.device("cpu")), torch.float32)
    model.step([(0, prompt[:num_rounded])])
    table = model.tables[0]
    assert len(table) * BLOCK_TOKENS == num_rounded, "the store has whole blocks"
    if kv_dtype is not None:
        for part in torch.split(_kv(model), list(parts or model.kv.shape[-1:]), -1):
            part[table] = rounded(part[table], kv_dtype)
    rows = [model.step([(0, prompt[num_rounded:])])[0][-1]]
    while len(rows) < num_tokens:
        rows.append(model.step([(0, [int(rows[-1].argmax())])])[0][-1])
    logprobs = torch.stack(rows).float().log_softmax(-1)
    return logprobs.argmax(-1).tolist(), logprobs


def _kv(model: PagedModel) -> Tensor:
    """Return the KV, without the states of layers that have such."""
    if not isinstance(model.attention, GroupsAttention):
        return model.kv
    backend = model.attention.backends[0]
    assert backend is not None
    return backend.kv
