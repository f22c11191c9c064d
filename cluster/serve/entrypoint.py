"""The application of a Ray Serve configuration: `import_path: cluster.serve.entrypoint:build`.

Serve builds such an application on any node and more than once, and no process stays to look after it. So
what `tandem serve` does beyond that (start Ray, plan CPUs, run an index server) is left to the configuration.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve

from cluster.config import ClusterConfig, parse_config
from cluster.errors import ConfigError, RosterAwayError, StartError
from cluster.model_source.names import HubName
from cluster.roster.ray_roster import await_roster
from cluster.scaling.counts import KnownCounts, counts_of, counts_to_deploy
from cluster.scaling.redis_counts import RedisCounts, counts_key
from cluster.scaling.serve_client import MARK_DEPLOYMENT, REPLICAS_KEY, declared_counts, deployment_name
from cluster.secret_files import read_trust
from cluster.serve.app import build_application
from cluster.serve.model_check import check_model
from cluster.serve.ray_private import deployed_config
from cluster.serve.rollout import with_replicas
from cluster.stores import NODE_ID_CHARS, check_redis_url, has_password, index_url
from kvtransfer.errors import WireError
from kvtransfer.store.index.redis_client import IndexAwayError

_KEYS = ("config", "secret_file", "redis_url_file")
# The time for which a build waits for the counts that the roster knows.
_ROSTER_S = 20.0
_log = logging.getLogger("tandem.declared")


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application; Serve calls this with the `args` in its configuration.

    `config` is the cluster's file as a mapping, with absolute paths and `cpus_per_rank` in each pool;
    `secret_file` holds the cluster secret, the same in each node; `redis_url_file`, optional, the URL of the
    store's index. Raises `ConfigError`, one line per field, which Serve shows as the application's message.
    """
    config = declared_config(args)
    secret = read_trust(config, certificates=False).secret
    config = config.with_model(config.model_source.fetch())
    check_model(config)
    cpus = {pool.name: pool.cpus_per_rank or 0.0 for pool in config.pools}
    life = declared_life(config.app, secret)
    config = with_declared_counts(config, deployed_config(config.app))
    key = counts_key(config.store.redis_namespace, life) if config.store.has_redis else ""
    counts = counts_to_deploy(config, known_counts(config, key))
    _log.info("building %s for the model %s with %s", config.app, config.model, counts)
    return build_application(config, cpus, life=life, counts=counts, counts_key=key)


def with_declared_counts(config: ClusterConfig, deployed: Mapping[str, Any] | None) -> ClusterConfig:
    """Return the configuration with the counts that its entry among Serve's applications has for the gateways
    (`user_config`), where it has any: unlike `args`, they may change without a restart of replicas."""
    deployments = {entry["name"]: entry for entry in (deployed or {}).get("deployments", [])}
    for pool in config.pools:
        entry = deployments.get(name := deployment_name(pool.name), {})
        if entry.get("num_replicas") is not None:
            raise ConfigError(
                f"deployments: {name}.num_replicas: leave it out: it would stop the replicas that were "
                f"ordered since the last deploy; say it in the user_config of {MARK_DEPLOYMENT}, as "
                f"{REPLICAS_KEY}: {{{pool.name}: {entry['num_replicas']}}}"
            )
    return with_replicas(config, declared_counts(deployments.get(MARK_DEPLOYMENT, {}).get("user_config")))


def known_counts(config: ClusterConfig, key: str) -> KnownCounts:
    """Return the counts that were ordered: from the roster of this Ray cluster or, where it has none yet,
    those that an earlier Ray cluster left in Redis under `key` ("": nowhere)."""
    if not ray.is_initialized():
        return KnownCounts()
    problem = ""
    try:
        view = await_roster(config.app, _ROSTER_S)
        if view is not None and view.deploy_mark:
            return counts_of(view)
    except RosterAwayError as error:
        problem = str(error)
    remembered = None
    if key:
        try:
            remembered = asyncio.run(_remembered_counts(config, key).read())
        except (IndexAwayError, WireError) as error:
            _log.warning("the counts that an earlier Ray cluster left cannot be read: %s", error)
    if remembered is None and problem:
        raise StartError(f"{problem}; deploying now could stop replicas that were ordered; deploy again")
    return remembered or KnownCounts()


