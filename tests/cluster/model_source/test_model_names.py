"""What is a path, a name, a URL; and what an option, a file and a running cluster make of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import load_config, parse_config
from cluster.errors import ConfigError
from cluster.model_source.names import HubName, ModelUrl, gguf_parts, located_model, model_name

POOLS = [{"name": "all", "role": "both"}]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("org/name", HubName("org/name")),
        ("org/name@v1", HubName("org/name", "v1")),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1")),
        ("org/name:q4/a.gguf", HubName("org/name", "", "q4/a.gguf")),
        ("org/name@v1:a.gguf", HubName("org/name", "v1", "a.gguf")),
        ("s3://bucket/folder/", ModelUrl("s3://bucket/folder")),
        ("https://host/m.gguf#0123abcd", ModelUrl("https://host/m.gguf", "0123abcd")),
        ("/org/name", None),
        ("./org/name", None),
        ("name", None),
        ("a/b/c", None),
    ],
)
def test_names_paths_and_urls_are_told_apart(text: str, named: HubName | ModelUrl | None) -> None:
    found = model_name(text)
    assert found == named
    assert found is None or model_name(str(found)) == found


def test_a_path_that_exists_is_a_path(tmp_path: Path) -> None:
    assert located_model("org/name", tmp_path) == "org/name"
    (tmp_path / "org/name").mkdir(parents=True)
    assert located_model("org/name", tmp_path) == str(tmp_path / "org/name")
    file = tmp_path / "cluster.yaml"
    file.write_text("model: org/other@v1\ndownload: {token_file: t}\npools: [{name: all, role: both}]\n")
    config = load_config(file)
    assert (config.model, config.model_name) == ("org/other@v1", "other")
    assert config.download.token_file == tmp_path / "t"


@pytest.mark.parametrize("text", ["ftp://a/b", "s3://", "https://user:pass@host/m", "https://host/m?key=1"])
def test_urls_that_cannot_be_fetched_from_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^model: ") as caught:
        model_name(text)
    assert "pass" not in str(caught.value).replace("password", "")


def test_a_file_outside_of_the_repository_is_refused() -> None:
    with pytest.raises(ConfigError, match="outside"):
        model_name("org/name:../../a.gguf")


def test_parts_of_a_split_model() -> None:
    assert gguf_parts("q/a-00002-of-00002.gguf") == ["q/a-00001-of-00002.gguf", "q/a-00002-of-00002.gguf"]
    assert gguf_parts("a.gguf") == ["a.gguf"]


def test_the_token_itself_is_no_setting() -> None:
    with pytest.raises(ConfigError, match=r"download\.token: unknown key; did you mean token_file"):
        parse_config({"model": "m", "pools": POOLS, "download": {"token": "hf_x"}}, "f")
    with pytest.raises(ConfigError, match=r"download\.endpoint: .*must be a URL"):
        parse_config({"model": "m", "pools": POOLS, "download": {"endpoint": "hub.example"}}, "f")
