"""Chat through a pipe: one line in, one line out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TextIO

import typer
from rich.console import Console

from cluster.api.blocking_client import BlockingClient
from cluster.api.generate_options import GenerateOptions
from cluster.cli.calls import completion_json, explain_view
from cluster.cli.chat_session import ChatSession, SpokenAnswer, chat_model
from cluster.proto.tandem.v1 import inference_pb2 as pb

# What a line of a pipe may hold; gateways take messages of 16 MiB by default.
MAX_LINE_CHARS = 16 << 20
_BREAKS_TO_SPACES = str.maketrans(dict.fromkeys("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", " "))


class PipeScreen:
    """Writes one line for each answer, and nothing else: its text, in which line breaks are spaces, or one
    JSON object."""

    def __init__(self, output: TextIO, errors: Console, *, as_json: bool) -> None:
        self._output = output
        self._errors = errors
        self._as_json = as_json

    def show(self, delta: pb.Delta) -> None:
        if not self._as_json:
            self._output.write(delta.text.translate(_BREAKS_TO_SPACES))
            self._output.flush()

    def end(self, answer: SpokenAnswer) -> None:
        if not self._as_json:
            self._output.write("\n")
        elif answer.completion is not None:
            self._output.write(f"{json.dumps(completion_json(answer.completion))}\n")
        self._output.flush()

    def note(self, text: str) -> None:
        self._errors.print(text, markup=False, highlight=False, soft_wrap=True)

    def explain(self, explained: pb.ExplainResponse) -> None:
        self._errors.print(explain_view(explained))


def chat_through_pipe(
    client: BlockingClient,
    options: GenerateOptions,
    source: TextIO,
    screen: PipeScreen,
    *,
    system: str,
    timeout_s: float | None,
) -> None:
    """Answer each line that is not empty; the first request that fails ends the chat, and so does Ctrl-C."""
    chat_model(client.models(), options.model)
    chat = ChatSession(client, options, screen, timeout_s, system)
    for line in pipe_lines(source):
        answer = chat.take(line)
        if answer is not None and answer.completion is None:
            raise KeyboardInterrupt


def pipe_lines(source: TextIO) -> Iterator[str]:
    """Yield each line that is not empty; a usage error for one that is too long, or no UTF-8."""
    try:
        while line := source.readline(MAX_LINE_CHARS + 1):
            if len(line) > MAX_LINE_CHARS:
                raise typer.BadParameter(
                    f"a line of standard input is longer than {MAX_LINE_CHARS} characters"
                )
            if line.strip():
                yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not UTF-8: {error}") from error
