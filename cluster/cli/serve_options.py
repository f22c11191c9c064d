"""The options of `tandem serve` and `tandem update` that stand in place of a configuration file, or change
one.

Options are written into the mapping that the file holds (without a file: into a small default), so that they
are checked as the file is, by the same code and with the same messages.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import yaml

from cluster.cli.gateway_options import spliced_options
from cluster.cli.model_download import fetched
from cluster.cli.terminal import bundled_model, err
from cluster.config import ClusterConfig, default_mapping, located_config, read_mapping
from cluster.errors import ConfigError, StartError
from cluster.model_source.names import located_model
from cluster.model_source.source import ModelSource
from cluster.shown_urls import settings_without_secrets
from workers.model.model_config import read_model_config
from workers.model.model_folder import described_folder


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What a command takes beside a file, or in its place. None or False: as the file says, or the default.

    Options of pools hold for all pools.
    """

    model: Annotated[
        str | None,
        typer.Option(
            help="Model folder, GGUF file, org/name[@revision] of the Hugging Face hub, or a URL; without it "
            "and a file: the bundled one."
        ),
    ] = None
    model_cache: Annotated[
        Path | None, typer.Option(help="Where folders that are made of GGUF files are kept.")
    ] = None
    model_name: Annotated[
        str | None, typer.Option(help="The name that clients use; default: the folder's or file's.")
    ] = None
    device: Annotated[str | None, typer.Option(help="Of all ranks: cpu or cuda.")] = None
    tp: Annotated[int | None, typer.Option(min=1, help="Ranks of a replica that share every layer.")] = None
    ep: Annotated[
        int | None, typer.Option(min=1, help="Parts of the experts of a layer; without --tp, also that.")
    ] = None
    pp: Annotated[int | None, typer.Option(min=1, help="Stages of a replica, each with some layers.")] = None
    dtype: Annotated[str | None, typer.Option(help="auto, bf16, fp16 or fp32.")] = None
    prefill: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Prefill replicas; 0: replicas that do both. Default: 1, but 0 where this host's GPUs "
            "do not suffice for two pools.",
        ),
    ] = None
    decode: Annotated[int | None, typer.Option(min=1, help="Decode replicas.")] = None
    kv_tokens: Annotated[
        str | None, typer.Option(help="KV capacity of a replica, in tokens; auto: what memory is left.")
    ] = None
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of each rank.")] = None
    host: Annotated[
        str | None, typer.Option(help='Address for the gateway to listen on; "auto": all of this node\'s.')
    ] = None
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Of the gateway; 0: a free one.")] = None
    admin_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Of the gateway, for operators; 0, or with --port: a free one."),
    ] = None
    http_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Of the gateway, for HTTP; 0, or with --port: a free one."),
    ] = None
    dram_gb: Annotated[
        float | None, typer.Option(min=0, help="Host memory for finished KV, in 1e9 bytes a node; 0: none.")
    ] = None
    nvme: Annotated[Path | None, typer.Option(help="Keep KV in this folder of a local disk too.")] = None
    nvme_gb: Annotated[
        float | None, typer.Option(min=0, help="How much of the disk, in 1e9 bytes a node.")
    ] = None
    keys_file: Annotated[
        Path | None,
        typer.Option(help="Serve only callers with a key of this file, which `tandem key` writes."),
    ] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let other hosts call without authentication.")
    ] = False


class Change(NamedTuple):
    """One setting that an option has changed in what a file says."""

    option: str
    # As errors name it: `pools[0].tp`.
    setting: str
    before: object
    after: object


class ServeConfig(NamedTuple):
    """A checked configuration, and what options changed in the file's."""

    config: ClusterConfig
    changes: tuple[Change, ...] = ()
    # "" unless the GPUs of this host decided which pools there are.
    reason: str = ""


def serve_config(file: Path | None, options: ServeOptions, num_gpus: int | None = None) -> ServeConfig:
    """Return the configuration of the file as the options change it, or without a file that of the options.

    `num_gpus` are those of this host where no other host takes part. None: unknown, or others do.
    `ConfigError` where it is not valid, in the words of the file's own check; a usage error that names the
    options where they contradict each other, or what the file says beside them.
    """
    _check_options(options, is_alone=file is None)
    if file is None:
        named = located_model(options.model or str(bundled_model()), Path().resolve())
        path = fetched(ModelSource(model=named)).path
        model = read_model_config(described_folder(path, options.model_cache))
        decode = 1 if options.decode is None else options.decode
        prefill, reason = _prefill_replicas(options, decode, num_gpus)
        raw = default_mapping(named, prefill, decode, model.max_context_tokens)
        _apply(raw, options, ())
        config = located_config(raw, "command line", Path())
        for pool in config.pools:
            pool.check_model(model)
        return ServeConfig(config, reason=reason)
    raw = copy.deepcopy(read_mapping(file))
    counts = list(_count_settings(raw, options, file))
    _check_against(raw, options, file)
    changes = _apply(raw, options, counts)
    names = ", ".join(dict.fromkeys(change.option for change in changes))
    source = f"{file} with {names}" if names else str(file)
    folder = file.resolve().parent
    config = located_config(raw, source, folder)
    return ServeConfig(config, tuple(change for change in changes if _replaces(change, folder)))


