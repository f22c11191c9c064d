"""What `tandem status` shows of admission: what waits by class, and what gateways do under load."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from cluster.cli.terminal import NONE, made_table
from cluster.proto.enums import name_of
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb

_NUM_CHANGES = 5


def admission_parts(status: admin_pb.StatusResponse) -> list[RenderableType]:
    """Return a table of the classes, over all gateways that answered, then what each gateway does under
    load, and the latest changes of that."""
    known = [it for it in status.gateways if it.HasField("admission")]
    if not known:
        return []
    parts: list[RenderableType] = [_classes([it.admission for it in known])]
    parts += [Text(_load_line(it)) for it in known if it.admission.rung]
    changes = sorted(
        ((change.at, it.gateway_id, change) for it in known for change in it.admission.changes),
        key=lambda item: item[:2],
    )
    return parts + [Text(_change_line(name, change)) for _, name, change in changes[-_NUM_CHANGES:]]


def _classes(admissions: list[admin_pb.AdmissionStatus]) -> Table:
    numbers = ["waiting", "wait now, s", "sent", "refused"]
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
            ", ".join(f"{reason} {count}" for reason, count in sorted(refused.items())) or NONE,
            str(sum(each.num_waiting for each in classes)),
            f"{max(each.wait_s for each in classes):.1f}",
            str(sum(each.num_released for each in classes)),
            str(refused.total()),
        )
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
