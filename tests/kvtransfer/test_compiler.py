"""Libraries are compiled once, whoever asks for them at the same time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtransfer.common import compiler

NUM_CALLERS = 4


def test_of_those_that_ask_at_once_one_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "sum.cpp"
    source.write_text("int sum(int a, int b) { return a + b; }", encoding="utf-8")
    every_one_asks = threading.Barrier(NUM_CALLERS)
    another_compiles = threading.Event()
    compiled: list[Path] = []

    def compile_slowly(_: str, source: Path, flags: object, path: Path) -> None:
        compiled.append(source)
        if len(compiled) > 1:
            another_compiles.set()
        another_compiles.wait(0.2)
        path.touch()

    def ask(_: int) -> Path | None:
        every_one_asks.wait(10)
        return compiler.compile_library(source, ("-O1",))

    monkeypatch.setattr(compiler, "private_folder", lambda name: tmp_path)
    monkeypatch.setattr(compiler, "find_compiler", lambda: "c++")
    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    with ThreadPoolExecutor(NUM_CALLERS) as callers:
        found = set(callers.map(ask, range(NUM_CALLERS)))
    assert compiled == [source]
    assert found == {path for path in tmp_path.iterdir() if path.suffix == ".so"}


def test_a_build_that_fails_leaves_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "sum.cpp"
    source.write_text("int sum;", encoding="utf-8")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(compiler, "private_folder", lambda name: tmp_path)
    monkeypatch.setattr(compiler, "find_compiler", lambda: "c++")
    monkeypatch.setattr(compiler, "_compile", fail)
    for _ in range(2):  # the second would wait for ever
        with pytest.raises(OSError, match="no space"):
            compiler.compile_library(source, ())
