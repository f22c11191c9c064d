"""The engine benchmark on a random model: its lines, its check, and its limits by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.host import cache_bytes
from workers.engine_bench import bench
from workers.engine_bench.bench import BenchOptions, run_engine_bench
from workers.engine_bench.peer_process import PeerSpec
from workers.engine_bench.roofline import LayerProducts, Roofline, num_weight_copies
from workers.engine_bench.weight_forms import GgufModel
from workers.errors import CapacityError, CheckpointError
from workers.model.model_config import read_model_config
from workers.model.model_folder import weights_folder
from workers.rank.model_runner import ModelRunner
from workers.rank.probe import DeviceLimits


class QuietMachine:
    """A meter for which others use the given shares of the CPU, and nothing from then on."""

    def __init__(self, *shares: float) -> None:
        self._shares = list(shares)

    def start(self) -> None:
        pass

    def share(self) -> float:
        return self._shares.pop(0) if self._shares else 0.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "llama", seed=3)
    return path


@pytest.fixture(autouse=True)
def _small_probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bench, "_GEMM_SIZE", 128)
    monkeypatch.setattr(bench, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(bench, "NUM_DECODE_STEPS", 4)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def run(model_dir: Path, *shares: float, **options: Any) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    defaults: dict[str, Any] = {
        "model_dir": model_dir,
        "dtype": "fp32",
        "threads": 1,
        "prefill": [40],
        "decode": [(1, 20), (3, 33)],
        "num_rounds": 1,
        "block_tokens": 16,
    }
    run_engine_bench(BenchOptions(**{**defaults, **options}), lines.append, QuietMachine(*shares))
    return lines


@pytest.mark.slow
def test_every_measure_has_its_limit_and_its_peer(model_dir: Path) -> None:
    """The peer is transformers in a process of its own."""
    lines = run(model_dir, peers=[PeerSpec("transformers", "", sys.executable)])
    check, machine, loaded = lines[:3]
    assert check["what"] == "check"
    assert check["max_error"] < 1e-5
    assert check["argmax_agreement"] == 1.0
    assert machine["cpu"]
    assert machine["dtype"] == "float32"
    assert (loaded["what"], loaded["peer"], loaded["dtype"]) == ("peer loaded", "transformers", "fp32")
    rounds = {line["of"]: line["tok_s"] for line in lines if line["what"] == "round"}
    assert list(rounds) == ["prefill 40", "decode 1 at 20", "decode 3 at 33"]
    measured = lines[6:]
    assert [line["what"] for line in measured] == ["prefill", "peer", "decode", "peer", "decode", "peer"]
    for line, peer in zip(measured[::2], measured[1::2], strict=True):
        decode = f"decode {line['batch']} at {line['context']}"
        rates = rounds["prefill 40" if line["what"] == "prefill" else decode]
        assert line["tok_s"] == pytest.approx(rates["tandem"], abs=0.2)
        assert line["limit_ratio"] == pytest.approx(line["tok_s"] / line["limit_tok_s"], rel=0.02, abs=1e-3)
        assert (peer["of"], peer["peer"]) == (line["what"], "transformers")
        assert peer["ratio"] == pytest.approx(rates["tandem"] / rates["transformers"], rel=0.02, abs=1e-3)
    assert [(line["tokens"], line["batch"], line["context"]) for line in measured[::2]] == [
        (40, 1, 0),
        (4, 1, 20),
        (12, 3, 33),
    ]


@pytest.mark.slow
def test_a_disturbed_round_is_void_and_repeated(model_dir: Path) -> None:
    lines = run(model_dir, 0.05, decode=[])
    assert [line["others"] for line in lines if line["what"] == "round"] == [0.05, 0.0]
    assert (lines[-1]["rounds"], lines[-1]["void"], lines[-1]["others"]) == (1, 0, [0.0])


def test_a_machine_that_never_rests_is_reported_as_such(model_dir: Path) -> None:
    lines = run(model_dir, *[0.3] * 20, prefill=[], decode=[(1, 20)])
    assert (lines[-1]["rounds"], lines[-1]["void"]) == (12, 12)
    assert lines[-1]["others"] == [0.3] * 12
    assert lines[-1]["tok_s"] > 0


def test_a_peer_that_is_not_installed_is_skipped_with_the_remedy(model_dir: Path, tmp_path: Path) -> None:
    # An interpreter without any packages.
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    lines = run(model_dir, peers=[PeerSpec("llama.cpp", "", str(bare))], decode=[])
    skipped = next(line for line in lines if line["what"] == "peer skipped")
    assert "not installed" in skipped["reason"]
    assert "pip install llama-cpp-python" in skipped["reason"]
    assert lines[-1]["what"] == "prefill"


@pytest.mark.slow
def test_a_peer_that_cannot_load_is_reported_and_the_others_are_measured(
    model_dir: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such instruction >&2\nexit 3\n")
    broken.chmod(0o755)
    peers = [PeerSpec("vllm", "", str(broken)), PeerSpec("transformers", "", sys.executable)]
    lines = run(model_dir, peers=peers, decode=[])
    failed = next(line for line in lines if line["what"] == "peer failed")
    assert failed["peer"] == "vllm"
    assert "exit status 3" in failed["reason"]
    assert "no such instruction" in failed["reason"]
    assert [line["peer"] for line in lines if line["what"] == "peer"] == ["transformers"]


@pytest.mark.slow
def test_without_peers_there_are_no_peer_lines(model_dir: Path) -> None:
    lines = run(model_dir, dtype="bf16", decode=[])
    assert [line["what"] for line in lines] == ["check", "machine", "round", "prefill"]
    # Rounding alone parts both from float32.
    assert 1e-4 < lines[0]["max_error_to_fp32"] < 2 * lines[0]["transformers_error_to_fp32"]
    assert lines[-1]["dtype"] == "bf16"


@pytest.mark.slow
def test_deterministic_mode_is_measured_as_a_peer(model_dir: Path) -> None:
    lines = run(model_dir, with_deterministic=True)
    assert [line["peer"] for line in lines if line["what"] == "peer"] == ["deterministic"] * 3
    assert all(line["ratio"] > 0 for line in lines if line["what"] == "peer")


@pytest.mark.slow
def test_forms_of_weights_have_their_error_and_their_limit(model_dir: Path, tmp_path: Path) -> None:
    """Those of a GGUF file give the logits of its dequantized weights."""
    file = gguf_files.write_gguf(tmp_path / "m.gguf", model_dir, GGMLQuantizationType.Q8_0)
    folders = [weights_folder(file, "fp32", tmp_path, keeps_quantized=it) for it in (False, True)]
    forms = {"weights": ["int8", "gguf"], "gguf": GgufModel(file, folders[1])}
    lines = run(folders[0], prefill=[], decode=[(1, 20)], **forms)
    int8, gguf = (line for line in lines if line["what"] == "check" and "of" in line)
    assert (int8["of"], gguf["of"]) == ("int8", "gguf")
    assert gguf["max_error"] < 1e-4 < int8["max_error"] < 0.1
    assert gguf["kl"] < 1e-6 < int8["kl"]
    stored, *measured = (line for line in lines if line["what"] in ("decode", "peer"))
    assert [line["peer"] for line in measured] == ["int8", "gguf"]
    # Codes of 8 bits with a scale for 32, and without, of weights of 32 bits.
    assert all(line["limit_tok_s"] > 1.5 * stored["limit_tok_s"] for line in measured)


@pytest.mark.slow
def test_a_chunk_is_compared_with_its_products(model_dir: Path) -> None:
    lines = run(model_dir, prefill=[512], decode=[])
    assert lines[-1]["products_tok_s"] > lines[-1]["tok_s"] > 0
    assert lines[-1]["products_ratio"] == pytest.approx(
        lines[-1]["tok_s"] / lines[-1]["products_tok_s"], rel=0.02, abs=1e-3
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_timed_by_the_fastest_kind(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Each of the four products of both layers costs the least of its kinds' times."""
    seen: list[str] = []

    def scripted_s(self: LayerProducts, candidate: Any, rows: torch.Tensor, num_runs: int) -> float:
        candidate.run(rows)  # every kind computes
        seen.append(candidate.name)
        return {"ours": 0.125, "torch": 0.15}.get(candidate.name, 0.5)

    monkeypatch.setattr(LayerProducts, "_best_s", scripted_s)
    config = read_model_config(model_dir)
    products = LayerProducts(config, dtype, 16, SystemClock())
    kinds = {"ours", "torch"} | ({"torch float32"} if dtype == torch.bfloat16 else set())
    assert kinds <= set(seen)
    seen.clear()
    assert products.seconds() == config.num_layers * 4 * 0.125
    assert set(seen) == {"ours", "torch"}  # those that are close to each other


