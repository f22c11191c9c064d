"""The process that owns an application: starts it, watches it, and stops it.

    starting Ray -> checking resources -> deploying -> loading replicas -> serving -> stopped

Called by the command line. No wait is unbounded: what cannot be placed is a `StartError` that names the
resource, and so is a replica that cannot load its model.
"""

from __future__ import annotations

import hmac
import importlib
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import psutil
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatusOverview
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.api.grpc_server import open_certificate
from cluster.config import LOOPBACK, ClusterConfig, PoolConfig
from cluster.dtypes import may_compute, needs_flags, settle_dtype
from cluster.errors import ConfigError, RayEndedError, StartError
from cluster.identity.audit import check_audit_folder
from cluster.identity.authenticator import Authenticator
from cluster.identity.key_roots import FIELD as KEY_ROOT_FIELD
from cluster.identity.key_roots import keep_key_root, key_root_proof
from cluster.index_server import IndexServer
from cluster.metrics.tracing import check_tracing
from cluster.roster.messages import StartingReplica
from cluster.roster.ray_roster import read_roster, read_starting, start_roster, stop_roster
from cluster.scaling.resource_demand import ReplicaDemand, shortages
from cluster.scaling.serve_client import deployment_name
from cluster.secret_files import read_trust
from cluster.serve.bounded_start import bounded_start
from cluster.serve.capacity import demands, gateway_bundle, plan_cpus
from cluster.serve.deployed import Deployed, forget
from cluster.serve.joined_ray import JoinedRay, find_target
from cluster.serve.local_ray import LocalRay
from cluster.serve.model_check import check_model
from cluster.serve.private_folder import PrivateFolder
from cluster.serve.rank_actors import node_host
from cluster.serve.ray_private import free_resources, session_logs
from cluster.serve.ray_token import draw_token, named_token_file, names_token
from cluster.serve.scaler_actor import stop_scaler
from cluster.serve.serve_runs import ServeRun, living_runs, record, run_at
from cluster.serve.store_actors import stop_stores
from cluster.stores import check_redis_url, check_store, draw_life, has_password, index_url
from kvtransfer.common.clock import Clock
from kvtransfer.common.host import cpu_flags
from kvtransfer.common.os_errors import os_reason
from kvtransfer.errors import StoreError
from kvtransfer.rpc.trust import Trust, draw_files

# How long resources may be missing before that is an error.
SCHEDULE_S = 20.0
_POLL_S = 0.25
# Replicas whose start is shown.
_SHOWN_STARTING = 2
_LOOK_S = 0.2
# How long a node may take to start a process and report its CPU flags.
_ANSWER_S = 60.0
_INTERRUPTED = "interrupted while starting"
# Options of `ray.init`.
_RAY_OPTIONS: dict[str, Any] = {
    "logging_level": logging.ERROR,
    "log_to_driver": False,
    "configure_logging": True,
}
_log = logging.getLogger(__name__)


Answer = TypeVar("Answer")


class StartProgress(NamedTuple):
    """Represents how far the start, or an update, of the application is."""

    stage: str
    # Pool name to (replicas ready, replicas wanted).
    ready: dict[str, tuple[int, int]]
    # The states of the replicas that are not ready, for people.
    detail: str = ""


class Addresses(NamedTuple):
    """Represents where a started application is reached."""

    gateways: tuple[str, ...]
    # URLs of their HTTP ports.
    http_urls: tuple[str, ...]
    # Addresses of their operators' calls.
    admins: tuple[str, ...]
    # URLs of their consoles.
    consoles: tuple[str, ...]
    # host:port of the Ray cluster, for `ray status --address` and for joining it.
    ray: str
    # The name of the joined cluster's owner, where it was joined; "": it was started here.
    joined: str
    # URL, or "" when the Ray cluster has none.
    dashboard: str
    # Folder of the Ray session's logs on this host.
    logs: str


