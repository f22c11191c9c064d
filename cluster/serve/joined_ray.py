"""A Ray cluster that runs already, and which of them is joined: only one that was named, or one of this user.

local        none is joined
host:port    the one there; a token that nobody named goes to this user's processes and to root's alone
auto         the one whose GCS is a process of this user; where none runs, none is joined
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import ClusterConfig
from cluster.errors import StartError
from cluster.serve.local_ray import own_signals
from cluster.serve.ray_owner import (
    RayOwner,
    is_persistent,
    listener_at,
    own_ray_clusters,
    split_address,
    user_name,
)
from cluster.serve.ray_private import HEAD_RESOURCE, raylet_socket, with_loopback_kept, with_nodes_of
from cluster.serve.ray_token import names_token, using_token_file
from cluster.serve.serve_runs import ServeRun, only_run, run_at
from kvtransfer.common.clock import Clock
from kvtransfer.common.os_errors import os_reason

LOCAL = "local"
AUTO = "auto"
_REACH_S = 5.0
_PROBE_S = 1.0
_PROBE_EVERY_S = 0.5
# The time for which nobody may listen at the address of a GCS before its Ray cluster has ended.
REFUSED_S = 3.0
# The same where another GCS may take its place, or where its host does not answer: Ray itself ends the
# processes of the cluster, this one too, after a minute.
AWAY_S = 50.0
_HEAD_ANSWER_S = 30.0
_NODE_ID = re.compile(r"--node[-_]id=([0-9a-f]{56})")


class RayTarget(NamedTuple):
    """Represents the Ray cluster that is to be joined."""

    # host:port.
    address: str
    # None: another host's, or nobody listens there now.
    owner: RayOwner | None = None
    # The file of its token; "": as the environment says, else Ray's own file.
    token_file: str = ""

    @property
    def text(self) -> str:
        """`the Ray cluster at HOST:PORT (process N, started by USER at TIME)`."""
        return f"the Ray cluster at {self.address}" + (f" ({self.owner.text})" if self.owner else "")


def find_target(
    ray_address: str, runs: Sequence[ServeRun], environment: Mapping[str, str]
) -> RayTarget | None:
    """Return the Ray cluster that `ray_address` means; None where that is one of our own.

    `StartError` where the address is none, where nothing answers there, where several are meant, and where
    the token of this user would go to somebody else.
    """
    if ray_address == LOCAL:
        return None
    if ray_address == AUTO:
        found = own_ray_clusters()
        if len(found) > 1:
            names = "; ".join(f"{address} ({owner.text})" for address, owner in found.items())
            raise StartError(
                f"{len(found)} Ray clusters of this user run here: {names}: name one with --ray-address"
            )
        if not found:
            return None
        ((address, owner),) = found.items()
        return _with_token(RayTarget(address, owner), runs, environment)
    try:
        host, port = split_address(ray_address)
    except ValueError as error:
        raise StartError(f"the Ray address must be auto, local or host:port, not {ray_address!r}") from error
    check_reachable(ray_address)
    target = _with_token(RayTarget(ray_address, listener_at(host, port)), runs, environment)
    if target.owner is not None and not target.owner.is_trusted and not names_token(environment):
        raise StartError(
            f"a process of {user_name(target.owner.user_id)} listens at {ray_address}, which would get the "
            "Ray token of this user; to join the Ray cluster of another user, name its token with "
            "RAY_AUTH_TOKEN_PATH"
        )
    return target


def running_target(
    ray_address: str,
    config: ClusterConfig,
    file: Path | None,
    runs: Sequence[ServeRun],
    environment: Mapping[str, str],
) -> RayTarget:
    """Return the Ray cluster in which the application of the configuration runs: the one at `ray_address` or,
    where that is "", the one of this user's run that the configuration means.

    `StartError` as `find_target`, where there is no such run, and where several are meant.
    """
    if not ray_address:
        run = only_run(config, file, runs)
        if run is None:
            others = "; ".join(run.text for run in runs) or "none"
            raise StartError(
                f"no `tandem serve` of this user runs the application {config.app!r} on this host (running: "
                f"{others}); name its Ray cluster with --ray-address HOST:PORT"
            )
        ray_address = run.ray
    target = find_target(ray_address, runs, environment)
    if target is None:
        raise StartError(
            f"no Ray cluster of this user runs on this host, which --ray-address {ray_address} needs"
        )
    return target


def _with_token(target: RayTarget, runs: Sequence[ServeRun], environment: Mapping[str, str]) -> RayTarget:
    """Return the target with the token of the run of this user that has started it, if there is one."""
    run = None if names_token(environment) else run_at(target.address, runs)
    return target if run is None else target._replace(token_file=run.token_file)


def check_reachable(ray_address: str) -> None:
    """Raise `StartError` when nothing listens at host:port: Ray itself would try for minutes."""
    try:
        socket.create_connection(split_address(ray_address), timeout=_REACH_S).close()
    except OSError as error:
        raise StartError(f"no Ray cluster answers at {ray_address}: {os_reason(error)}") from error


class JoinedRay:
    """Connects to a Ray cluster that somebody else has started, and notices its end."""

    is_own = False

    def __init__(self, target: RayTarget, clock: Clock, **options: Any) -> None:
        """`options` are those of `ray.init`. `StartError` where the cluster does not take us."""
        self.target = target
        self.token_file = Path(target.token_file) if target.token_file else None
        self._closing = contextlib.ExitStack()
        if target.token_file:
            self._closing.enter_context(using_token_file(target.token_file))
        try:
            with own_signals(), with_nodes_of(lambda: _node_ids(target.owner)), with_loopback_kept():
                context = ray.init(address=target.address, **options)
        except (ConnectionError, RuntimeError) as error:
            self._closing.close()
            raise StartError(f"{target.text} cannot be joined: {error}") from error
        self.dashboard_url: str = context.dashboard_url or ""
        self._raylet = _listener_of(raylet_socket())
        self._watch = GcsWatch(clock.now(), may_return=self._may_return())
        self._clock = clock
        self._probed_at = clock.now()
        self._ended = ""

    def why_ended(self) -> str:
        """Return why the cluster has ended, "" while it lives. May take a second where its host is away."""
        if not self._ended and (self._has_ended() or self._lost_gcs()):
            self._ended = (
                f"{self.target.text}, which was joined, has ended, and the streams with it; start it again, "
                "or let `tandem serve` start a Ray of its own (--ray-address local)"
            )
        return self._ended

    def shut_down(self) -> None:
        """Disconnect."""
        ray.shutdown()
        self._closing.close()

    def kill(self) -> None:
        """Do nothing: its processes are not ours."""

    def _has_ended(self) -> bool:
        return self._raylet is not None and _is_gone(self._raylet)

    def _lost_gcs(self) -> bool:
        now = self._clock.now()
        owner = self.target.owner
        if owner is not None and owner.process is not None and not _is_gone(owner.process):
            self._watch.see(now, "up")
            return False
        if now < self._probed_at + _PROBE_EVERY_S:
            return False
        self._probed_at = now
        return self._watch.see(now, _probe(self.target.address))

    def _may_return(self) -> bool:
        """Whether another GCS may take the place of this one: asked of the GCS' own host."""
        owner = self.target.owner
        if owner is not None:
            return owner.process is not None and is_persistent(owner.process)
        for node in ray.nodes():
            if node["Alive"] and HEAD_RESOURCE in node["Resources"]:
                there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                asked = ray.remote(gcs_is_persistent).options(num_cpus=0, scheduling_strategy=there)
                with contextlib.suppress(RayError):
                    answer: bool = ray.get(asked.remote(), timeout=_HEAD_ANSWER_S)
                    return answer
        return True


