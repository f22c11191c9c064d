"""The datasets of `tandem bench serve` by their names; each kind has a file, such as `sharegpt_dataset.py`.

Files are read as far as requests are wanted of them, line by line; a line that cannot be used is named by its
number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from cluster.bench.conversations import read_conversations
from cluster.bench.dataset_load import DatasetSettings, Load, RunSettings
from cluster.bench.lengths_dataset import lengths_load
from cluster.bench.mooncake_dataset import mooncake_load
from cluster.bench.sessions_dataset import sessions_load
from cluster.bench.sharegpt_dataset import sharegpt_load

Kind = Literal["sharegpt", "mooncake", "sessions", "lengths"]
_FILE_KINDS: dict[str, Kind] = {"sharegpt": "sharegpt", "mooncake": "mooncake", "lengths": "lengths"}
LengthKind = Literal["fixed", "uniform", "lognormal"]


class Dataset(NamedTuple):
    """What `--dataset` names."""

    kind: Kind
    # A file, or of `lengths` a distribution.
    name: str = ""

    @property
    def is_file(self) -> bool:
        """Whether `name` is a file's."""
        return self.kind in ("sharegpt", "mooncake") or self.is_table

    @property
    def is_table(self) -> bool:
        """Whether lengths come from a file."""
        return self.kind == "lengths" and self.name not in get_args(LengthKind)


def parse_dataset(text: str) -> Dataset:
    """Return what the text names: `sharegpt:FILE`, `mooncake:FILE`, `sessions`, `lengths:KIND` or
    `lengths:FILE`; `ValueError` says what is expected."""
    kind, _, name = text.partition(":")
    if kind == "sessions" and not name:
        return Dataset("sessions")
    if name and (known := _FILE_KINDS.get(kind)) is not None:
        dataset = Dataset(known, name)
        if dataset.is_table and name.isalpha() and not Path(name).exists():
            raise ValueError(f"{name[:200]!r} is none of {', '.join(get_args(LengthKind))}, and no file")
        return dataset
    raise ValueError(
        "expected sharegpt:FILE, mooncake:FILE, sessions, or lengths:KIND with fixed, uniform, lognormal or "
        f"a CSV file, not {text[:200]!r}"
    )


def open_dataset(dataset: Dataset, settings: DatasetSettings) -> Callable[[RunSettings], Load]:
    """Return what makes the load of a run. The runs of a sweep read on in the file of conversations;
    `BenchError` names a file or a line that cannot be read."""
    if dataset.kind == "sharegpt":
        conversations = read_conversations(Path(dataset.name))
        return partial(sharegpt_load, dataset.name, conversations, settings)
    if dataset.kind == "mooncake":
        return partial(mooncake_load, Path(dataset.name), settings)
    if dataset.kind == "sessions":
        return partial(sessions_load, settings)
    return partial(lengths_load, dataset.name, dataset.is_table, settings)
