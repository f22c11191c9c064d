"""GGUF files as folders: the tensors and logits that other readers find, and errors that say what to do."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf_files
import numpy as np
import pytest
import torch
import transformers
from decoder_logits import decoder_logits
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvtransfer.common.clock import ManualClock
from kvtransfer.common.file_lock import try_lock
from workers.errors import CheckpointError
from workers.model import native
from workers.model.fingerprint import DigestCache, model_fingerprint
from workers.model.gguf import gguf_weights
from workers.model.gguf.gguf_file import GgufFile
from workers.model.gguf.gguf_weights import GgufWeights, bfloat16_bits
from workers.model.model_config import read_model_config, weight_files
from workers.model.model_folder import described_folder, weights_folder
from workers.model.quantization.quantized_files import QuantizedTensorFiles
from workers.model.quantization.quantized_weight import QuantizedWeight
from workers.model.weights import ShardSpec, WeightReader

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 256,
    "head_dim": 128,
    "eos_token_id": None,
}
TYPES = ["F32", "F16", "Q8_0", "Q4_1", "Q4_K"]
FILE = "model.safetensors"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MakeCheckpoint = Callable[..., Path]


def _written(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, family: str = "llama", kind: str = "Q8_0", **options: Any
) -> Path:
    checkpoint = make_checkpoint(family, **SHAPE)
    return gguf_files.write_gguf(tmp_path / "model.gguf", checkpoint, GGMLQuantizationType[kind], **options)


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}


def _theirs(file: Path) -> tuple[Any, dict[str, Tensor]]:
    """Read the file with transformers: the model, and its tensors."""
    config = transformers.AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    tensors = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=not config.tie_word_embeddings)
    return model, tensors


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tensors_and_logits_equal_those_of_transformers(
    family: str, kind: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    file = _written(tmp_path, make_checkpoint, family, kind)
    folder = weights_folder(file, "fp32", tmp_path / "cache")
    model, expected = _theirs(file)
    found = _tensors(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in expected.items())
    tokens = torch.randint(256, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.inference_mode():
        reference = model(torch.tensor([tokens])).logits[0]
    assert reference.std() > 0
    error = (decoder_logits(folder, tokens) - reference).abs().max() / reference.abs().max()
    assert float(error) <= 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_those_of_the_package_rounded_once(
    dtype: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    file = _written(tmp_path, make_checkpoint, "qwen3", "Q4_K")
    found = _tensors(weights_folder(file, dtype, tmp_path / "cache"))
    values = gguf_files.dequantized([file])
    for ours, theirs in (("self_attn.q_proj", "attn_q"), ("mlp.down_proj", "ffn_down")):
        expected = torch.from_numpy(values[f"blk.1.{theirs}.weight"].copy()).to(DTYPES[dtype])
        assert torch.equal(found[f"model.layers.1.{ours}.weight"], expected)


def test_a_float_checkpoint_comes_back_bit_for_bit(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Also the rows of queries and keys, which the file has in another order."""
    folder = weights_folder(_written(tmp_path, make_checkpoint, "llama", "F32"), "fp32", tmp_path / "cache")
    original = _tensors(make_checkpoint("llama", **SHAPE))
    found = _tensors(folder)
    assert found.keys() == original.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in original.items())
    ours, theirs = read_model_config(folder), read_model_config(make_checkpoint("llama", **SHAPE))
    for field in ("hidden_size", "num_kv_heads", "head_dim", "rope", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.eos_token_ids == (255,)


KEPT = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]


