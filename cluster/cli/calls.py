"""The commands on a running cluster, behind `cluster.cli.main`; they reach a gateway through the client."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.api.client import Client, Collector, Completion, GenerateOptions, Prompt, generate_request
from cluster.api.json_text import as_dict, status_json
from cluster.cli.bench import Objectives, RequestRecord, Workload, knee, run_workload, summarize
from cluster.cli.display import bench_table, explain_view, histogram, status_view, sweep_plot
from cluster.errors import BenchError
from cluster.proto import tandem_pb2 as pb
from cluster.text.validation import check_values
from kvtransfer.common.clock import Clock


async def generate(
    address: str, prompt: Prompt, options: GenerateOptions, timeout_s: float | None, *, as_json: bool
) -> None:
    """Stream the text to standard output as it comes, or print one JSON object at the end.

    Several samples do not stream: their texts would mix. They follow one another at the end.
    """
    check_values(generate_request(prompt, options))
    collector = Collector()
    async with Client(address) as client:
        stream = client.generate(prompt, options, timeout_s=timeout_s)
        async for event in stream:
            collector.add(event)
            if isinstance(event, pb.Delta) and not as_json and (options.n or 1) == 1:
                sys.stdout.write(event.text)
                sys.stdout.flush()
    completion = collector.completion()
    if as_json:
        print(json.dumps(completion_json(completion)))
    elif len(completion.texts) > 1:
        for index, text in enumerate(completion.texts):
            print(f"--- {index}: {completion.finish_reasons[index]}\n{text}")
    else:
        print()


def completion_json(completion: Completion) -> dict[str, Any]:
    """One object: text, token_ids, finish_reason, usage, timing, and logprobs where they were asked for;
    with more samples, `samples` holds each."""
    finished = completion.finished
    samples = [
        {
            "text": text,
            "token_ids": list(ids),
            "finish_reason": reason,
            **({"logprobs": [as_dict(item) for item in logprobs]} if logprobs else {}),
        }
        for text, ids, reason, logprobs in zip(
            completion.texts,
            completion.token_ids,
            completion.finish_reasons,
            completion.logprobs,
            strict=True,
        )
    ]
    return {
        "request_id": completion.request_id,
        **samples[0],
        **({"samples": samples} if len(samples) > 1 else {}),
        "seed": completion.seed,
        "usage": as_dict(finished.usage),
        "timing": as_dict(finished.timing),
        "prefill_replica": finished.prefill_replica,
        "decode_replica": finished.decode_replica,
    }


async def status(address: str, console: Console, *, as_json: bool) -> None:
    async with Client(address) as client:
        reply = await client.status()
        stores = (await client.store_stat()).nodes if reply.stores else []
        paths = await client.paths()
    if as_json:
        print(json.dumps(status_json(reply, stores, paths)))
    else:
        console.print(status_view(reply, stores, paths))


async def explain(address: str, request_id: str, console: Console, *, as_json: bool) -> None:
    async with Client(address) as client:
        reply = await client.explain(request_id)
    if as_json:
        print(json.dumps(as_dict(reply)))
    else:
        console.print(explain_view(reply))


async def bench_serve(
    address: str,
    workloads: Sequence[Workload],
    objectives: Objectives,
    timeout_s: float,
    clock: Clock,
    console: Console,
    *,
    as_json: bool,
) -> None:
    """Run the workloads one after the other; a table, a plot and with several rates the knee, or JSON lines.

    A workload's `vocab_size` 0 becomes the served model's.
    """
    runs: list[tuple[str, dict[str, Any]]] = []
    records: list[RequestRecord] = []
    async with Client(address) as client:
        model = (await client.models())[0]
        for workload in workloads:
            drawn = replace(workload, vocab_size=workload.vocab_size or model.vocab_size)
            label = f"{drawn.rate_per_s:g} req/s" if drawn.rate_per_s > 0 else f"{drawn.concurrency} at once"
            records = await _run(client, drawn, timeout_s, clock, console, label)
            figures = {
                "what": "serve",
                "model": model.name,
                "offered_per_s": drawn.rate_per_s or None,
                "concurrency": drawn.concurrency or None,
                "input_tokens": drawn.input_tokens,
                "output_tokens": drawn.output_tokens,
                "shared_prefix_tokens": drawn.shared_prefix_tokens,
                "prefix_groups": drawn.num_groups,
                **summarize(records, objectives),
            }
            runs.append((label, figures))
            if as_json:
                print(json.dumps(figures), flush=True)
    reasons = [figures["first_reason"] for _, figures in runs if figures["first_reason"]]
    if reasons and not any(figures["num_ok"] for _, figures in runs):
        raise BenchError(f"no request finished; the first: {reasons[0]}")
    rates = [(figures["offered_per_s"], figures["good_share"]) for _, figures in runs]
    is_sweep = len(runs) > 1
    if is_sweep and as_json:
        print(json.dumps({"what": "knee", "offered_per_s": knee(rates)}))
    if as_json:
        return
    console.print(bench_table(runs))
    if reasons:
        console.print(f"not every request finished; the first: {reasons[0]}", markup=False, soft_wrap=True)
    if is_sweep:
        points = [(figures["offered_per_s"], figures["goodput_per_s"]) for _, figures in runs]
        console.print(sweep_plot(points, min(console.width, 100)))
        best = knee(rates)
        console.print(f"knee: {'below the lowest rate' if best is None else f'{best:g} req/s'}")
    elif ttfts := [record.ttft_s * 1e3 for record in records if record.outcome == "ok"]:
        console.print(histogram("TTFT", ttfts, min(console.width, 100)))


async def _run(
    client: Client, workload: Workload, timeout_s: float, clock: Clock, console: Console, label: str
) -> list[RequestRecord]:
    async def send(prompt: list[int], num_tokens: int) -> AsyncIterator[int]:
        options = GenerateOptions(max_tokens=num_tokens, ignore_eos=True, seed=workload.seed)
        events = aiter(client.generate(prompt, options, timeout_s=timeout_s, resume=False))
        async for event in events:
            if isinstance(event, pb.Delta) and event.token_ids:
                yield len(event.token_ids)

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=workload.num_requests)
        return await run_workload(workload, send, clock, lambda _: progress.advance(task))
