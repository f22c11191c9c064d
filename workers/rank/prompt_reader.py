"""Read the parts of prompts that are asked for in addition to samples: log-probabilities of their tokens, and
embeddings.

The logits of all positions of a chunk would take gigabytes with a large vocabulary. They are computed in
pieces, of which the log-probabilities that are asked for are all that is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from workers.messages.rank_channel import (
    BatchEntry,
    EntryEmbedding,
    EntryLogprobs,
    PromptTargets,
    StepPlan,
    StepReport,
)
from workers.messages.sampling import PackedLogprobs
from workers.model.attention.interface import to_device
from workers.model.rank_memory import LOGITS_PIECE_BYTES
from workers.rank.containment import Containment
from workers.rank.device_queue import CopiedOut, DeviceQueue
from workers.rank.input_batch import PlannedRows
from workers.rank.progress import Progress, StepFaults
from workers.rank.rank_model import RankModel


class PromptReadings(NamedTuple):
    """The readings of a step, on their way to the host, by entry of its plan: tables as `_table` makes them
    with their `num_top`, and float32 vectors [hidden_size]."""

    tables: Sequence[tuple[int, int, CopiedOut]]
    vectors: Sequence[tuple[int, CopiedOut]]

    def complete(self, report: StepReport) -> StepReport:
        """Return the report with what was read of entries that have not failed. Waits for the copies."""
        failed = {it.index for it in report.failed}
        return replace(
            report,
            prompt_logprobs=tuple(
                EntryLogprobs(index, _packed(copied, num_top))
                for index, num_top, copied in self.tables
                if index not in failed
            ),
            embeddings=tuple(
                EntryEmbedding(index, _on_host(copied).astype("<f4").tobytes())
                for index, copied in self.vectors
                if index not in failed
            ),
        )


class PromptReader:
    """Reads from the hidden states after the last layer. The ranks of the last stage do it together, piece by
    piece; the one that samples keeps the readings. An entry that cannot be read fails."""

    def __init__(
        self,
        model: RankModel,
        containment: Containment,
        queue: DeviceQueue,
        progress: Progress,
        faults: StepFaults,
    ) -> None:
        self._decoder, self._groups, self._unfinished, _ = model
        self._containment = containment
        self._queue = queue
        self._progress = progress
        self._faults = faults
        self.rows_of_piece = max(1, LOGITS_PIECE_BYTES // (4 * model.decoder.config.vocab_size))
        self._index_to_entry: dict[int, BatchEntry] = {}
        self._tables: list[tuple[int, int, CopiedOut]] = []
        self._vectors: list[tuple[int, CopiedOut]] = []

    def begin(self, plan: StepPlan) -> None:
        """Begin a step: `read` reads what its entries ask for."""
        self._index_to_entry = {
            index: entry
            for index, entry in enumerate(plan.entries)
            if entry.targets is not None or entry.pools
        }

    def read(self, rows: PlannedRows, hidden: Tensor) -> None:
        """Read what is asked of these sequences of the step, whose last hidden states [num_tokens,
        hidden_size] these are."""
        if not (self._index_to_entry and self._groups.is_last_stage):
            return
        ends = np.cumsum(rows.lengths)
        for place in np.flatnonzero(np.isin(rows.indices, list(self._index_to_entry))).tolist():
            only = rows.only(np.arange(rows.num_sequences) == place)
            entry = self._index_to_entry[int(rows.indices[place])]
            of_entry = hidden[int(ends[place]) - entry.num_tokens : int(ends[place])]
            self._faults.begin(only)
            is_read = entry.targets is None or self._read_logprobs(only, entry.targets, of_entry)
            if is_read and entry.pools:
                is_read = self._read_vector(only, of_entry[-1:])
            if not is_read:
                self._containment.fail(only)

    def take(self) -> PromptReadings | None:
        """Return what the step has read; None: nothing."""
        readings = PromptReadings(self._tables, self._vectors)
        self._tables, self._vectors = [], []
        return readings if readings.tables or readings.vectors else None

    def _read_logprobs(self, only: PlannedRows, targets: PromptTargets, hidden: Tensor) -> bool:
        """Read log-probabilities from a sequence's hidden states [num_tokens, hidden_size]. Returns whether
        that succeeded, also at the other ranks."""
        tokens = np.frombuffer(targets.tokens, "<i4")
        hidden = hidden[targets.start - int(only.starts[0]) :][: len(tokens)]
        firsts = range(0, len(tokens), self.rows_of_piece)
        pending = [slice(first, min(first + self.rows_of_piece, len(tokens))) for first in reversed(firsts)]
        tables: list[Tensor] = []
        while pending:
            piece = pending.pop()
            num_rows = piece.stop - piece.start
            table = self._attempt(
                partial(self._table, hidden[piece], tokens[piece], targets.num_top), num_rows, hidden
            )
            if table is not None:
                tables.append(table)
            elif num_rows == 1:
                return False
            else:
                middle = piece.start + num_rows // 2
                pending += [slice(middle, piece.stop), slice(piece.start, middle)]
        if self._groups.is_sampler:
            whole = self._containment.retry_after_freeing_cache(partial(torch.cat, tables))
            self._tables.append((int(only.indices[0]), targets.num_top, self._copied(whole)))
        return True

    def _read_vector(self, only: PlannedRows, hidden: Tensor) -> bool:
        """Read the hidden state [1, hidden_size] of a sequence's last token, as `_read_logprobs`."""
        vector = self._attempt(lambda: self._decoder.final_norm(hidden)[0].float(), 0, hidden)
        if vector is not None and self._groups.is_sampler:
            self._vectors.append((int(only.indices[0]), self._copied(vector)))
        return vector is not None

    def _attempt(self, work: Callable[[], Tensor], num_rows: int, like: Tensor) -> Tensor | None:
        """Return the result of `work`, which computes the head for `num_rows`; None if it failed here or at
        another rank."""
        self._unfinished.begin_head(num_rows)
        done = self._containment.attempt(work)
        if done is None:
            self._unfinished.finish(like)
        if not self._groups.agree(done is not None) or done is None:
            return None
        self._progress.mark_layer()
        return done

    def _table(self, hidden: Tensor, tokens: NDArray[np.int32], num_top: int) -> Tensor:
        """Return int32 [num_rows, 1 + 2 * num_top] of float32 bits: the log-probabilities of `tokens` after
        the rows of `hidden`, those of the likeliest, and then the ids of these; nothing at ranks that compute
        only a part of the logits."""
        self._faults.at("reading")
        logits = self._decoder.logits(hidden)
        if not self._groups.is_sampler:
            return logits
        logprobs = logits.log_softmax(dim=-1)
        index = to_device(tokens.astype(np.int64), logits.device)
        top = logprobs.topk(num_top, dim=-1)
        floats = torch.cat((logprobs.gather(1, index[:, None]), top.values), 1)
        return torch.cat((floats.view(torch.int32), top.indices.to(torch.int32)), 1)

    def _copied(self, source: Tensor) -> CopiedOut:
        return self._queue.copy_out(source, self._queue.host_memory(source))


def _packed(copied: CopiedOut, num_top: int) -> PackedLogprobs:
    table = _on_host(copied)
    columns = table[:, 0], table[:, 1 + num_top :], table[:, 1 : 1 + num_top]
    logprobs, ids, top = (np.ascontiguousarray(column).astype("<i4").tobytes() for column in columns)
    return PackedLogprobs(num_top, logprobs, ids, top)


def _on_host(copied: CopiedOut) -> NDArray[np.generic]:
    copied.event.synchronize()
    values: NDArray[np.generic] = copied.host.numpy()
    return values