def announced_config(file: Path | None, options: ServeOptions, num_gpus: int | None = None) -> ClusterConfig:
    """Return the configuration as `serve_config` does. Print a line on standard error for each setting of the
    file that an option replaces, and for pools that this host's GPUs decided."""
    with named_by_options(options):
        config, changes, reason = serve_config(file, options, num_gpus)
    if reason:
        err.print(reason, highlight=False, markup=False, soft_wrap=True)
    for change in changes:
        assert file is not None, "nothing else is changed"
        err.print(change_line(change, file), highlight=False, markup=False, soft_wrap=True)
    return config


def serve_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options in the fields of its one parameter that is `ServeOptions`."""
    return spliced_options(command, ServeOptions)


def change_line(change: Change, file: Path) -> str:
    """Return `--tp 4 replaces 2, pools[0].tp of cluster.yaml`."""
    option = change.option if change.after is True else f"{change.option} {change.after}"
    return f"{option} replaces {change.before}, {change.setting} of {file}"


@contextlib.contextmanager
def named_by_options(options: ServeOptions) -> Iterator[None]:
    """Have errors name the option where the setting that they name came from one."""
    try:
        yield
    except (ConfigError, StartError) as error:
        raise type(error)(in_options(str(error), options)) from error


def in_options(text: str, options: ServeOptions) -> str:
    """Return the text with the settings that options have set replaced by these: `--nvme` for
    `store.nvme_path`. A line that began with source and setting begins with the option."""
    for name, setting in _settings(options):
        text = re.sub(rf"(?m)^[^\n]*?: {setting}(?=: )", _flag(name), text)
        text = re.sub(rf"(?<![\w.\]-]){setting}(?![\w-])", _flag(name), text)
    return "\n".join(dict.fromkeys(text.split("\n")))


def _settings(options: ServeOptions) -> Iterator[tuple[str, str]]:
    """Yield each option that was given, and the pattern of its setting in messages."""
    for name, path in _OPTIONS.items():
        if len(path) > 1 and getattr(options, name) is not None:
            yield name, re.escape(".".join(path))
    for name, path in _POOL_OPTIONS.items():
        if getattr(options, name) is not None:
            # `kv_tokens` alone names no other setting, which `tp` or `device` may.
            pool = r"pools\[\d+\]\."
            bare = rf"(?:{pool})?(?:engine\.)?" if "engine" in path else pool
            yield name, bare + (path[-1] if "engine" in path else r"\.".join(path))


def config_yaml(config: ClusterConfig) -> str:
    """Return a file that means the same: what was set, and defaults left out. Passwords in URLs are hidden:
    they belong into the files that settings such as `store.redis_url_file` name."""
    raw = settings_without_secrets(config.model_dump(mode="json", exclude_unset=True))
    kept = {name: value for name, value in raw.items() if value != {}}
    text: str = yaml.safe_dump(kept, sort_keys=False, default_flow_style=None, width=100)
    return text


# ----------------------------------------------------------------------------------------------
# Where each option goes.

# Options of pools, and the path of each below its pool.
_POOL_OPTIONS = {
    "device": ("device",),
    "tp": ("tp",),
    "ep": ("ep",),
    "pp": ("pp",),
    "dtype": ("dtype",),
    "kv_tokens": ("engine", "kv_tokens"),
    "threads": ("engine", "num_threads"),
}
_OPTIONS = {
    "model": ("model",),
    "model_cache": ("model_cache",),
    "model_name": ("gateway", "model_name"),
    "host": ("gateway", "host"),
    "port": ("gateway", "port"),
    "admin_port": ("gateway", "admin_port"),
    "http_port": ("gateway", "http", "port"),
    "dram_gb": ("store", "dram_gb"),
    "nvme": ("store", "nvme_path"),
    "nvme_gb": ("store", "nvme_gb"),
    "keys_file": ("auth", "keys_file"),
}
# Options that count the replicas of the pool of this role; without a decode pool, of that of the role `both`.
_COUNTS = ("prefill", "decode")
_PORTS = ("port", "admin_port", "http_port")
_ABSENT = object()


def _apply(
    raw: dict[str, Any], options: ServeOptions, counts: Sequence[tuple[str, int, int]]
) -> list[Change]:
    """Write the options into the mapping. `counts` are (option, index of the pool, replicas)."""
    changes: list[Change] = []
    for name, path in _OPTIONS.items():
        value = getattr(options, name)
        if name == "model" and value is not None:
            value = located_model(value, Path().resolve())
        if value is not None:
            changes += _set(raw, path, value.resolve() if isinstance(value, Path) else value, name, "")
    if options.keys_file is not None:
        changes += _set(raw, ("auth", "mode"), "required", "keys_file", "")
    if options.insecure:
        changes += _set(raw, ("auth", "insecure"), True, "insecure", "")
    for index, pool in _pools(raw):
        for name, path in _POOL_OPTIONS.items():
            if (value := getattr(options, name)) is not None:
                changes += _set(pool, path, value, name, f"pools[{index}].")
    for name, place, count in counts:
        changes += _set(raw["pools"][place], ("replicas",), count, name, f"pools[{place}].")
    return changes


def _prefill_replicas(options: ServeOptions, decode: int, num_gpus: int | None) -> tuple[int, str]:
    """Return the number of prefill replicas without a file, and the reason where the GPUs decide.

    A pool that both prefills and decodes takes all GPUs where they do not suffice for two pools: halves of a
    GPU would take turns, so that decoding waits for prefills, and would hold the weights twice.
    """
    if options.prefill is not None or options.device != "cuda" or num_gpus is None:
        return 1 if options.prefill is None else options.prefill, ""
    gpus_per_replica = (options.tp or options.ep or 1) * (options.pp or 1)
    if not decode * gpus_per_replica <= num_gpus < (1 + decode) * gpus_per_replica:
        return 1, ""
    found = "one GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    return 0, f"--prefill 0: with {found} on this host, one pool prefills and decodes"


def _set(
    mapping: dict[str, Any], path: tuple[str, ...], value: object, option: str, prefix: str
) -> Iterator[Change]:
    """Set what is at the path; nothing where something else than a mapping is on the way, which the check
    reports."""
    *folders, last = path
    for name in folders:
        mapping = mapping.setdefault(name, {})
        if not isinstance(mapping, dict):
            return
    before, mapping[last] = mapping.get(last, _ABSENT), value
    yield Change(_flag(option), prefix + ".".join(path), before, value)


def _replaces(change: Change, folder: Path) -> bool:
    """Whether the file, which is in the folder, says something else."""
    if change.option == _flag("model") and isinstance(change.before, str):
        return located_model(change.before, folder.resolve()) != change.after
    if isinstance(change.after, Path) and isinstance(change.before, str):
        return (folder / change.before).resolve() != change.after
    return change.before is not _ABSENT and str(change.before) != str(change.after)


def _pools(raw: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    pools = raw.get("pools")
    for index, pool in enumerate(pools if isinstance(pools, list) else ()):
        if isinstance(pool, dict):
            yield index, pool


def _count_settings(raw: dict[str, Any], options: ServeOptions, file: Path) -> Iterator[tuple[str, int, int]]:
    """Return the pools of the file whose replicas `--prefill` and `--decode` count; a usage error where it is
    not clear which one is meant."""
    for role in _COUNTS:
        count = getattr(options, role)
        if count is None:
            continue
        if count == 0:
            raise typer.BadParameter(
                f"{file} names its pools; remove the pool there instead", param_hint=_flag(role)
            )
        roles = (role,) if role == "prefill" else (role, "both")
        found = next(
            (
                places
                for it in roles
                if (places := [at for at, pool in _pools(raw) if pool.get("role") == it])
            ),
            [],
        )
        if len(found) != 1:
            what = f"{len(found)} pools" if found else "no pool"
            raise typer.BadParameter(
                f"{file} has {what} of the role {role}; set `replicas` there", param_hint=_flag(role)
            )
        yield role, found[0], count


def _check_options(options: ServeOptions, *, is_alone: bool) -> None:
    """Raise a usage error where options contradict each other."""
    if is_alone and (options.nvme is None) != (options.nvme_gb is None):
        raise typer.BadParameter("go together", param_hint="--nvme, --nvme-gb")
    if options.insecure and options.keys_file is not None:
        raise typer.BadParameter(
            "contradict each other: who has a key is served, or everybody",
            param_hint="--insecure, --keys-file",
        )
    ports = [(name, port) for name in _PORTS if (port := getattr(options, name))]
    for (first, port), (second, other) in itertools.combinations(ports, 2):
        if port == other:
            raise typer.BadParameter(f"cannot both be {port}", param_hint=f"{_flag(first)}, {_flag(second)}")
    if options.nvme is not None and options.dram_gb == 0:
        raise typer.BadParameter(
            "contradict each other: NVMe is read and written through host memory",
            param_hint="--dram-gb, --nvme",
        )


def _check_against(raw: dict[str, Any], options: ServeOptions, file: Path) -> None:
    """Raise an error where an option contradicts what the file says elsewhere."""
    auth = raw.get("auth")
    if options.insecure and isinstance(auth, dict) and auth.get("mode") == "required":
        raise ConfigError(f"--insecure contradicts auth.mode: required of {file}")
    for index, pool in _pools(raw):
        if options.device is not None and pool.get("devices"):
            raise typer.BadParameter(
                f"contradicts pools[{index}].devices of {file}, which names the device of each stage",
                param_hint="--device",
            )


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
