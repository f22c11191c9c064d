"""Rules of the architecture: names, layers, cycles, time as an argument, sizes, plain text."""

from __future__ import annotations

import ast
import collections
import contextlib
import gc
import graphlib
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import pytest
from optional_programs import PROGRAM_TO_PACKAGE
from source_trees import attributes, imported, nodes, tree

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cluster", "workers", "router", "kvtransfer")
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 90
MAX_P95_FUNCTION_LINES = 30
# With the reason after it, in the docstring of a file that may be longer.
LONG_FILE_REASON = "over 600 lines because"
CLOCK = Path("kvtransfer/common/clock.py")
# Runs in the interpreters of other engines, which have none of our packages.
PEER_CHILD = Path("workers/engine_bench/peer_child.py")
# Where an exception of any kind becomes an answer: the main loops of actors, the last resort of a server, and
# a library that raises bare `Exception` for a file that it cannot read.
EDGES = {
    "workers/replica/engine_core.py",
    "workers/replica/engine_decisions.py",
    "workers/rank/process.py",
    "cluster/text/tokenizer.py",
}
EDGES |= {f"cluster/http/{name}.py" for name in ("server", "endpoints")}
EDGES |= {"cluster/api/last_resort.py", "cluster/console/http_server.py", "cluster/errors.py"}
EDGES.add("cluster/gateway/request_task.py")

_SKIPPED = {".venv", ".git", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}


def sources(*folders: str) -> list[Path]:
    """All Python files below these folders that people write, relative to the root."""
    return sorted(
        path.relative_to(ROOT)
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")) and not _SKIPPED & set(path.parts)
    )


def texts() -> Iterator[Path]:
    """All text files of the repository that people write."""
    suffixes = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".proto", ".cpp", ".sh", ""}
    for path in sorted(ROOT.rglob("*")):
        relative = path.relative_to(ROOT)
        if path.is_file() and path.suffix in suffixes and not _SKIPPED & set(relative.parts):
            yield relative


@pytest.fixture(scope="module", autouse=True)
def trees_are_not_collected() -> Iterator[None]:
    """Keep the garbage collector from visiting the nodes of all trees again and again."""
    gc.disable()
    yield
    gc.enable()


CODE = sources(*PACKAGES)
ALL = sources(*PACKAGES, "tests", "benchmarks", "models")


def assert_none(file_to_findings: Mapping[str, Set[str]]) -> None:
    assert {file: sorted(findings) for file, findings in file_to_findings.items() if findings} == {}


@pytest.mark.parametrize("name", PACKAGES)
def test_the_four_names_are_our_four_folders(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ == str(ROOT / name / "__init__.py")


def test_no_module_below_is_named_like_a_package() -> None:
    assert [path for path in CODE if path.stem in PACKAGES] == []
    assert [path for path in CODE if path.parent.name in PACKAGES and len(path.parts) > 2] == []


def test_no_file_has_a_name_that_says_nothing() -> None:
    nothing = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [path for path in sources(*PACKAGES, "tests") if path.stem in nothing] == []


def test_tests_are_not_a_package() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_time_and_randomness_are_arguments() -> None:
    banned = {"asyncio.sleep", "datetime.now", "datetime.datetime.now", "torch.seed", "np.random.seed"}
    found = {
        str(path): (imported(path) & {"time", "random"}) | (attributes(path) & banned)
        for path in CODE
        if path not in (CLOCK, PEER_CHILD)
    }
    assert_none(found)


def test_nothing_is_pickled() -> None:
    banned = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "torch.load", "torch.save"}
    assert_none({str(path): (imported(path) | attributes(path)) & banned for path in CODE})


def test_broad_excepts_stand_at_the_edges_only() -> None:
    found = {
        str(path): {
            f"line {node.lineno}"
            for node in nodes(path)
            if isinstance(node, ast.ExceptHandler)
            and (node.type is None or {"Exception", "BaseException"} & set(_names(node.type)))
        }
        for path in CODE
        if path.as_posix() not in EDGES
    }
    assert_none(found)


def test_the_environment_is_read_at_the_command_line_only() -> None:
    # The others hand it on to their children, or tell a library what it takes from nowhere else.
    readers = {"cluster/cli/main.py", "cluster/cli/serve_command.py", "workers/replica/rank_group.py"}
    readers |= {"kvtransfer/transports/nccl.py", "kvtransfer/transports/nixl.py"}
    # Triton's cache is where its variables say.
    readers |= {"workers/rank/kernel_task.py", "workers/rank/kernel_compiler.py"}
    readers.add(PEER_CHILD.as_posix())
    readers |= {"cluster/cli/update.py", "cluster/serve/ray_token.py", "cluster/serve/ray_private.py"}
    readers |= {"workers/model/native/isa.py"}  # for tests and benchmarks
    readers |= {"workers/model/model_folder.py"}  # each host has a cache of its own
    assert_none(
        {
            str(path): attributes(path) & {"os.environ", "os.getenv"}
            for path in CODE
            if path.as_posix() not in readers
        }
    )


