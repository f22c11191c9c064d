"""`tandem bench store`: a trace through the policies of the store at several sizes, without a cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from cluster.bench.trace_file import TRACE_BLOCK_TOKENS, read_trace
from cluster.cli.terminal import AsJson, err, made_table, out
from cluster.errors import BenchError
from kvtransfer.store.policy.trace_simulation import POLICIES, Outcome, TierSizes, simulate

# Blocks of 512 tokens: NVMe has about what one node holds of a model with 100 kB a token.
_DEVICE_BLOCKS = 2000
_DRAM_BLOCKS = "8000"
_NVME_BLOCKS = "0,10000,20000,40000,80000"


def bench_store(
    trace: Annotated[
        Path, typer.Option(help="Requests with their blocks, in Mooncake's format (JSON lines).")
    ],
    device_blocks: Annotated[int, typer.Option(min=0, help="What the replicas hold.")] = _DEVICE_BLOCKS,
    dram_blocks: Annotated[str, typer.Option(help="Sizes of the host tier.")] = _DRAM_BLOCKS,
    nvme_blocks: Annotated[str, typer.Option(help="Sizes of the NVMe tier.")] = _NVME_BLOCKS,
    as_json: AsJson = False,
) -> None:
    """Replay a trace through the store's policies, without a cluster: hit rates against the ideal, writes."""
    sizes = _whole_numbers(dram_blocks), _whole_numbers(nvme_blocks)
    replay_store(trace, device_blocks, *sizes, err if as_json else out, as_json=as_json)


def _whole_numbers(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [-1]
    if min(values) < 0:
        raise typer.BadParameter(f"expected whole numbers from 0 between commas, not {text!r}")
    return values


def replay_store(
    trace: Path,
    device_blocks: int,
    dram_blocks: Sequence[int],
    nvme_blocks: Sequence[int],
    console: Console,
    *,
    as_json: bool,
) -> None:
    """Replay the trace with every size of DRAM and NVMe and every policy; print a table, or JSON lines one by
    one. `BenchError` when the trace cannot be read or is empty."""
    block_tokens, requests = TRACE_BLOCK_TOKENS, []
    for request in read_trace(trace):
        block_tokens = request.block_tokens
        requests.append(request.full_blocks)
    if not any(requests):
        raise BenchError(f"{trace} has no full block of {block_tokens} tokens")
    outcomes = []
    with console.status("replaying") as status:
        for dram in dram_blocks:
            for nvme in nvme_blocks:
                for policy in POLICIES if nvme else ("all",):
                    status.update(f"replaying: DRAM {dram}, NVMe {nvme} blocks, {policy}")
                    outcome = simulate(requests, TierSizes(device_blocks, dram, nvme), policy)
                    outcomes.append(outcome)
                    if as_json:
                        print(json.dumps(store_json(outcome, block_tokens)), flush=True)
    if not as_json:
        console.print(store_table(outcomes, block_tokens))


def store_json(outcome: Outcome, block_tokens: int) -> dict[str, Any]:
    """Return one run as JSON values; rates are shares of all blocks of the trace."""
    return {
        "what": "store",
        "policy": outcome.policy if outcome.sizes.nvme else None,
        "block_tokens": block_tokens,
        "device_blocks": outcome.sizes.device,
        "dram_blocks": outcome.sizes.dram,
        "nvme_blocks": outcome.sizes.nvme,
        "num_blocks": outcome.num_blocks,
        "device_hit_rate": outcome.num_device_hits / outcome.num_blocks,
        "dram_hit_rate": outcome.num_dram_hits / outcome.num_blocks,
        "nvme_hit_rate": outcome.num_nvme_hits / outcome.num_blocks,
        "hit_rate": outcome.hit_rate,
        "ideal_hit_rate": outcome.ideal_hit_rate,
        "written_blocks": outcome.num_written,
        "moved_blocks": outcome.num_moved,
        "written_per_hit": outcome.written_per_hit,
    }


def store_table(outcomes: Sequence[Outcome], block_tokens: int) -> Table:
    """Return a table of one trace's runs, grouped by size."""
    first = outcomes[0]
    title = (
        f"{first.num_blocks} blocks of {block_tokens} tokens; the device holds {first.sizes.device}; "
        f"ideal hit rate {_percent(first.ideal_hit_rate)}"
    )
    table = made_table(
        title,
        numbers=("DRAM", "NVMe", "policy", "device", "DRAM hit", "NVMe hit", "all", "ideal", "written/hit"),
    )
    sizes = first.sizes
    for outcome in outcomes:
        if outcome.sizes != sizes:
            table.add_section()
        sizes = outcome.sizes
        table.add_row(
            str(sizes.dram),
            str(sizes.nvme),
            outcome.policy if sizes.nvme else "",
            _percent(outcome.num_device_hits / outcome.num_blocks),
            _percent(outcome.num_dram_hits / outcome.num_blocks),
            _percent(outcome.num_nvme_hits / outcome.num_blocks),
            _percent(outcome.hit_rate),
            _percent(outcome.hit_rate / outcome.ideal_hit_rate) if outcome.num_ideal_hits else "",
            "" if outcome.written_per_hit is None else f"{outcome.written_per_hit:.2f}",
        )
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
