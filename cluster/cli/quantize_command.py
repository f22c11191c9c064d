"""`tandem quantize`: write a quantized folder of a model, and say what that costs in accuracy."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from cluster.cli.model_download import fetched
from cluster.cli.progress_report import stages
from cluster.cli.terminal import AsJson, die, err, made_table, out
from cluster.dtypes import auto_dtype
from cluster.model_source.names import located_model
from cluster.model_source.source import ModelSource
from cluster.text.tokenizer import ModelText
from workers.errors import QuantizationError
from workers.model.model_folder import described_folder, weights_folder

if TYPE_CHECKING:  # their modules import torch, which takes seconds
    from torch import Tensor

    from workers.quantizer.quantize_checkpoint import QuantizedFolder
    from workers.quantizer.rounding import Rounder
    from workers.quantizer.target import QuantizationTarget

# The text that a model is calibrated with, and that by which it is measured.
_CALIBRATION_WINDOWS, _MEASURED_WINDOWS, _WINDOW_TOKENS = 64, 8, 512
# A token and one that follows.
_MIN_MEASURED_TOKENS = 2
Shown = Callable[[float, str], None]


def quantize(
    model: Annotated[str, typer.Argument(help="Folder, GGUF file, or name, as of `tandem serve`.")],
    to: Annotated[
        str,
        typer.Option(
            help="int4, int8 or fp8: weights alone; w8a8: weights and inputs of products in 8 bits.",
        ),
    ],
    to_folder: Annotated[Path, typer.Option("--out", help="The folder to write, or to continue.")],
    group: Annotated[
        int | None,
        typer.Option(help="Inputs that share a scale; default: 32 of int4, all inputs of int8."),
    ] = None,
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="Give each group of int4 a zero point: more accurate.")
    ] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="A text like those of your requests: weights and inputs then lose less."),
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Compute the perplexity before and after, a layer at a time.")
    ] = True,
    text: Annotated[
        Path | None, typer.Option(help="The text of the perplexity; default: Tandem's own README.")
    ] = None,
    model_cache: Annotated[
        Path | None, typer.Option(help="Folder for what is made of a GGUF file; default: ~/.cache/tandem.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Quantize MODEL into a folder that Tandem and vLLM serve (compressed-tensors).

    Run the command again to continue after an interruption.
    """
    from workers.quantizer.target import QuantizationTarget  # here: it takes torch, as all below

    try:
        target = QuantizationTarget.of(to, group, is_asymmetric=asymmetric)
    except QuantizationError as error:
        raise typer.BadParameter(str(error)) from None
    calibration = None if calibrate is None else _read(calibrate, "--calibrate")
    measured = _measured_text(text) if measure else None
    path = fetched(ModelSource(model=located_model(model, Path().resolve()))).path
    with stages(err, f"quantizing {path.name}") as say:
        source = weights_folder(path, "bf16", model_cache, lambda phase: say("converting", phase))
    run = _Run(source, described_folder(path, model_cache), to_folder, target)
    windows = None if measured is None else run.windows(measured, _MEASURED_WINDOWS)
    try:
        written = run.write(calibration)
        perplexities = None if windows is None else run.measure(windows)
    except KeyboardInterrupt:
        die("interrupted; the same command continues", 130)
    if as_json:
        typer.echo(json.dumps(_as_json(written, perplexities)))
    else:
        _show(to_folder, written, perplexities, is_calibrated=calibrate is not None)


