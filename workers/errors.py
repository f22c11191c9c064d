"""The errors of a replica.

WorkerError
├── CheckpointError       the model folder cannot be served: the text names the file, key or tensor
├── CapacityError         the request can never fit this replica: do not retry it here
├── QueueFullError        no capacity now: try another replica, or later
├── OutOfBlocksError      the block pool has fewer free blocks than asked: preempt or wait
├── GrammarRefusedError   a grammar is refused: it is wrong, or beyond what is compiled
├── RankDiedError         a rank process ended or stopped answering: the replica must be replaced
├── QuantizationError     a checkpoint cannot be quantized as asked: the text names what, and the remedy
└── PeerError             an engine that is measured along with ours: misnamed, not loaded, dead or silent
"""

from __future__ import annotations


class WorkerError(Exception):
    """Base of all errors of workers."""


class CheckpointError(WorkerError):
    """The checkpoint is unsupported or incomplete; names what and where."""


class CapacityError(WorkerError):
    """The request needs more blocks or context than the replica has at all."""


class QueueFullError(WorkerError):
    """The replica's waiting queue is full."""


class OutOfBlocksError(WorkerError):
    """Fewer blocks are free than were asked for; none was taken."""


class GrammarRefusedError(WorkerError):
    """A grammar cannot be compiled or followed here; the text is for whoever wrote it."""


class RankDiedError(WorkerError):
    """A rank ended, hung or reported that it cannot continue."""


class PeerError(WorkerError):
    """A peer of the engine benchmark was named wrongly, did not load, died or did not answer in time."""


class QuantizationError(WorkerError):
    """A checkpoint cannot be quantized as asked."""
