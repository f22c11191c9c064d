"""The members of a running cluster: replicas, pools and gateways, their ages, versions and clocks."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.api.admission_shares import reasons_text, tenant_shares
from cluster.config import LOOPBACK
from cluster.doctor.check_context import Check
from cluster.doctor.checks import CheckResult, Figures, error, note, ok, warning
from cluster.doctor.live_cluster import GatewayReply, Live
from cluster.gateway.circuit_breaker import NOTE as BREAKER
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb

GROUP = "members"
# Replicas report several times a second.
_LATE_S = 3.0
_YOUNG_S = 300.0
# A gateway that runs for this time has seen the first start of all replicas.
_SETTLED_S = 600.0
_MAX_SKEW_S = 1.0
# Tenants in one finding.
_MAX_TENANTS = 5
_LOCAL = tuple(f"{host}:" for host in LOOPBACK)


def replicas(live: Live) -> Iterator[CheckResult]:
    num_good = 0
    for replica in live.status.replicas:
        name = f"{replica.replica_id} ({name_of(admin_pb.ReplicaRole, replica.role)})"
        state = name_of(admin_pb.ReplicaState, replica.state)
        if state == "refused":
            yield error(
                f"{name} is not used: {replica.note}",
                "it would compute other KV than the others, or store it otherwise",
                "give all replicas the same model, dtype and block_tokens; see worker-*.err of that replica",
            )
        elif state == "leaving":
            yield note(
                f"{name} is leaving", "it takes nothing new and ends when its streams have moved or ended"
            )
        elif state != "ready":
            yield warning(
                f"{name} is {state}" + (f": {replica.note}" if replica.note else ""),
                "this gateway has no Link to it, so it gets no request from here",
                "see whether its process runs and its port can be reached from the gateway",
            )
        elif BREAKER in replica.note:
            yield warning(
                f"{name} is avoided: {replica.note}",
                "it failed several times in a row or stands still; this gateway places nothing there while "
                "another replica is left",
                "the reason is in its worker-*.err; a stopped process or a rank without a processor is tried "
                "again by itself when it continues",
            )
        elif replica.load.age_s > _LATE_S:
            yield warning(
                f"{name} last reported {replica.load.age_s:.0f} s ago",
                "its engine core hangs or has no processor; the gateway drops it after 8 s",
                "look at the load of that node",
            )
        else:
            num_good += 1
    if num_good:
        yield ok(f"{num_good} replicas are ready and report", num_replicas=num_good)


def flapping(live: Live) -> Iterator[CheckResult]:
    """Report replicas that were replaced. An epoch is the time, in milliseconds, at which a replica
    registered."""
    before = {(item.replica_id, item.epoch) for item in live.before.replicas}
    came = [item.replica_id for item in live.status.replicas if (item.replica_id, item.epoch) not in before]
    if came and live.status.uptime_s > _SETTLED_S:
        yield warning(
            f"{', '.join(came)} came while we looked",
            "a replica that ends again and again makes its requests start anew at others",
            "the reason is the last line of the ended one's worker-*.err",
        )
    if live.status.wall_time_s and live.status.uptime_s >= _SETTLED_S:
        renewed = {item.pool for item in live.status.replicas if item.replica_id in came}
        for pool in sorted({item.pool for item in live.status.replicas} - renewed):
            yield from _young(live, pool)


def _young(live: Live, pool: str) -> Iterator[CheckResult]:
    now = live.status.wall_time_s
    ages = [now - item.epoch / 1000 for item in live.status.replicas if item.pool == pool]
    young = [age for age in ages if age < _YOUNG_S]
    if young and not any(
        move.pool == pool and now - move.at < _YOUNG_S for move in live.status.scaling_changes
    ):
        yield warning(
            f"pool {pool}: {len(young)} of {len(ages)} replicas began in the last {_YOUNG_S / 60:.0f} "
            f"minutes (the youngest {min(young):.0f} s ago), without a scaling move",
            "if no update was made, they were replaced: a rank died or hung, or memory ran out",
            "the reason is the last line of the ended one's worker-*.err; `dmesg` has killed processes",
            num_young=len(young),
        )


def pools(live: Live) -> Iterator[CheckResult]:
    for pool in live.status.pools:
        seen = f"pool {pool.name}: {pool.num_ready} of {pool.desired} replicas are ready"
        figures: Figures = {"pool": pool.name, "ready": pool.num_ready, "desired": pool.desired}
        if pool.num_ready < pool.desired:
            yield warning(
                seen,
                "there is less capacity than is wanted",
                "while they load, wait; else see Ray's dashboard for what cannot be placed, and worker-*.err",
                **figures,
            )
        else:
            yield ok(seen, **figures)
        if pool.pinned and pool.max > 0:  # else the autoscaler does not move it
            yield note(
                f"pool {pool.name} is pinned at {pool.desired} by an operator",
                "the autoscaler leaves it alone",
                f"`tandem scale --release {pool.name}` gives it back",
            )
        if pool.num_reassigned:
            yield note(f"pool {pool.name}: {pool.num_reassigned} replicas play another role for now")


def gateways(live: Live) -> Iterator[CheckResult]:
    """Check that every gateway answers, and that there is more than one."""
    answering = [reply for reply in live.gateways if reply.status is not None]
    for reply in live.gateways:
        if reply.status is None:
            yield warning(
                f"the gateway at {reply.address} does not answer: {reply.error}",
                "clients that know only this one are not served; other hosts may still reach it",
                "see whether its process runs, and whether its port is open from here",
            )
    if len(live.gateways) == 1:
        yield note(
            "there is one gateway",
            "while it is replaced, clients wait for the next one",
            "gateway.replicas: 2, on nodes of their own or with port 0; clients take several addresses",
        )
    elif answering:
        yield ok(f"{len(answering)} of {len(live.gateways)} gateways answer")
    for gateway in live.status.gateways:
        for other, reason in sorted(gateway.unheard.items()):
            yield warning(
                f"gateway {gateway.gateway_id} does not hear what {other} places: {reason}",
                "both may choose the same replica at the same time, which lengthens queues under load",
                "see whether the gateways reach each other's gateway.fleet_port and share the cluster secret",
            )
        if gateway.quota_note:
            yield warning(
                f"gateway {gateway.gateway_id}: {gateway.quota_note}",
                "a tenant whose requests all come to one gateway gets less than auth.tenants gives it",
                "set store.redis_url to a server that all gateways reach, or see why they do not",
            )


def admission(live: Live) -> Iterator[CheckResult]:
    """Report the state of each gateway under load, its waiting requests, and the refused and served
    tenants."""
    before = {it.gateway_id: _num_refused(it.admission) for it in live.before.gateways}
    for gateway in live.status.gateways:
        if not gateway.HasField("admission"):
            continue
        stats, name = gateway.admission, gateway.gateway_id
        num_refused = _num_refused(stats)
        num_new = num_refused - before.get(name, num_refused)
        details = _admission_text(stats)
        figures: Figures = {"gateway": name, "rung": stats.rung, "num_refused": num_refused}
        if stats.rung:
            yield warning(
                f"gateway {name} is under load: {stats.rung_name.replace('_', ' ')}; {details}",
                f"new requests wait for {stats.pressure:.0%} of their objectives",
                "more replicas, or longer objectives under admission; docs/overload.md says how to size them",
                **figures,
            )
        elif num_new > 0:
            yield note(
                f"gateway {name} refused {num_new} requests while we looked; {details}",
                "their clients get RESOURCE_EXHAUSTED, and when to try again",
                "docs/overload.md says what is refused when, and how to size objectives and queues",
                **figures,
            )
        else:
            yield ok(f"gateway {name} is not under load; {details}", **figures)


def _num_refused(stats: admin_pb.AdmissionStatus) -> int:
    return sum(sum(it.num_refused.values()) for it in stats.classes)


def _admission_text(stats: admin_pb.AdmissionStatus) -> str:
    """Return the numbers of waiting and refused requests by class, and the tenants that were served most."""
    waiting, refused = [], []
    for it in stats.classes:
        name = name_of(pb.ServiceClass, it.service_class)
        if it.num_waiting:
            waiting.append(f"{name} {it.num_waiting}")
        if reasons := reasons_text(it.num_refused):
            refused.append(f"{name} {reasons}")
    shares = tenant_shares([stats])
    served = [f"{it.tenant} {it.share:.0%}" for it in shares[:_MAX_TENANTS]]
    if rest := shares[_MAX_TENANTS:]:
        served.append(f"{len(rest)} more {sum(it.share for it in rest):.0%}")
    return (
        f"waiting: {', '.join(waiting) or 'none'}; refused since its start: {'; '.join(refused) or 'none'}; "
        f"share of the replicas' time lately: {', '.join(served) or 'none'}"
    )


def quotas(live: Live) -> Iterator[CheckResult]:
    """Report tenants whose requests are refused because of their limits."""
    for quota in live.status.quotas:
        refused = dict(quota.num_refused)
        if not refused:
            continue
        limits = ", ".join(f"{num} by {name}" for name, num in sorted(refused.items()))
        yield note(
            f"tenant {quota.tenant} is over its limits: refused since it was last idle: {limits}",
            "its clients get RESOURCE_EXHAUSTED, and when to try again",
            f"if it should have more, raise these fields of auth.tenants.{quota.tenant}, or of its entry *",
        )


def clocks(live: Live) -> Iterator[CheckResult]:
    known = [reply for reply in live.gateways if reply.status is not None and reply.status.wall_time_s]
    for reply in known:
        beyond = abs(reply.skew_s) - reply.round_trip_s / 2
        if beyond > _MAX_SKEW_S:
            ahead = "ahead of" if reply.skew_s > 0 else "behind"
            yield warning(
                f"the clock of the gateway at {reply.address} is {abs(reply.skew_s):.1f} s {ahead} ours",
                "logs, traces and metrics of these hosts do not fit together; nodes that are two hours apart "
                "drop each other's entries in the index",
                "synchronize both clocks (chrony, systemd-timesyncd)",
                skew_s=round(reply.skew_s, 3),
            )
    if known and all(abs(reply.skew_s) - reply.round_trip_s / 2 <= _MAX_SKEW_S for reply in known):
        largest = max(abs(reply.skew_s) for reply in known)
        yield ok(f"clocks agree with ours within {1e3 * largest:.1f} ms ({len(known)} gateways)")


def versions(live: Live) -> Iterator[CheckResult]:
    """Compare the versions of the gateways, and of this command. Replicas of another protocol are refused."""
    known = {
        reply.address: dict(reply.status.versions) for reply in live.gateways if reply.status is not None
    }
    packages = sorted({package for found in known.values() for package in found})
    mixed = {
        package: values
        for package in packages
        if len(values := {found.get(package, "") for found in known.values()}) > 1
    }
    for package, values in mixed.items():
        listed = ", ".join(sorted(value or "none" for value in values))
        yield warning(
            f"gateways have different versions of {package}: {listed}",
            "they may behave differently, and what was tested together no longer runs together",
            "finish the update, or give all nodes the same image",
        )
    own = {found.get("tandem-serve", "") for found in known.values()} - {""}
    if live.version and own and own != {live.version}:
        yield note(f"this command is version {live.version}, the cluster {', '.join(sorted(own))}")
    if known and not mixed:
        listed = ", ".join(
            f"{package} {value}" for package, value in sorted(next(iter(known.values())).items()) if value
        )
        yield ok(f"all gateways have {listed}")


def authentication(live: Live) -> Iterator[CheckResult]:
    """Check that the gateways authenticate their callers."""
    answering = [reply for reply in live.gateways if reply.status is not None]
    unasked = [reply.address for reply in answering if _mode(reply) == "none"]
    if unasked:
        are_local = all(address.removeprefix("tls://").startswith(_LOCAL) for address in unasked)
        say = note if are_local else warning
        yield say(
            f"callers are NOT authenticated at {', '.join(unasked)} (auth.mode none)",
            "whoever reaches it is served, names any tenant and administers the cluster",
            "`tandem key new`, then auth.keys_file and auth.mode: required (docs/security.md)",
            num_gateways=len(unasked),
        )
    elif answering:
        yield ok(f"{len(answering)} of {len(live.gateways)} gateways authenticate their callers")


def _mode(reply: GatewayReply) -> str:
    return "" if reply.status is None else reply.status.authentication


def traffic(live: Live) -> Iterator[CheckResult]:
    shares = dict(live.status.traffic)
    if shares:
        listed = ", ".join(f"{name} {share:g}" for name, share in sorted(shares.items()))
        yield note(
            f"requests are shared between applications: {listed}", "another version gets a part of them"
        )


CHECKS = (
    Check("replicas", GROUP, "Replicas that are refused, unreachable, avoided or late", replicas),
    Check("flapping", GROUP, "Replicas that were replaced recently", flapping),
    Check("pools", GROUP, "Pools below what is desired, pinned or lent", pools),
    Check(
        "gateways",
        GROUP,
        "Gateways that do not answer, are alone, or do not know each other's use of limits",
        gateways,
    ),
    Check(
        "admission",
        GROUP,
        "The rung of each gateway, the queue and the refusals of each class, and tenants' shares",
        admission,
    ),
    Check("quotas", GROUP, "Tenants that are refused because of their limits", quotas),
    Check("clocks", GROUP, "Clocks of the gateways' hosts against this one", clocks),
    Check("versions", GROUP, "Versions that differ between gateways", versions),
    Check("authentication", GROUP, "Whether the gateways authenticate their callers", authentication),
    Check("traffic", GROUP, "Requests passed on to another application", traffic),
)
