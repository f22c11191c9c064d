"""Notes the variants of Triton's kernels that a block of code launches, each of which is compiled when it is
first met. Works with kernels that are interpreted as well."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

_ALIGNMENT = 16


@contextlib.contextmanager
def launched_variants() -> Iterator[set[tuple[Any, ...]]]:
    """Yield a set to which the variants are added: the kernel's name, and its specialization for each
    argument."""
    from triton.runtime.jit import KernelInterface

    variants: set[tuple[Any, ...]] = set()
    get = KernelInterface.__getitem__

    def note(kernel: Any, grid: Any) -> Any:
        launch = get(kernel, grid)

        def run(*args: Any, **kwargs: Any) -> Any:
            variants.add(_variant(kernel, args, kwargs))
            return launch(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KernelInterface, "__getitem__", note)
        yield variants


def _variant(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    # An interpreted kernel keeps what the decorator was given.
    given = getattr(kernel, "kwargs", None) or vars(kernel)
    never = set(given.get("do_not_specialize") or ())
    unaligned = set(given.get("do_not_specialize_on_alignment") or ())
    parameters = inspect.signature(kernel.fn).parameters
    named = dict(zip(parameters, args, strict=False)) | dict(kwargs)
    described: list[tuple[str, Any]] = []
    for name, value in sorted(named.items()):
        is_constant = name not in parameters or "constexpr" in str(parameters[name].annotation)
        described.append(
            (name, value if is_constant else _specialization(value, name in never, name in unaligned))
        )
    return (kernel.fn.__name__, *described)


def _specialization(value: Any, is_never: bool, is_unaligned: bool) -> Any:
    """Return the specialization of a kernel for an argument."""
    if value is None or isinstance(value, float):
        return type(value).__name__
    if isinstance(value, int):
        width = "int32" if -(1 << 31) <= value < 1 << 31 else "int64"
        if is_never:
            return width
        return 1 if value == 1 else (width, not is_unaligned and value % _ALIGNMENT == 0)
    if hasattr(value, "block_shape"):  # a tensor whose tiles are copied by their coordinates
        return str(value.base.dtype), tuple(value.block_shape)
    is_aligned = not (is_never or is_unaligned) and value.data_ptr() % _ALIGNMENT == 0
    return str(value.dtype), is_aligned
