"""Read which layers have a sliding window, as config.json says. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workers.model.config_values import ConfigValues
from workers.model.families.family import Family


class WindowReader(ConfigValues):
    """Reads the keys of config.json about windows."""

    def __init__(self, file: Path, raw: dict[str, Any], family: Family) -> None:
        super().__init__(file, raw)
        self._family = family

    def read(self, num_layers: int) -> tuple[int, ...]:
        """Return the window of each layer; 0: it sees all tokens."""
        kinds = self._default_kinds(num_layers)
        given = self.raw.get("layer_types")
        if given is not None and given != kinds:
            kinds = self._layer_types(given, num_layers)
        if self._family.is_last_layer_full:
            kinds[-1] = "full_attention"
        if "sliding_attention" not in kinds:
            return (0,) * num_layers
        window = self.count("sliding_window")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)

    def _default_kinds(self, num_layers: int) -> list[str]:
        """Return the kinds of layers that follow from other keys than `layer_types`."""
        if self._family.windows == "none":
            return ["full_attention"] * num_layers
        if self._family.windows == "all":
            window = self.raw.get("sliding_window")
            return ["full_attention" if window is None else "sliding_attention"] * num_layers
        if self._family.windows == "pattern":
            return self._pattern(num_layers)
        sliding = self.raw.get("use_sliding_window", False) and self.raw["sliding_window"] is not None
        first = self.raw.get("max_window_layers", 28)
        if not isinstance(first, int):
            self.refuse("max_window_layers", "is not a number of layers")
        is_alternating = self._family.windows == "alternating"
        return [
            "sliding_attention" if sliding and has_window else "full_attention"
            for has_window in (
                layer < first and layer % 2 == 0 if is_alternating else layer >= first
                for layer in range(num_layers)
            )
        ]

    def _pattern(self, num_layers: int) -> list[str]:
        """Return the kinds of layers by `sliding_window_pattern`: every so many-th sees all, or the layers
        repeat letters, of which L is one with a window."""
        if self.raw.get("sliding_window") is None:
            return ["full_attention"] * num_layers
        pattern = self.raw.get("sliding_window_pattern")
        if isinstance(pattern, str) and pattern and not set(pattern) - {"L", "G"}:
            letters = [pattern[layer % len(pattern)] for layer in range(num_layers)]
            return ["sliding_attention" if letter == "L" else "full_attention" for letter in letters]
        every = self.count("sliding_window_pattern")
        return [
            "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)
        ]

    def _layer_types(self, given: Any, num_layers: int) -> list[str]:
        if self._family.windows not in ("switched", "alternating", "pattern"):
            self.refuse("layer_types", f"is not supported in a {self._family.name} model")
        if not isinstance(given, list) or len(given) != num_layers:
            self.refuse("layer_types", f"does not name the {num_layers} layers")
        if not all(kind in ("full_attention", "sliding_attention") for kind in given):
            self.refuse("layer_types", "is not supported (supported: full_attention, sliding_attention)")
        is_switched = self._family.windows in ("switched", "alternating")
        if is_switched and "sliding_attention" in given and not self.raw.get("use_sliding_window", False):
            self.refuse("layer_types", "has sliding layers, but use_sliding_window is not set")
        return [str(kind) for kind in given]
