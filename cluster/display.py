"""What the command line shows people: tables, the path matrix, plots. Figures in, rich objects out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import plotext
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.bench import PERCENTILES
from cluster.proto import tandem_pb2 as pb

_NONE = "-"
_NUM_BINS = 30
_LATE_S = 3.0
"""Replicas report several times a second; an older report is worth a note."""


class DemoRow(NamedTuple):
    """One request of the demonstration. Times are milliseconds, rates 1e9 bytes a second."""

    prefill: str
    decode: str
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    itl_ms: float
    transfer_gb_s: float
    transport: str


def progress_line(stage: str, ready: dict[str, tuple[int, int]]) -> str:
    """`loading: prefill 1 of 1, decode 0 of 1`; `ready` is pool name to (replicas ready, wanted)."""
    pools = ", ".join(f"{name} {num} of {wanted}" for name, (num, wanted) in ready.items())
    return f"{stage}: {pools}" if pools else stage


@contextlib.contextmanager
def stages(console: Console, first: str) -> Iterator[Callable[[str], None]]:
    """Tell what is going on: by a spinner on a terminal, elsewhere by a line whenever it changes."""
    if console.is_terminal:
        with console.status(first) as status:
            yield status.update
        return
    told: list[str] = []

    def tell(stage: str) -> None:
        if told[-1:] != [stage]:
            told.append(stage)
            console.print(stage, soft_wrap=True, highlight=False)

    tell(first)
    yield tell


def engine_line(figures: dict[str, Any]) -> str:
    """A line of the engine's benchmark: `prefill  tokens 512  batch 1  ...`."""
    rest = "  ".join(f"{name} {value}" for name, value in figures.items() if name != "what")
    return f"{figures['what']:<8} {rest}"


def demo_table(rows: Sequence[DemoRow]) -> Table:
    """What the requests of the demonstration met, one row each."""
    numbers = "cached\ntokens", "TTFT\nms", "ITL\nms", "transfer\nGB/s"
    table = _table("requests that share a prefix", "", "prefill replica", "decode replica", numbers=numbers)
    if any(row.prefill == row.decode for row in rows):
        table.caption = "the same replica twice: it held most of the prompt and computed the rest itself"
        table.caption_justify = "left"
    for number, row in enumerate(rows, 1):
        cached = f"{row.cached_tokens} of {row.prompt_tokens}"
        table.add_row(
            str(number),
            row.prefill,
            row.decode,
            f"[green]{cached}[/]" if row.cached_tokens else cached,
            f"{row.ttft_ms:.1f}",
            f"{row.itl_ms:.1f}",
            f"{row.transfer_gb_s:.2f} {row.transport}" if row.transport else _NONE,
        )
    return table


def status_view(status: pb.StatusResponse) -> Group:
    """The replicas, the gateways, and the matrix of measured paths between replicas."""
    model = status.model
    head = Text(
        f"{model.name}: {'ready' if status.ready else 'not ready'}; "
        f"context {model.max_context_tokens} tokens, blocks of {model.block_tokens}\n"
        f"requests: {status.num_running_requests} running, {status.num_finished_requests} finished, "
        f"{status.num_cancelled_requests} cancelled, {status.num_failed_requests} failed\n"
    )
    parts: list[RenderableType] = [head, _replica_table(status.replicas)]
    parts += [
        Text(f"{replica.replica_id}: {note}")
        for replica in status.replicas
        for note in _replica_notes(replica)
    ]
    if any(replica.paths for replica in status.replicas):
        parts.append(_path_matrix(status.replicas))
    gateways = _table("gateways", "gateway", "address", "process")
    for gateway in status.gateways:
        gateways.add_row(gateway.gateway_id, gateway.address, str(gateway.process_id))
    return Group(*parts, gateways)


def explain_view(explained: pb.ExplainResponse) -> Group:
    """Every decision with all its candidates, the chosen ones marked, and what happened when."""
    end = f"{explained.state}: {explained.reason}" if explained.reason else explained.state
    parts: list[RenderableType] = [Text(f"{explained.request_id}: {end}\n")]
    for decision in explained.decisions:
        parts += [_candidate_table(decision)]
        parts += [
            Text(f"{candidate.replica_id} ({candidate.side}): {candidate.note}")
            for candidate in decision.candidates
            if candidate.note
        ]
    timeline = _table("timeline", "ms", "event", "detail")
    for event in explained.timeline:
        timeline.add_row(f"{event.at_ms:.1f}", event.name, event.detail)
    return Group(*parts, timeline)


def bench_table(runs: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    """One column a run of `cluster.bench.summarize`, headed by its load."""
    table = _table("serving benchmark", "", numbers=[label for label, _ in runs])
    figures = [figure for _, figure in runs]
    table.add_row("finished", *(f"{run['num_ok']} of {run['num_requests']}" for run in figures))
    for name, key in (("refused", "num_refused"), ("timed out", "num_timed_out"), ("failed", "num_failed")):
        if any(run[key] for run in figures):
            table.add_row(name, *(str(run[key]) for run in figures))
    for name, key in (
        ("requests/s", "requests_per_s"),
        ("input tokens/s", "input_tok_s"),
        ("output tokens/s", "output_tok_s"),
    ):
        table.add_row(name, *(f"{run[key]:.1f}" for run in figures))
    for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("end to end", "e2e_ms")):
        for rank in PERCENTILES:
            cells = (f"{run[key][f'p{rank}']:.1f}" if run[key] else _NONE for run in figures)
            table.add_row(f"{name} p{rank}, ms", *cells)
    table.add_row("goodput, requests/s", *(f"{run['goodput_per_s']:.1f}" for run in figures))
    table.add_row("good", *(f"{run['good_share']:.0%}" for run in figures))
    return table


