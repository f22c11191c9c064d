"""The syntax trees of source files, each parsed and walked once for all rules that look at it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@functools.cache
def tree(path: Path) -> ast.Module:
    """Parse a file, given relative to the root."""
    return ast.parse((ROOT / path).read_text(), str(path))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of the file's tree."""
    return tuple(ast.walk(tree(path)))


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Return the full names of the modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


@functools.cache
def attributes(path: Path) -> frozenset[str]:
    """Return every dotted expression of a file, as written."""
    return frozenset(_dotted(node) for node in nodes(path) if isinstance(node, ast.Attribute))


def _dotted(node: ast.expr) -> str:
    """Return the expression as written, without the cost of `ast.unparse` where it is names and dots."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ast.unparse(node)
