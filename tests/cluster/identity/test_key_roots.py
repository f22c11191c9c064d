"""Key roots: their file, the chain of a prompt under one root or two, and rotation while prompts arrive."""

from __future__ import annotations

import base64
import itertools
import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from cluster.errors import ConfigError
from cluster.identity.key_roots import (
    KeyRoots,
    end_rotation,
    keep_key_root,
    key_root_proof,
    parse_key_roots,
    rotate_key_root,
)
from kvtransfer.blocks.keys import extend_keys, root_key

BLOCK = 4
MODEL = b"m" * 16
PROMPT = bytes(range(BLOCK * 4 * 3))


def line(root_id: str, byte: int) -> str:
    return f"{root_id} {base64.b64encode(bytes([byte]) * 32).decode()}\n"


def drawing() -> Callable[[int], bytes]:
    """Random bytes that differ from call to call."""
    numbers = itertools.count(1)
    return lambda size: bytes([next(numbers)]) * size


class Roots:
    """Key roots over a file, and how many blocks of each chain are cached."""

    def __init__(self, path: Path) -> None:
        self.cached: dict[bytes, int] = {}
        self.roots = KeyRoots(path, drawing(), BLOCK, self.num_cached)

    def num_cached(self, keys: Sequence[bytes]) -> int:
        return self.cached.get(keys[0], 0)

    def cache(self, byte: int, num_blocks: int, group: str = "g") -> None:
        self.cached[expected(byte, group)[0]] = num_blocks

    async def chain(self, group: str = "g") -> tuple[bytes, ...]:
        return (await self.roots.chain(PROMPT, MODEL, group)).block_keys

    def reload(self) -> None:
        assert self.roots._file is not None
        self.roots._file.reload()


def expected(byte: int, group: str = "g") -> tuple[bytes, ...]:
    return extend_keys(root_key(bytes([byte]) * 32, MODEL, group), PROMPT, BLOCK)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "roots"
    path.write_text(line("first", 1))
    return path


async def test_a_chain_begins_at_the_root_of_group_and_model(path: Path) -> None:
    roots = Roots(path)
    chain = await roots.roots.chain(PROMPT, MODEL, "g")
    assert chain.root_key == root_key(bytes([1]) * 32, MODEL, "g")
    assert chain.block_keys == expected(1)
    assert await roots.chain("h") == expected(1, "h")


@pytest.mark.parametrize(("num_new", "num_old", "chosen"), [(0, 0, 2), (1, 1, 2), (1, 2, 1), (3, 2, 2)])
async def test_of_two_roots_the_one_counts_under_which_more_is_cached(
    path: Path, num_new: int, num_old: int, chosen: int
) -> None:
    path.write_text(line("second", 2) + line("first", 1))
    roots = Roots(path)
    roots.cache(2, num_new)
    roots.cache(1, num_old)
    assert await roots.chain() == expected(chosen)


async def test_after_the_overlap_the_new_root_alone_counts(path: Path) -> None:
    roots = Roots(path)
    roots.cache(1, 3)
    path.write_text(line("second", 2) + line("first", 1))
    roots.reload()
    assert await roots.chain() == expected(1)
    path.write_text(line("second", 2))
    roots.reload()
    assert await roots.chain() == expected(2)


async def test_a_file_that_breaks_leaves_the_last_good_roots(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    roots = Roots(path)
    path.write_text("first not-base64!\n")
    with caplog.at_level(logging.ERROR):
        roots.reload()
    assert await roots.chain() == expected(1)
    assert "auth.key_root_file" in caplog.text
    assert "not-base64!" not in caplog.text
    path.write_text(line("second", 2))
    roots.reload()
    assert await roots.chain() == expected(2)


async def test_without_a_file_a_root_is_drawn_that_nobody_else_has() -> None:
    chains = [await KeyRoots(None, os.urandom, BLOCK, len).chain(PROMPT, MODEL, "") for _ in range(2)]
    keys = {chain.root_key for chain in chains}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has 0 roots"),
        (line("a", 1) + line("b", 2) + line("c", 3), "has 3 roots"),
        (line("a", 1) + line("a", 2), "same id"),
        (line("a", 1) + line("b", 1), "same secret"),
        ("a\n", "line 1 has 1 words"),
        ("a b c\n", "line 1 has 3 words"),
        ("\n" + line("a/b", 1), "line 2: an id has"),
        ("a " + base64.b64encode(b"short").decode(), "5 bytes; 32 are needed"),
        ("a b!\n", "not base64"),
        ("é\n", "not ASCII"),
    ],
)
def test_a_file_that_is_wrong_is_refused(path: Path, text: str, problem: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as error:
        Roots(path)
    assert "auth.key_root_file" in str(error.value)


def test_no_text_shows_a_secret(path: Path) -> None:
    (root,) = parse_key_roots(path.read_bytes())
    assert repr(root) == "KeyRoot(id='first')"


def test_a_root_that_is_kept_is_drawn_once(tmp_path: Path) -> None:
    draw, folder = drawing(), tmp_path / "nvme"
    path = keep_key_root(folder, draw)
    text = path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keep_key_root(folder, draw).read_text() == text
    assert [it.name for it in folder.iterdir()] == ["key-root"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="none can be kept"):
        keep_key_root(tmp_path / "file", draw)


def test_a_rotation_has_a_beginning_and_an_end(tmp_path: Path) -> None:
    path, draw = tmp_path / "roots", drawing()
    (first,) = rotate_key_root(path, draw)
    second, overlapped = rotate_key_root(path, draw)
    assert overlapped == first
    with pytest.raises(ConfigError, match=f"from {first.id} to {second.id} has not ended"):
        rotate_key_root(path, draw)
    assert end_rotation(path) == (second,) == parse_key_roots(path.read_bytes())
    with pytest.raises(ConfigError, match="no rotation to end"):
        end_rotation(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_only_who_has_the_same_roots_gives_the_same_proof(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, byte in zip(paths, (1, 1, 2), strict=True):
        path.write_text(line("root", byte))
    mine, same, other = (key_root_proof(path, b"question") for path in paths)
    assert mine == same != other
    assert key_root_proof(paths[0], b"another") != mine
    assert "No such file" in str(key_root_proof(tmp_path / "d", b"question"))
