"""Chat on a terminal: the screen, the editor of lines, and the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from cluster.api.blocking_client import BlockingClient
from cluster.api.client import Completion
from cluster.api.generate_options import GenerateOptions
from cluster.cli.calls import explain_view
from cluster.cli.chat_session import ChatSession, SpokenAnswer, chat_model
from cluster.errors import CallError, InvalidRequestError
from cluster.proto.tandem.v1 import inference_pb2 as pb

_MAX_HISTORY_LINES = 1000
_PROMPT = "> "
# Of what a model says, a terminal gets no control characters beside these.
_KEPT_CONTROLS = "\n\t"


class TerminalScreen:
    """Shows answers as they come, what the model thinks in dim letters, and a line of figures after each."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_thinking = False

    def show(self, delta: pb.Delta) -> None:
        if delta.reasoning:
            self._is_thinking = True
            self._print(delta.reasoning, "dim italic")
        if delta.text:
            if self._is_thinking:
                self._is_thinking = False
                self._console.print("\n")
            self._print(delta.text, "green")

    def end(self, answer: SpokenAnswer) -> None:
        self._is_thinking = False
        self._console.print()
        if answer.completion is not None:
            self.note(stats_line(answer.completion))
        else:
            self.note("(the answer is not complete)")

    def note(self, text: str) -> None:
        self._console.print(printable(text), style="dim", markup=False, highlight=False, soft_wrap=True)

    def explain(self, explained: pb.ExplainResponse) -> None:
        self._console.print(explain_view(explained))

    def _print(self, text: str, style: str) -> None:
        self._console.print(
            printable(text), end="", style=style, markup=False, highlight=False, soft_wrap=True
        )


def printable(text: str) -> str:
    """Return the text without control characters, with which a model could steer the terminal."""
    return "".join(it if it.isprintable() or it in _KEPT_CONTROLS else "\ufffd" for it in text)


def stats_line(completion: Completion) -> str:
    """Return `48 tokens (length), first after 0.03 s, then 120.0 a second; 64 of 80 prompt tokens cached`."""
    usage, timing = completion.finished.usage, completion.finished.timing
    cached = usage.cached.device + usage.cached.dram + usage.cached.nvme + usage.cached.remote
    num_later, later_s = usage.completion_tokens - 1, (timing.e2e_ms - timing.ttft_ms) / 1e3
    rate = f", then {num_later / later_s:.1f} a second" if num_later > 0 and later_s > 0 else ""
    capped = f"; max_tokens was cut to {usage.capped_max_tokens}, by the room in the context or the load"
    return (
        f"{usage.completion_tokens} tokens ({completion.finish_reasons[0]}), first after "
        f"{timing.ttft_ms / 1e3:.2f} s{rate}; {cached} of {usage.prompt_tokens} prompt tokens cached"
        f"{capped if usage.capped_max_tokens else ''}"
    )


class LineEditor:
    """Reads lines from a terminal, with the editing and the history that shells have."""

    def __init__(self, history: Path | None, note: Callable[[str], None]) -> None:
        import readline  # here: where standard input is no terminal, it is not needed

        self._readline = readline
        self._history = history
        self._note = note
        self._num_new = 0
        if history is not None and history.exists():
            try:
                readline.read_history_file(history)
            except OSError as error:
                self._forget(error)

    def lines(self) -> Iterator[str]:
        """Yield each line until Ctrl-D; Ctrl-C discards what was typed."""
        while True:
            try:
                line = input(_PROMPT)
            except EOFError:
                self._note("")
                return
            except KeyboardInterrupt:
                self._note("\nCtrl-D ends the chat")
                continue
            self._num_new += bool(line)
            if line.strip():
                yield line

    def save(self) -> None:
        """Append what was typed to the file."""
        if self._history is None or self._num_new == 0:
            return
        try:
            self._history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._history.touch(mode=0o600)
            self._readline.set_history_length(_MAX_HISTORY_LINES)
            self._readline.append_history_file(self._num_new, self._history)
        except OSError as error:
            self._forget(error)

    def _forget(self, error: OSError) -> None:
        self._note(f"no history: {self._history}: {error.strerror}")
        self._history = None


def chat_on_terminal(
    client: BlockingClient,
    options: GenerateOptions,
    console: Console,
    *,
    system: str,
    timeout_s: float | None,
    history: Path | None,
) -> None:
    """Chat until Ctrl-D. A request that fails is shown, and the chat continues without it."""
    model = chat_model(client.models(), options.model)
    screen = TerminalScreen(console)
    chat = ChatSession(client, options, screen, timeout_s, system)
    screen.note(f"{model.name}, {model.max_context_tokens} tokens of context; /help lists the commands")
    editor = LineEditor(history, screen.note)
    try:
        for line in editor.lines():
            try:
                chat.take(line)
            except (CallError, InvalidRequestError) as error:
                console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
                screen.note("the chat is as before that message; /reset begins anew")
            except KeyboardInterrupt:
                screen.note("interrupted")
    finally:
        editor.save()
