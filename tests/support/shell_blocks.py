"""The shell commands that the pages print: blocks of Markdown in the language `sh`, and what they need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "models" / "README.md")

# The needs of a block beyond this machine and a cluster on it, as named by the word after `sh`.
NEEDS = {
    "needs-hub": "downloads a model",
    "needs-gpu": "ranks on CUDA devices",
    "needs-hosts": "several hosts",
    "needs-kubernetes": "a Kubernetes cluster, and a container engine",
    "needs-minutes": "tests, trains or measures for minutes to hours",
}
# How a line begins that somebody will paste into a shell.
_COMMAND = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/\w+|tandem|make|python|pip|curl|kubectl|helm|docker|hf|ray)\s"
)
_FENCE = re.compile(r"\s*```(.*)$")


class Block(NamedTuple):
    """One fenced block: `line` is that of its fence, `info` what follows the fence."""

    page: Path
    line: int
    info: str
    text: str

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(self.info.split()[1:])

    @property
    def is_shell(self) -> bool:
        return self.info.split()[:1] == ["sh"]

    @property
    def has_commands(self) -> bool:
        """Whether a line looks like one for a shell."""
        return any(_COMMAND.match(line) for line in self.text.splitlines())

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Yield every fenced block of the page."""
    opened: tuple[int, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not (fence := _FENCE.match(line)):
            lines.append(line)
        elif opened is None:
            opened, lines = (number, fence[1].strip()), []
        else:
            yield Block(page, *opened, "\n".join(lines))
            opened = None


def runnable(page: Path) -> list[Block]:
    """Return the shell blocks that need nothing but this machine and a cluster on it."""
    return [block for block in blocks(page) if block.is_shell and not block.needs]
