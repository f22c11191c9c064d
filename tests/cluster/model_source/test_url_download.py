"""Models by URL, from a web server on loopback."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import MAIN, Hub, running_hub

from cluster.errors import ConfigError, StartError
from cluster.model_source import partial_file
from cluster.model_source.config import DownloadConfig
from cluster.model_source.source import ModelSource
from workers.errors import CheckpointError
from workers.model.model_config import read_model_config, weight_files

TINY = {path.name: path.read_bytes() for path in (Path(__file__).parents[3] / "models/tiny").iterdir()}
WEIGHTS = "model.safetensors"


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(partial_file, "_PAUSE_S", 0.0)
    with running_hub({"files": {MAIN: {**TINY, "pytorch_model.bin": b"pickled"}}}) as made:
        yield made


def source(web: Hub, folder: Path, path: str = "files", *, offline: bool = False) -> ModelSource:
    return ModelSource(
        model=f"{web.url}/{path}", download=DownloadConfig(cache_folder=folder / "cache", offline=offline)
    )


def test_a_folder_comes_whole_and_a_known_version_asks_nobody(web: Hub, tmp_path: Path) -> None:
    fetched = source(web, tmp_path).fetch()
    assert {path.name for path in fetched.path.iterdir()} == TINY.keys() - {"training.json"}
    assert (fetched.path / WEIGHTS).read_bytes() == TINY[WEIGHTS]
    assert read_model_config(fetched.path).num_layers == 6
    assert fetched.served_name == "files"
    web.requests.clear()
    assert fetched.fetch() == fetched
    assert source(web, tmp_path, offline=True).fetch() == fetched.model_copy(
        update={"download": source(web, tmp_path, offline=True).download}
    )
    assert source(web, tmp_path).fetch(prefer_cached=True) == fetched
    assert web.requests == []


def test_changed_files_are_another_version(web: Hub, tmp_path: Path) -> None:
    fetched = source(web, tmp_path).fetch()
    web.repositories["files"][MAIN]["config.json"] += b" "
    again = source(web, tmp_path).fetch()
    assert again.path != fetched.path
    (tmp_path / "another").mkdir()
    elsewhere = DownloadConfig(cache_folder=tmp_path / "another")
    with pytest.raises(ConfigError, match="has changed since the start"):
        fetched.model_copy(update={"download": elsewhere}).fetch()


def test_a_cut_transfer_continues(web: Hub, tmp_path: Path) -> None:
    web.cuts[WEIGHTS] = [1000, 1 << 20]
    fetched = source(web, tmp_path).fetch()
    assert (fetched.path / WEIGHTS).read_bytes() == TINY[WEIGHTS]


def test_a_gguf_file_comes_with_its_siblings(web: Hub, tmp_path: Path) -> None:
    web.repositories["files"][MAIN] |= {f"m-0000{part}-of-00002.gguf": b"GGUF" * part for part in (1, 2)}
    fetched = source(web, tmp_path, "files/m-00001-of-00002.gguf").fetch()
    assert fetched.path.read_bytes() == b"GGUF"
    assert fetched.path.with_name("m-00002-of-00002.gguf").read_bytes() == b"GGUF" * 2


def test_what_is_not_there_is_refused_in_one_sentence(web: Hub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json: name a folder"):
        source(web, tmp_path, "files/absent").fetch()
    with pytest.raises(StartError, match="cannot be read"):
        source(web, tmp_path, "files/absent.gguf").fetch()
    with pytest.raises(ConfigError, match="is not in the cache"):
        source(web, tmp_path, offline=True).fetch()
    del web.repositories["files"][MAIN][WEIGHTS]
    with pytest.raises(ConfigError, match=r"no safetensors, but pytorch_model\.bin"):
        source(web, tmp_path).fetch()
    with pytest.raises(StartError, match="Unauthorized"):
        source(web, tmp_path, "absent").fetch()
    with pytest.raises(StartError, match="cannot be read"):
        ModelSource(model="http://127.0.0.1:9/m", download=source(web, tmp_path).download).fetch()


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_driver_that_is_missing_is_named(tmp_path: Path, scheme: str, package: str) -> None:
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    made = ModelSource(model=f"{scheme}://bucket/m", download=DownloadConfig(cache_folder=tmp_path))
    with pytest.raises(ConfigError, match=f"pip install fsspec {package}"):
        made.fetch()


def test_a_local_folder_with_pickled_weights_alone_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"but pytorch_model\.bin, which is never loaded.*: download"):
        weight_files(tmp_path)