class Service:
    """Owns one application and, unless another one is joined, the Ray cluster below it. `stop` may be called
    at any time.

    `ray_address`: "local" starts a Ray cluster, "auto" joins the one of this user on this host or starts one,
    anything else is the address of a cluster to join. `file` is where the configuration is from.
    """

    def __init__(
        self,
        config: ClusterConfig,
        clock: Clock,
        *,
        ray_address: str = "local",
        environment: Mapping[str, str] | None = None,
        file: Path | None = None,
    ) -> None:
        """`environment` may name a Ray token."""
        self._config = config
        self._clock = clock
        self._ray_address = ray_address
        self._environment = environment or {}
        self._file = file
        self._ray: LocalRay | JoinedRay | None = None
        self._deployed = False
        self._index_server: IndexServer | None = None
        self._folder: PrivateFolder | None = None
        # The reason for the dtype of all pools, set after `start`.
        self.dtype_reason = ""
        # The place of the logs of the Ray cluster that was started here, set after `stop`.
        self.kept_logs: Path | None = None

    def start(self, report: Callable[[StartProgress], None], interrupted: threading.Event) -> Addresses:
        """Return when every replica serves; `StartError` or `ConfigError` when that cannot be.

        `interrupted` may be set from a signal handler: start then ends with `StartError`.
        """
        check_model(self._config)
        check_redis_url(self._config.store)
        check_tracing(self._config.tracing)
        check_gateway_files(self._config, self._clock)
        given = self._config
        self._hide_secrets()
        trust = read_trust(self._config)
        _check_interrupted(interrupted)
        runs = living_runs()
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        target = find_target(self._ray_address, runs, self._environment)
        report(StartProgress(f"joining {target.text}" if target else "starting Ray", {}))
        threading.Thread(target=_import_application, name="imports", daemon=True).start()
        with bounded_start(interrupted):
            if target is None:
                self._ray = self._local_ray()
            else:
                self._ray = JoinedRay(target, self._clock, **_RAY_OPTIONS)
        addresses = self._while_ray_lives(lambda: self._bring_up(given, trust, report, interrupted))
        record(self._private_folder(), self._run(addresses))
        return addresses

    def _bring_up(
        self,
        given: ClusterConfig,
        trust: Trust,
        report: Callable[[StartProgress], None],
        interrupted: threading.Event,
    ) -> Addresses:
        if not self._is_own_ray:
            check_secrets(given, self._config, trust)
            check_key_roots(self._config, is_drawn=given.auth.key_root_file is None)
        _check_interrupted(interrupted)
        report(StartProgress("checking resources", {}))
        cpus = self._wait_for_resources(interrupted)
        # Once for all pools and nodes: a replica that starts later takes the same.
        node_to_flags = node_cpu_flags(self._config.pools) if needs_flags(self._config) else {}
        self._config, self.dtype_reason = settle_dtype(self._config, node_to_flags)
        _log.info("dtype %s", self.dtype_reason)
        _check_interrupted(interrupted)
        report(StartProgress("deploying", {}))
        self._deploy(cpus, trust)
        return self._wait_until_serving(report, interrupted)

    def _hide_secrets(self) -> None:
        """Replace values that must not pass through Ray by the paths of files: secrets that are drawn here,
        and a Redis URL with a password. The root of block keys stays with the NVMe records that it names, if
        there are any; all else is removed at the end."""
        config = self._config
        if config.secret_file is None:
            drawn = draw_files(self._private_folder().path)
            config = config.with_secret_file(Path(drawn.secret_file))
        if config.auth.key_root_file is None:
            folder = config.store.nvme_path or self._private_folder().path
            config = config.with_key_root_file(keep_key_root(folder, secrets.token_bytes))
        if has_password(config.store.redis_url):
            file = self._private_folder().write("redis-url", config.store.redis_url)
            config = config.with_redis_url("", file)
        self._config = config

    def _private_folder(self) -> PrivateFolder:
        if self._folder is None:
            try:
                self._folder = PrivateFolder()
            except OSError as error:
                raise StartError(
                    f"no private folder can be made in the temporary folder: {os_reason(error)}"
                ) from error
        return self._folder

    def wait(self, interrupted: threading.Event) -> None:
        """Return when interrupted; `RayEndedError` when the Ray cluster ends before."""
        while not interrupted.wait(_LOOK_S):
            self._check_ray()

    def stop(self) -> None:
        """Let streams drain and stores flush; end all processes of the application, and of Ray if it was
        started here.

        `RayEndedError` when that Ray has ended before; the remaining processes of our own are killed.
        """
        try:
            if self._ray is not None:
                self._check_ray()
                if self._deployed:
                    self._while_ray_lives(self._delete)
                self._ray.shut_down()
        finally:
            if self._index_server is not None:
                self._index_server.close()
            self._index_server = None
            if self._folder is not None:
                self.kept_logs = self._folder.close()
            self._folder = None
            self._ray = None
            self._deployed = False

    def _while_ray_lives(self, work: Callable[[], Answer]) -> Answer:
        """Do the work in a thread: without Ray's processes, its calls return after a minute or never."""
        executor = ThreadPoolExecutor(1, "calls of Ray")
        done = executor.submit(work)
        while not wait([done], _LOOK_S).done:
            self._check_ray()
        executor.shutdown()
        return done.result()

    def _delete(self) -> None:
        serve.delete(self._config.app)
        stop_scaler(self._config.app)
        stop_stores(self._config.app, self._config.store.flush_s)
        stop_roster(self._config.app)
        forget(self._config.app)

    def _check_ray(self) -> None:
        if self._ray is not None and (reason := self._ray.why_ended()):
            self._ray.kill()
            raise RayEndedError(reason)

    @property
    def _is_own_ray(self) -> bool:
        return self._ray is not None and self._ray.is_own

    def _local_ray(self) -> LocalRay:
        check_store(self._config.store, memory_bytes=psutil.virtual_memory().total)
        folder = self._private_folder()
        token_file = None if names_token(self._environment) else draw_token(folder)
        is_loopback = self._config.gateway.host in LOOPBACK
        return LocalRay(folder, loopback=is_loopback, token_file=token_file, **_RAY_OPTIONS)

    def _run(self, addresses: Addresses) -> ServeRun:
        assert self._ray is not None
        tls = "" if self._config.gateway.tls_cert_file is None else "tls://"
        return ServeRun(
            app=self._config.app,
            process_id=os.getpid(),
            started_at=self._clock.wall(),
            file=str(self._file.resolve()) if self._file else "",
            gateways=addresses.gateways,
            admins=tuple(tls + address for address in addresses.admins),
            ray=addresses.ray,
            dashboard=addresses.dashboard,
            token_file=str(self._ray.token_file or named_token_file(self._environment)),
        )

    def _wait_for_resources(self, interrupted: threading.Event) -> dict[str, float]:
        """Return the CPUs per rank for each pool, once everything fits. A cluster started here cannot grow:
        no wait."""
        deadline = self._clock.now() + (0.0 if self._is_own_ray else SCHEDULE_S)
        while True:
            total = node_resources()
            check_hosts(self._config, len(total))
            free = free_resources()
            gateways = [
                ReplicaDemand("gateway", (gateway_bundle(self._config.gateway),))
                for _ in range(self._config.gateway.replicas)
            ]
            num_gateways = len(gateways) + self._config.gateway.surge  # one more while an update rolls them
            cpus = plan_cpus(self._config.pools, num_gateways, free)
            missing = shortages(demands(self._config.pools, cpus) + gateways, free, total)
            if not missing:
                return cpus
            if self._clock.now() >= deadline or interrupted.wait(1.0):
                raise StartError("the Ray cluster lacks resources: " + "; ".join(missing))

    def _deploy(self, cpus: dict[str, float], trust: Trust) -> None:
        serve.start(proxy_location="Disabled")
        if self._config.app in serve.status().applications:
            address = ray.get_runtime_context().gcs_address
            run = run_at(address, [run for run in living_runs() if run.app == self._config.app])
            where = f": {run.text}" if run else ""
            raise StartError(
                f"the application {self._config.app!r} already runs in this Ray cluster{where}; stop that "
                "one, name another `app:` in the file of this one, or leave --ray-address out: then this one "
                "starts a Ray of its own"
            )
        start_roster(self._config.app)
        self._deployed = True
        config, life = self._with_index(trust), draw_life()
        application = _import_application()
        application.deploy(config, Deployed(config.model_dump_json(), cpus, life))

    def _with_index(self, trust: Trust) -> ClusterConfig:
        """Return the configuration with a server for the store's index, which is started here where none is
        named."""
        store = self._config.store
        if not (store.index and store.dram_gb) or store.has_redis:
            return self._config
        host = node_host(self._config.transfer.data_host)
        if self._config.inner_tls is not None and host not in LOOPBACK:
            raise ConfigError(
                "store.redis_url: the server that is started here speaks no TLS, which inner_tls asks for; "
                "name one whose URL begins with rediss://, or set store.index: false"
            )
        try:
            self._index_server = IndexServer(host, trust, self._clock)
        except StoreError as error:
            _log.warning("each node's store knows its own records only: %s", error)
            return self._config
        return self._config.with_redis_url(self._index_server.url)

    def _wait_until_serving(
        self, report: Callable[[StartProgress], None], interrupted: threading.Event
    ) -> Addresses:
        unplaced_since: float | None = None
        while not interrupted.wait(_POLL_S):
            status = serve.status().applications.get(self._config.app)
            ready = self._ready(status)
            report(StartProgress("loading", ready, starting_text(read_starting(self._config.app))))
            if status is not None and status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise StartError(failure(status))
            waiting = unplaced()
            unplaced_since = (unplaced_since or self._clock.now()) if waiting else None
            if unplaced_since is not None and self._clock.now() > unplaced_since + SCHEDULE_S:
                raise StartError("Ray cannot place a replica: " + "; ".join(waiting))
            if status is not None and status.status == "RUNNING":
                addresses = self._addresses()
                if addresses.gateways and all(num >= wanted for num, wanted in ready.values()):
                    return addresses
        raise StartError(_INTERRUPTED)

    def _ready(self, status: ApplicationStatusOverview | None) -> dict[str, tuple[int, int]]:
        ready = {}
        for pool in self._config.pools:
            deployment = status.deployments.get(deployment_name(pool.name)) if status else None
            num_running = deployment.replica_states.get("RUNNING", 0) if deployment else 0
            ready[pool.name] = (num_running, pool.replicas)
        return ready

    def _addresses(self) -> Addresses:
        assert self._ray is not None
        view, dashboard = read_roster(self._config.app), self._ray.dashboard_url
        scheme = "http" if self._config.gateway.tls_cert_file is None else "https"
        return Addresses(
            gateways=tuple(record.address for record in view.gateways),
            http_urls=tuple(f"{scheme}://{record.http}/v1" for record in view.gateways if record.http),
            admins=tuple(record.admin for record in view.gateways),
            consoles=tuple(
                f"{scheme}://{record.console}/console" for record in view.gateways if record.console
            ),
            ray=ray.get_runtime_context().gcs_address,
            joined=self._ray.target.text if isinstance(self._ray, JoinedRay) else "",
            dashboard=f"http://{dashboard}" if dashboard else "",
            logs=session_logs(),
        )


