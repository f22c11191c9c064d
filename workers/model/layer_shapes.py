"""Describe what differs between the layers of a model: the sizes of their heads, where their keys and values
are kept, and what each takes beside the hidden states.

The KV of every layer is cut into the same cells, so that transfer and stores see one shape: a cell is the
least part of a layer's heads that a rank holds, and has `width` elements for a token. Where layers have heads
of several sizes, some leave elements of their cells unused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from workers.model.config_values import ConfigValues, shown

_HEAD_KEYS = {"head_dim", "num_key_value_heads"}
# Beyond what any model has; lists of as many frequencies are made.
_MAX_HEAD_DIM = 1 << 16


def head_dim_problem(head_dim: int) -> str:
    """Say why heads of this size are not supported; "" if they are."""
    if head_dim % 2:
        return "is odd: rotary embedding needs pairs"
    return f"is more than {_MAX_HEAD_DIM}" if head_dim > _MAX_HEAD_DIM else ""


class HeadShape(NamedTuple):
    """The number of a layer's key-value heads, and the size of all its heads."""

    num_kv_heads: int
    head_dim: int


class LayerShapes(NamedTuple):
    """What differs between layers, beside their windows: nothing, by default."""

    # The heads of layers without a window; None: those of all.
    full_heads: HeadShape | None = None
    # Layers without a window take their keys, before norm and rotation, for values.
    are_keys_values: bool = False
    # So many layers, the last, have no keys and values, and attend to those of an earlier one.
    num_shared: int = 0
    # The feed-forward of these is twice as wide.
    is_shared_double: bool = False
    # The size of the input that each layer has beside the hidden states, and the vocabulary of the table that
    # it comes from; 0: there is none.
    input_size: int = 0
    input_vocab_size: int = 0


ALIKE = LayerShapes()