class _Run:
    """Quantizes one model."""

    def __init__(self, source: Path, described: Path, to_folder: Path, target: QuantizationTarget) -> None:
        """`described` has the tokenizer of the model in `source`."""
        self._source, self._described = source, described
        self._out, self._target = to_folder, target
        self._dtype_name = auto_dtype(source, on_cpu=True)

    def windows(self, text: _Text, num_windows: int) -> list[Tensor]:
        """Return windows of the tokens of a text, which must be enough."""
        from workers.quantizer.text_perplexity import text_windows

        tokens = np.frombuffer(ModelText.load(self._described).encode(text.content), "<u4")
        if len(tokens) < text.min_tokens:
            problem = f"has {len(tokens)} tokens, and {text.min_tokens} are needed; name a longer text"
            raise typer.BadParameter(f"{text.name}: {problem}", param_hint=text.option)
        return text_windows(tokens, num_windows, _WINDOW_TOKENS)

    def write(self, calibration: _Text | None) -> QuantizedFolder:
        """Write the folder, calibrated with a text if there is one."""
        from workers.quantizer.quantize_checkpoint import QuantizationJob

        rounder, method = self._rounder(calibration)
        job = QuantizationJob(self._source, self._out, self._target, method)
        with _bar(f"quantizing to {self._target.name}") as shown:
            return job.run(rounder, lambda done, total, what: shown(done / total, what))

    def measure(self, windows: list[Tensor]) -> tuple[float, float] | None:
        """Return the perplexity before and after; None, and why in a line, where it cannot be had."""
        from workers.quantizer.rounded_inputs import round_product_inputs
        from workers.quantizer.text_perplexity import layered_perplexity
        from workers.rank.runner_settings import read_dtype

        dtype = read_dtype(self._dtype_name)
        try:
            with _bar("measuring perplexity") as shown:
                show = functools.partial(_show_part, shown)
                before = layered_perplexity(self._source, dtype, windows, functools.partial(show, "before"))
                watch = round_product_inputs if self._target.quantizes_inputs else lambda decoder: None
                after = layered_perplexity(
                    self._out, dtype, windows, functools.partial(show, "after"), watch=watch
                )
        except QuantizationError as error:
            err.print(f"perplexity is not measured: {error}", soft_wrap=True, highlight=False, markup=False)
            return None
        return before, after

    def _rounder(self, calibration: _Text | None) -> tuple[Rounder, str]:
        """Return what rounds, and what names its method, with the text that it depends on."""
        from workers.quantizer.calibrated_rounder import CalibratedRounder
        from workers.quantizer.rounding import NearestRounder
        from workers.rank.runner_settings import read_dtype

        if calibration is None:
            return NearestRounder(self._target), "nearest"
        windows = self.windows(calibration, _CALIBRATION_WINDOWS)
        rounder = CalibratedRounder(self._source, self._target, windows, read_dtype(self._dtype_name))
        digest = hashlib.sha256(calibration.content.encode()).hexdigest()
        return rounder, f"calibrated {digest} {self._dtype_name}"


class _Text(NamedTuple):
    """A text that is given by an option, and how many tokens it needs."""

    content: str
    name: str
    option: str
    min_tokens: int


def _measured_text(file: Path | None) -> _Text:
    """Return the text in the file, or the description of this distribution."""
    if file is not None:
        return _read(file, "--text")
    content = str(importlib.metadata.metadata("tandem-serve").json["description"])
    return _Text(content, "README", "--text", _MIN_MEASURED_TOKENS)


def _read(file: Path, option: str) -> _Text:
    min_tokens = _MIN_MEASURED_TOKENS if option == "--text" else _WINDOW_TOKENS
    try:
        return _Text(file.read_text(encoding="utf-8"), str(file), option, min_tokens)
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8, at byte {error.start}; convert it, or name another text"
        raise typer.BadParameter(f"{file}: {problem}", param_hint=option) from error
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise typer.BadParameter(f"{file}: {reason}", param_hint=option) from error


def _show_part(shown: Shown, what: str, done: int, total: int) -> None:
    shown(done / total, what)


@contextmanager
def _bar(what: str) -> Iterator[Shown]:
    """Show a bar on a terminal, otherwise a line, and how far it is every few seconds."""
    if not err.is_terminal:
        with stages(err, what) as say:
            yield lambda part, detail: say(what, f"{detail}, {100 * part:.0f} %")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda part, detail: bar.update(task, description=f"{what}, {detail}", completed=part)


def _as_json(
    written: QuantizedFolder, perplexities: tuple[float, float] | None
) -> dict[str, float | dict[int, float] | None]:
    before, after = perplexities or (None, None)
    return {
        "source_bytes": written.source_bytes,
        "bytes": written.num_bytes,
        "layer_errors": written.layer_to_error,
        "perplexity_before": before,
        "perplexity_after": after,
    }


def _show(
    folder: Path, written: QuantizedFolder, perplexities: tuple[float, float] | None, *, is_calibrated: bool
) -> None:
    """Print the errors, the sizes and the perplexities."""
    of_what = "products with the text" if is_calibrated else "weights"
    out.print(f"errors of the layers, as parts of their {of_what}")
    table = made_table("", "layer", numbers=["error"])
    for layer, error in written.layer_to_error.items():
        table.add_row(str(layer), f"{100 * error:.2f} %")
    out.print(table)
    before, after = written.source_bytes / 1e9, written.num_bytes / 1e9
    out.print(f"weights     {after:.3f} GB, before {before:.3f} GB", highlight=False)
    if perplexities is not None:
        was, found = perplexities
        part = 100 * (found / was - 1)
        out.print(f"perplexity  {found:.3f}, before {was:.3f} ({part:+.2f} %)", highlight=False)
    out.print(f"written     {folder}", soft_wrap=True, highlight=False, markup=False)
