"""Programs that tests hand to other processes as text import what there is: no linter reads them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
OURS = ("cluster", "workers", "router", "kvtransfer")


def programs() -> Iterator[tuple[Path, ast.Module]]:
    """The texts of several lines that are programs and import something."""
    for file in sorted([*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = textwrap.dedent(node.value)
                if "\n" in text and "import " in text:
                    try:
                        yield file, ast.parse(text)
                    except SyntaxError:  # prose
                        continue


def has_module(package: ModuleType, name: str) -> bool:
    is_package = hasattr(package, "__path__")
    return is_package and importlib.util.find_spec(f"{package.__name__}.{name}") is not None


def test_programs_in_strings_import_what_there_is() -> None:
    missing, num_found = [], 0
    for file, program in programs():
        for node in ast.walk(program):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
                module = importlib.import_module(node.module or "")
                num_found += 1
                missing += [
                    f"{file.relative_to(ROOT)}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not (hasattr(module, alias.name) or has_module(module, alias.name))
                ]
    assert num_found > 5, "the programs are not found"
    assert missing == []
