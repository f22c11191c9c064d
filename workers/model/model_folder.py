"""Give a GGUF file, or a folder whose tokenizer is a SentencePiece model, the form of a folder in Hugging
Face layout with a tokenizer.json, once per host.

The folders are in a cache that belongs to one user: one with the configuration and the tokenizer, which takes
a moment, and of a GGUF file one for each dtype with the weights as well. A folder is written under another
name and renamed when it is whole, by one process at a time; others wait for it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvtransfer.common.file_lock import try_lock
from kvtransfer.common.os_errors import os_reason
from workers.errors import CheckpointError
from workers.model.gguf.gguf_config import config_of, generation_config_of
from workers.model.gguf.gguf_file import GgufFile, is_gguf, model_name_of, part_paths
from workers.model.gguf.gguf_tokenizer import tokenizer_of
from workers.model.model_config import read_model_config
from workers.model.quantization.own_format import own_config
from workers.model.sentencepiece_tokenizer import (
    CONFIG,
    SOURCES,
    converted_tokenizer,
    has_sentencepiece_alone,
)

# Part of every key: folders of other versions are not used.
_FORMAT = "tandem-gguf-3"
_FOLDER_FORMAT = "tandem-folder-1"
_KEY_CHARS = 24
_MAX_NAME_CHARS = 80
# What of each part its key covers, and a header has: the tokens and merges of a vocabulary above all.
_KEY_BYTES = 16 << 20
# Beside the weights.
_SPARE_BYTES = 64 << 20
_POLL_S = 0.1
# After this time a folder that no process asks for is removed, when another one is made.
_UNUSED_S = 30 * 86400.0
_OWN_NAME = re.compile(rf"[^.].*-[0-9a-f]{{{_KEY_CHARS}}}(-(fp32|bf16|fp16))?(-quantized)?", re.DOTALL)

# What is copied beside a tokenizer that was converted.
_COPIED = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)

Progress = Callable[[str], None]


def default_cache() -> Path:
    """Return where folders are kept if the configuration does not say: `$XDG_CACHE_HOME/tandem/models`, or
    `~/.cache/tandem/models`, of the host and the user of this process."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
    return home / "tandem" / "models"


def described_folder(model: Path, cache: Path | None = None) -> Path:
    """Return a folder with the configuration and the tokenizer of the model: `model` itself if that is a
    folder with a tokenizer.json. That of a GGUF file says how its matrices are quantized. Raises
    `CheckpointError`. `cache` None: `default_cache`."""
    if is_gguf(model):
        return _gguf_folder(model, cache, "", lambda phase: None, keeps_quantized=True)
    if not has_sentencepiece_alone(model):
        return model
    read_model_config(model)  # its errors name the folder, those of a reader of the copy would not
    parts = (model.resolve().name[:_MAX_NAME_CHARS], _folder_key(model))
    return _made(model, cache, parts, lambda folder: _write_folder(model, folder), lambda phase: None)


def weights_folder(
    model: Path,
    dtype: str,
    cache: Path | None = None,
    progress: Progress = lambda phase: None,
    *,
    keeps_quantized: bool = False,
) -> Path:
    """Return a folder with the weights of the model as well, those of a GGUF file in `dtype`: fp32, bf16 or
    fp16. `keeps_quantized`: its matrices stay quantized. Raises `CheckpointError`. `progress` is called with
    what is done where this takes a while."""
    if not is_gguf(model):
        return model
    return _gguf_folder(model, cache, dtype, progress, keeps_quantized=keeps_quantized)


def _gguf_folder(
    model: Path, cache: Path | None, dtype: str, progress: Progress, *, keeps_quantized: bool
) -> Path:
    def write(folder: Path) -> None:
        file = GgufFile.read(model)
        _write_description(file, folder, keeps_quantized=keeps_quantized)
        if dtype:
            _write_weights(file, folder, dtype, progress, keeps_quantized=keeps_quantized)

    try:
        form = "quantized" if dtype and keeps_quantized else ""
        parts = (model_name_of(model)[:_MAX_NAME_CHARS], _key(model), dtype, form)
    except OSError as error:
        raise CheckpointError(f"{model}: cannot be read: {os_reason(error, has_path=False)}") from error
    return _made(model, cache, parts, write, progress)


def _made(
    model: Path,
    cache: Path | None,
    parts: Sequence[str],
    write: Callable[[Path], None],
    progress: Progress,
) -> Path:
    """Return the folder whose name has these parts, written by this process if it is not there."""
    cache = cache or default_cache()
    folder = cache / "-".join(filter(None, parts))
    try:
        if _use(folder):
            return folder
        _make_private(cache)
        with _locked(cache / f".{folder.name}.lock", f"waiting for {model.name} to be converted", progress):
            if not _use(folder):
                _write(folder, write)
        _remove_unused(cache, folder.stat().st_mtime)
        return folder
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise CheckpointError(f"{model}: {_NO_SPACE.format(cache=cache)}") from error
        raise CheckpointError(
            f"{model}: cannot be converted in {cache}: {os_reason(error, has_path=False)}; correct that, or "
            "set model_cache to another folder"
        ) from error


_NO_SPACE = "there is no space left to convert it in {cache}; free some, or set model_cache to another folder"


