"""The forms of weights that the engine benchmark measures beside those of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from workers.model.model_config import ModelConfig
from workers.model.quantization.weight_form import AS_STORED, WeightDtype, WeightForm
from workers.model.rank_memory import Checkpoint, RankShape
from workers.model.weight_bytes import WeightBytes

# `gguf`: as the model's GGUF file has them.
FormName = WeightDtype | Literal["gguf"]


class GgufModel(NamedTuple):
    """A GGUF file, and the folder that is made of it with its matrices as they are."""

    file: Path
    folder: Path


class MeasuredForm(NamedTuple):
    """Weights of the checkpoint in `folder`, in a form."""

    folder: Path
    form: WeightForm = AS_STORED

    def weight_bytes(self, config: ModelConfig, item_bytes: int, device: str) -> WeightBytes:
        """Return the mean bytes of a weight on a device of this type, where floats have `item_bytes`."""
        whole = RankShape(config, 0, config.num_layers)
        return Checkpoint.read(self.folder).mean_bytes(whole, item_bytes, self.form.on(device))


def measured_form(name: FormName, model_dir: Path, gguf: GgufModel | None) -> MeasuredForm:
    """Return the form of this name of the model; `gguf` is what it is made of, if that is a GGUF file."""
    if name != "gguf":
        return MeasuredForm(model_dir, WeightForm(name))
    assert gguf is not None, "the form gguf is of a GGUF file"
    return MeasuredForm(gguf.folder)
