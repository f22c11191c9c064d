"""Files that an operator, a model's author or a damaged disk may have filled with anything."""

from __future__ import annotations

import json
import os
import struct
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from gateway_harness import write_model

from benchmarks.random_checkpoint import write_random_checkpoint
from cluster.config import load_config, parse_config
from cluster.errors import ConfigError
from cluster.text.chat_template import load_chat_template
from cluster.text.tokenizer import ModelText
from tests.fuzz.mutation import any_tree, mutate_bytes, mutate_tree
from tests.fuzz.target import Target, outcome, stderr_in
from workers.errors import CheckpointError
from workers.model.ignored_keys import ignored_keys
from workers.model.model_config import file_problem, read_model_config, weight_files
from workers.model.weights import ShardSpec, WeightReader

CONFIG: dict[str, Any] = {
    "app": "tandem",
    "model": "models/tiny",
    "pools": [
        {"name": "prefill", "role": "prefill", "replicas": 2, "tp": 2, "resources": {"fast": 1.5}},
        {"name": "decode", "role": "decode", "pp": 2, "layers": [1, 1], "engine": {"kv_tokens": "auto"}},
    ],
}


def open_targets(stack: ExitStack, folder: Path) -> list[Target]:
    """Return the targets of the cluster's configuration and of a model's files."""
    checkpoint = folder / "checkpoint"
    write_random_checkpoint(checkpoint, "llama", seed=1)
    write_model(folder / "text")
    config = folder / "cluster.yaml"
    model = _ModelFiles(checkpoint, folder / "text")
    return [
        Target("configuration, tree", _config_tree, 300),
        Target("configuration, file", lambda rng: _config_file(config, rng), 60),
        Target("config.json", model.config, 400),
        Target("safetensors header", model.header, 250),
        Target("index of weight files", model.index, 250),
        Target("chat template's file", model.template, 400),
        Target("tokenizer.json", model.tokenizer, 60),
    ]


# ------------------------------------------------------------------------------------------ configuration


def _some_config(rng: Random) -> dict[str, Any]:
    """Return a valid configuration with some of its sections spelled out."""
    sections = parse_config(CONFIG, "fuzz").model_dump(mode="json")
    names = rng.sample(sorted(sections), rng.randint(0, 3))
    return CONFIG | {name: sections[name] for name in names}


def _config_tree(rng: Random) -> str:
    raw = mutate_tree(rng, _some_config(rng))
    if not isinstance(raw, dict):
        return "no mapping"
    return outcome(lambda: parse_config(raw, "fuzz"), ConfigError)


def _config_file(path: Path, rng: Random) -> str:
    raw = _some_config(rng)
    if rng.random() < 0.7:
        raw = mutate_tree(rng, raw)
    text = yaml.safe_dump(raw, allow_unicode=rng.random() < 0.5).encode(errors="replace")
    path.write_bytes(mutate_bytes(rng, text) if rng.random() < 0.5 else text)
    return outcome(lambda: load_config(path), ConfigError)


# ---------------------------------------------------------------------------------------------- the model


class _ModelFiles:
    """A small checkpoint, of which one file at a time is replaced, and what a gateway reads of a model."""

    def __init__(self, checkpoint: Path, text: Path) -> None:
        self._config_file = checkpoint / "config.json"
        self._weights_file = checkpoint / "model.safetensors"
        self._config = read_model_config(checkpoint)
        self._config_raw = json.loads(self._config_file.read_text())
        self._weights = self._weights_file.read_bytes()
        (length,) = struct.unpack_from("<Q", self._weights)
        self._header = json.loads(self._weights[8 : 8 + length])
        self._data = self._weights[8 + length :]
        self._text = text
        self._tokenizer_config = json.loads((text / "tokenizer_config.json").read_text())
        self._tokenizer = json.loads((text / "tokenizer.json").read_text())
        self._sharded = checkpoint.parent / "sharded"
        self._sharded.mkdir()
        (self._sharded / "a.safetensors").write_bytes(self._weights)

    def config(self, rng: Random) -> str:
        """`config.json`, which comes with the weights."""
        folder = self._text
        (folder / "config.json").write_bytes(_json(rng, self._config_raw))

        def read() -> None:
            read_model_config(folder)
            ignored_keys(folder)

        return outcome(read, CheckpointError)

    def header(self, rng: Random) -> str:
        """The header of a safetensors file: what is read of it is a slice of the file, or an error."""
        header = _json(rng, self._header)
        length = (
            len(header) if rng.random() < 0.9 else rng.choice((0, 1, len(header) + 1, 1 << 40, (1 << 64) - 1))
        )
        data = self._data if rng.random() < 0.8 else self._data[: rng.randrange(len(self._data))]
        self._weights_file.write_bytes(struct.pack("<Q", length) + header + data)
        whole = ShardSpec.whole(self._config)

        def read() -> None:
            if file_problem(self._weights_file):
                return
            reader = WeightReader(
                self._weights_file.parent, self._config, whole, torch.float32, torch.device("cpu")
            )
            with reader:
                reader.head(reader.embedding())
                for layer in range(self._config.num_layers):
                    reader.layer(layer)
                reader.final_norm()
                reader.finish()

        return outcome(read, CheckpointError)

    def index(self, rng: Random) -> str:
        """The index of a checkpoint of several files."""
        raw = {"metadata": {}, "weight_map": dict.fromkeys(self._header, "a.safetensors")}
        (self._sharded / "model.safetensors.index.json").write_bytes(_json(rng, raw))
        return outcome(lambda: weight_files(self._sharded), CheckpointError)

    def template(self, rng: Random) -> str:
        """`tokenizer_config.json`, with the chat template."""
        raw = self._tokenizer_config
        if rng.random() < 0.5:
            named = [{"name": "default", "template": "x"}, {"name": "tools", "template": "y"}]
            raw = raw | {"chat_template": named}
        (self._text / "tokenizer_config.json").write_bytes(_json(rng, raw))
        return outcome(lambda: load_chat_template(self._text), CheckpointError)

    def tokenizer(self, rng: Random) -> str:
        """`tokenizer.json`; a text that the tokenizer takes is one that it gives back."""
        (self._text / "tokenizer.json").write_bytes(_json(rng, self._tokenizer))

        def read() -> None:
            text = ModelText.load(self._text)
            text.decode(text.encode("the quick brown fox"))

        with stderr_in(Path(os.devnull)):  # Rust code prints each of its panics
            return outcome(read, CheckpointError)


def _json(rng: Random, tree: Any) -> bytes:
    """Return a JSON file like `tree`: with other values, or damaged."""
    choice = rng.randrange(8)
    if choice < 6:
        tree = mutate_tree(rng, tree)
    elif choice == 6:
        tree = any_tree(rng)
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    return mutate_bytes(rng, text) if choice == 7 or rng.random() < 0.2 else text
