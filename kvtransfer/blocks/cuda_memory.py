"""Host memory that CUDA can reach: it is pinned, and tensors of a device may view it."""

from __future__ import annotations

import contextlib
import logging

import torch

_log = logging.getLogger(__name__)

# cudaHostRegisterPortable: pinned for every device of the process.
_PORTABLE = 1


def pin(address: int, num_bytes: int, device: torch.device) -> bool:
    """Pin host memory of this process for CUDA, which takes all of its pages. Logs why if it is refused."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        status = runtime.cudaHostRegister(address, num_bytes, _PORTABLE)
    if status != runtime.cudaError.success:
        _log.warning("%d bytes of host memory could not be pinned: %s", num_bytes, status)
        _drop_pending_error(device)
        return False
    return True


def _drop_pending_error(device: torch.device) -> None:
    """Clear the error that a refused call of the runtime has left to this thread: torch would raise it after
    the next kernel. Torch has no call for that, so a kernel raises it here."""
    with torch.inference_mode(), contextlib.suppress(torch.AcceleratorError, torch.OutOfMemoryError):
        torch.zeros(1, device=device)


def unpin(address: int) -> None:
    """Undo `pin`, before the memory is unmapped."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostUnregister(address)))


class _Exposed:
    """Bytes at an address that a device can read."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def view_memory(address: int, num_bytes: int) -> torch.Tensor:
    """View pinned host memory as a uint8 tensor of the device that pinned it, which reads it over the bus.
    The memory must outlive the view. Torch asks the driver for the device, which fails for memory of a card
    that this process does not see."""
    return torch.as_tensor(_Exposed(address, num_bytes))