def _key(model: Path) -> str:
    """Return what differs where the file does: a digest of the size, the time of change and the beginning of
    each part."""
    digest = hashlib.sha256(_FORMAT.encode())
    for part in part_paths(model):
        with part.open("rb") as stream:
            state = os.fstat(stream.fileno())
            digest.update(f"|{state.st_size}|{state.st_mtime_ns}|".encode())
            digest.update(stream.read(_KEY_BYTES))
    return digest.hexdigest()[:_KEY_CHARS]


def _use(folder: Path) -> bool:
    """Return whether the folder is there, and note that it was used now: by its time of change."""
    with contextlib.suppress(OSError):  # a cache that can only be read, above all
        os.utime(folder)
    return folder.is_dir()


def _remove_unused(cache: Path, now: float) -> None:
    """Remove folders that no process has asked for in a long time; `now` in seconds since 1970. Where that
    fails, they stay."""
    for folder in cache.iterdir():
        with contextlib.suppress(OSError):
            if _OWN_NAME.fullmatch(folder.name) and folder.stat().st_mtime < now - _UNUSED_S:
                _remove(folder, now)


def _remove(folder: Path, now: float) -> None:
    """Remove a folder, unless another process has begun to use it meanwhile."""
    lock = try_lock(folder.with_name(f".{folder.name}.lock"))
    if lock is None:
        return
    try:
        removed = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(removed, ignore_errors=True)  # of a process that ended meanwhile
        folder.rename(removed)
        if removed.stat().st_mtime >= now - _UNUSED_S:
            removed.rename(folder)
        else:
            shutil.rmtree(removed)
    finally:
        os.close(lock)


def _folder_key(model: Path) -> str:
    """Return what differs where one of the files does that a folder is made of: a digest of their bytes."""
    digest = hashlib.sha256(_FOLDER_FORMAT.encode())
    try:
        for name in (*SOURCES, *_COPIED):
            if (model / name).is_file():
                content = hashlib.sha256((model / name).read_bytes()).hexdigest()
                digest.update(f"|{name}|{content}|".encode())
    except OSError as error:
        raise CheckpointError(f"{model}: cannot be read: {os_reason(error, has_path=False)}") from error
    return digest.hexdigest()[:_KEY_CHARS]


def _write(folder: Path, write: Callable[[Path], None]) -> None:
    """Write the folder; until it is whole, under another name."""
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():  # of a process that ended meanwhile
        shutil.rmtree(partial)
    partial.mkdir(mode=0o700)
    try:
        write(partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_folder(model: Path, folder: Path) -> None:
    """Copy the small files of a folder, with the tokenizer converted."""
    tokenizer_json, tokenizer_config = converted_tokenizer(model)
    for name in _COPIED:
        if (model / name).is_file():
            (folder / name).parent.mkdir(mode=0o700, exist_ok=True)
            (folder / name).write_bytes((model / name).read_bytes())
    (folder / CONFIG).write_text(json.dumps(tokenizer_config, indent=1), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")


def _write_weights(
    file: GgufFile, folder: Path, dtype: str, progress: Progress, *, keeps_quantized: bool
) -> None:
    from workers.model.gguf.gguf_weights import GgufWeights, check_whole  # here: what it imports

    check_whole(file)
    weights = GgufWeights(file, dtype, keeps_quantized=keeps_quantized)
    _check_space(file, folder.parent, weights.num_bytes)
    weights.write(folder, progress)


def _model_config(file: GgufFile, *, keeps_quantized: bool) -> dict[str, Any]:
    """Return what config.json says."""
    config = config_of(file)
    if not keeps_quantized:
        return config
    from workers.model.gguf.gguf_forms import kept_forms  # here, as above
    from workers.model.gguf.gguf_names import written_tensors

    forms = kept_forms(written_tensors(file))
    return config | {"quantization_config": own_config(forms)} if forms else config


def _write_description(file: GgufFile, folder: Path, *, keeps_quantized: bool) -> None:
    tokenizer = tokenizer_of(file)
    objects = {
        "config.json": _model_config(file, keeps_quantized=keeps_quantized),
        "generation_config.json": generation_config_of(file),
        "tokenizer_config.json": tokenizer.tokenizer_config,
    }
    for name, value in objects.items():
        (folder / name).write_text(json.dumps(value, indent=1), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer_json, encoding="utf-8")
    others = folder / "additional_chat_templates"
    for name, text in tokenizer.templates.items():
        if name == "default":
            (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
        else:
            others.mkdir(mode=0o700, exist_ok=True)
            (others / f"{name}.jinja").write_text(text, encoding="utf-8")


def _check_space(file: GgufFile, cache: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(cache).free
    if free < num_bytes + _SPARE_BYTES:
        raise CheckpointError(
            f"{file.path}: its weights take {num_bytes / 1e9:.1f} GB in {cache}, where {free / 1e9:.1f} GB "
            "are free; free some, or set model_cache to another folder"
        )


def _make_private(cache: Path) -> None:
    """Make the folder, or raise `OSError` where others can write to it."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.mkdir(mode=0o700, exist_ok=True)
    found = cache.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError("others than this user can write to it")


@contextlib.contextmanager
def _locked(path: Path, phase: str, progress: Progress) -> Iterator[None]:
    """Hold the lock of a folder; `progress` is called while another process does."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    pause = threading.Event()
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(phase)
                pause.wait(_POLL_S)
        yield
    finally:
        os.close(lock)
