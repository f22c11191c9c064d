"""The model's folder: complete, readable, supported by the decoder, and divisible as configured for the
pools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from cluster.config import PoolConfig
from cluster.doctor.check_context import Check, CheckContext
from cluster.doctor.checks import CheckResult, error, note, ok, warning
from cluster.errors import ConfigError
from cluster.serve.resource_needs import gb
from cluster.served_model import described_model
from cluster.text.chat_template import load_chat_template
from cluster.text.tokenizer import ModelText
from workers.errors import CheckpointError
from workers.model.gguf.gguf_file import GgufFile, is_gguf
from workers.model.gguf.gguf_names import written_tensors
from workers.model.ignored_keys import ignored_keys
from workers.model.model_config import (
    ModelConfig,
    file_problem,
    read_header,
    read_model_config,
    weight_files,
)
from workers.model.model_folder import default_cache
from workers.model.quantization.weight_form import WeightForm

GROUP = "model"
# The tokens of a block of which the CPU kernels read a multiple.
_KERNEL_TOKENS = 16
_FOLDER = "name the folder of a checkpoint in Hugging Face layout, or a GGUF file, as `model`"


def config_json(context: CheckContext) -> Iterator[CheckResult]:
    try:
        model = read_model_config(described_model(context.config))
    except CheckpointError as problem:
        yield error(str(problem), "no replica can load it", _FOLDER)
        return
    kept = (
        f"{model.num_kv_heads} of KV" if model.latent is None else f"a latent of {model.latent.width} in KV"
    )
    shape = f"{model.num_layers} layers, {model.num_heads} heads ({kept})"
    name = context.config.model_source.served_name
    yield ok(f"{name}: {model.family}, {shape}, {model.max_context_tokens} tokens of context")
    yield from _weight_form(context, model)
    for key, why in ignored_keys(described_model(context.config)).items():
        yield warning(
            f"config.json has {key}, which is ignored",
            f"{why}; the model's makers may have measured other results",
            "compare the model's output with its makers' own before you rely on it",
        )


def _weight_form(context: CheckContext, model: ModelConfig) -> Iterator[CheckResult]:
    """Say what becomes of the weights of a quantized checkpoint."""
    scheme, pools = model.quantization, context.config.pools
    if scheme is None:
        return
    what = f"weights are quantized ({scheme.method}: {scheme.name})"
    if not WeightForm(pools[0].weight_dtype).keeps_stored:
        yield ok(f"{what}, and weight_dtype is {pools[0].weight_dtype}")
        return
    yield ok(f"{what}, and stay so in products")


def weights(context: CheckContext) -> Iterator[CheckResult]:
    """Check that every file that the index names exists, and has the length that its header gives."""
    if is_gguf(context.config.model_path):
        yield from _gguf_weights(context)
        return
    try:
        files = weight_files(context.config.model_path)
        problems = [problem for file in files if (problem := file_problem(file))]
        num_bytes = sum(file.stat().st_size for file in files)
        problems += _missing_tensors(context.config.model_path, files)
    except (CheckpointError, OSError) as problem:
        yield error(
            str(problem), "no replica can load it", "download the checkpoint again, with all its files"
        )
        return
    for text in problems:
        yield error(text, "the replica that reads it does not start", "download that file again")
    if not problems:
        yield ok(f"{len(files)} files of weights, {gb(num_bytes)}, all whole", num_bytes=num_bytes)


def _gguf_weights(context: CheckContext) -> Iterator[CheckResult]:
    """Check a file from which every host dequantizes the weights when it starts its first replica."""
    from workers.model.gguf.gguf_weights import check_whole  # here: it imports what reads all types

    try:
        file = GgufFile.read(context.config.model_path)
        check_whole(file)
        num_tensors = len(written_tensors(file))
    except (CheckpointError, OSError) as problem:
        yield error(str(problem), "no replica can load it", "take another file of the model")
        return
    cache = context.config.model_cache or default_cache()
    yield ok(
        f"{num_tensors} tensors in {len(file.parts)} GGUF files, all whole; each host dequantizes them once, "
        f"in {cache}"
    )


def tokenizer(context: CheckContext) -> Iterator[CheckResult]:
    try:
        ModelText.load(described_model(context.config))
    except CheckpointError as problem:
        remedy = "save it as tokenizer.json (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        yield error(str(problem), "gateways do not start", remedy)
        return
    try:
        template = load_chat_template(described_model(context.config))
    except CheckpointError as problem:
        yield error(str(problem), "gateways do not start", "correct that file")
        return
    if template is None:
        yield note("the tokenizer is there; there is no chat template", "chats are refused, texts are served")
    else:
        yield ok("tokenizer and chat template are there")


def split(context: CheckContext) -> Iterator[CheckResult]:
    """Report settings that `tandem serve` would refuse, and those that it would serve less well than
    configured."""
    try:
        model = read_model_config(described_model(context.config))
    except CheckpointError:
        return  # reported by `config_json`
    problems = 0
    for pool in context.config.pools:
        for result in _pool_results(pool, model):
            problems += 1
            yield result
    if not problems:
        yield ok("the model can be split as every pool wants")


def _held_in_kv(model: ModelConfig) -> str:
    """Name what ranks can divide of the KV."""
    return f"{model.kv_cells.num_cells} KV heads" if model.latent is None else "one latent in the KV"


def _may_split(pool: PoolConfig, model: ModelConfig) -> bool:
    """Whether the ranks of a replica can divide latents as the pool is configured."""
    split = pool.engine.model_copy(update={"latent_kv": "split"})
    try:
        pool.model_copy(update={"engine": split}).check_model(model)
    except ConfigError:
        return False
    return True


def _split_results(pool: PoolConfig) -> Iterator[CheckResult]:
    """Check that the kernels read a rank's part of a block."""
    block_tokens, tp = pool.engine.block_tokens, pool.tp
    if block_tokens % (tp * _KERNEL_TOKENS):
        yield warning(
            f"pool {pool.name}: each of {tp} ranks keeps {block_tokens // tp} tokens of a block",
            f"the CPU kernels read multiples of {_KERNEL_TOKENS}, so torch computes attention, more slowly",
            f"engine.block_tokens: {tp * _KERNEL_TOKENS}, in all pools",
        )


