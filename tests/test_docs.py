"""Rules of the documentation: what a page names exists, links resolve, lines are short, words are current."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.model.families.known_families import ARCHITECTURE_TO_FAMILY

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cluster", "workers", "router", "kvtransfer", "models", "benchmarks", "tests", "helm", "docs")
PAGES = [ROOT / "README.md", *sorted(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))]
MAX_COLUMNS = 100
# A longer cell of a table belongs into the text.
MAX_CELL_CHARS = 200
# Suffixes of the files that are ours wherever they are named; other files are checked below a folder of ours.
OUR_SUFFIXES = (".py", ".md", ".js", ".cpp", ".proto")
# Names of other projects, of Kubernetes and of environments, in backticks.
FOREIGN = {"ClusterIP", "ConfigMap", "DecodePreallocQueue", "GRPCRoute", "HiCacheController", "KillMode"}
FOREIGN |= {"LoadBalancer", "NewCluster", "NodeAddress", "NodePort", "ProcessGroupNCCL", "RayCluster"}
FOREIGN |= {
    "InferencePool",
    "RayService",
    "SessionName",
    "TimeoutStopSec",
    "ServiceMonitor",
    "PodMonitor",
    *ARCHITECTURE_TO_FAMILY,
    "Mistral3ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
}
RETIRED = {"brain", "brains", "desk", "door", "doors", "hall", "house", "houses", "journey"}
RETIRED |= {"keeper", "lever", "levers", "phantom", "rooms", "shelf", "sight", "tally", "visitor"}

_CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CLASS = re.compile(r"[A-Z][a-z0-9]+(?:[A-Z][A-Za-z0-9]*)+")
_CELL_END = re.compile(r"(?<!\\)\|")
_DEFINED = re.compile(
    r"^(?P<indent> *)(?:(?P<kind>class|def|async def) (?P<name>\w+)|(?P<field>\w+): )", re.MULTILINE
)
_SLUG_DROPPED = re.compile(r"[^\w\- ]")


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page outside code blocks and comments, with their numbers."""
    is_code = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith(("    ", "<!--")):
            yield number, line


def code_spans(page: Path) -> Iterator[tuple[int, str]]:
    """Everything in backticks on a page."""
    for number, line in prose(page):
        for span in _CODE_SPAN.findall(line):
            yield number, span


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@functools.cache
def defined_names() -> dict[str, frozenset[str]]:
    """Every class of the code with its members, and every message and method of the public API with none."""
    found: dict[str, frozenset[str]] = {}
    folders = [ROOT / name for name in ("cluster", "workers", "router", "kvtransfer", "tests", "benchmarks")]
    for path in itertools.chain.from_iterable(folder.rglob("*.py") for folder in folders):
        for name, member in _members(path.read_text()):
            found[name] = found.get(name, frozenset()) | {member}
    proto = "".join(path.read_text() for path in sorted((ROOT / "cluster/proto/tandem/v1").glob("*.proto")))
    found.update({name: frozenset() for name in re.findall(r"\b(?:message|rpc|enum) (\w+)", proto)})
    rules = (ROOT / "helm/tandem/rules/tandem.yaml").read_text()
    found.update({name: frozenset() for name in re.findall(r"alert: (\w+)", rules)})
    return found


def _members(text: str) -> Iterator[tuple[str, str]]:
    """Yield each class of a file with itself and with each method and field, from the lines of their
    definitions: to parse all files takes long."""
    outer: list[tuple[int, str]] = []
    for found in _DEFINED.finditer(text):
        indent, kind, name = len(found["indent"]), found["kind"], found["name"] or found["field"]
        while outer and outer[-1][0] >= indent:
            outer.pop()
        if kind == "class":
            yield name, name
            outer.append((indent, name))
        elif outer and indent == outer[-1][0] + 4:
            yield outer[-1][1], name


def expanded(text: str) -> list[str]:
    """`a_{b,c}.py` as `a_b.py` and `a_c.py`."""
    if match := re.fullmatch(r"(.*)\{([^}]*)\}(.*)", text):
        return [f"{match[1]}{middle}{match[3]}" for middle in match[2].split(",")]
    return [text]


def files_named(page: Path, path: str) -> list[Path]:
    """Where a path points: from the root, from the page's folder or, for a bare name, anywhere below that."""
    found = [file for folder in (ROOT, page.parent) for file in folder.glob(path)]
    if not found and "/" not in path:
        is_general = page.parent in (ROOT, ROOT / "docs")
        folders = [ROOT / name for name in FOLDERS] if is_general else [page.parent]
        found = [file for folder in folders for file in folder.rglob(path)]
    return found


