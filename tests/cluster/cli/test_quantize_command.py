"""`tandem quantize`: what it writes, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import gguf_files
import pytest
from gguf import GGMLQuantizationType
from typer.testing import CliRunner, Result

from cluster.cli.main import cli
from cluster.cli.terminal import BUNDLED_MODEL
from cluster.errors import ClusterError
from workers.errors import WorkerError
from workers.model.model_config import read_model_config


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["quantize", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("def add(first, second):\n    return first + second\n\n" * 40, encoding="utf-8")
    return file


def test_the_folder_is_served_as_the_model_was(tmp_path: Path, text: Path) -> None:
    done = _run(BUNDLED_MODEL, "--to", "int4", "--out", tmp_path / "out", "--text", text, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert list(found["layer_errors"]) == [str(layer) for layer in range(6)]
    assert found["bytes"] < 0.5 * found["source_bytes"]
    assert 1 < found["perplexity_before"] < 50
    assert abs(found["perplexity_after"] / found["perplexity_before"] - 1) < 0.05
    quantization = read_model_config(tmp_path / "out").quantization
    assert quantization is not None
    assert quantization.name == "int4 group 32"
    names = {file.name for file in BUNDLED_MODEL.iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names | {"tandem_quantize.json"}


@pytest.mark.slow
def test_people_read_errors_sizes_and_perplexity(tmp_path: Path, text: Path) -> None:
    arguments = [
        BUNDLED_MODEL,
        "--to",
        "int4",
        "--out",
        tmp_path / "out",
        "--text",
        text,
        "--calibrate",
        text,
    ]
    done = _run(*arguments)
    assert done.exit_code == 0, done.output
    assert "errors of the layers, as parts of their products with the text" in done.stdout
    assert "perplexity" in done.stdout
    again = _run(*arguments)
    assert again.exit_code == 0
    assert again.stdout == done.stdout
    other = _run(*arguments[:-2], "--no-measure")  # rounds to the nearest code
    assert other.exit_code != 0
    assert "with other settings; name another folder" in str(other.exception)


def test_a_gguf_file_is_quantized_from_what_it_is_worth(tmp_path: Path) -> None:
    file = gguf_files.write_gguf(tmp_path / "model.gguf", BUNDLED_MODEL, GGMLQuantizationType.Q8_0)
    options = ["--to", "int8", "--out", tmp_path / "out", "--no-measure", "--model-cache", tmp_path / "cache"]
    done = _run(file, *options)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    quantization = read_model_config(tmp_path / "out").quantization
    assert quantization is not None
    assert quantization.name == "int8"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "int3"], "'int3' is none of int8, w8a8, int4, fp8"),
        (["--to", "int4", "--group", "33"], "a group of 33 inputs is no multiple of 8"),
        (["--to", "w8a8", "--group", "32"], "leave the group out"),
        (["--to", "w8a8", "--asymmetric"], "zero points are for int4"),
        (["--to", "int4", "--calibrate", "missing.txt"], "missing.txt: cannot be read: No such file"),
        (["--to", "int4", "--calibrate", "."], "cannot be read: Is a directory"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    done = _run(BUNDLED_MODEL, *arguments, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert words in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--calibrate", "--text"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "text.txt: has 0 tokens, and"),
        (b"T", "are needed; name a longer text"),
        (b"abc\xff", "text.txt: is not UTF-8, at byte 3"),
    ],
)
def test_texts_are_read_before_anything_is_written(
    option: str, content: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    done = _run(BUNDLED_MODEL, "--to", "int4", "--out", tmp_path / "out", option, tmp_path / "text.txt")
    assert done.exit_code == 2
    assert words in done.output
    assert option in done.output
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_there_is_said_in_a_sentence(tmp_path: Path) -> None:
    done = _run("/nowhere/model", "--to", "int8", "--out", tmp_path / "out")
    assert isinstance(done.exception, ClusterError | WorkerError)  # which `tandem` prints, and exits with 1
    assert str(done.exception).startswith("/nowhere/model: no such folder; name a folder")
    assert not (tmp_path / "out").exists()
