"""Steps of attention alone, for its tests: queries attend to KV that lies in blocks, without norms and
rotation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from compiled_kernels import kernels_of
from torch import Tensor

from workers.model.attention.cpu_backend import CpuAttention
from workers.model.attention.interface import NO_MARKS as NO_MARKS
from workers.model.attention.interface import (
    AttentionBackend,
    AttentionShape,
    HostReader,
    LayerAttention,
    Marks,
    Rotation,
    SequenceSpan,
    StepInput,
    kv_shape,
)
from workers.model.attention.torch_backend import TorchAttention


def unrotated(
    num_heads: int,
    head_dim: int,
    windows: tuple[int, ...] = (0,),
    device: torch.device | str = "cpu",
    *,
    score_scale: float | None = None,
    softcap: float = 0.0,
) -> AttentionShape:
    """Return a shape whose rotary embedding changes nothing, for tensors on `device`."""
    rotations = (Rotation(torch.zeros(head_dim // 2, device=device)),)
    return AttentionShape(num_heads, windows, rotations, score_scale, softcap)


def capped(scores: Tensor, softcap: float) -> Tensor:
    """Return what a cap makes of scores; 0: none."""
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the probabilities of scores [..., keys]; `sinks` [..., 1] are in the sums too."""
    if sinks is None:
        return scores.softmax(-1)
    most = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    powers = torch.exp(scores - most)
    return powers / (powers.sum(-1, keepdim=True) + torch.exp(sinks - most))


def write(kv: Tensor, layer: int, table: Sequence[int], keys_values: Tensor) -> None:
    """Write the keys and values [T, 2K, D] of a sequence to its blocks."""
    for position, heads in enumerate(keys_values):
        block, offset = divmod(position, kv.shape[4])
        kv[table[block], layer, :, :, offset] = heads.view(2, -1, kv.shape[5])


def qkv_of(query: Tensor, kv: Tensor, layer: int, step: StepInput) -> Tensor:
    """Return the products [T, (H + 2K) * D] whose keys and values lie in the blocks already."""
    positions = step.positions()
    blocks = torch.from_numpy(step.token_blocks(positions)).long()
    offsets = torch.from_numpy(positions % step.block_tokens)
    keys_values = kv[blocks, layer].flatten(1, 2)[torch.arange(len(offsets)), :, offsets]
    return torch.cat((query, keys_values), 1).flatten(1)


def attend(
    backend: AttentionBackend,
    spans: Sequence[SequenceSpan],
    queries: Sequence[Tensor] | Tensor,
    host: HostReader | None = None,
    marks: Marks = NO_MARKS,
    sinks: Tensor | None = None,
) -> list[Tensor]:
    """Attend from a query [T, H, D] in each layer of one step, all with `sinks` [H]; return the results
    [T, H * D] of each layer."""
    kv = backend.kv
    step = StepInput.of(spans, kv_shape(kv).block_tokens, host, marks)
    products = [qkv_of(query, kv, layer, step) for layer, query in enumerate(queries)]
    plan = backend.plan(step)
    return [
        plan.run(LayerAttention(layer, backend.shape.windows[layer], sinks=sinks), qkv)
        for layer, qkv in enumerate(products)
    ]


def make_backend(
    name: str, shape: AttentionShape, kv: Tensor, *, is_deterministic: bool = False
) -> AttentionBackend:
    """Make the backend of that name, one of `compiled_kernels.BACKENDS`, for KV that it serves."""
    if name == "torch":
        return TorchAttention(shape, kv)
    return CpuAttention(shape, kv, kernels_of(name), is_deterministic=is_deterministic)


def attend_once(
    name: str,
    kv: Tensor,
    spans: Sequence[SequenceSpan],
    query: Tensor,
    window: int = 0,
    marks: Marks = NO_MARKS,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend in layer 0 by the backend of that name."""
    shape = unrotated(query.shape[1], query.shape[2], (window,) * kv.shape[1], kv.device)
    return attend(make_backend(name, shape, kv), spans, [query], marks=marks, sinks=sinks)[0]