def named_paths(page: Path) -> Iterator[tuple[int, str, str]]:
    """Line, path and test function ("": none) of every file or folder that the page names."""
    for number, span in code_spans(page):
        path, _, function = span.partition("::")
        if not re.fullmatch(r"[\w./*{},-]+", path) or path.startswith((".", "/", "-")) or "/." in path:
            continue
        is_below = path.split("/")[0] in FOLDERS and "/" in path
        is_folder = path.endswith("/") and is_below
        if is_folder or path.endswith(OUR_SUFFIXES) or (is_below and Path(path).suffix in (".yaml", ".json")):
            for each in expanded(path):
                yield number, each, function
        elif is_below and re.fullmatch(r"[\w/]+", path):
            yield number, path, function


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_paths_that_a_page_names_exist(page: Path) -> None:
    missing = []
    for number, path, function in named_paths(page):
        files = files_named(page, path)
        if not files or (function and not any(f"def {function}(" in file.read_text() for file in files)):
            missing.append(f"{number}: {path} {function}".rstrip())
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_rows_of_folders_name_files_in_them(page: Path) -> None:
    """In a table, a bare file name stands in the row of the folder that holds it."""
    missing = []
    for number, line in prose(page):
        row = re.match(r"\| \[?`(\w+)/`", line)
        if row and (page.parent / row[1]).is_dir():
            names = [span for span in _CODE_SPAN.findall(line) if re.fullmatch(r"\w+\.py", span)]
            missing += [f"{number}: {name}" for name in names if not list((page.parent / row[1]).rglob(name))]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_classes_that_a_page_names_exist(page: Path) -> None:
    missing = []
    for number, span in code_spans(page):
        name, _, member = span.split("(")[0].partition(".")
        if not _CLASS.fullmatch(name) or name in FOREIGN:
            continue
        members = defined_names().get(name)
        if members is None or (member and member not in members):
            missing.append(f"{number}: {span}")
    assert missing == []


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = (line.lstrip("#").strip() for _, line in prose(page) if line.startswith("#"))
    return {_SLUG_DROPPED.sub("", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    broken = []
    for number, line in prose(page):
        for target in _LINK.findall(line):
            path, _, anchor = target.partition("#")
            if re.match(r"\w+:", path):
                continue
            file = (page.parent / path).resolve() if path else page
            is_broken = not file.exists() or (anchor and anchor not in slugs(file))
            broken += [f"{number}: {target}"] if is_broken else []
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_are_wrapped(page: Path) -> None:
    """Except tables, and lines that end in something that cannot be cut, such as a link."""
    long = [
        number
        for number, line in prose(page)
        if len(line) > MAX_COLUMNS and not line.startswith("|") and " " in line.strip()[:MAX_COLUMNS]
        if not _LINK.search(line)
    ]
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_cells_of_tables_are_short(page: Path) -> None:
    """Also those of tables that are generated from the code."""
    long = [
        f"{number}: {len(cell)} characters: {cell[:40]}"
        for number, line in prose(page)
        if line.startswith("|")
        for cell in map(str.strip, _CELL_END.split(line))
        if len(cell) > MAX_CELL_CHARS
    ]
    assert long == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_words_are_current(page: Path) -> None:
    found = [
        f"{number}: {word}"
        for number, line in prose(page)
        for word in re.findall(r"[a-z]+", _CODE_SPAN.sub("", line).lower())
        if word in RETIRED
    ]
    assert found == []


def test_every_page_is_listed() -> None:
    listed = {
        (ROOT / "docs" / target.partition("#")[0]).resolve()
        for _, line in prose(ROOT / "docs/README.md")
        for target in _LINK.findall(line)
    }
    assert {page for page in PAGES if page.parent == ROOT / "docs"} - listed == {ROOT / "docs/README.md"}


def test_make_bench_runs_every_benchmark_that_this_machine_can_run_alone() -> None:
    """Three need more than that. The page names all of them; none that is run demands an argument."""
    programs = {
        path.stem: path.read_text()
        for path in (ROOT / "benchmarks").glob("*.py")
        if 'if __name__ == "__main__"' in path.read_text()
    }
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    listed = re.search(r"^BENCHMARKS \?= (.*)$", makefile, re.M)
    assert listed is not None
    assert sorted(listed[1].split()) == sorted(programs.keys() - {"gpu", "isolation", "perplexity"})
    page = (ROOT / "benchmarks" / "README.md").read_text()
    assert set(re.findall(r"^\| `python -m benchmarks\.(\w+)", page, re.M)) == programs.keys()
    demanding = {name for name, text in programs.items() if re.search(r"add_argument\(\s*\"[^-]", text)}
    assert demanding <= {"gpu", "isolation", "perplexity"}


def test_only_one_place_says_what_was_validated_on_a_card() -> None:
    """A bare "not yet validated on CUDA" is out of date: docs/architecture.md says which card ran what."""
    folders = [ROOT / name for name in (*FOLDERS, "docs")]
    files = [ROOT / "README.md", *(path for folder in folders for path in folder.rglob("*"))]
    stale = re.compile(
        r"not\s+(?:#\s*)?yet\s+(?:#\s*)?validated\s+(?:#\s*)?on\s+(?:#\s*)?CUDA", re.IGNORECASE
    )
    suffixes = {".md", ".py", ".yaml", ".json", ".txt", ".tpl"}
    found = [
        name_of(path)
        for path in dict.fromkeys(files)
        if path.suffix in suffixes and path != Path(__file__) and stale.search(path.read_text())
    ]
    assert found == []
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.partition("## Validated on a card")[2].partition("\n## ")[0]
    for said in ("27 November 2026", "NVIDIA H100 80GB HBM3", "torch 2.11.0+cu130", "triton 3.6.0"):
        assert said in section
