"""A device whose copies are made as late as it may make them, with CPU tensors in place of its own, and a
count of what torch would copy there from pageable memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class DelayedCopy:
    """A copy that was begun."""

    def __init__(self, copies: DelayedCopies, source: Tensor, target: Tensor) -> None:
        self._copies, self.source, self.target = copies, source, target

    def synchronize(self) -> None:
        self._copies.catch_up(self)


class DelayedCopies:
    """Copies that are made, in their order, when somebody waits for one of them, or, within `in_order`, when
    other work of the device needs one."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        # The buffers that were taken, and the addresses of those that were not given back.
        self.num_buffers = 0
        self.held: set[int] = set()
        # The bytes that were copied from buffers.
        self.num_bytes = 0
        self._begun: list[DelayedCopy] = []

    def buffer(self, num_bytes: int) -> Tensor:
        self.num_buffers += 1
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.held.add(memory.data_ptr())
        return memory

    def release(self, buffer: Tensor) -> None:
        assert all(_address(it.source) != _address(buffer) for it in self._begun)
        self.held.remove(buffer.data_ptr())

    def send(self, source: Tensor, target: Tensor) -> DelayedCopy:
        assert source.is_contiguous()
        assert _address(source) in self.held
        assert (source.dtype, source.shape) == (target.dtype, target.shape)
        self._begun.append(DelayedCopy(self, source, target))
        return self._begun[-1]

    def catch_up(self, last: DelayedCopy | None = None) -> None:
        """Make the copies that were begun, up to `last` if it is one of them, else all."""
        if last is not None and last not in self._begun:
            return
        while self._begun:
            copy = self._begun.pop(0)
            copy.target.copy_(copy.source)
            self.num_bytes += copy.source.nbytes
            if copy is last:
                return

    def awaits(self, tensor: Tensor) -> bool:
        """Whether a copy to the memory of this tensor was begun and not made."""
        return any(_address(it.target) == _address(tensor) for it in self._begun)

    def in_order(self) -> StreamOrder:
        """Return a context in which what computes with a target finds it complete, as work that a device has
        in one stream with its copies does."""
        return StreamOrder(self)


class StreamOrder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes the copies that an operation needs before it."""

    def __init__(self, copies: DelayedCopies) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies = copies

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        read = [it for it in tree_leaves((args, kwargs)) if isinstance(it, Tensor)]
        if not func.is_view and any(map(self._copies.awaits, read)):
            self._copies.catch_up()
        return func(*args, **(kwargs or {}))


class PageableUploads(TorchFunctionMode):
    """Counts in `num_bytes` what torch is asked to copy to CUDA, and leaves it where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is torch.Tensor.to and any(map(_is_cuda, (*args, *given.values()))):
            self.num_bytes += args[0].nbytes
            args = [_on_cpu(it) for it in args]
            given = {name: _on_cpu(it) for name, it in given.items()}
        return func(*args, **given)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_cuda(argument: Any) -> bool:
    return isinstance(argument, torch.device) and argument.type == "cuda"


def _on_cpu(argument: Any) -> Any:
    return torch.device("cpu") if _is_cuda(argument) else argument
