"""The commands of `tandem bench`, and `tandem bench engine` with what it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.table import Table

from cluster.bench.record_command import bench_record_command
from cluster.bench.serving_command import bench_serve_command
from cluster.bench.store_bench import bench_store
from cluster.cli.model_download import fetched
from cluster.cli.terminal import NONE, AsJson, bundled_model, made_table, out
from cluster.dtypes import auto_dtype
from cluster.model_source.names import located_model
from cluster.model_source.source import ModelSource
from workers.engine_bench.peer_process import parse_peers
from workers.engine_bench.weight_forms import FormName, GgufModel
from workers.errors import PeerError
from workers.model.gguf.gguf_file import is_gguf
from workers.model.model_folder import described_folder, weights_folder
from workers.model.quantization.weight_form import WeightDtype

cli = typer.Typer(no_args_is_help=True, help="Measure a running cluster, the engine or the store alone.")

cli.command("serve")(bench_serve_command)
cli.command("record")(bench_record_command)
cli.command("store")(bench_store)


_WEIGHTS_HELP = "Forms of weights that are measured beside: int8,int4,fp8; gguf: as the GGUF file has them."
_PEER_HELP = (
    "Measured beside, in turn: transformers,llama.cpp,vllm; NAME:fp32 for a dtype, llama.cpp:q8_0 or "
    "llama.cpp:q4_k_m for quantized weights."
)


@cli.command("engine")
def bench_engine(
    model: Annotated[
        str | None,
        typer.Option(help="Folder, GGUF file, or name, as of `tandem serve`; default: the bundled one."),
    ] = None,
    model_cache: Annotated[
        Path | None, typer.Option(help="Folder for what is made of a GGUF file; default: ~/.cache/tandem.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="auto (as the cluster resolves it), bf16, fp16 or fp32.")
    ] = "auto",
    threads: Annotated[int, typer.Option(min=1)] = 2,
    prefill: Annotated[str, typer.Option(help="Prompt lengths; empty: none.")] = "512,2048",
    decode_batch: Annotated[
        str,
        typer.Option(
            help="Sequences of a step, and their context if it is another: 1,4,16,16x2048; empty: none."
        ),
    ] = "1,4,8,16",
    context: Annotated[int, typer.Option(min=1, help="Tokens before the decode figures.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which others left the CPU alone.")] = 5,
    block_tokens: Annotated[int, typer.Option()] = 64,
    device: Annotated[str, typer.Option()] = "cpu",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Measure deterministic mode beside it, too.")
    ] = False,
    expert_offload: Annotated[
        int, typer.Option(min=0, help="Experts of each layer that the CPU computes, as in `engine`.")
    ] = 0,
    weights: Annotated[str, typer.Option(help=_WEIGHTS_HELP)] = "",
    peer: Annotated[str, typer.Option(help=_PEER_HELP)] = "",
    peer_python: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH: the interpreter that has the peer; default: this.")
    ] = None,
    peer_cache: Annotated[
        Path | None, typer.Option(help="Folder for the peers' converted and compiled files.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prefill and decode rates of the engine alone, without Ray, beside the machine's limits and other
    engines."""
    from workers.engine_bench.bench import BenchOptions, run_engine_bench  # here: it imports torch

    try:
        peers = parse_peers(peer, peer_python or [])
    except PeerError as error:
        raise typer.BadParameter(str(error)) from None
    prompts = [_prompt_tokens(item) for item in prefill.split(",")] if prefill else []
    shapes = [_decode_shape(item, context) for item in decode_batch.split(",")] if decode_batch else []
    forms = _weight_forms(weights)
    named = located_model(model or str(bundled_model()), Path().resolve())
    path = fetched(ModelSource(model=named)).path
    if dtype == "auto":
        dtype = auto_dtype(described_folder(path, model_cache), on_cpu=device == "cpu")
    options = BenchOptions(
        model_dir=weights_folder(path, dtype, model_cache),
        dtype=dtype,
        threads=threads,
        prefill=prompts,
        decode=shapes,
        num_rounds=rounds,
        peers=peers,
        peer_cache=peer_cache,
        block_tokens=block_tokens,
        device=device,
        with_deterministic=deterministic,
        expert_offload=expert_offload,
        weights=forms,
        gguf=_gguf_model(path, dtype, model_cache) if "gguf" in forms else None,
    )
    lines: list[dict[str, Any]] = []

    def show(stats: dict[str, Any]) -> None:
        lines.append(stats)
        if as_json:
            print(json.dumps(stats), flush=True)
        elif stats["what"] not in ENGINE_RESULTS:
            rest = "  ".join(f"{name} {_shown(value)}" for name, value in stats.items() if name != "what")
            print(f"{stats['what']}: {rest}", flush=True)

    run_engine_bench(options, show)
    if not as_json:
        # With all peers the table is wider than 80 columns, and nothing of it can be folded.
        Console(width=max(out.width, _ENGINE_TABLE_WIDTH)).print(engine_table(lines))


