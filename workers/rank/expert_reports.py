"""Report how many tokens the experts of a rank's stage have had."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.messages.rank_channel import ExpertCounts
from workers.model.decoder import Decoder


class ExpertReports:
    """Makes the reports of one stage's experts. All ranks of a stage choose the same experts for the same
    tokens, so that one of them reports.

    Counts are read beside the work that is under way on a device, on a stream of their own: a report neither
    waits for that work nor holds it up, and what it misses is in the next one."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        """Begin to count: what was computed until now is in no report. `device` is that of the decoder."""
        self._decoder = decoder
        self._layers = decoder.expert_layers
        self._stream = None
        if self._layers and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._reported = self._read()

    def take(self) -> ExpertCounts | None:
        """Return the counts since the last report; None: there are no experts, or no tokens."""
        if not self._layers:
            return None
        counts = self._read()
        new, self._reported = counts - self._reported, counts
        if not new.any():
            return None
        mixture = self._decoder.config.mixture
        assert mixture is not None
        packed = new.numpy().astype("<u4").tobytes()
        return ExpertCounts(self._layers, mixture.rule.num_chosen, packed)

    def _read(self) -> Tensor:
        with torch.cuda.stream(self._stream):  # does nothing without a stream
            return self._decoder.expert_counts()
