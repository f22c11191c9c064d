"""The card that kernels are chosen for: its compute capability, and what a program may take of it.

Kernels have tiles for the largest shared memory, that of data center cards, and smaller ones for the others.
A kernel that no card of a kind has run can fail to compile there: `compiles` finds out before it is used."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from triton.compiler.errors import CompilationError
from triton.errors import TritonError

_log = logging.getLogger("tandem.rank")
_KIB = 1 << 10
# Bytes of shared memory that a program can have, by compute capability; of others, the least of them.
_CAPABILITY_TO_SHARED = {
    80: 163 * _KIB, 86: 99 * _KIB, 87: 163 * _KIB, 89: 99 * _KIB, 90: 227 * _KIB, 100: 227 * _KIB,
    103: 227 * _KIB, 110: 227 * _KIB, 120: 99 * _KIB, 121: 99 * _KIB,
}  # fmt: skip
_LEAST_SHARED = 99 * _KIB
HOPPER = 90


class Card(NamedTuple):
    """A kind of cards: `capability`, 10 times the major number of the compute capability plus the minor
    one."""

    capability: int

    @property
    def shared_bytes(self) -> int:
        """The bytes of shared memory that a program can have."""
        return _CAPABILITY_TO_SHARED.get(self.capability, _LEAST_SHARED)

    @property
    def has_much_shared(self) -> bool:
        """Whether that is more than the cards have that are none of a data center's."""
        return self.shared_bytes > _LEAST_SHARED

    @property
    def has_descriptors(self) -> bool:
        """Whether tiles are copied by their coordinates, without threads (TMA)."""
        return self.capability >= HOPPER


# The card of tensors that lie on none, in Triton's interpreter and where kernels are only compiled.
stand_in = Card(HOPPER)


def card_of(device: torch.device) -> Card:
    """Return the kind of card that a device is."""
    return _card(device) if device.type == "cuda" else stand_in


@functools.cache
def _card(device: torch.device) -> Card:
    major, minor = torch.cuda.get_device_capability(device)
    return Card(10 * major + minor)


def compiles(name: str, run: Callable[[], object]) -> bool:
    """Run kernels once. Returns False, and logs why, where they do not compile or do not fit; other errors of
    the device, and that memory is short, are raised."""
    try:
        run()
    except (CompilationError, TritonError) as error:
        problem = str(error) or type(error).__name__
    except RuntimeError as error:  # of the compiler's passes
        if isinstance(error, torch.OutOfMemoryError) or "PassManager" not in str(error):
            raise
        problem = str(error)
    else:
        return True
    _log.warning("%s cannot be used on this device, the former kernels are: %s", name, problem[:500])
    return False
