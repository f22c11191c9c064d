"""An owner that dies: adopts the arena whose descriptor it inherits, and works until a fault kills it."""

from __future__ import annotations

import sys

from catalog_harness import SESSION, CatalogHarness

from kvtransfer.common.faults import FaultRule


def main(fd: int, point: str, marker: str) -> None:
    harness = CatalogHarness(rules=[FaultRule(point, "kill", marker)])
    harness.adopt(fd)
    harness.catalog.session_opened(SESSION)
    harness.put("x")
    harness.read("x")
    harness.put("y", "x")
    harness.catalog.purge("purged", None)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
