"""Write the quantized folder of a checkpoint, shard by shard. What was written stays written: a run that was
interrupted continues with the first shard that is missing."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvtransfer.common.os_errors import os_reason
from kvtransfer.common.panics import PanicError, panics_as_errors
from workers.errors import QuantizationError
from workers.model.model_config import read_json, weight_files
from workers.model.safetensors_stream import file_header, index_text
from workers.quantizer.checkpoint_plan import CheckpointPlan, PlannedShard, PlannedTensor, SourceTensors
from workers.quantizer.compressed_tensors import stored_tensors, stored_values
from workers.quantizer.rounding import Rounder
from workers.quantizer.target import QuantizationTarget

RECORD = "tandem_quantize.json"
_FORMAT = 1
# What is not copied: weights of any form, and what is written anew.
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"})
_WRITTEN_ANEW = frozenset({"config.json", "model.safetensors.index.json", RECORD})
_COPIED_FOLDERS = ("additional_chat_templates",)
_SPARE_BYTES = 64 << 20
_HEADER_BYTES = 16 << 20

Progress = Callable[[int, int, str], None]


class QuantizedFolder(NamedTuple):
    """A folder that was written: the error of each layer as a part of its weights (root mean square), and
    the bytes of the weights before and after."""

    layer_to_error: dict[int, float]
    source_bytes: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizationJob:
    """A folder to write. `method` says by what means, with what they depend on: a folder that was begun by
    others is refused."""

    source: Path
    out: Path
    target: QuantizationTarget
    method: str = "nearest"

    def run(self, rounder: Rounder, progress: Progress = lambda done, total, what: None) -> QuantizedFolder:
        """Write what is missing. `progress` is called with the bytes done, those of all weights, and what is
        done next. Raises `QuantizationError` where another folder is there, another process writes it, or
        there is no space; and `CheckpointError`."""
        config = read_json(self.source / "config.json")
        if config.get("quantization_config") or config.get("text_config", {}).get("quantization_config"):
            raise QuantizationError(
                f"{self.source}: quantized already, as quantization_config of its config.json says; take the "
                "checkpoint in 16 or 32 bits of which it was made"
            )
        try:
            with SourceTensors(self.source) as source, _exclusive(self.out):
                plan = CheckpointPlan.of(source, self.target)
                record = self._record()
                self._check_space(plan, record)
                missing = [shard for shard in plan.shards if not self._is_written(shard, record)]
                for shard in plan.shards[: plan.shards.index(missing[-1]) + 1] if missing else ():
                    done = _Done(plan, shard, progress)
                    if shard in missing:
                        self._write_shard(shard, source, record, rounder, done)
                    else:
                        self._follow_shard(shard, rounder, done)
                self._write_small_files(config, plan)
                source_bytes = sum(tensor.num_bytes for tensor in source.tensors)
        except OSError as error:
            reason = os_reason(error, has_path=True)
            raise QuantizationError(f"{self.out}: cannot be written: {reason}") from error
        except (SafetensorError, PanicError) as error:
            raise QuantizationError(f"{self.out}: what is written cannot be read: {error}") from error
        errors = {int(layer): error for shard in record.shards.values() for layer, error in shard.items()}
        return QuantizedFolder(dict(sorted(errors.items())), source_bytes, plan.num_bytes)

    def _record(self) -> _Record:
        """Return what was written so far; begin with nothing where the folder is empty."""
        of_job = {
            "format": _FORMAT,
            "source": _identity(self.source),
            "target": dataclasses.asdict(self.target),
            "method": self.method,
        }
        file = self.out / RECORD
        if not file.exists():
            if any(self.out.iterdir()):
                raise QuantizationError(f"{self.out}: is there, with other files; name another folder")
            _write_text(file, json.dumps({"job": of_job, "shards": {}}, indent=1))
            return _Record(file, of_job, {})
        found = read_json(file)
        if found.get("job") != of_job:
            raise QuantizationError(
                f"{self.out}: was begun from another model or with other settings; name another folder, or "
                "remove it"
            )
        return _Record(file, of_job, found["shards"])

    def _check_space(self, plan: CheckpointPlan, record: _Record) -> None:
        missing = sum(shard.num_bytes for shard in plan.shards if not self._is_written(shard, record))
        free = shutil.disk_usage(self.out).free
        if missing and free < missing + _SPARE_BYTES:
            raise QuantizationError(
                f"{self.out}: the weights take {missing / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; "
                "free some, or name a folder elsewhere"
            )

    def _is_written(self, shard: PlannedShard, record: _Record) -> bool:
        return shard.name in record.shards and (self.out / shard.name).is_file()

    def _write_shard(
        self, shard: PlannedShard, source: SourceTensors, record: _Record, rounder: Rounder, done: _Done
    ) -> None:
        """Write a file under another name until it is whole."""
        partial = self.out / f".{shard.name}.partial"
        layer_to_error = {}
        with partial.open("wb") as stream:
            stream.write(file_header(shard.stored))
            for layer, tensors in shard.layers():
                errors = self._write_layer(stream, layer, tensors, source, rounder, done)
                if errors is not None:
                    layer_to_error[str(layer)] = errors
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(self.out / shard.name)
        record.add(shard.name, layer_to_error)

    def _follow_shard(self, shard: PlannedShard, rounder: Rounder, done: _Done) -> None:
        """Have the rounder take over the layers of a file that is written."""
        with panics_as_errors, safe_open(str(self.out / shard.name), framework="pt", device="cpu") as written:
            for layer, tensors in shard.layers():
                if not any(it.is_quantized for it in tensors):
                    continue

                def values(tensors: Sequence[PlannedTensor] = tensors) -> dict[str, Tensor]:
                    return {it.source.name: self._written_value(written, it) for it in tensors}

                done.next(f"layer {layer}, which is written")
                rounder.follow(layer, values)

    def _written_value(self, written: Any, planned: PlannedTensor) -> Tensor:
        stored: list[Tensor] = [written.get_tensor(it.name) for it in planned.stored]
        if not planned.is_quantized:
            return stored[0]
        return stored_values(stored, self.target).to(stored[1].dtype)

    def _write_layer(
        self,
        stream: BufferedWriter,
        layer: int,
        tensors: Sequence[PlannedTensor],
        source: SourceTensors,
        rounder: Rounder,
        done: _Done,
    ) -> float | None:
        """Write the tensors of a layer; return the error of its quantized ones, None where there are none."""
        error = weight = 0.0
        if any(it.is_quantized for it in tensors):
            done.next(f"layer {layer}")
            rounder.begin_layer(layer)
        for planned in tensors:
            tensor = source.tensor(planned.source.name)
            if planned.is_quantized:
                done.next(f"layer {layer}")
                rounded = rounder.rounded(planned.source.name, tensor, tensor.dtype)
                error, weight = error + rounded.squared_error, weight + rounded.squared_weight
                stored = stored_tensors(rounded, self.target)
            else:
                stored = [rounder.kept(planned.source.name, tensor)]
            for value in stored:
                _write_values(stream, value)
            done.num_bytes += planned.num_bytes
        return math.sqrt(error / weight) if weight else None

    def _write_small_files(self, config: dict[str, Any], plan: CheckpointPlan) -> None:
        """Copy the tokenizer and what else is small; config.json is the last file: it makes a model of the
        folder."""
        for file in sorted(self.source.iterdir()):
            is_other = file.name.startswith(".") or file.suffix in _WEIGHT_SUFFIXES
            if file.is_file() and not is_other and file.name not in _WRITTEN_ANEW:
                shutil.copyfile(file, self.out / file.name)
            elif file.is_dir() and file.name in _COPIED_FOLDERS:
                shutil.copytree(file, self.out / file.name, dirs_exist_ok=True)
        if len(plan.shards) > 1:
            name_to_file = {it.name: shard.name for shard in plan.shards for it in shard.stored}
            _write_text(self.out / "model.safetensors.index.json", index_text(name_to_file, plan.num_bytes))
        config = config | {"quantization_config": self.target.config(plan.ignored)}
        _write_text(self.out / "config.json", json.dumps(config, indent=2) + "\n")


class _Done:
    """Counts the bytes that are done, for whom watches."""

    def __init__(self, plan: CheckpointPlan, shard: PlannedShard, progress: Progress) -> None:
        before = plan.shards[: plan.shards.index(shard)]
        self.num_bytes = sum(it.num_bytes for it in before)
        self._total, self._progress = plan.num_bytes, progress

    def next(self, what: str) -> None:
        """Report what is done now."""
        self._progress(self.num_bytes, self._total, what)


@dataclasses.dataclass(slots=True)
class _Record:
    """The file that says what a folder is made of, and which shards are written, with the errors of their
    layers."""

    file: Path
    job: dict[str, Any]
    shards: dict[str, dict[str, float]]

    def add(self, shard: str, layer_to_error: dict[str, float]) -> None:
        self.shards[shard] = layer_to_error
        _write_text(self.file, json.dumps({"job": self.job, "shards": self.shards}, indent=1))


def _identity(folder: Path) -> str:
    """Return what differs where a checkpoint does: a digest of its configuration, and of the sizes, times of
    change and beginnings of its files with weights."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        with file.open("rb") as stream:
            state = os.fstat(stream.fileno())
            digest.update(f"|{file.name}|{state.st_size}|{state.st_mtime_ns}|".encode())
            digest.update(stream.read(_HEADER_BYTES))
    return digest.hexdigest()


def _write_values(stream: BufferedWriter, tensor: Tensor) -> None:
    """Write the values of a tensor from where they are."""
    if tensor.numel():
        stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _write_text(file: Path, text: str) -> None:
    """Write a small file whole, or not at all."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other processes from writing it meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise QuantizationError(f"{folder}: another process writes it; wait for that to end") from None
        yield
    finally:
        os.close(lock)