def gcs_is_persistent() -> bool:
    """Whether a GCS of this user on this host keeps its tables elsewhere."""
    return any(
        owner.process is not None and is_persistent(owner.process) for owner in own_ray_clusters().values()
    )


class GcsWatch:
    """Decides when a GCS that cannot be reached has ended. `see` takes the finding of a probe: "up",
    "refused" (its host answers that nobody listens) or "silent"."""

    def __init__(self, now: float, *, may_return: bool) -> None:
        self._refused_s = AWAY_S if may_return else REFUSED_S
        self._up_at = now

    def see(self, now: float, state: str) -> bool:
        """Return whether it has ended."""
        if state == "up":
            self._up_at = now
        return now - self._up_at >= (self._refused_s if state == "refused" else AWAY_S)


def _probe(address: str) -> str:
    try:
        socket.create_connection(split_address(address), timeout=_PROBE_S).close()
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "silent"
    return "up"


def _node_ids(gcs: RayOwner | None) -> list[str]:
    """Return the nodes on this host, as the raylets of this user, of root and of the user of the GCS have
    them in their arguments; others could name any node."""
    trusted = {os.geteuid(), 0, *(() if gcs is None else (gcs.user_id,))}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if set(process.uids()) <= trusted and process.name() == "raylet":
                found += _NODE_ID.findall(" ".join(process.cmdline()))
    return found


def _listener_of(path: str) -> psutil.Process | None:
    """Return the process that listens at a unix socket, by the kernel's account; None where it cannot be
    seen."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
            size = struct.calcsize("3i")
            process_id, _, _ = struct.unpack(
                "3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            )
            return psutil.Process(process_id) if process_id else None
        except (OSError, psutil.Error):
            return None


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