class KvCells(NamedTuple):
    """The KV of a model: the layers that have keys and values of their own, the cells of each, and the
    elements of a cell for a token; the `parts` of these that have a scale each where KV has 8 bits, which is
    one for each head, or for a latent and the rotated part of keys beside it; and the kinds of cells, 2 for
    keys and values, 1 for latents of both."""

    num_layers: int
    num_cells: int
    parts: tuple[int, ...]
    num_kinds: int = 2

    @property
    def width(self) -> int:
        """The elements of a cell for a token."""
        return sum(self.parts)

    @staticmethod
    def of(num_layers: int, kinds: Iterable[HeadShape]) -> KvCells:
        """Return the cells of `num_layers` layers that have heads of these kinds: as many as the heads of all
        kinds can be divided by, and so wide that those of each kind lie in them at equal distances."""
        known = list(kinds)
        num_cells = math.gcd(*(kind.num_kv_heads for kind in known))
        widths = (kind.num_kv_heads // num_cells * kind.head_dim for kind in known)
        size = math.gcd(*(kind.head_dim for kind in known))
        return KvCells(num_layers, num_cells, (size,) * (math.lcm(*widths) // size))


def kv_sources(windows: Sequence[int], num_shared: int) -> tuple[int, ...]:
    """Return the layer whose keys and values each layer attends to: its own, but for the last `num_shared`,
    which take those of the last layer before them that has their window (0: none)."""
    num_own = len(windows) - num_shared
    window_to_last = {window: layer for layer, window in enumerate(windows[:num_own])}
    return (*range(num_own), *(window_to_last[window] for window in windows[num_own:]))


class LayerShapeReader(ConfigValues):
    """Reads the keys of config.json by which layers differ."""

    def read(self, heads: HeadShape, num_heads: int, vocab_size: int, windows: Sequence[int]) -> LayerShapes:
        """Read them for layers with these `windows`, which have `heads` unless a key says otherwise."""
        are_keys_values = bool(self.raw.get("attention_k_eq_v"))
        full_heads = self._full_heads(heads, windows, are_keys_values)
        self._refuse_heads(full_heads, num_heads)
        num_shared = self._num_shared(windows)
        input_size = self._none_or("hidden_size_per_layer_input")
        input_vocab_size = self.count("vocab_size_per_layer_input") if input_size else 0
        if input_size and input_vocab_size < vocab_size:
            self.refuse("vocab_size_per_layer_input", f"is less than the vocab_size {vocab_size}")
        return LayerShapes(
            None if full_heads == heads or 0 not in windows else full_heads,
            are_keys_values and 0 in windows,
            num_shared,
            bool(num_shared and self.raw.get("use_double_wide_mlp")),
            input_size,
            input_vocab_size,
        )

    @property
    def _is_by_layer(self) -> bool:
        """Whether `per_layer_config` says which heads layers have, and no other key."""
        return self.raw.get("per_layer_config") is not None

    def _refuse_heads(self, full_heads: HeadShape, num_heads: int) -> None:
        """Refuse heads of layers without a window that cannot be, by the key that gives them."""
        num_kv_heads, head_dim = full_heads
        if num_heads % num_kv_heads:
            problem = f"does not divide the {num_heads} attention heads"
            if self._is_by_layer:
                self.refuse("per_layer_config", f"has num_key_value_heads {num_kv_heads}, which {problem}")
            self.refuse("num_global_key_value_heads", problem)
        if problem := head_dim_problem(head_dim):
            if self._is_by_layer:
                self.refuse("per_layer_config", f"has head_dim {head_dim}, which {problem}")
            self.refuse("global_head_dim", problem)

    def _refuse_other_layers(self, by_layer: dict[str, object], num_layers: int) -> None:
        """Refuse entries of `per_layer_config` that would be passed over, as they are of no layer."""
        known = set(map(str, range(num_layers)))
        other = next((layer for layer in by_layer if layer not in known), None)
        if other is not None:
            self.refuse("per_layer_config", f"names {shown(other)}, which is none of {num_layers} layers")

    def _full_heads(self, heads: HeadShape, windows: Sequence[int], are_keys_values: bool) -> HeadShape:
        """Return the heads of layers without a window."""
        by_layer = self.raw.get("per_layer_config")
        if not self._is_by_layer:
            of_keys = "num_global_key_value_heads" if are_keys_values else ""
            num_kv_heads = self.count(of_keys, heads.num_kv_heads) if of_keys else heads.num_kv_heads
            return HeadShape(num_kv_heads, self.count("global_head_dim"))
        if not isinstance(by_layer, dict):
            self.refuse("per_layer_config", "is not an object with an entry for each layer that differs")
        self._refuse_other_layers(by_layer, len(windows))
        kinds: tuple[set[HeadShape], set[HeadShape]] = (set(), set())
        for layer, window in enumerate(windows):
            kinds[window > 0].add(self._heads_of(by_layer, layer, heads))
        full, sliding = kinds
        if len(full) > 1 or sliding - {heads}:
            self.refuse("per_layer_config", "gives layers of one kind different heads")
        return full.pop() if full else heads

    def _heads_of(self, by_layer: dict[str, object], layer: int, heads: HeadShape) -> HeadShape:
        """Return the heads of a layer by `per_layer_config`, as transformers 5 writes it."""
        own = by_layer.get(str(layer), {})
        if not isinstance(own, dict) or own.keys() - _HEAD_KEYS:
            self.refuse(
                "per_layer_config",
                f"is not supported (supported for layers: {', '.join(sorted(_HEAD_KEYS))})",
            )
        key = f"per_layer_config.{layer}"
        values = ConfigValues(self.file, {f"{key}.{name}": value for name, value in own.items()})
        return HeadShape(
            values.count(f"{key}.num_key_value_heads", heads.num_kv_heads),
            values.count(f"{key}.head_dim", heads.head_dim),
        )

    def _num_shared(self, windows: Sequence[int]) -> int:
        num_shared = self._none_or("num_kv_shared_layers")
        own = windows[: len(windows) - num_shared] if num_shared < len(windows) else ()
        if set(windows[len(own) :]) - set(own):
            self.refuse("num_kv_shared_layers", "leaves a kind of layers without keys and values")
        return num_shared

    def _none_or(self, key: str) -> int:
        """Return the whole number of the key; 0 where it is missing, null or 0."""
        return self.count(key) if self.raw.get(key) else 0
