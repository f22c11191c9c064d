"""Find the model that a plan is for: a folder or GGUF file, a published shape by its name, or a config.json
alone."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cluster.errors import ConfigError
from cluster.planning.described_shape import described_shape, stand_in
from cluster.planning.device_profile import Precision
from cluster.planning.published_shapes import NAME_TO_SHAPE, PublishedShape, published_shape
from cluster.planning.shape_weights import ShapeWeights
from cluster.serve.resource_needs import RankWeights
from workers.errors import CheckpointError
from workers.model.gguf.gguf_checkpoint import checkpoint_of
from workers.model.kv_form import KvForm
from workers.model.model_config import ModelConfig, read_model_config, weight_files
from workers.model.model_folder import described_folder
from workers.model.quantization.stored_format import CodeType
from workers.model.quantization.weight_form import WeightForm, rounds_inputs_of
from workers.model.rank_memory import RankShape
from workers.model.sizes import ModelWork
from workers.model.weight_bytes import WeightBytes

# Of activations: plans are for 16 bits.
ITEM_BYTES = 2
# What the cluster's file names where the model is known by `--shape` alone.
SHAPE_FOLDER = "model-folder"


class PlannedWeights(RankWeights, Protocol):
    """Sizes of weights, and the mean bytes of each."""

    def mean_bytes(self, rank: RankShape, item_bytes: int, form: WeightForm) -> WeightBytes:
        """Return the mean bytes of the weights that the rank keeps."""


class PlannedModel(NamedTuple):
    """The model of a plan. `source` is what the cluster's file names; `has_files` False: the model is known
    by its shape alone, and the file has to be given its folder."""

    source: str
    shape: ModelConfig
    weights: PlannedWeights
    form: WeightForm
    kv_dtype: str
    has_files: bool
    latent_kv: str = "replicated"
    # Why the engine refuses it, where the plan is for a model of its sizes.
    refusal: str = ""

    @property
    def everything(self) -> RankShape:
        """One rank with all layers."""
        return RankShape(self.shape, 0, self.shape.num_layers)

    @property
    def weight_bytes(self) -> int:
        return self.weights.weight_bytes(self.everything, ITEM_BYTES, self.form)

    @property
    def work(self) -> ModelWork:
        """The least work of its steps."""
        return self.work_with_offload(0)

    def work_with_offload(self, num_experts: int) -> ModelWork:
        """Return the least work of its steps where the CPU computes so many experts of each layer, which have
        16 bits then."""
        rank = dataclasses.replace(self.everything, expert_offload=num_experts)
        mean = self.weights.mean_bytes(rank, ITEM_BYTES, self.form)
        return ModelWork(self.shape, ITEM_BYTES, self.kv_dtype, mean)

    @property
    def stored_token_bytes(self) -> int:
        """The KV of a token in the store, which keeps all tokens of all layers, whatever their windows."""
        cells = self.shape.kv_cells
        num_layers = sum(map(self.shape.has_attention, range(cells.num_layers)))
        form = KvForm.of(self.kv_dtype, ITEM_BYTES, len(cells.parts))
        return cells.num_kinds * num_layers * cells.num_cells * form.head_bytes(cells.width)

    def product_precision(self, device: str) -> Precision:
        """Return in which precision the device multiplies: with fewer than 16 bits only where the checkpoint
        means inputs to be rounded too."""
        scheme = self.shape.quantization
        if scheme is None or not self.form.keeps_stored:
            return "bf16"
        formats = [targeted.format for targeted in scheme.formats]
        if not all(rounds_inputs_of(stored, device) for stored in formats):
            return "bf16"
        return "fp8" if formats[0].codes is CodeType.FP8 else "int8"


def planned_model(text: str, weight_dtype: str, kv_dtype: str, latent_kv: str = "replicated") -> PlannedModel:
    """Return the model of `--model`, one of its sizes where the engine refuses it. Raises `ConfigError` where
    there is none of this name, and `CheckpointError` where its files cannot be read, or the decoder cannot
    compute it and its config.json does not have the sizes."""
    form = WeightForm(weight_dtype)
    return _named(text, form, kv_dtype)._replace(latent_kv=latent_kv)


def model_of_shape(
    text: str, weight_dtype: str, kv_dtype: str, latent_kv: str = "replicated"
) -> PlannedModel:
    """Return the model of `--shape`. Raises `ConfigError`, naming the size, for a shape that is incomplete,
    and `CheckpointError` for one that the decoder cannot compute."""
    shape = _by_shape(SHAPE_FOLDER, described_shape(text), WeightForm(weight_dtype), kv_dtype)
    return shape._replace(latent_kv=latent_kv)


def _named(text: str, form: WeightForm, kv_dtype: str) -> PlannedModel:
    path = Path(text)
    if path.is_file() and path.suffix == ".json":
        return _by_keys(text, json_keys(path), form, kv_dtype)
    if path.exists():
        folder = described_folder(path, None)
        try:
            shape = read_model_config(folder)
        except CheckpointError:
            if not (folder / "config.json").is_file():
                raise
            return _by_keys(text, json_keys(folder / "config.json"), form, kv_dtype)
        if path.is_dir() and not _has_weights(path):
            return PlannedModel(text, shape, ShapeWeights(shape), form, kv_dtype, has_files=False)
        return PlannedModel(text, shape, checkpoint_of(path), form, kv_dtype, has_files=True)
    if (published := published_shape(text)) is not None:
        return _of_published(published, form, kv_dtype)
    raise ConfigError(
        f"--model {text}: neither a folder, a GGUF file, nor a config.json, nor one of the shapes that are "
        f"known by name: {', '.join(NAME_TO_SHAPE)}; --shape describes another one"
    )


def _by_keys(text: str, keys: Mapping[str, Any], form: WeightForm, kv_dtype: str) -> PlannedModel:
    """Return the model of these keys of a config.json, or one of its sizes where the engine refuses them."""
    try:
        return _by_shape(text, keys, form, kv_dtype)
    except CheckpointError as error:
        sizes = stand_in(keys)
        if sizes is None:
            raise
        return _by_shape(text, sizes, form, kv_dtype)._replace(refusal=str(error))


def json_keys(file: Path) -> Mapping[str, Any]:
    """Read the keys of a config.json. Raises `ConfigError`, naming the file."""
    try:
        keys = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {file}: cannot be read as JSON: {error}") from error
    if not isinstance(keys, dict):
        raise ConfigError(f"--model {file}: is not a JSON object")
    return keys


def _of_published(published: PublishedShape, form: WeightForm, kv_dtype: str) -> PlannedModel:
    model = _by_shape(published.hub_name, published.config, form, kv_dtype)
    return model._replace(weights=ShapeWeights(model.shape, published.experts))


def _by_shape(name: str, keys: Mapping[str, Any], form: WeightForm, kv_dtype: str) -> PlannedModel:
    with tempfile.TemporaryDirectory(prefix="tandem-plan-") as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(dict(keys)), encoding="utf-8")
        try:
            shape = read_model_config(Path(folder))
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(file), name)) from error
    return PlannedModel(name, shape, ShapeWeights(shape), form, kv_dtype, has_files=False)


def _has_weights(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except CheckpointError:
        return False