def _import_application() -> ModuleType:
    """Import what an application consists of, all of a gateway too. Starting Ray takes longer, and leaves a
    processor free for it."""
    return importlib.import_module("cluster.serve.app")


def starting_text(starting: Sequence[StartingReplica]) -> str:
    """Return `decode-0a1b: loading weights, 3 of 28 layers, 1.2 of 15.2 GB`, of two replicas, and how many
    more there are."""
    shown = [f"{it.replica_id}: {it.phase}" for it in starting[:_SHOWN_STARTING]]
    more = len(starting) - len(shown)
    return "; ".join([*shown, f"{more} more"] if more > 0 else shown)


def check_gateway_files(config: ClusterConfig, clock: Clock) -> None:
    """Read the files by which gateways know their callers and prove their own identity, and look whether they
    can write their audit log; `ConfigError` or `StartError` names the setting."""
    Authenticator(config.auth, clock)
    open_certificate(config.gateway, config.auth, "inference")
    open_certificate(config.gateway, config.auth, "admin")
    path = config.auth.key_root_file
    if path is not None and isinstance(problem := key_root_proof(path, b""), str):
        raise ConfigError(f"{KEY_ROOT_FIELD}: {problem}")
    check_audit_folder(config.auth.audit)


def check_secrets(given: ClusterConfig, config: ClusterConfig, trust: Trust) -> None:
    """Raise `ConfigError` where another node of the Ray cluster does not read the same secrets from the files
    of `config`, of which those that `given` does not name were written here, and `StartError` for a node that
    does not answer."""
    question = secrets.token_hex(16)
    wanted = _proofs(config, trust, question)
    for address, answer in _ask_other_nodes(secret_proofs, config.model_dump_json(), question).items():
        if isinstance(answer, str):
            raise ConfigError(f"the node {address}: {answer}; {_remedy(given)}")
        for field, ours, theirs in zip(("secret_file", "store.redis_url_file"), wanted, answer, strict=True):
            if not hmac.compare_digest(ours, theirs):
                raise ConfigError(f"{field}: the node {address} has another one there; {_remedy(given)}")