def test_ray_is_applied_in_few_files() -> None:
    users = [path.as_posix() for path in CODE if any(n.split(".")[0] == "ray" for n in imported(path))]
    names = ["metrics/ray_registry", "roster/ray_roster", "serve/app", "serve/entrypoint"]
    names += [
        "serve/gateway_actor",
        "serve/joined_ray",
        "serve/launcher",
        "serve/local_ray",
        "serve/rank_actors",
        "serve/ray_private",
        "serve/replica_actor",
        "serve/scaler_actor",
    ]
    names += ["serve/store_actors", "serve/update"]
    assert users == [f"cluster/{name}.py" for name in names]


def test_private_parts_of_ray_are_used_in_one_file() -> None:
    private = re.compile(r"\bray(\.\w+)*\.(_\w+|experimental)\b")
    found = {
        str(path): {name for name in imported(path) | attributes(path) if private.search(name)}
        | {
            f"line {node.value.lineno}: _internal"
            for node in nodes(path)
            if isinstance(node, ast.keyword) and node.arg == "_internal"
        }
        for path in sources(*PACKAGES, "benchmarks")
        if path.as_posix() != "cluster/serve/ray_private.py"
    }
    assert_none(found)


def test_optional_programs_are_looked_up_in_one_place() -> None:
    """Tests find them by `optional_programs` and are marked, so that no machine needs one, nor hides that."""
    calls = {"Popen", "run", "call", "check_call", "check_output", "create_subprocess_exec"}
    found: dict[str, set[str]] = {}
    for path in sources("tests"):
        looks = {
            ast.unparse(it) for it in nodes(path) if isinstance(it, ast.Attribute) and it.attr == "which"
        }
        if path != Path("tests/support/optional_programs.py"):
            found[str(path)] = looks | ({"shutil.which"} & imported(path))
        for node in nodes(path):
            if isinstance(node, ast.Call) and node.args and _last_name(node.func) in calls:
                first = node.args[0].elts[:1] if isinstance(node.args[0], ast.List) else node.args[:1]
                started = {str(each.value) for each in first if isinstance(each, ast.Constant)}
                found.setdefault(str(path), set()).update(started & PROGRAM_TO_PACKAGE.keys())
    assert_none(found)


def test_files_have_a_docstring_and_a_size() -> None:
    found: dict[str, set[str]] = {}
    for path in ALL:
        text = (ROOT / path).read_text()
        problems = found.setdefault(str(path), set())
        if text.strip() and not ast.get_docstring(tree(path)):
            problems.add("no docstring")
        num_lines = len(text.splitlines())
        if num_lines > MAX_FILE_LINES and LONG_FILE_REASON not in text[:800]:
            problems.add(f"{num_lines} lines")
    assert_none(found)


def test_functions_have_a_size() -> None:
    found = {
        str(path): {
            f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
            for node in nodes(path)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.end_lineno is not None
            and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
        }
        for path in ALL
    }
    assert_none(found)


def test_every_package_has_a_readme() -> None:
    for folder in (*PACKAGES, "tests", "benchmarks", "models", "helm"):
        readme = ROOT / folder / "README.md"
        assert readme.is_file(), f"{folder} has no README.md"


def test_no_path_of_a_machine_is_written_down() -> None:
    machine = re.compile(
        "|".join(("/" + "work/", "/" + "home/" + "[a-z]", "/" + "Users/" + "[a-z]", "/" + "opt/"))
    )
    found = [
        f"{path}:{number}"
        for path in texts()
        for number, line in enumerate((ROOT / path).read_text(errors="ignore").splitlines(), 1)
        if machine.search(line)
    ]
    assert found == []


def _names(node: ast.expr) -> Iterator[str]:
    elements = node.elts if isinstance(node, ast.Tuple) else [node]
    return (ast.unparse(element) for element in elements)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