@pytest.mark.parametrize("kind", KEPT)
def test_matrices_that_stay_quantized_are_worth_what_they_were(
    kind: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Of llama, where rows of queries and keys are in another order in the file."""
    file = _written(tmp_path, make_checkpoint, "llama", kind)
    plain, quantized = (
        weights_folder(file, "fp32", tmp_path / "cache", keeps_quantized=keeps) for keeps in (False, True)
    )
    assert plain != quantized
    expected, scheme = _tensors(plain), read_model_config(quantized).quantization
    assert scheme is not None
    assert read_model_config(described_folder(file, tmp_path / "cache")).quantization == scheme
    with QuantizedTensorFiles(quantized, torch.float32, torch.device("cpu"), scheme) as files:
        assert files.names == expected.keys()
        for name, tensor in expected.items():
            assert files.is_quantized(name) == (tensor.dim() == 2)
            assert torch.equal(files.tensor(name, tuple(tensor.shape)), tensor), name
    _check_tables(quantized, expected)
    tokens = torch.randint(256, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    found, reference = decoder_logits(quantized, tokens), decoder_logits(plain, tokens)
    assert float((found - reference).abs().max() / reference.abs().max()) <= 1e-3


def _check_tables(folder: Path, expected: dict[str, Tensor]) -> None:
    """Embedding and head stay quantized as well, if there are kernels for them."""
    config, cpu = read_model_config(folder), torch.device("cpu")
    if native.load() is None:
        return
    with WeightReader(folder, config, ShardSpec.whole(config), torch.bfloat16, cpu) as reader:
        embedding = reader.embedding()
        for table, name in ((embedding, "model.embed_tokens"), (reader.head(embedding), "lm_head")):
            assert isinstance(table, QuantizedWeight)
            assert torch.equal(table.dequantized(), expected[f"{name}.weight"])


def test_pieces_of_a_tensor_that_stays_quantized_are_the_whole(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _written(tmp_path, make_checkpoint, "llama", "Q4_K")
    for name, num_bytes in (("whole", 1 << 30), ("pieces", 5 * 4 * 512)):
        monkeypatch.setattr(gguf_weights, "_PIECE_BYTES", num_bytes)
        (tmp_path / name).mkdir()
        weights = GgufWeights(GgufFile.read(file), "bf16", keeps_quantized=True)
        weights.write(tmp_path / name, lambda phase: None)
        assert weights.num_bytes == sum(it.nbytes for it in load_file(tmp_path / name / FILE).values())
    assert (tmp_path / "pieces" / FILE).read_bytes() == (tmp_path / "whole" / FILE).read_bytes()


def test_a_file_of_floats_has_nothing_that_stays_quantized(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    file = _written(tmp_path, make_checkpoint, "qwen3", "F16")
    folder = weights_folder(file, "fp16", tmp_path / "cache", keeps_quantized=True)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    plain = weights_folder(file, "fp16", tmp_path / "cache")
    assert (folder / FILE).read_bytes() == (plain / FILE).read_bytes()


def test_a_split_file_in_several_shards_is_the_same_model(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    whole = _tensors(weights_folder(_written(tmp_path, make_checkpoint), "bf16", tmp_path / "cache"))
    first = _written(tmp_path, make_checkpoint, parts=3)
    assert first.name == "model-00001-of-00003.gguf"
    (tmp_path / "shards").mkdir()
    GgufWeights(GgufFile.read(first), "bf16").write(tmp_path / "shards", lambda phase: None, 300_000)
    found = _tensors(tmp_path / "shards")
    assert len(weight_files(tmp_path / "shards")) > 2
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    ties = np.arange(0x3F80_8000, 0x3F90_8000, 0x1_0000, dtype=np.uint32)
    values = np.concatenate([bits, ties, np.array([0x7F7F_FFFF, 0x7F80_0000, 0xFF80_0000], np.uint32)])
    floats = values.view(np.float32)
    numbers = ~np.isnan(floats)
    expected = torch.from_numpy(floats.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    found = bfloat16_bits(floats)
    assert np.array_equal(found[numbers], expected[numbers])
    assert np.isnan((found[~numbers].astype(np.uint32) << 16).view(np.float32)).all()


def test_the_fingerprint_depends_on_the_model_and_not_on_where_it_is(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    file = _written(tmp_path, make_checkpoint)
    other = tmp_path / "other" / "name.gguf"
    other.parent.mkdir()
    shutil.copyfile(file, other)
    os.utime(other, (1, 1))
    folders = [
        weights_folder(file, "bf16", tmp_path / "cache"),
        weights_folder(other, "bf16", tmp_path / "cache 2"),
        weights_folder(_written(tmp_path, make_checkpoint, kind="Q4_1"), "bf16", tmp_path / "cache"),
    ]
    same, again, different = (model_fingerprint(it, DigestCache(None, ManualClock())) for it in folders)
    assert same == again != different


def test_a_changed_file_has_another_folder_and_one_that_is_made_is_kept(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    cache = tmp_path / "tandem" / "models"
    file = _written(tmp_path, make_checkpoint)
    phases: list[str] = []
    folder = weights_folder(file, "bf16", cache, phases.append)
    assert phases[0].startswith("converting model.gguf, 0 of ")
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(cache.stat().st_mode) == 0o700
    before = (folder / "model.safetensors").stat()
    phases.clear()
    assert weights_folder(file, "bf16", cache, phases.append) == folder
    assert (folder / "model.safetensors").stat() == before
    assert phases == []
    os.utime(file, (1, 1))
    assert weights_folder(file, "bf16", cache) != folder
    assert described_folder(file, cache) not in (folder, weights_folder(file, "fp16", cache))


_CONVERT = (
    "import sys; from pathlib import Path; from workers.model.model_folder import weights_folder\n"
    "phases = []\n"
    "print(weights_folder(Path(sys.argv[1]), 'bf16', Path(sys.argv[2]), phases.append))\n"
    "print(any(phase.startswith('converting') for phase in phases))"
)


def test_of_several_processes_one_converts(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    file, cache = _written(tmp_path, make_checkpoint), tmp_path / "cache"
    command = [sys.executable, "-c", _CONVERT, str(file), str(cache)]
    root = Path(__file__).resolve().parents[2]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(3)]
    results = [process.communicate()[0].split("\n")[:2] for process in started]
    assert len({folder for folder, _ in results}) == 1
    assert sorted(converted for _, converted in results) == ["False", "False", "True"]


def test_what_a_process_left_that_ended_meanwhile_is_not_used(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = _written(tmp_path, make_checkpoint), tmp_path / "cache"

    class Ended(Exception):
        pass

    def end(phase: str) -> None:
        if " 5 of " in phase:
            raise Ended

    with monkeypatch.context() as patch:
        patch.setattr(
            shutil, "rmtree", lambda path, ignore_errors=False: None
        )  # a killed process removes nothing
        with pytest.raises(Ended):
            weights_folder(file, "bf16", cache, end)
    assert [path for path in cache.iterdir() if not path.name.startswith(".")] == []
    assert [path.suffix for path in cache.iterdir() if path.is_dir()] == [".partial"]
    folder = weights_folder(file, "bf16", cache)
    assert len(_tensors(folder)) == len(GgufFile.read(file).name_to_tensor)
    assert [path for path in cache.iterdir() if path.suffix == ".partial"] == []


def test_folders_that_nothing_asks_for_are_removed_when_another_is_made(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    cache, days = tmp_path / "cache", 86400
    first = weights_folder(_written(tmp_path, make_checkpoint), "bf16", cache)
    second = weights_folder(tmp_path / "model.gguf", "fp16", cache)
    (cache / "notes").mkdir()
    now = second.stat().st_mtime
    for folder in (first, second, cache / "notes"):
        os.utime(folder, (now - 31 * days, now - 31 * days))
    assert weights_folder(tmp_path / "model.gguf", "fp16", cache) == second
    assert first.is_dir(), "nothing was made"
    third = weights_folder(tmp_path / "model.gguf", "fp32", cache)
    assert {path.name for path in cache.iterdir() if path.is_dir()} == {second.name, third.name, "notes"}
    assert weights_folder(tmp_path / "model.gguf", "bf16", cache) == first
    assert _tensors(first)


def test_a_folder_that_another_process_works_on_stays(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    first = weights_folder(_written(tmp_path, make_checkpoint), "bf16", cache)
    os.utime(first, (1, 1))
    lock = try_lock(cache / f".{first.name}.lock")
    assert lock is not None
    weights_folder(tmp_path / "model.gguf", "fp16", cache)
    assert first.is_dir()
    os.close(lock)
    weights_folder(tmp_path / "model.gguf", "fp32", cache)
    assert not first.is_dir()


def test_templates_become_files(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    metadata = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_template.../../escape": "elsewhere",
    }
    folder = described_folder(_written(tmp_path, make_checkpoint, metadata=metadata), tmp_path / "cache")
    assert (folder / "chat_template.jinja").read_text() == "plain"
    others = folder / "additional_chat_templates"
    assert {file.name: file.read_text() for file in others.iterdir()} == {"tool_use.jinja": "tools"}
    assert not (folder / "model.safetensors").exists()


class _Damage(NamedTuple):
    change: Callable[[Path], Path]
    message: str


def _replaced(old: bytes, new: bytes) -> Callable[[Path], Path]:
    def change(file: Path) -> Path:
        data = file.read_bytes()
        assert old in data
        file.write_bytes(data.replace(old, new, 1))
        return file

    return change


def _cut(num_bytes: int) -> Callable[[Path], Path]:
    def change(file: Path) -> Path:
        os.truncate(file, file.stat().st_size + num_bytes if num_bytes < 0 else num_bytes)
        return file

    return change


DAMAGE = {
    "cut data": _Damage(_cut(-4000), "model.gguf: cut short at .* bytes; download it again"),
    "cut header": _Damage(_cut(2000), "model.gguf: cut short at 2000 bytes; download it again"),
    "no gguf": _Damage(_replaced(b"GGUF", b"PK\x03\x04"), "not a GGUF file.*; download it again"),
    "architecture": _Damage(
        _replaced(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"),
        "general.architecture 'mamba' is not supported; take a model of one of llama, ",
    ),
    "tokenizer": _Damage(_replaced(b"gpt2", b"bert"), "tokenizer.ggml.model 'bert' is not supported"),
    "splits": _Damage(_replaced(b"default", b"unknown"), "tokenizer.ggml.pre 'unknown' is not supported"),
    "key": _Damage(
        _replaced(b"llama.block_count", b"llama.block_C0unt"),
        "llama.block_count is missing, not a positive integer",
    ),
    "tensor": _Damage(_replaced(b"blk.0.ffn_up", b"blk.0.ffn_xx"), "tensor blk.0.ffn_xx.weight is not known"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_cannot_be_read_is_refused_in_a_sentence(
    case: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    file = DAMAGE[case].change(_written(tmp_path, make_checkpoint))
    with pytest.raises(CheckpointError, match=DAMAGE[case].message) as caught:
        weights_folder(file, "bf16", tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


def test_every_part_has_to_be_there(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    first = _written(tmp_path, make_checkpoint, parts=3)
    with pytest.raises(CheckpointError, match=r"part 2 of a split file; name model-00001-of-00003.gguf"):
        described_folder(first.with_name("model-00002-of-00003.gguf"), tmp_path / "cache")
    renamed = shutil.copyfile(first, tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="the first of 3 parts, but not named like one"):
        described_folder(renamed, tmp_path / "cache")
    first.with_name("model-00003-of-00003.gguf").unlink()
    with pytest.raises(
        CheckpointError, match=r"model-00003-of-00003.gguf: this part is missing; download all 3"
    ):
        described_folder(first, tmp_path / "cache")


def test_a_disk_without_space_is_found_before_anything_is_written(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _written(tmp_path, make_checkpoint)
    free = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(CheckpointError, match=r"its weights take .* GB in .*; free some, or set model_cache"):
        weights_folder(file, "bf16", tmp_path / "cache")


def test_a_cache_to_which_others_can_write_is_not_used(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(CheckpointError, match=r"others than this user can write to it; .* set model_cache"):
        described_folder(_written(tmp_path, make_checkpoint), tmp_path / "open")


def test_a_llama_3_scaling_is_found_from_its_factors(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """Against transformers' own computation of the frequencies."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from workers.model.gguf.gguf_config import llama3_factors

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(head_dim=64, rope_parameters=scaling)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    assert torch.allclose(plain / frequencies, torch.tensor(llama3_factors(500000.0, 64, 32.0)), rtol=1e-4)


def test_a_folder_stays_what_it_is(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint("llama", **SHAPE)
    assert described_folder(folder) == weights_folder(folder, "bf16") == folder
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
