"""Report how many tokens the experts of a rank have had."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from workers.messages.rank_channel import ExpertCounts
from workers.model.decoder import Decoder
from workers.model.sizes import held_experts


class ExpertReports:
    """Makes the reports of one rank's experts. Ranks that share their experts count the same tokens, so that
    the first of them reports.

    Counts are read beside the work that is under way on a device, on a stream of their own: a report neither
    waits for that work nor holds it up, and what it misses is in the next one."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        """Begin to count: what was computed until now is in no report. `device` is that of the decoder."""
        shard = decoder.shard
        is_first = shard.tp_rank % (shard.tp_size // shard.ep_size) == 0
        self._decoder = decoder
        self._layers = decoder.expert_layers if is_first else ()
        shape, self._owned = decoder.config.mixture, range(0)
        if shape is not None:
            self._owned = held_experts(shape, shard.tp_rank, shard.tp_size, shard.ep_size).experts
        self._stream = None
        if self._layers and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._reported, self._copied = self._read()
        # Loads are known when all ranks have reported: copies shall not wait for one that no token chooses.
        self._owes_report = any(it.copies is not None for it in decoder.mixtures.values())

    def take(self) -> ExpertCounts | None:
        """Return the counts since the last report; None: there are no experts, or no tokens, or another rank
        reports them. Where ranks have slots for copies, the first report may be of no tokens."""
        if not self._layers:
            return None
        counts, copied = self._read()
        new, self._reported = counts - self._reported, counts
        triples = [(*key, count - self._copied.get(key, 0)) for key, count in copied.items()]
        triples, self._copied = [it for it in triples if it[2]], copied
        if not (new.any() or triples or self._owes_report):
            return None
        self._owes_report = False
        shape = self._decoder.config.mixture
        assert shape is not None
        return ExpertCounts(
            self._layers,
            self._owned.start,
            shape.rule.num_experts,
            shape.rule.num_chosen,
            new.numpy().astype("<u4").tobytes(),
            np.array(triples, "<u4").tobytes(),
        )

    def _read(self) -> tuple[Tensor, dict[tuple[int, int], int]]:
        """Return the tokens since the start of the experts that the rank owns, [num_layers, num_owned], and
        those of its copies, by layer and expert."""
        with torch.cuda.stream(self._stream):  # does nothing without a stream
            counts = self._decoder.expert_counts()
        copied: dict[tuple[int, int], int] = {}
        for of_layer, (number, mixture) in zip(counts, self._decoder.mixtures.items(), strict=True):
            if mixture.copies is not None:
                of_copies = mixture.copies.slots.tokens(of_layer)
                copied |= {(number, expert): count for expert, count in of_copies.items()}
        return counts[:, : len(self._owned)], copied
