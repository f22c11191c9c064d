"""Attention of models whose layers form groups with KV and block tables apart (`workers.model.kv_groups`): a
backend for each group, over its KV. A group of layers that keep a state has none: its blocks are handed to
the layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import Tensor

from workers.model.attention.interface import (
    AttentionBackend,
    AttentionPlan,
    AttentionShape,
    LayerAttention,
    StepInput,
)
from workers.model.state.layer_states import LayerStates
from workers.model.state.state_step import StateStep

MakeGroup = Callable[[AttentionShape, Tensor], AttentionBackend]


class GroupsAttention(AttentionBackend):
    """Attention by one backend for each group of layers, which are numbered as in a KV of all. Blocks in host
    memory are of the first group alone."""

    def __init__(
        self,
        shape: AttentionShape,
        groups: Sequence[Sequence[int]],
        kvs: Sequence[Tensor],
        make: MakeGroup,
        *,
        has_states: bool = False,
    ) -> None:
        """`groups` are the layers of this rank in each group, ascending, and `kvs` their KV. `make` makes the
        backend of a group; one without layers here has none. With `has_states`, the layers of the last group
        keep a state."""
        super().__init__(shape, kvs[0])
        self._kvs = tuple(kvs)
        # The group of layers with a state, where one is here.
        self.state_group = len(groups) - 1 if has_states and groups[-1] else None
        self.has_states = self.state_group is not None
        self._layer_to_group = {layer: group for group, layers in enumerate(groups) for layer in layers}
        self._layer_to_place = {layer: place for layers in groups for place, layer in enumerate(layers)}
        shapes = [_of_layers(shape, layers) for layers in groups]
        self._kinds = [_kinds_with(shape, layers) for layers in groups]
        self.backends = [
            make(its, kv) if layers and number != self.state_group else None
            for number, (its, kv, layers) in enumerate(zip(shapes, kvs, groups, strict=True))
        ]
        made = [backend for backend in self.backends if backend is not None]
        self.name = ", ".join(dict.fromkeys(backend.name for backend in made)) or "none"
        self.can_stage = self.backends[0] is None or self.backends[0].can_stage
        self.is_deterministic = all(backend.is_deterministic for backend in made)
        self.can_capture = all(backend.can_capture for backend in made)
        # By the identity of the layer, which is kept with it.
        self._id_to_local: dict[int, tuple[LayerAttention, int, LayerAttention]] = {}

    @property
    def kvs(self) -> Sequence[Tensor]:
        return self._kvs

    @property
    def split_tokens(self) -> int:
        return max((it.split_tokens for it in self.backends if it is not None), default=0)

    def local(self, layer: LayerAttention) -> tuple[int, LayerAttention]:
        """Return the group of a layer, and the layer as the group's backend numbers it."""
        known = self._id_to_local.get(id(layer))
        if known is None:
            group = self._layer_to_group[layer.index]
            kinds = self._kinds[group]
            place, kind = self._layer_to_place[layer.index], kinds.index(layer.kind) if kinds else 0
            known = layer, group, dataclasses.replace(layer, index=place, kind=kind)
            self._id_to_local[id(layer)] = known
        return known[1], known[2]

    def states_of(self, layer: LayerAttention) -> Tensor:
        """Return the states of a layer, [num_blocks, num_parts, part_size], a view of the group's blocks."""
        assert self.state_group is not None
        return self._kvs[self.state_group][:, self._layer_to_place[layer.index], 0, :, 0]

    def plan(self, step: StepInput) -> GroupsPlan:
        return GroupsPlan(self, step)

    def over(self, shape: AttentionShape, kv: Tensor) -> AttentionBackend:
        backend = next(it for it in self.backends if it is not None)
        return backend.over(shape, kv)


class GroupsPlan(AttentionPlan):
    """The attention of one step: a plan for each group of layers, with its tables."""

    def __init__(self, backend: GroupsAttention, step: StepInput) -> None:
        super().__init__(step)
        self.backend = backend
        self._plans = [
            None if its is None else its.plan(_of_group(step, group))
            for group, its in enumerate(backend.backends)
        ]
        group = backend.state_group
        # Of the layers with a state, where such are here.
        self.state_step = None if group is None else StateStep.of(_of_group(step, group))

    @property
    def parts(self) -> Sequence[AttentionPlan | None]:
        return self._plans

    def local(self, layer: LayerAttention) -> tuple[int, LayerAttention]:
        return self.backend.local(layer)

    def states(self, layer: LayerAttention) -> LayerStates:
        """Return the states of a layer that keeps such, and what the step does with them."""
        assert self.state_step is not None
        return LayerStates(self.backend.states_of(layer), self.state_step)

    def run(self, layer: LayerAttention, qkv: Tensor) -> Tensor:
        group, local = self.local(layer)
        plan = self._plans[group]
        assert plan is not None
        return plan.run(local, qkv)

    def attend(self, layer: LayerAttention, queries: Tensor) -> Tensor:
        group, local = self.local(layer)
        plan = self._plans[group]
        assert plan is not None
        return plan.attend(local, queries)


def _of_group(step: StepInput, group: int) -> StepInput:
    """Return the step with the tables of one group."""
    if not group:
        return dataclasses.replace(step, group_tables=())
    tables, device = step.group_tables[group - 1], step.device
    if device is not None:
        device = dataclasses.replace(device, tables=device.group_tables[group - 1], group_tables=())
    return dataclasses.replace(step, tables=tables, group_tables=(), host=None, device=device)


def _kinds_with(shape: AttentionShape, layers: Sequence[int]) -> list[int]:
    """Return which kinds of heads these layers have."""
    return [number for number, kind in enumerate(shape.kinds) if not set(layers).isdisjoint(kind.layers)]


def _of_layers(shape: AttentionShape, layers: Sequence[int]) -> AttentionShape:
    """Return the shape of these layers alone, numbered from 0."""
    place = {layer: index for index, layer in enumerate(layers)}
    kinds = []
    for kind in (shape.kinds[number] for number in _kinds_with(shape, layers)):
        layer_to_window = dict(zip(kind.layers, kind.windows, strict=True))
        kept = [layer for layer in kind.layers if layer in place]
        of_kept = tuple(place[layer] for layer in kept), tuple(layer_to_window[layer] for layer in kept)
        kinds.append(kind._replace(layers=of_kept[0], windows=of_kept[1]))
    return dataclasses.replace(
        shape,
        windows=tuple(shape.windows[layer] for layer in layers),
        kinds=tuple(kinds),
        reads=tuple(place[layer] for layer in shape.reads if layer in place),
    )