def histogram(name: str, values_ms: Sequence[float], width: int) -> Text:
    """The distribution of a latency, in text."""
    figure = _empty_figure(f"{name}, ms", width, 12)
    figure.draw(figure.hist(list(values_ms), bins=_NUM_BINS))
    return Text(plotext.uncolorize(str(figure.build())))


def sweep_plot(points: Sequence[tuple[float, float]], width: int) -> Text:
    """Goodput against offered load, both in requests a second, beside the line where they are equal."""
    rates = [rate for rate, _ in points]
    figure = _empty_figure("goodput against offered load, requests/s", width, 16)
    for label, values, marker in (("offered", rates, "."), ("good", [good for _, good in points], "o")):
        figure.draw(figure.signal(rates, values, marker=marker).lines().label(label))
    return Text(plotext.uncolorize(str(figure.build())))


def _empty_figure(title: str, width: int, height: int) -> Any:
    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, height)
    figure.title(title)
    return figure


def _replica_table(replicas: Sequence[pb.Replica]) -> Table:
    numbers = "run/\nwait", "free\nblocks", "cached", "prefill\ntok/s", "step\nms", "moved\nGB/s"
    table = _table("replicas", "replica", "role", "state", numbers=numbers)
    for replica in replicas:
        load = replica.load
        table.add_row(
            replica.replica_id,
            f"{replica.role}{_shape(replica)}",
            replica.state,
            f"{load.num_running}/{load.num_waiting}",
            f"{load.num_free_blocks}/{load.num_total_blocks}",
            str(load.num_cached_blocks),
            _rate(load.prefill_tok_s, 0),
            _rate(load.decode_step_ms, 1),
            _rate(load.transfer_gb_s, 2),
        )
    return table


def _shape(replica: pb.Replica) -> str:
    """` 2x2 (10+18)`: tp x pp and the layers of each stage; empty for a single rank."""
    layers = replica.stage_layers
    if replica.tp * len(layers) <= 1:
        return ""
    split = f" ({'+'.join(map(str, layers))})" if len(layers) > 1 else ""
    return f" {replica.tp}x{len(layers)}{split}"


def _replica_notes(replica: pb.Replica) -> list[str]:
    """What should not be: each a line, and none for a healthy replica."""
    load = replica.load
    counts = (
        (load.num_checksum_failures, "pieces failed their checksum and were computed again"),
        (load.num_quarantined_blocks, "blocks in quarantine"),
        (load.num_leaked_blocks, "blocks referenced although nothing runs"),
    )
    notes = [replica.note] if replica.note else []
    if load.age_s > _LATE_S:
        notes.append(f"its last report is {load.age_s:.0f} s old")
    notes += [
        f"rank {path.rank} writes to {path.peer_replica_id} rank {path.peer_rank} over {path.transport} "
        f"({path.device}), {path.gb_s:.2f} GB/s: {path.instead_of}"
        for path in replica.paths
        if path.instead_of
    ]
    return notes + [f"{number} {meaning}" for number, meaning in counts if number]


def _candidate_table(decision: pb.Decision) -> Table:
    title = f"attempt {decision.attempt}, policy {decision.policy}: {decision.reason}"
    numbers = "matched", "uncached", "backlog", "transfer", "pressure", "cost"
    table = _table(title, "", "replica", "side", numbers=numbers)
    chosen = {("prefill", decision.prefill), ("decode" if decision.prefill else "local", decision.decode)}
    for candidate in decision.candidates:
        table.add_row(
            "[green]*[/]" if (candidate.side, candidate.replica_id) in chosen else "",
            candidate.replica_id,
            candidate.side,
            str(candidate.matched_tokens),
            str(candidate.uncached_tokens),
            f"{candidate.backlog_tokens:.0f}",
            f"{candidate.transfer_tokens:.0f}",
            f"{candidate.pressure_tokens:.0f}",
            f"{candidate.cost:.1f}",
        )
    return table


def _path_matrix(replicas: Sequence[pb.Replica]) -> Table:
    """Rows write, columns receive; each cell sums up the paths between the ranks of the two."""
    cells: dict[tuple[str, str], list[pb.Path]] = {}
    for replica in replicas:
        for path in replica.paths:
            cells.setdefault((replica.replica_id, path.peer_replica_id), []).append(path)
    targets = sorted({target for _, target in cells})
    table = _table("paths (rows write to columns; the slowest of several)", "from", *targets)
    for source in sorted({source for source, _ in cells}):
        table.add_row(source, *(_path_cell(cells.get((source, target), [])) for target in targets))
    return table


def _path_cell(paths: Sequence[pb.Path]) -> str:
    """`shm memory 5.80 GB/s 3 us`, and how many paths it stands for; warnings are yellow."""
    if not paths:
        return _NONE
    slowest = min(paths, key=lambda path: path.gb_s)
    names = "+".join(sorted({f"{path.transport} {path.device}" for path in paths}))
    number = f" x{len(paths)}" if len(paths) > 1 else ""
    cell = f"{names}{number} {slowest.gb_s:.2f} GB/s {max(path.latency_us for path in paths):.0f} us"
    return f"[yellow]{cell}[/]" if any(path.instead_of for path in paths) else cell


def _table(title: str, *texts: str, numbers: Sequence[str] = ()) -> Table:
    """A table that is narrow enough for 80 columns; the `numbers` stand to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)

    for name in texts:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _rate(value: float, num_digits: int) -> str:
    return f"{value:.{num_digits}f}" if value else _NONE