def _remedy(given: ClusterConfig) -> str:
    if given.secret_file is None:
        return (
            "the secret was drawn here: write one, such as by `openssl rand -hex 32`, to a file at the same "
            "path of every node, and name it as secret_file"
        )
    if has_password(given.store.redis_url):
        return (
            "store.redis_url holds a password: write it to a file at the same path of every node, and name "
            "that as store.redis_url_file"
        )
    return "every node needs the same files at the same paths"


def secret_proofs(config_json: str, question: str) -> tuple[bytes, bytes] | str:
    """Return proofs that require knowledge of the cluster secret and the URL of the index, or why this node
    cannot read them."""
    config = ClusterConfig.model_validate_json(config_json)
    try:
        return _proofs(config, read_trust(config), question)
    except ConfigError as error:
        return str(error)


def _proofs(config: ClusterConfig, trust: Trust, question: str) -> tuple[bytes, bytes]:
    url = index_url(config, trust)
    return trust.key_for(f"same secret {question}"), trust.key_for(f"same index {question} {url}")


def check_key_roots(config: ClusterConfig, *, is_drawn: bool) -> None:
    """Raise `ConfigError` where another node of the Ray cluster does not read the same key roots from the
    same path: its gateways would not find the KV that others have cached. `StartError` for a node that does
    not answer."""
    path, question = config.auth.key_root_file, secrets.token_bytes(16)
    assert path is not None
    own = key_root_proof(path, question)
    if isinstance(own, str):
        raise ConfigError(own)
    remedy = (
        "write it with `tandem key root FILE`, copy it to the same path of every node, and name it"
        if is_drawn
        else "copy it to the same path of every node"
    )
    for address, answer in _ask_other_nodes(key_root_proof, path, question).items():
        if isinstance(answer, str):
            lacks = "cannot read the root that was drawn here" if is_drawn else f"has none: {answer}"
            raise ConfigError(f"{KEY_ROOT_FIELD}: the node {address} {lacks}; {remedy}")
        if answer != own:
            raise ConfigError(f"{KEY_ROOT_FIELD}: the node {address} has other roots there; {remedy}")


