"""Records what a block of code launches on a device, or would: operations of torch that compute or copy, and
kernels of Triton, compiled or interpreted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# They give memory, but write nothing to it.
_ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::detach", "aten::lift_fresh", "aten::_unsafe_view")


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, names: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = [it.alias_info for it in func._schema.returns]
        is_view = bool(returns) and all(it is not None and not it.is_write for it in returns)
        if not is_view and not func._schema.name.startswith(_ALLOCATIONS):
            self._names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[str]]:
    """Yield a list that the names of the launches are appended to, in their order."""
    from triton.runtime.jit import KernelInterface

    names: list[str] = []
    get = KernelInterface.__getitem__

    def record(kernel: Any, grid: Any) -> Any:
        launch = get(kernel, grid)

        def run(*args: Any, **kwargs: Any) -> Any:
            names.append(kernel.fn.__name__)
            # The interpreter's own work on CPU tensors is no launch.
            with torch.utils._python_dispatch._disable_current_modes():
                return launch(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch, _Operations(names):
        patch.setattr(KernelInterface, "__getitem__", record)
        yield names