def _weight_forms(listed: str) -> tuple[FormName, ...]:
    known: tuple[FormName, ...] = (*get_args(WeightDtype), "gguf")
    names = [name for name in listed.split(",") if name]
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"{', '.join(unknown)}: not among {', '.join(known)}")
    return tuple(name for name in known if name in names)


def _gguf_model(path: Path, dtype: str, model_cache: Path | None) -> GgufModel:
    """Return the file and the folder that is made of it with its matrices as they are."""
    if not is_gguf(path):
        raise typer.BadParameter(f"--weights gguf: {path} is not a GGUF file")
    return GgufModel(path, weights_folder(path, dtype, model_cache, keeps_quantized=True))


_ENGINE_TABLE_WIDTH = 120
# The lines of the engine benchmark that its table holds.
ENGINE_RESULTS = ("prefill", "decode", "peer")


def engine_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Return one row for each measure: tokens a second of ours, then of each peer and limit with the median
    of the rounds' ratios of ours to it."""
    peers = list(dict.fromkeys(line["peer"] for line in lines if line["what"] == "peer"))
    title = "engine benchmark, tok/s (ratio of tandem's, median of rounds)"
    table = made_table(title, "measure", numbers=["tandem", *peers, "limit", "products", "void"])
    for line in lines:
        if line["what"] not in ("prefill", "decode"):
            continue
        is_prefill = line["what"] == "prefill"
        name = f"prefill {line['tokens']}" if is_prefill else f"decode {line['batch']} at {line['context']}"
        cells = [_shown(line["tok_s"])]
        for peer in peers:
            found = next((each for each in lines if _is_of(each, line) and each["peer"] == peer), {})
            cells.append(_with_ratio(found.get("peer_tok_s"), found.get("ratio")))
        for limit in ("limit", "products"):
            cells.append(_with_ratio(line.get(f"{limit}_tok_s"), line.get(f"{limit}_ratio")))
        table.add_row(name, *cells, f"{line['void']} of {line['rounds']}" if line["void"] else "")
    return table


def _with_ratio(tok_s: float | None, ratio: float | None) -> str:
    return NONE if tok_s is None or ratio is None else f"{tok_s:.1f} ({ratio:.2f})"


def _is_of(peer: Mapping[str, Any], line: Mapping[str, Any]) -> bool:
    keys = ("tokens", "batch", "context")
    is_peer = peer["what"] == "peer" and peer["of"] == line["what"]
    return is_peer and all(peer[key] == line[key] for key in keys)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    if isinstance(value, float):
        return f"{value:.3g}" if value < 10 else f"{value:.1f}"
    return NONE if value is None else str(value)


_COUNT = "0*[1-9][0-9]*"
_PROMPT_TOKENS = re.compile(_COUNT)
_DECODE_SHAPE = re.compile(f"({_COUNT})(?:x({_COUNT}))?")


def _prompt_tokens(item: str) -> int:
    if not _PROMPT_TOKENS.fullmatch(item.strip()):
        raise _not_understood("--prefill", "whole numbers N", item)
    return int(item)


def _decode_shape(item: str, context: int) -> tuple[int, int]:
    """Read "16", or "16x2048" with a context of its own."""
    found = _DECODE_SHAPE.fullmatch(item.strip())
    if found is None:
        raise _not_understood("--decode-batch", "whole numbers N or NxCONTEXT", item)
    batch, own_context = found.groups()
    return int(batch), int(own_context or context)


def _not_understood(option: str, wanted: str, item: str) -> typer.BadParameter:
    """Return the error for an item of a list."""
    return typer.BadParameter(f"expected {wanted} above 0 between commas, not {item!r}", param_hint=option)