def _ask_other_nodes(work: Callable[..., Answer], *args: Path | str | bytes) -> dict[str, Answer]:
    """Return, by address, the result of `work` on each other node of the Ray cluster that runs processes of
    an application."""
    here = ray.get_runtime_context().get_node_id()
    others = {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU") and node["NodeID"] != here
    }
    asked = [
        ray.remote(work)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        .remote(*args)
        for node_id in others
    ]
    try:
        answers: list[Answer] = ray.get(asked, timeout=_ANSWER_S)
    except RayError as error:
        addresses = ", ".join(others.values())
        raise StartError(f"not every one of the Ray nodes {addresses} answers: {error}") from error
    return dict(zip(others.values(), answers, strict=True))


def node_cpu_flags(pools: Sequence[PoolConfig]) -> dict[str, frozenset[str]]:
    """Return, by address, the CPU flags of every node on which a CPU rank of these pools may be placed.

    Raises `StartError` for a node that does not answer.
    """
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if may_compute(pools, node)}
    here = ray.get_runtime_context().get_node_id()
    asked = {
        node_id: ray.remote(cpu_flags)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        .remote()
        for node_id in nodes
        if node_id != here
    }
    try:
        answers = dict(zip(asked, ray.get(list(asked.values()), timeout=_ANSWER_S), strict=True))
    except RayError as error:
        addresses = ", ".join(nodes[node_id] for node_id in asked)
        raise StartError(
            f"not every one of the nodes {addresses} says what its processors can do ({error}); name the "
            "dtype of the pools"
        ) from error
    return {
        address: answers[node_id] if node_id in answers else cpu_flags() for node_id, address in nodes.items()
    }


