"""Read which layers of a model attend, which keep a state, and which have a feed-forward alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from workers.model.config_values import ConfigValues, shown

LayerKind = Literal["attention", "state", "feed_forward", "experts"]
_ATTENDING: dict[str, LayerKind] = {"full_attention": "attention", "attention": "attention"}


def named_kinds(
    values: ConfigValues, key: str, num_layers: int, names: dict[str, LayerKind]
) -> list[LayerKind] | None:
    """Return the kinds of layers that the list `key` names, by these `names` beside those of attention; None
    where there is no such key. Raises `CheckpointError` for any other name."""
    given, known = values.raw.get(key), _ATTENDING | names
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != num_layers:
        values.refuse(key, f"does not name the {num_layers} layers")
    for name in given:
        if name not in known:
            values.refuse(key, f"has {shown(name)}, which is not supported (supported: {', '.join(known)})")
    return [known[name] for name in given]


def layers_of(kinds: Sequence[LayerKind], kind: LayerKind) -> tuple[int, ...]:
    """Return the layers of a kind."""
    return tuple(layer for layer, its in enumerate(kinds) if its == kind)
