"""The hidden states of windows of text between the layers of a model, of which one is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from workers.errors import QuantizationError
from workers.model.attention.choice import choose_attention
from workers.model.attention.interface import AttentionBackend, SequenceSpan, StepInput
from workers.model.decoder import Decoder
from workers.model.model_config import read_model_config
from workers.model.sizes import last_stage_limit
from workers.model.weights import ShardSpec, WeightReader

_BLOCK_TOKENS = 64
Watch = Callable[[Decoder], None]


class WindowStates:
    """Runs windows of tokens, int64 [num_tokens] each, through the model in `folder`, stage by stage."""

    def __init__(self, folder: Path, dtype: torch.dtype, windows: list[Tensor]) -> None:
        """Raises `QuantizationError` for a model with layers that keep states, which have blocks of their
        own; and `CheckpointError`."""
        self._folder, self._dtype = folder, dtype
        self._windows = windows
        self._config = read_model_config(folder)
        if self._config.state is not None:
            raise QuantizationError(
                f"{folder}: has layers that keep a state, and cannot be run layer by layer"
            )
        # The inputs of the next stage.
        self._states: list[Tensor] = []

    @property
    def states(self) -> list[Tensor]:
        """The hidden states of each window behind the stages that have run, [num_tokens, num_inputs]."""
        return self._states

    def stages(self) -> list[ShardSpec]:
        """Return the stages: a layer each, but all that share keys and values in the last."""
        last = last_stage_limit(self._config)
        stages = [ShardSpec(layer, layer + 1) for layer in range(last)]
        return [*stages, ShardSpec(last, self._config.num_layers)]

    def load(self, stage: ShardSpec, replaced: Mapping[str, Tensor] | None = None) -> Decoder:
        """Load the next stage, with the tensors `replaced` in place of those of their names."""
        reader = WeightReader(self._folder, self._config, stage, self._dtype, torch.device("cpu"))
        with reader:
            reader.replace(replaced or {})
            decoder = Decoder(self._config, reader, stage)
            reader.finish()
        if stage.layer_start == 0:
            self._states = [decoder.embed(tokens) for tokens in self._windows]
        return decoder

    def advance(
        self,
        stage: ShardSpec,
        watch: Watch = lambda decoder: None,
        replaced: Mapping[str, Tensor] | None = None,
    ) -> Decoder:
        """Run the next stage, as `load` loads it, and return it. `watch` is called with it before."""
        decoder = self.load(stage, replaced)
        watch(decoder)
        self.pass_on([self.run(decoder, number) for number in range(len(self._windows))])
        return decoder

    def pass_on(self, states: list[Tensor]) -> None:
        """Take over what a stage made of the states of all windows."""
        self._states = states

    @torch.inference_mode()
    def run(self, decoder: Decoder, number: int) -> Tensor:
        """Return what the next stage makes of the states of a window, which stay."""
        states = self._states[number].clone()
        attention, num_blocks = _attention(decoder, len(states))
        step = StepInput.of([SequenceSpan(0, len(states), range(num_blocks))], _BLOCK_TOKENS)
        return decoder.run_layers(states, attention.plan(step))


def _attention(decoder: Decoder, num_tokens: int) -> tuple[AttentionBackend, int]:
    """Return attention over an empty KV of this stage with the blocks of a window, and these."""
    cells, shard = decoder.config.kv_cells, decoder.shard
    num_blocks = -(-num_tokens // _BLOCK_TOKENS)
    num_layers = min(shard.layer_end, cells.num_layers) - shard.layer_start
    shape = (num_blocks, num_layers, cells.num_kinds, cells.num_cells, _BLOCK_TOKENS, cells.width)
    kv = torch.zeros(shape, dtype=decoder.attention_shape.dtype)
    return choose_attention(decoder.attention_shape, kv), num_blocks
