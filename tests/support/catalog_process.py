"""An owner that dies: adopts the arena whose descriptor it inherits, and works until a fault kills it."""

from __future__ import annotations

import sys

from catalog_harness import SESSION, CatalogHouse

from kvtransfer.common.faults import FaultRule


def main(fd: int, point: str, marker: str) -> None:
    house = CatalogHouse(rules=[FaultRule(point, "kill", marker)])
    house.adopt(fd)
    house.catalog.session_opened(SESSION)
    house.put("x")
    house.read("x")
    house.put("y", "x")
    house.catalog.purge("purged", None)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