def declared_config(args: dict[str, Any]) -> ClusterConfig:
    """Parse and check the configuration of `args`; `ConfigError` names each bad field."""
    if unknown := sorted(set(args) - set(_KEYS)):
        raise ConfigError(f"args.{unknown[0]}: unknown; the keys are {', '.join(_KEYS)}")
    raw = args.get("config")
    if not isinstance(raw, dict):
        raise ConfigError("args.config: expected a mapping with the keys model and pools")
    config = parse_config(raw, "args.config")
    if "secret_file" in args:
        config = config.model_copy(update={"secret_file": Path(_text(args, "secret_file"))})
    if "redis_url_file" in args:
        config = config.with_redis_url("", Path(_text(args, "redis_url_file")))
    if lines := [f"args.config: {problem}" for problem in _undeclared(config)]:
        raise ConfigError("\n".join(lines))
    check_redis_url(config.store)
    return config


def _remembered_counts(config: ClusterConfig, key: str) -> RedisCounts:
    url = index_url(config, read_trust(config, certificates=False))
    return RedisCounts(url, key, str(config.store.redis_ca_file or ""))


def declared_life(app: str, secret: bytes) -> str:
    """Return the name of the application's life. It is equal for each build, so that replicas of a changed
    configuration find the stores of their nodes, and reveals nothing of the secret."""
    return hmac.digest(secret, f"life of {app}".encode(), "sha256").hex()[:NODE_ID_CHARS]


def _undeclared(config: ClusterConfig) -> list[str]:
    """Return the missing settings that `tandem serve` would decide."""
    problems = []
    paths = {
        "model": None if config.model_source.name else config.model_path,
        "download.cache_folder": config.download.cache_folder,
        "download.token_file": config.download.token_file,
        "secret_file": config.secret_file,
        "store.nvme_path": config.store.nvme_path,
        "store.redis_url_file": config.store.redis_url_file,
        "store.redis_ca_file": config.store.redis_ca_file,
        "auth.keys_file": config.auth.keys_file,
        "auth.key_root_file": config.auth.key_root_file,
        "auth.audit.folder": config.auth.audit.folder,
    }
    if config.auth.jwt is not None:
        paths["auth.jwt.keys_file"] = config.auth.jwt.keys_file
    if config.auth.certificates is not None:
        paths["auth.certificates.ca_file"] = config.auth.certificates.ca_file
    if config.inner_tls is not None:
        paths |= {f"inner_tls.{name}": path for name, path in config.inner_tls}
    paths |= {f"gateway.{name}": getattr(config.gateway, name) for name in ("tls_cert_file", "tls_key_file")}
    problems += [
        f"{field}: {path} must be an absolute path: there is no file that it could be relative to"
        for field, path in paths.items()
        if path is not None and not path.is_absolute()
    ]
    if isinstance(name := config.model_source.name, HubName) and not name.is_pinned:
        problems.append(
            f"model: {name} must name a commit, as {name.repository}@0123abcd...: Serve builds the "
            "application more than once, and a branch may have moved between"
        )
    if config.secret_file is None:
        problems.append("secret_file: must be given: every node reads the same secret from it")
    if config.auth.key_root_file is None:
        problems.append(
            "auth.key_root_file: must be given: every gateway reads the same roots of block keys from it"
        )
    for number, pool in enumerate(config.pools):
        if pool.cpus_per_rank is None:
            problems.append(
                f"pools[{number}].cpus_per_rank: must be given: without `tandem serve` nobody shares out the "
                "cluster's CPUs"
            )
        if pool.dtype == "auto" and "cpu" in pool.stage_devices:
            problems.append(
                f"pools[{number}].dtype: must be given: without `tandem serve` nobody looks at the "
                "processors of all nodes; bf16 where each has AVX512-BF16, AMX or Arm's BF16, else fp32"
            )
    store = config.store
    if has_password(store.redis_url):
        problems.append(
            "store.redis_url: holds a password, which Serve would keep; write it to a file of every node and "
            "name that as args.redis_url_file"
        )
    if store.dram_gb and store.index and not store.has_redis:
        problems.append(
            "store.redis_url: must be given, or args.redis_url_file: nobody would keep a server of our own; "
            "store.index: false does without, and each node then knows its own tiers only"
        )
    return problems


def _text(args: dict[str, Any], key: str) -> str:
    value = args[key]
    if not isinstance(value, str) or not value:
        raise ConfigError(f"args.{key}: expected the path of a file")
    return value