def test_products_are_timed_over_more_weights_than_a_cache_holds() -> None:
    assert num_weight_copies(12 << 20, 32 << 20) == 4
    assert num_weight_copies(100 << 20, 32 << 20) == 2
    assert num_weight_copies(1 << 20, 0) == 2, "unknown"
    assert num_weight_copies(12 << 20, 384 << 20) == 7


def test_the_largest_cache_is_found(tmp_path: Path) -> None:
    for index, size in enumerate(("48K", "1024K", "32M", "odd")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert cache_bytes(tmp_path) == 32 << 20
    assert cache_bytes(tmp_path / "none") == 0


def test_limits_by_hand(model_dir: Path) -> None:
    """Weights counted in the checkpoint itself; at 1 flop a nanosecond and 1 byte a nanosecond."""
    tensors = load_file(model_dir / "model.safetensors")
    head = tensors["lm_head.weight"].numel()
    layers = sum(tensor.numel() for name, tensor in tensors.items() if "_proj.weight" in name)
    config = read_model_config(model_dir)
    kv_items_per_token = 2 * 2 * 2 * 16  # K and V, 2 layers, 2 heads of 16
    pair_flops = 2 * 2 * 4 * 16 * 2  # multiply and add, for scores and values: 4 heads of 16, 2 layers
    compute_bound = Roofline(config, 4, DeviceLimits(flop_s=1e9, byte_s=1e30))
    assert compute_bound.prefill_tok_s(3) == pytest.approx(
        3e9 / (2 * 3 * layers + 2 * head + (1 + 2 + 3) * pair_flops)
    )
    assert compute_bound.decode_tok_s(5, 100) == pytest.approx(1e9 / (2 * (layers + head) + 100 * pair_flops))
    read_bound = Roofline(config, 4, DeviceLimits(flop_s=1e30, byte_s=1e9))
    assert read_bound.prefill_tok_s(3) == pytest.approx(3e9 / (4 * (layers + head)))
    assert read_bound.decode_tok_s(5, 100) == pytest.approx(
        5e9 / (4 * (layers + head + 5 * 100 * kv_items_per_token))
    )


def test_lengths_beyond_the_model_are_refused(model_dir: Path) -> None:
    with pytest.raises(CapacityError, match="3000 tokens exceed the model's 2048 positions"):
        run(model_dir, prefill=[3000])


@pytest.mark.slow
def test_experts_that_the_cpu_computes_are_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it is refused, as by a rank."""
    write_random_checkpoint(tmp_path, "qwen3_moe", seed=1, num_experts=4, num_experts_per_tok=2)
    with pytest.raises(CheckpointError, match=r"^engine\.expert_offload 3: on device cpu all experts are in"):
        run(tmp_path, expert_offload=3)
    monkeypatch.setattr(bench, "refuse_expert_offload", lambda *_, **__: None)
    runners: list[ModelRunner] = []

    class NotedRunner(ModelRunner):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            runners.append(self)

    monkeypatch.setattr(bench, "ModelRunner", NotedRunner)
    lines = run(tmp_path, expert_offload=3, prefill=[], decode=[(1, 20)])
    assert lines[0]["what"] == "check"
    assert lines[0]["max_error"] < 1e-5
    (runner,) = runners
    split = runner._model.decoder.split_experts
    assert [int((layer.places < 0).sum()) for layer in split] == [3] * len(split)
    assert split