def _pool_results(pool: PoolConfig, model: ModelConfig) -> Iterator[CheckResult]:
    try:
        pool.check_model(model)
    except ConfigError as problem:
        yield error(
            str(problem), "`tandem serve` refuses it", f"correct tp, ep, pp or layers of pool {pool.name}"
        )
        return
    if pool.engine.latent_kv == "split":
        yield from _split_results(pool)
    elif pool.tp > model.kv_cells.num_cells:
        yield note(
            f"pool {pool.name}: tp {pool.tp} is above the model's {_held_in_kv(model)}",
            "several ranks hold a copy of each, so kv_tokens takes more memory than with fewer ranks",
            "engine.latent_kv: split, by which each rank keeps its part" if _may_split(pool, model) else "",
        )
    if pool.engine.kv_tokens != "auto" and pool.engine.kv_tokens < model.max_context_tokens:
        yield note(
            f"pool {pool.name}: kv_tokens {pool.engine.kv_tokens} is below the model's context of "
            f"{model.max_context_tokens}",
            "a request may be no longer than what one replica holds",
            f"engine.kv_tokens: {model.max_context_tokens}, where memory allows"
            if pool.role != "prefill"
            else "",
        )
    if pool.dtype == "auto" and not model.checkpoint_dtype:
        yield warning(
            f"pool {pool.name}: dtype is auto, and config.json names none",
            "it is served in fp32, which takes twice the memory of bf16",
            "name the dtype",
        )


CHECKS = (
    Check(
        "model-config",
        GROUP,
        "Whether config.json names a supported architecture, and no ignored key changes results",
        config_json,
    ),
    Check(
        "model-weights",
        GROUP,
        "Whether every safetensors file is there and complete, with every tensor of the index",
        weights,
    ),
    Check("model-tokenizer", GROUP, "Whether there are a tokenizer.json and a chat template", tokenizer),
    Check(
        "model-split", GROUP, "tp, ep, pp, layers, kv_tokens and dtype of each pool against the model", split
    ),
)


def _missing_tensors(folder: Path, files: tuple[Path, ...]) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if files == (folder / "model.safetensors",) or not index.is_file():
        return []
    held = {file.name: set(read_header(file)[1]) for file in files}
    named: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return [
        f"{folder / file}: {tensor} is missing, which the index names"
        for tensor, file in named.items()
        if tensor not in held[file]
    ][:8]
