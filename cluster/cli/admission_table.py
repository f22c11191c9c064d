"""What `tandem status` shows of admission: what waits by class, who was served, and what gateways do under
load."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cluster.api.admission_shares import (
    TenantShare,
    class_shares,
    good_share,
    reasons_text,
    tenant_outcomes,
    tenant_shares,
)
from cluster.cli.terminal import NONE, made_table
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb

_NUM_CHANGES = 5
# Tenants that are shown, of all gateways together.
_NUM_TENANTS = 20


def admission_parts(status: admin_pb.StatusResponse) -> list[RenderableType]:
    """Return tables of the classes and of the tenants, over all gateways that answered, then what each
    gateway does under load, and the latest changes of that."""
    known = [it for it in status.gateways if it.HasField("admission")]
    if not known:
        return []
    admissions = [it.admission for it in known]
    shares = tenant_shares(admissions)
    parts: list[RenderableType] = [_classes(admissions, class_shares(shares))]
    if shares:
        parts.append(_tenants(shares))
    if outcomes := tenant_outcomes(known):
        parts.append(_goodput(outcomes))
    parts += [Text(_load_line(it)) for it in known if it.admission.rung]
    changes = sorted(
        ((change.at, it.gateway_id, change) for it in known for change in it.admission.changes),
        key=lambda item: item[:2],
    )
    return parts + [Text(_change_line(name, change)) for _, name, change in changes[-_NUM_CHANGES:]]


def _classes(admissions: list[admin_pb.AdmissionStatus], class_to_share: dict[str, float]) -> Table:
    numbers = ["waiting", "wait now, s", "sent", "share", "refused"]
    table = made_table("admission", "class", "refused because", numbers=numbers)
    by_name: dict[str, list[admin_pb.ClassStatus]] = {}
    for admission in admissions:
        for each in admission.classes:
            by_name.setdefault(name_of(pb.ServiceClass, each.service_class), []).append(each)
    for name, classes in by_name.items():
        refused: Counter[str] = Counter()
        for each in classes:
            refused.update(each.num_refused)
        table.add_row(
            name,
            reasons_text(refused) or NONE,
            str(sum(each.num_waiting for each in classes)),
            f"{max(each.wait_s for each in classes):.1f}",
            str(sum(each.num_released for each in classes)),
            f"{class_to_share.get(name, 0.0):.0%}" if class_to_share else NONE,
            str(refused.total()),
        )
    return table


def _tenants(shares: list[TenantShare]) -> Table:
    table = made_table("served, last minute", "tenant", "by class", numbers=["share"])
    for it in shares[:_NUM_TENANTS]:
        by_class = ", ".join(f"{name} {share:.0%}" for name, share in sorted(it.class_to_share.items()))
        table.add_row(escape(it.tenant), by_class, f"{it.share:.0%}")
    if rest := shares[_NUM_TENANTS:]:
        table.add_row(f"{len(rest)} more", NONE, f"{sum(it.share for it in rest):.0%}")
    return table


def _goodput(tenant_to_outcomes: dict[str, Counter[str]]) -> Table:
    table = made_table("goodput, last 10 minutes", "tenant", "by outcome", numbers=["good"])
    for tenant, outcomes in list(tenant_to_outcomes.items())[:_NUM_TENANTS]:
        share = good_share(outcomes)
        shown = NONE if share is None else f"{share:.0%}"
        table.add_row(escape(tenant), reasons_text(outcomes), shown)
    return table


def _load_line(gateway: admin_pb.GatewayStatus) -> str:
    admission = gateway.admission
    return (
        f"{gateway.gateway_id}: {_words(admission.rung_name)} (rung {admission.rung} of 4); new requests "
        f"wait for {admission.pressure:.0%} of their objectives; {admission.num_capped} had max_tokens cut"
    )


def _change_line(gateway_id: str, change: admin_pb.RungChange) -> str:
    at = datetime.fromtimestamp(change.at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    return (
        f"{at} {gateway_id}: {_words(change.before)} -> {_words(change.after)}, new requests wait for "
        f"{change.pressure:.0%} of their objectives"
    )


def _words(rung_name: str) -> str:
    return rung_name.replace("_", " ")
