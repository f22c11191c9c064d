"""Options of the whole suite."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kuberay-crds",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="with KubeRay's rayservices.yaml, against which the chart's RayService is checked",
    )
