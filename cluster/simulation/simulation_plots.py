"""Plots of a simulation as PNG files, by matplotlib: time lines, distributions of the time to the first token
and between tokens, and the load of each replica."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cluster.errors import ConfigError
from cluster.simulation.simulation_result import SimulationResult
from cluster.simulation.time_lines import TimeLines

_SIZE_INCHES = (10.0, 6.0)
_NUM_BINS = 60
# More replicas than this are drawn as their mean and range.
_MOST_LINES = 16


def prepare_plots(folder: Path) -> None:
    """Make the folder. Raises `ConfigError` where that fails, or matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plots: needs matplotlib: pip install matplotlib")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plots {folder}: {error.strerror}") from error


def save_plots(folder: Path, result: SimulationResult, lines: TimeLines) -> list[Path]:
    """Write the plots into a folder that was prepared, and return their files. Raises `ConfigError` where
    they cannot be written."""
    from matplotlib.figure import Figure

    try:
        files = []
        drawings: dict[str, Callable[[Any], None]] = {
            "time_lines.png": lambda figure: _draw_lines(figure, lines),
            "latencies.png": lambda figure: _draw_latencies(figure, result),
            "replicas.png": lambda figure: _draw_replicas(figure, result),
        }
        for name, draw in drawings.items():
            figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
            draw(figure)
            figure.savefig(folder / name)
            files.append(folder / name)
    except OSError as error:
        raise ConfigError(f"--plots {folder}: {error.strerror}") from error
    return files


def _draw_lines(figure: Any, lines: TimeLines) -> None:
    rows: tuple[tuple[str, Mapping[str, Sequence[float]]], ...] = (
        ("prompt tokens that wait", lines.backlog_tokens),
        ("requests that run", lines.running),
        ("KV in use", lines.kv_used),
    )
    axes = figure.subplots(len(rows) + 1, 1, sharex=True)
    for axis, (name, by_replica) in zip(axes, rows, strict=False):
        axis.set_ylabel(name)
        values = [[*line, *[0] * (len(lines.times_s) - len(line))] for line in by_replica.values()]
        if len(values) <= _MOST_LINES:
            for replica_id, line in zip(by_replica, values, strict=True):
                axis.plot(lines.times_s, line, linewidth=0.8, label=replica_id)
        else:
            together = np.asarray(values)
            axis.fill_between(lines.times_s, together.min(0), together.max(0), alpha=0.3)
            axis.plot(lines.times_s, together.mean(0))
    axes[-1].set_ylabel("held in gateways")
    axes[-1].plot(lines.times_s, lines.held)
    axes[-1].set_xlabel("seconds")
    if 0 < len(lines.running) <= _MOST_LINES:
        axes[0].legend(fontsize="x-small", ncols=4)


def _draw_latencies(figure: Any, result: SimulationResult) -> None:
    good = [record for record in result.records if record.is_good]
    left, right = figure.subplots(1, 2)
    for axis, name, values in (
        (left, "time to first token, s", [record.ttft_s for record in good]),
        (right, "time between tokens, s", [record.tpot_s for record in good if record.num_output > 1]),
    ):
        axis.hist(values, bins=_NUM_BINS)
        axis.set_xlabel(name)
        axis.set_ylabel("requests")


def _draw_replicas(figure: Any, result: SimulationResult) -> None:
    top, bottom = figure.subplots(2, 1, sharex=True)
    names = [use.replica_id for use in result.replicas]
    computed = [use.num_computed for use in result.replicas]
    top.bar(names, computed, label="computed")
    top.bar(names, [use.num_found for use in result.replicas], bottom=computed, label="found in the cache")
    top.set_ylabel("tokens of prompts")
    top.legend()
    bottom.bar(names, [use.busy_s / result.span_s for use in result.replicas])
    bottom.set_ylabel("busy")
    bottom.tick_params(axis="x", rotation=90)
