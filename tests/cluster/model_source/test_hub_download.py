"""Models by name, from a hub on loopback: whole, once a host, verified, resumed, and refused in words."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from hub_server import MAIN, OLD, TOKEN, Hub, running_hub
from huggingface_hub import constants
from import_path import import_path
from safetensors.numpy import save

from cluster.errors import ConfigError, StartError
from cluster.model_source import partial_file
from cluster.model_source.config import DownloadConfig
from cluster.model_source.fetch_context import FetchContext, FetchProgress
from cluster.model_source.source import ModelSource
from workers.model.model_config import read_model_config, weight_files

ROOT = Path(__file__).resolve().parents[3]
TINY = {path.name: path.read_bytes() for path in (ROOT / "models/tiny").iterdir()}
WEIGHTS = "model.safetensors"
MIB = 1 << 20
SHARDS = {
    f"model-0000{number}-of-00002.safetensors": save({f"t{number}": numpy.full(5000, number, "f4")})
    for number in (1, 2)
}
SMALL = {name: data for name, data in TINY.items() if name != WEIGHTS}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(partial_file, "_PAUSE_S", 0.0)
    unwanted = {
        "pytorch_model.bin": b"pickled",
        "onnx/model.onnx": b"o",
        "README.md": b"r",
        "tf_model.h5": b"h",
    }
    with running_hub(
        {"org/tiny": {MAIN: {**TINY, **unwanted}, OLD: SMALL | {WEIGHTS: TINY[WEIGHTS]}}}
    ) as made:
        yield made


def source(hub: Hub, folder: Path, model: str = "org/tiny", **settings: object) -> ModelSource:
    given = {"cache_folder": folder / "cache", "endpoint": hub.url, **settings}
    return ModelSource(model=model, download=DownloadConfig.model_validate(given))


def refusal(made: ModelSource) -> str:
    """What the one who serves it reads: one sentence."""
    with pytest.raises((ConfigError, StartError)) as caught:
        made.fetch()
    text = str(caught.value)
    assert "\n" not in text
    assert TOKEN not in text
    return text


def test_only_the_needed_files_come_and_a_second_fetch_asks_for_none(hub: Hub, tmp_path: Path) -> None:
    seen: list[FetchProgress] = []
    made = source(hub, tmp_path)
    fetched = made.fetch(FetchContext(seen.append))
    assert fetched.model == f"org/tiny@{MAIN}"
    assert {path.name for path in fetched.path.iterdir()} == TINY.keys() - {"training.json"}
    assert all((fetched.path / name).read_bytes() == TINY[name] for name in ("config.json", WEIGHTS))
    assert read_model_config(fetched.path).num_layers == 6
    assert weight_files(fetched.path) == (fetched.path / WEIGHTS,)
    assert seen[-1] == FetchProgress("downloading org/tiny", len(TINY[WEIGHTS]), len(TINY[WEIGHTS]))
    assert made.path == fetched.path, "a branch is what it was when it was last fetched"
    hub.requests.clear()
    assert fetched.fetch() == fetched
    assert hub.requests == [], "a commit in the cache needs no network"
    made.fetch()
    assert hub.requests == ["/api/models/org/tiny"], "a branch is looked up"


def test_branches_tags_and_commits_are_revisions(hub: Hub, tmp_path: Path) -> None:
    hub.refs["v1"] = OLD
    assert source(hub, tmp_path, "org/tiny@v1").fetch().model == f"org/tiny@{OLD}"
    assert source(hub, tmp_path, f"org/tiny@{OLD}").fetch().model == f"org/tiny@{OLD}"
    assert hub.transfers[WEIGHTS] == 1


def test_a_moved_branch_is_another_version_and_an_update_keeps_the_earlier(hub: Hub, tmp_path: Path) -> None:
    hub.refs["main"] = OLD
    made = source(hub, tmp_path)
    made.fetch()
    hub.refs["main"] = MAIN
    assert made.fetch(prefer_cached=True).model == f"org/tiny@{OLD}"
    assert made.fetch().model == f"org/tiny@{MAIN}"
    assert hub.transfers[WEIGHTS] == 1, "what is equal is fetched once"


def test_shards_come_by_the_index(hub: Hub, tmp_path: Path) -> None:
    names = list(SHARDS)
    index = json.dumps({"weight_map": {"t1": names[0], "t2": names[1]}}).encode()
    files = SMALL | SHARDS | {"model.safetensors.index.json": index, "consolidated.safetensors": b"again"}
    hub.repositories["org/split"] = {MAIN: files}
    fetched = source(hub, tmp_path, "org/split").fetch()
    assert [file.name for file in weight_files(fetched.path)] == names
    assert hub.transfers["consolidated.safetensors"] == 0
    del files[names[1]]
    (tmp_path / "other").mkdir()
    assert f"lacks {names[1]}" in refusal(source(hub, tmp_path / "other", "org/split"))


def test_a_gguf_file_comes_alone_with_its_split_siblings(hub: Hub, tmp_path: Path) -> None:
    parts = {f"q4/m-0000{part}-of-00002.gguf": b"GGUF" + bytes([part]) * 20_000 for part in (1, 2)}
    hub.repositories["org/gguf"] = {MAIN: parts | {"q8.gguf": b"GGUF", "config.json": b"{}"}}
    fetched = source(hub, tmp_path, "org/gguf:q4/m-00001-of-00002.gguf").fetch()
    assert fetched.model == f"org/gguf@{MAIN}:q4/m-00001-of-00002.gguf"
    assert fetched.path.read_bytes() == parts["q4/m-00001-of-00002.gguf"]
    assert sorted(path.name for path in fetched.path.parent.iterdir()) == [name[3:] for name in parts]
    assert hub.transfers.keys() == parts.keys()
    assert fetched.served_name == "m-00001-of-00002"
    assert "has no file q5.gguf; it has q4/m-0" in refusal(source(hub, tmp_path, "org/gguf:q5.gguf"))
    assert "name one of them, such as org/gguf:q4/m" in refusal(source(hub, tmp_path, "org/gguf"))


def test_a_cut_transfer_continues_where_it_ended(hub: Hub, tmp_path: Path) -> None:
    hub.cuts[WEIGHTS] = [3 * MIB + 17, 2 * MIB]
    fetched = source(hub, tmp_path).fetch()
    assert hub.starts[WEIGHTS] == [0, 3 * MIB, 5 * MIB]
    assert (fetched.path / WEIGHTS).read_bytes() == TINY[WEIGHTS]


def test_the_next_process_continues_a_download_that_was_interrupted(hub: Hub, tmp_path: Path) -> None:
    interrupted = threading.Event()

    def interrupt(progress: FetchProgress) -> None:
        if progress.num_bytes >= 4 * MIB:
            interrupted.set()

    with pytest.raises(StartError, match="the next start continues"):
        source(hub, tmp_path).fetch(FetchContext(interrupt, interrupted))
    fetched = source(hub, tmp_path).fetch()
    assert hub.starts[WEIGHTS] == [0, 4 * MIB]
    assert (fetched.path / WEIGHTS).read_bytes() == TINY[WEIGHTS]


def test_a_server_without_ranges_sends_all_again(hub: Hub, tmp_path: Path) -> None:
    hub.cuts[WEIGHTS] = [3 * MIB]
    hub.ignores_ranges = True
    fetched = source(hub, tmp_path).fetch()
    assert (fetched.path / WEIGHTS).read_bytes() == TINY[WEIGHTS]


def test_a_stalled_or_overloaded_server_is_asked_again(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    hub.stalls[WEIGHTS] = [2 * MIB]
    hub.statuses[WEIGHTS] = [503]
    source(hub, tmp_path).fetch()
    assert hub.starts[WEIGHTS] == [0, 2 * MIB]


def test_what_never_arrives_is_given_up_and_kept(hub: Hub, tmp_path: Path) -> None:
    hub.cuts[WEIGHTS] = [2 * MIB, *[0] * 5]
    assert "does not arrive" in refusal(source(hub, tmp_path))
    source(hub, tmp_path).fetch()
    assert hub.starts[WEIGHTS] == [0, *[2 * MIB] * 6]


@pytest.mark.parametrize("size", [len(TINY[WEIGHTS]), len(TINY[WEIGHTS]) + 100, 3 * MIB])
def test_damaged_bytes_are_refused_and_fetched_again(hub: Hub, tmp_path: Path, size: int) -> None:
    hub.damaged[WEIGHTS] = [bytes(size)]
    fetched = source(hub, tmp_path).fetch()
    assert (fetched.path / WEIGHTS).read_bytes() == TINY[WEIGHTS]
    assert hub.starts[WEIGHTS].count(0) == 2


def test_bytes_that_stay_damaged_are_never_served(hub: Hub, tmp_path: Path) -> None:
    hub.damaged = {"tokenizer.json": [bytes(len(TINY["tokenizer.json"]))] * 2}
    assert "tokenizer.json of org/tiny has arrived 2 times" in refusal(source(hub, tmp_path))
    digest = hashlib.sha256(TINY["tokenizer.json"]).hexdigest()
    assert not list((tmp_path / "cache").rglob(f"{digest}*"))
    assert not list((tmp_path / "cache").rglob("tokenizer.json"))


def test_a_blob_of_another_program_that_is_cut_short_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    fetched = source(hub, tmp_path).fetch()
    (fetched.path / WEIGHTS).resolve().write_bytes(TINY[WEIGHTS][: 5 * MIB])
    fetched.fetch()
    assert (fetched.path / WEIGHTS).read_bytes() == TINY[WEIGHTS]
    assert hub.transfers[WEIGHTS] == 2


def test_weights_that_were_uploaded_cut_short_are_refused(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["org/tiny"][MAIN][WEIGHTS] = TINY[WEIGHTS][:-1]
    assert "cut short" in refusal(source(hub, tmp_path))


def test_two_processes_of_a_host_download_once(hub: Hub, tmp_path: Path) -> None:
    hub.gate = threading.Event()
    code = (
        "import sys; from cluster.model_source.source import ModelSource\n"
        "from cluster.model_source.fetch_context import FetchContext\n"
        "show = lambda it: print(it.stage, flush=True)\n"
        "print(ModelSource.model_validate_json(sys.argv[1]).fetch(FetchContext(show)).path)"
    )
    order = [sys.executable, "-c", code, source(hub, tmp_path).model_dump_json()]
    environment = {"PYTHONPATH": import_path(ROOT), "HOME": str(tmp_path)}
    first = subprocess.Popen(order, stdout=subprocess.PIPE, text=True, env=environment)
    assert hub.started.wait(60)
    second = subprocess.Popen(order, stdout=subprocess.PIPE, text=True, env=environment)
    assert second.stdout is not None
    assert second.stdout.readline() == "waiting for the process that downloads org/tiny\n"
    hub.gate.set()
    places = [process.communicate(timeout=60)[0].splitlines()[-1] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert places == [str(source(hub, tmp_path).path)] * 2
    assert set(hub.transfers.values()) == {1}


def test_offline_serves_what_is_in_the_cache_and_says_what_is_not(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline = source(hub, tmp_path, offline=True)
    assert "download.offline lets nothing be fetched" in refusal(offline)
    source(hub, tmp_path).fetch()
    hub.requests.clear()
    assert offline.fetch().model == f"org/tiny@{MAIN}"
    assert f"org/tiny@{OLD} is not in the cache" in refusal(
        source(hub, tmp_path, f"org/tiny@{OLD}", offline=True)
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert source(hub, tmp_path).fetch().model == f"org/tiny@{MAIN}"
    assert "HF_HUB_OFFLINE lets nothing be fetched" in refusal(source(hub, tmp_path, "org/other"))
    assert hub.requests == []


def test_a_hub_that_is_away_does_not_keep_back_what_is_in_the_cache(hub: Hub, tmp_path: Path) -> None:
    source(hub, tmp_path).fetch()
    away = source(hub, tmp_path, endpoint="http://127.0.0.1:9")
    assert away.fetch().model == f"org/tiny@{MAIN}"
    assert "cannot be reached" in refusal(source(hub, tmp_path, "org/other", endpoint="http://127.0.0.1:9"))


def test_the_token_of_a_file_opens_private_models_and_stays_with_the_hub(hub: Hub, tmp_path: Path) -> None:
    hub.private.add("org/tiny")
    assert "no repository of" in refusal(source(hub, tmp_path))
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    made = source(hub, tmp_path, token_file=file)
    assert made.fetch().path.is_dir()
    assert hub.leaked == [], "the store of large files is another host"
    assert TOKEN not in made.model_dump_json()
    file.write_text(" \n")
    assert refusal(made).startswith("download.token_file: ")
    assert "No such file" in refusal(source(hub, tmp_path, token_file=tmp_path / "absent"))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/none", "org/none is no folder here, and no repository of"),
        ("org/tiny@v9", "org/tiny has no revision v9: name a branch"),
        (f"org/tiny@{'d' * 40}", f"has no revision {'d' * 40}"),
        ("org/gated", "org/gated is gated: accept its terms at"),
        ("org/pickled", "has no safetensors, but pytorch_model.bin, which is never loaded"),
        ("org/adapter", "has neither model.safetensors nor model.safetensors.index.json, but adapter_model"),
        ("org/empty", "org/empty has no weights"),
        ("org/a--b", "org/a--b"),
    ],
)
def test_what_cannot_be_fetched_is_refused_in_one_sentence(
    hub: Hub, tmp_path: Path, model: str, words: str
) -> None:
    hub.repositories |= {
        "org/gated": {MAIN: TINY},
        "org/pickled": {MAIN: SMALL | {"pytorch_model.bin": b"x"}},
        "org/adapter": {MAIN: SMALL | {"adapter_model.safetensors": b"x"}},
        "org/empty": {MAIN: SMALL},
    }
    hub.gated.add("org/gated")
    assert words in refusal(source(hub, tmp_path, model))
    assert hub.transfers[WEIGHTS] == 0
    assert hub.transfers["pytorch_model.bin"] == 0
