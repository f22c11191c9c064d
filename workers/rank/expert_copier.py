"""Copy experts between the ranks of a stage, at the border of two steps, as the engine core orders."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.errors import WorkerError
from workers.messages.rank_channel import ExpertCopy
from workers.model import native
from workers.model.decoder import Decoder
from workers.model.experts.copied_experts import CopiedExperts
from workers.rank.collectives import RankGroups

# The bytes in which a rank names the kernels that it computes with.
_NAME_BYTES = 64


class ExpertCopier:
    """Moves copies of one rank's experts, and those of others to it. All ranks of a stage make the same
    changes in the same order, so that they divide rows alike from the same step on.

    An error here ends the rank, as one between two steps or inside a collective does."""

    def __init__(self, decoder: Decoder, groups: RankGroups) -> None:
        """Raise `WorkerError` if ranks that would have copies compute by unlike kernels: copies have the
        layout of these, and who computes a row follows from its bits, which all ranks must have alike."""
        shard = decoder.shard
        self._groups = groups
        self._num_sharing = shard.tp_size // shard.ep_size
        named = ((number, mixture.copies) for number, mixture in decoder.mixtures.items())
        self._layers = {number: copies for number, copies in named if copies is not None}
        if self._layers:
            _refuse_unlike(groups, decoder.device)

    def change(self, orders: Sequence[ExpertCopy]) -> None:
        """Carry out orders, of which those for layers of other stages are left out."""
        for order in orders:
            layer = self._layers.get(order.layer)
            if layer is None:
                continue
            if order.expert >= 0:
                self._copy(layer, order)
            layer.note(order.part, order.slot, order.expert)

    def _copy(self, layer: CopiedExperts, order: ExpertCopy) -> None:
        """Send an expert from its owner to the part that gets a copy: each of the ranks that share it sends
        its columns to the rank with the same ones."""
        groups = self._groups
        part, place = divmod(groups.tp_rank, self._num_sharing)
        owner = layer.slots.owner(order.expert)
        source, target = (number * self._num_sharing + place for number in (owner, order.part))
        nothing = torch.empty((0, layer.num_bytes), dtype=torch.uint8, device=layer.device)
        sent, num_rows = [nothing] * groups.tp, [0] * groups.tp
        if part == owner:
            sent[target] = layer.read(order.expert)[None]
        if part == order.part:
            num_rows[source] = 1
        received = groups.exchange(sent, num_rows)
        if part == order.part:
            layer.write(order.slot, received[source][0])


def _refuse_unlike(groups: RankGroups, device: torch.device) -> None:
    name = _kernels_of(device)
    names = {bytes(it.flatten().tolist()) for it in groups.exchange([name] * groups.tp, [1] * groups.tp)}
    if len(names) > 1:
        found = ", ".join(sorted(it.rstrip(b"\0").decode() for it in names))
        raise WorkerError(
            f"engine.expert_copies: the ranks of a stage compute by unlike kernels ({found}), and rows would "
            "have other bits at one than at another; set 0, or take nodes of one kind"
        )


def _kernels_of(device: torch.device) -> Tensor:
    """Return the name of what a rank computes with, as uint8 [1, _NAME_BYTES] on its device."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        kernels = native.load()
        name = f"torch {torch.backends.cpu.get_cpu_capability()}" if kernels is None else kernels.isa.value
    packed = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    return torch.tensor(list(packed), dtype=torch.uint8, device=device)[None]
