"""Compute norms by the fastest way that a device has."""

from __future__ import annotations

from torch import Tensor

from workers.model import cuda, native
from workers.model.norm import Norm


def apply_norm(x: Tensor, norm: Norm, out: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """Add `residual` to `x` [num_rows, size], in place, where it is given. Normalize in float32, and multiply
    by the norm's weight. The result is written to `out` where it is given, which may be `x` if there is no
    residual. The kernels compute RMS norms; a LayerNorm is computed by torch."""
    if cuda.serves(x.device) and not norm.is_layer_norm:
        from workers.model.cuda import layer_ops

        return layer_ops.rms_norm(x, norm, out, residual)
    if residual is not None:
        x.add_(residual)
    if native.serves(x.device, x.dtype) and x.stride(-1) == 1 and not norm.is_layer_norm:
        kernels = native.load()
        assert kernels is not None
        return kernels.rms_norm(x, norm, out)
    normed = norm.normed(x)
    return normed if out is None else out.copy_(normed)


def add_normed(hidden: Tensor, x: Tensor, norm: Norm) -> None:
    """Add the norm of `x` [num_rows, size], which may be overwritten, to `hidden` [num_rows, size]."""
    if cuda.serves(x.device) and not norm.is_layer_norm:
        from workers.model.cuda import layer_ops

        layer_ops.add_normed(hidden, x, norm)
        return
    hidden.add_(apply_norm(x, norm, x))
