"""The part of the configuration that each deployment uses: an update replaces only those whose part has
changed.

Pure functions over configurations; `cluster.serve.update` carries them out in Ray Serve.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cluster.config import ClusterConfig
from cluster.dtypes import resolve_dtype, with_dtype
from cluster.errors import ConfigError
from cluster.identity.config import STORE_SHARE_FIELDS
from cluster.scaling.counts import KnownCounts, counts_to_deploy
from cluster.serve.capacity import bundles, placement_strategy
from cluster.served_model import described_model
from cluster.shown_urls import settings_without_secrets

_BESIDE = "deploy the other one beside this application and move the traffic (docs/upgrades.md)"
_ANEW = "stop the application and start it anew"


# Settings that a replica does not use itself: Serve applies them, with or without a restart.
_SERVE_SETTINGS = {
    "replicas",
    "surge",
    "cpus_per_rank",
    "resources",
    "health_check_period_s",
    "health_check_timeout_s",
}


class SettingChange(NamedTuple):
    """Represents one setting that differs, by its path in the file; None: absent on that side."""

    path: str
    before: Any
    after: Any


class Roll(NamedTuple):
    """Represents the effect of an update on one pool, or on the gateways (`pool` "")."""

    pool: str
    # "stay", "roll", "start" (it is new) or "stop" (it is no longer named).
    action: str
    num_replicas: int
    # A replacement starts before the one that it replaces leaves.
    surges: bool
    # The reason why `num_replicas` differs from the file; "" when it does not.
    kept: str = ""


def pool_version(config: ClusterConfig, name: str) -> str:
    """Return the version of one pool's replicas: Ray Serve restarts them when it changes. Whatever they use
    of the configuration must be in it, because they keep running when the rest changes."""
    pool = next(pool for pool in config.pools if pool.name == name)
    shares = config.auth.shares("device_kv_share")
    return _digest(
        app=config.app,
        model=_model(config),
        download=config.download.model_dump(mode="json"),
        model_name=config.model_name,
        pool=pool.model_dump(mode="json", exclude=_SERVE_SETTINGS),
        transfer=config.transfer.model_dump(mode="json"),
        store=config.store.model_dump(mode="json"),
        logs=config.logs.model_dump(mode="json"),
        faults=[fault.model_dump(mode="json") for fault in config.debug.faults],
        pace=config.debug.pace and config.debug.pace.model_dump(mode="json"),
        group_shares=[shares.default, shares.by_group],
    )


def gateway_version(config: ClusterConfig) -> str:
    """Return the version of the gateways, as `pool_version`. Of the pools they use the fields that are named
    here, and the counts, which they receive without a restart (`with_replicas`)."""
    pools = [(pool.name, pool.role, pool.engine.block_tokens) for pool in config.pools]
    return _digest(
        app=config.app,
        model=_model(config),
        download=config.download.model_dump(mode="json"),
        pools=pools,
        router=config.router.model_dump(mode="json"),
        admission=config.admission.model_dump(mode="json"),
        gateway=config.gateway.model_dump(mode="json", exclude={"replicas", "resources", "surge"}),
        scaling=config.scaling.model_dump(mode="json"),
        auth=config.auth.model_dump(mode="json"),
        logs=config.logs.model_dump(mode="json"),
        tracing=config.tracing.model_dump(mode="json"),
        recording=config.recording.model_dump(mode="json"),
        costs=config.costs.model_dump(mode="json"),
        debug=config.debug.model_dump(mode="json"),
    )


def with_replicas(config: ClusterConfig, replicas: Mapping[str, int]) -> ClusterConfig:
    """Return the configuration with these counts, by pool."""
    pools = [
        pool.model_copy(update={"replicas": replicas.get(pool.name, pool.replicas)}) for pool in config.pools
    ]
    return config.model_copy(update={"pools": tuple(pools)})


def check_update(old: ClusterConfig, new: ClusterConfig) -> None:
    """Raise `ConfigError` with each field that cannot change while the application runs, and the remedy."""
    problems = []
    if old.model != new.model:
        problems.append(f"model: {old.model} serves now, the file says {new.model}; {_BESIDE}")
    for field in ("block_tokens", "kv_dtype", "dtype", "weight_dtype"):
        before, after = _kv_form(old, field), _kv_form(new, field)
        if before != after:
            problems.append(
                f"pools: {field} is {before} now, the file says {after}: old and new replicas could not "
                f"exchange KV; {_BESIDE}"
            )
    for change in changes(old, new):
        if change.path.startswith("inner_tls"):
            problems.append(
                f"{change.path}: connections with and without TLS do not go together, and a certificate is "
                f"renewed in its file; leave it at {change.before}, or {_ANEW}"
            )
        if change.path.startswith("store."):
            problems.append(
                f"{change.path}: an update does not restart stores; leave it at {change.before}, or {_ANEW}"
            )
    problems += [
        f"auth.tenants: {field} differs: an update does not restart stores; leave it as it was, or {_ANEW}"
        for field in STORE_SHARE_FIELDS
        if old.auth.shares(field) != new.auth.shares(field)
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def carried_over(old: ClusterConfig, new: ClusterConfig) -> ClusterConfig:
    """Return `new` with the decisions of `tandem serve` at its start: the files of the cluster secret and of
    the key roots, the server of the store's index, and the dtype for which `auto` stands, which replicas that
    exchange KV must not change, whatever nodes have joined since."""
    index = old.store.redis_url, old.store.redis_url_file
    if new.store.has_redis and (new.store.redis_url, new.store.redis_url_file) != index:
        raise ConfigError(f"store.redis_url: another server cannot be taken while stores run; {_ANEW}")
    new = new.with_redis_url(*index).with_secret_file(old.secret_file)
    new = new.with_key_root_file(new.auth.key_root_file or old.auth.key_root_file)
    running = old.pools[0].dtype
    return with_dtype(new, running) if new.pools[0].dtype == "auto" and running != "auto" else new


def changes(old: ClusterConfig, new: ClusterConfig) -> list[SettingChange]:
    """Return every setting that differs, sorted by path; pools are matched by name. Passwords are hidden."""
    before, after = dict(_flat("", _by_name(old))), dict(_flat("", _by_name(new)))
    return [
        SettingChange(
            path, settings_without_secrets(before.get(path)), settings_without_secrets(after.get(path))
        )
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    ]


def plan_rolls(
    old: ClusterConfig,
    new: ClusterConfig,
    cpus: tuple[Mapping[str, float], Mapping[str, float]],
    desired: Mapping[str, int],
    pinned: frozenset[str] = frozenset(),
) -> list[Roll]:
    """Plan the changes of each pool and of the gateways. `cpus` are the shares per rank, by pool, before and
    after; `desired` are the counts ordered since, which outlive the update (`cluster.scaling.counts`)."""
    rolls = []
    before = {pool.name: pool for pool in old.pools}
    declared = {pool.name: pool.replicas for pool in old.pools}
    counts = counts_to_deploy(new, KnownCounts(dict(desired), tuple(pinned), declared))
    for pool in new.pools:
        known = before.get(pool.name)
        if known is None:
            action = "start"
        else:
            same = pool_version(old, pool.name) == pool_version(new, pool.name)
            # Serve restarts a replica when its placement by Ray changes.
            same &= bundles(known, cpus[0][pool.name]) == bundles(pool, cpus[1][pool.name])
            same &= placement_strategy(known) == placement_strategy(pool)
            action = "stay" if same else "roll"
        num = counts[pool.name]
        kept = ""
        if num != pool.replicas:
            who = "an operator chose" if pool.name in pinned else "was ordered last"
            who = "the autoscaler chose" if pool.name in new.scaling.autoscaled else who
            kept = f"{num}, as {who}; the file says {pool.replicas}"
        rolls.append(Roll(pool.name, action, num, pool.surge, kept))
    named = {pool.name for pool in new.pools}
    rolls += [Roll(name, "stop", 0, False) for name in before if name not in named]
    same = gateway_version(old) == gateway_version(new) and old.gateway.resources == new.gateway.resources
    rolls.append(Roll("", "stay" if same else "roll", new.gateway.replicas, new.gateway.surge))
    return rolls


def _digest(**parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _model(config: ClusterConfig) -> str | list[str]:
    """Return what names the model, and the cache where one is configured."""
    return [str(config.model), str(config.model_cache)] if config.model_cache else str(config.model)


def _kv_form(config: ClusterConfig, field: str) -> int | str:
    """Return a setting that is equal in all pools."""
    engine = config.pools[0].engine
    if field == "weight_dtype":
        return config.pools[0].weight_dtype
    if field != "dtype":
        return engine.block_tokens if field == "block_tokens" else engine.kv_dtype
    return resolve_dtype(config.pools, described_model(config))


def _by_name(config: ClusterConfig) -> dict[str, Any]:
    settings = config.model_dump(mode="json")
    settings["pools"] = {pool["name"]: pool for pool in settings["pools"]}
    return settings


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else key, inner)
    else:
        yield path, value
