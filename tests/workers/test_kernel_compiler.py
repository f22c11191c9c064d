"""When the child compiles kernels, and when it knows that an earlier one has compiled them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from rank_specs import cuda_spec

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.messages import ReplicaIdentity
from workers.model.decoder import Decoder
from workers.model.model_config import read_model_config
from workers.model.weights import ShardSpec, WeightReader
from workers.rank import kernel_compiler
from workers.rank.kernel_compiler import compile_kernels
from workers.rank.kernel_task import KernelReport

HOPPER = 90


class Compiler:
    """Stands for what compiles: counts its calls."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}
        self.num_calls = 0
        self.meanwhile: Callable[[], None] = lambda: None

    def __call__(self, variants: Sequence[object], num_processes: int) -> KernelReport:
        self.num_calls += 1
        self.meanwhile()
        return KernelReport(3, 3, self.errors)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_compiler, "_rehearsed", lambda spec, capability: ())
    monkeypatch.setattr(kernel_compiler, "compile_variants", made)
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 3.6")
    return made


def test_kernels_are_compiled_once_for_a_configuration_and_a_card(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    spec = cuda_spec(tmp_path)
    assert compile_kernels(spec, HOPPER) == KernelReport(3, 3)
    other_replica = replace(
        spec, replica=ReplicaIdentity("other", 2), ticket=b"t", engine_core_address="x:1", device="cuda:1"
    )
    assert compile_kernels(other_replica, HOPPER) == KernelReport(is_known=True)
    assert compiler.num_calls == 1
    compile_kernels(replace(spec, max_sequences=9), HOPPER)
    compile_kernels(spec, 100)
    (tmp_path / "config.json").write_text('{"head_dim": 64}')
    compile_kernels(spec, HOPPER)
    assert compiler.num_calls == 4


def test_each_rank_of_a_replica_has_its_kernels_compiled(compiler: Compiler, tmp_path: Path) -> None:
    """The ranks' parts of the model may differ."""
    first = cuda_spec(tmp_path, tp=2)
    for spec in (first, replace(first, rank=1)):
        assert compile_kernels(spec, HOPPER) == KernelReport(3, 3)
        assert compile_kernels(spec, HOPPER) == KernelReport(is_known=True)
    assert len(list((tmp_path / "cache").glob("*.lock"))) == 1, "they take turns"


def test_kernels_that_failed_are_tried_again(compiler: Compiler, tmp_path: Path) -> None:
    compiler.errors = {"_rows_kernel": "spills"}
    spec = cuda_spec(tmp_path)
    assert compile_kernels(spec, HOPPER).kernel_to_error == compiler.errors
    compile_kernels(spec, HOPPER)
    assert compiler.num_calls == 2


def test_ranks_that_start_together_compile_once(compiler: Compiler, tmp_path: Path) -> None:
    spec, reports, is_compiling = cuda_spec(tmp_path), [], threading.Event()

    def compile_second() -> None:
        is_compiling.wait()
        reports.append(compile_kernels(spec, HOPPER))

    second = threading.Thread(target=compile_second)
    second.start()
    compiler.meanwhile = is_compiling.set
    first = compile_kernels(spec, HOPPER)
    second.join()
    assert (first.num_compiled, reports) == (3, [KernelReport(is_known=True)])


def test_weights_without_values_have_the_shapes_of_those_that_are_read(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, "qwen3", seed=1)
    config, device = read_model_config(tmp_path), torch.device("meta")
    with WeightReader(tmp_path, config, ShardSpec.whole(config), torch.bfloat16, device) as reader:
        reader.omit_values()
        decoder = Decoder(config, reader, ShardSpec.whole(config))
        reader.finish()
    assert decoder.embedding is not None
    hidden = decoder.embed(torch.zeros(3, dtype=torch.int64, device=device))
    assert (hidden.shape, hidden.dtype, hidden.device) == ((3, config.hidden_size), torch.bfloat16, device)
    assert len(decoder.layers) == config.num_layers
