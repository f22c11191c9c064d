"""Which files of a repository or folder are the model: what is read of it, and nothing pickled."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from cluster.errors import ConfigError
from cluster.model_source.names import GGUF, gguf_parts
from workers.errors import CheckpointError
from workers.model.model_config import file_problem, weight_files

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Read by gateways, engine cores or ranks, or by the tokenizer's library beside its own file.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
)
# One of each is needed.
_NEEDED = (("config.json",), ("tokenizer.json", "tokenizer.model"))
_TEMPLATE = re.compile(r"additional_chat_templates/[\w-][\w.-]*\.jinja")
_WEIGHTS = re.compile(r"[\w-][\w.-]*\.safetensors")
_PICKLED = (".bin", ".pth", ".pt", ".ckpt", ".msgpack", ".h5", ".pkl")


def small_files(listed: Collection[str]) -> list[str]:
    """Return the files beside the weights; the index of the weights only where there is more than one."""
    wanted = [file for file in listed if file in SMALL_FILES or _TEMPLATE.fullmatch(file)]
    return wanted + ([INDEX] if SINGLE not in listed and INDEX in listed else [])


def weights_of(name: str, listed: Collection[str], read_index: Callable[[], bytes]) -> list[str]:
    """Return the weights, where there is more than one file by the index. `ConfigError` where there are none
    that can be loaded."""
    if SINGLE in listed:
        return [SINGLE]
    if INDEX not in listed:
        raise ConfigError(f"model: {_without_weights(name, listed)}")
    return _shards(name, read_index())


def gguf_files(name: str, file: str, listed: Collection[str]) -> list[str]:
    """Return the GGUF file with its siblings; `ConfigError` where one is not listed."""
    parts = gguf_parts(file)
    for part in parts:
        if part not in listed:
            there = sorted(it for it in listed if it.endswith(GGUF))
            raise ConfigError(f"model: {name} has no file {part}; {_some('it has', there, 'GGUF file')}")
    return parts


def is_whole(folder: Path, file: str) -> bool:
    """Whether the folder has all that is needed, and no safetensors file that is cut short."""
    try:
        if file:
            return all((folder / part).is_file() for part in gguf_parts(file))
        if not all(any((folder / name).is_file() for name in names) for names in _NEEDED):
            return False
        return not any(file_problem(weights) for weights in weight_files(folder))
    except (CheckpointError, OSError):
        return False


def cut_short(folder: Path, weights: Iterable[str]) -> str:
    """Return what is wrong with a safetensors file that came as it was offered; "" where nothing is."""
    try:
        return next((text for file in weights if (text := file_problem(folder / file))), "")
    except CheckpointError as error:
        return str(error)


def _shards(name: str, index: bytes) -> list[str]:
    try:
        shards = sorted({str(file) for file in json.loads(index)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"model: the {INDEX} of {name} has no weight_map; name another revision") from error
    for shard in shards:
        if _WEIGHTS.fullmatch(shard) is None:
            raise ConfigError(f"model: the {INDEX} of {name} names {shard[:100]!r}, no file beside it")
    return shards


def _without_weights(name: str, listed: Collection[str]) -> str:
    if found := sorted(it for it in listed if it.endswith(GGUF)):
        return f"{name} has GGUF files alone; name one of them, such as {name}:{found[0]}"
    if pickled := sorted(it for it in listed if it.endswith(_PICKLED)):
        return (
            f"{name} has no safetensors, but {pickled[0]}, which is never loaded, as unpickling can run "
            "anything: name a repository or revision with safetensors, or convert it"
        )
    if found := sorted(it for it in listed if _WEIGHTS.fullmatch(it)):
        return (
            f"{name} has neither {SINGLE} nor {INDEX}, but {found[0]}: name a repository in the layout of "
            "transformers (an adapter is not a model)"
        )
    return f"{name} has no weights: name a repository with {SINGLE} or {INDEX}"


def _some(before: str, files: list[str], kind: str) -> str:
    return f"{before} {', '.join(files[:5])}" if files else f"{before} no {kind}"
