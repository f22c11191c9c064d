"""Errors of the operating system name the path and the reason, and no number."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtransfer.common.os_errors import os_reason


def test_the_reason_stands_without_its_number(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(OSError) as caught:  # noqa: PT011
        missing.read_bytes()
    assert os_reason(caught.value) == f"{missing}: No such file or directory"
    assert os_reason(caught.value, has_path=True) == "No such file or directory"
    assert os_reason(ValueError("not a number")) == "not a number"