def check_hosts(config: ClusterConfig, num_nodes: int) -> None:
    """Raise `ConfigError` where an address or a port does not work on that many hosts."""
    gateway, data_host = config.gateway, config.transfer.data_host
    if num_nodes > 1 and data_host in LOOPBACK:
        raise ConfigError(
            f"transfer.data_host: {data_host} cannot be reached from the other {num_nodes - 1} Ray nodes; "
            "set it to auto"
        )
    for field, port in {**gateway.listed_ports, "gateway.fleet_port": gateway.fleet_port}.items():
        if port and gateway.replicas > num_nodes:
            raise ConfigError(
                f"{field}: {gateway.replicas} gateways on {num_nodes} Ray nodes cannot all have the "
                f"port {port}; set it to 0, which gives each a free one"
            )


def unplaced() -> list[str]:
    """Return why placement groups of the cluster wait: their resources against what is free."""
    wanted = [
        ReplicaDemand(
            group["name"] or "?", tuple(group["bundles"].values()), may_spread=group["strategy"] == "PACK"
        )
        for group in ray.util.placement_group_table().values()
        if group["state"] == "PENDING"
    ]
    if not wanted:
        return []
    return shortages(wanted, free_resources(), node_resources())


def node_resources() -> list[dict[str, float]]:
    """Return all that each living node of the Ray cluster has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def failure(status: ApplicationStatusOverview) -> str:
    """Return one line for each failed deployment, with the innermost exception of its traceback."""
    lines = [
        f"{name}: {_innermost(deployment.message)}"
        for name, deployment in status.deployments.items()
        if deployment.status in ("DEPLOY_FAILED", "UNHEALTHY")
    ]
    return "\n".join(lines) or _innermost(status.message)


def _innermost(message: str) -> str:
    errors = re.findall(r"^\S*(?:Error|Exception)\b.*$", message, flags=re.MULTILINE)
    return errors[-1] if errors else message.strip()


def _check_interrupted(interrupted: threading.Event) -> None:
    if interrupted.is_set():
        raise StartError(_INTERRUPTED)