# Names that the field's words replaced: none comes back as the name of a module, class or function.
RETIRED_NAME = re.compile(
    "Executor|WriterHouse|JourneyPlan|Intake|Planned|Avoiding|Moving|StreamMoves|Outbound|Inbound|PushBook"
    "|LandingBook|LoadBook|Passed|Ask|Option|SegmentBooks|PagesAhead|Board|TrafficRelay|Case|Verdict|Tiers"
    "|intake|placing|moving|stream_moves|outbound|inbound|books|segment_books|asking|sending|ahead|page_taker"
    "|lending|board|catalogue|figures|meters|recent|examination|declared"
)
# Words of the old vocabulary: none is part of the name of a module, class or function, in the product or in
# tests.
RETIRED_WORD = re.compile(
    "house|rooms?|desk|journey|walk|hall|door|visitor|sight|shelf|hands|wishes|lever|keeper|brain|tally|phantom"
    "|elsewhere|lately"
)
# One file name for one concept of every package, or for one concept at two layers.
SHARED_FILE_NAMES = frozenset(
    {
        "__init__.py",
        "config.py",
        "errors.py",
        "messages.py",
        "migration.py",
        "doctor.py",
        "store_admin.py",
        "update.py",
    }
    | {"bench.py", "scale.py", "sampling.py"}
)


def definitions(path: Path) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        node
        for node in nodes(path)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    )


def words_of(name: str) -> set[str]:
    """`LandingTable`, `landing_table` and `LANDING_TABLE` are the words landing and table."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def test_the_field_s_words_are_used() -> None:
    found: dict[str, set[str]] = {}
    for path in ALL:
        names = {path.stem, *path.parent.parts} | {node.name for node in definitions(path)}
        found[str(path)] = {
            name
            for name in names
            if RETIRED_NAME.fullmatch(name) or any(map(RETIRED_WORD.fullmatch, words_of(name)))
        }
    assert_none(found)


def test_a_public_class_name_means_one_concept() -> None:
    files = collections.defaultdict(list)
    for path in CODE:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(path.as_posix())
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}


def test_a_file_name_means_one_concept() -> None:
    files = collections.defaultdict(list)
    for path in CODE:
        files[path.name].append(path.as_posix())
    assert {
        name: paths for name, paths in files.items() if len(paths) > 1 and name not in SHARED_FILE_NAMES
    } == {}


def test_layers_hold() -> None:
    """The contracts of `pyproject.toml`: one for the packages, one for the folders of each."""
    # In a process of its own: import-linter configures logging for all of its process.
    lint = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", lint], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_no_import_cycle() -> None:
    """Between files, imports inside functions and for type checking counted too."""
    modules = {_module(path): path for path in CODE}
    graph = {name: set(imported(path) & modules.keys()) - {name} for name, path in modules.items()}
    for name in graph:  # `from package import module` names the package as well
        graph[name] -= {
            other for other in graph[name] if other in {each.rpartition(".")[0] for each in graph[name]}
        }
    with contextlib.suppress(graphlib.CycleError):
        list(graphlib.TopologicalSorter(graph).static_order())
        return
    raise AssertionError(_cycle(graph))


def test_docstrings_name_modules_that_exist() -> None:
    modules = {_module(path) for path in CODE}
    members = {f"{_module(path)}.{node.name}" for path in CODE for node in definitions(path)}
    named = re.compile(r"`((?:cluster|workers|router|kvtransfer)(?:\.\w+)+)`")
    found: dict[str, set[str]] = {}
    for path in ALL:
        text = (ROOT / path).read_text()
        names = {name for name in named.findall(text) if name.split(".")[0] != path.stem}
        found[str(path)] = {
            name
            for name in names
            if name not in modules
            and not any(name == it or name.startswith(it + ".") for it in members)
            and name.rpartition(".")[0] not in modules
        }
        found[str(path)] |= {
            name
            for name in re.findall(
                r"`((?:cluster|workers|router|kvtransfer|tests|benchmarks)/[\w/.]+)`", text
            )
            if not any((ROOT / f"{name.rstrip('/')}{suffix}").exists() for suffix in ("", ".py"))
        }
    assert_none(found)


def test_comments_are_comments() -> None:
    """No bare string stands behind an assignment."""
    found = {
        str(path): {
            f"line {second.lineno}"
            for node in nodes(path)
            if isinstance(getattr(node, "body", None), list)
            for second in node.body[1:]  # type: ignore[attr-defined]
            if isinstance(second, ast.Expr)
            and isinstance(second.value, ast.Constant)
            and isinstance(second.value.value, str)
        }
        for path in ALL
    }
    assert_none(found)


def test_most_functions_are_short() -> None:
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for path in CODE
        for node in definitions(path)
        if not isinstance(node, ast.ClassDef) and node.end_lineno is not None
    )
    assert lengths[int(len(lengths) * 0.95)] < MAX_P95_FUNCTION_LINES


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _cycle(graph: dict[str, set[str]]) -> str:
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        return " -> ".join(error.args[1])
    return ""
