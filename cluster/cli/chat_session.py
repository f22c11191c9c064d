"""`tandem chat`: a conversation with the served model, on a terminal or line by line through a pipe."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import typer
from rich.console import Console

from cluster.api.blocking_client import BlockingClient
from cluster.api.client import Collector, Completion
from cluster.api.generate_options import GenerateOptions, Turn
from cluster.cli.calls import completion_json, explain_view
from cluster.errors import CallError, ConfigError, InvalidRequestError
from cluster.proto.tandem.v1 import inference_pb2 as pb

# What a line of a pipe may hold; gateways take messages of 16 MiB by default.
MAX_LINE_CHARS = 16 << 20
_MAX_HISTORY_LINES = 1000
_PROMPT = "> "
# Of what a model says, a terminal gets no control characters beside these.
_KEPT_CONTROLS = "\n\t"
_BREAKS_TO_SPACES = str.maketrans(dict.fromkeys("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", " "))


@dataclass(slots=True)
class Conversation:
    """What was said so far. `system` goes before it in every request."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)

    def prompt(self, text: str) -> list[Turn]:
        """Return the messages of a request in which the user says `text` next."""
        system = [Turn("system", self.system)] if self.system else []
        return [*system, *self.turns, Turn("user", text)]

    def add(self, text: str, answer: str) -> None:
        """Take in what the user said, and the answer."""
        self.turns += [Turn("user", text), Turn("assistant", answer)]

    def as_json(self) -> dict[str, Any]:
        """Return the messages as other programs write them."""
        system = [Turn("system", self.system)] if self.system else []
        return {"messages": [turn._asdict() for turn in (*system, *self.turns)]}


class SpokenAnswer(NamedTuple):
    """An answer as far as it came; `completion` is None where it did not come to its end."""

    text: str
    completion: Completion | None


class Screen(Protocol):
    """Shows a chat."""

    def show(self, delta: pb.Delta) -> None:
        """Show the next part of an answer."""

    def end(self, answer: SpokenAnswer) -> None:
        """Show that the answer is over."""

    def note(self, text: str) -> None:
        """Say something about the chat."""

    def explain(self, explained: pb.ExplainResponse) -> None:
        """Show where a request went."""


class ChatSession:
    """Sends what the user says, and carries out the user's commands."""

    def __init__(
        self,
        client: BlockingClient,
        options: GenerateOptions,
        screen: Screen,
        timeout_s: float | None = None,
        system: str = "",
    ) -> None:
        self.conversation = Conversation(system)
        self._client = client
        self._options = replace(options, session_id=_drawn_id())
        self._screen = screen
        self._timeout_s = timeout_s
        self._request_id = ""
        # Files that hold this chat, which may be written again.
        self._saved: set[Path] = set()

    def take(self, line: str) -> SpokenAnswer | None:
        """Send what the user says, and return the answer; or carry out a command.

        Ctrl-C ends the answer, and the chat has it as far as it came. `CallError` or `InvalidRequestError`
        when the request fails: the chat is then as before.
        """
        if line.startswith("/") and not line.startswith("//"):
            self._command(line)
            return None
        return self._say(line.removeprefix("/") if line.startswith("//") else line)

    def _say(self, text: str) -> SpokenAnswer:
        prompt = self.conversation.prompt(text)
        collector, parts, completion = Collector(), [], None
        events = self._client.generate(prompt, self._options, timeout_s=self._timeout_s)
        try:
            for event in events:
                collector.add(event)
                if isinstance(event, pb.Accepted):
                    self._request_id = event.request_id
                elif isinstance(event, pb.Delta):
                    parts.append(event.text)
                    self._screen.show(event)
                elif isinstance(event, pb.Finished):
                    completion = collector.completion()
        except KeyboardInterrupt:
            with _ignored_interrupts():
                events.close()
        except CallError:
            self._screen.end(SpokenAnswer("".join(parts), None))
            raise
        answer = SpokenAnswer("".join(parts), completion)
        self._screen.end(answer)
        if answer.text or completion is not None:
            self.conversation.add(text, answer.text)
        return answer

    def _command(self, line: str) -> None:
        name, _, argument = line[1:].partition(" ")
        argument = argument.strip()
        if name == "help":
            self._screen.note("\n".join(f"{usage:<14} {meaning}" for usage, meaning in COMMANDS.items()))
        elif name == "explain":
            if not self._request_id:
                self._screen.note("nothing was asked yet")
            else:
                self._screen.explain(self._client.explain(self._request_id))
        elif name == "reset":
            self.conversation.turns.clear()
            self._options = replace(self._options, session_id=_drawn_id())
            self._screen.note("the chat begins anew")
        elif name == "system":
            self.conversation.system = argument
            self._screen.note("from now on with this system prompt" if argument else "no system prompt now")
        elif name == "save" and argument:
            self._save(Path(argument).expanduser())
        else:
            self._screen.note(f"unknown command: {line[:80]}; /help lists them, //text sends /text")

    def _save(self, path: Path) -> None:
        path = path.absolute()
        text = json.dumps(self.conversation.as_json(), indent=2, ensure_ascii=False) + "\n"
        try:
            with path.open("w" if path in self._saved else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            self._screen.note(f"{path} exists already; name another file")
        except OSError as error:
            self._screen.note(f"cannot write {path}: {error.strerror}")
        else:
            self._saved.add(path)
            self._screen.note(f"{len(self.conversation.turns)} messages are in {path}")


COMMANDS = {
    "/explain": "where the last request went, and why",
    "/reset": "forget what was said; the system prompt stays",
    "/system TEXT": "set the system prompt; without TEXT: have none",
    "/save FILE": "write the chat to FILE, as JSON",
    "/help": "this list",
    "Ctrl-C": "end the answer; the chat goes on",
    "Ctrl-D": "end the chat",
}


# ----------------------------------------------------------------------------------------------
# On a terminal.


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


# ----------------------------------------------------------------------------------------------
# Through a pipe.


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


def chat_model(models: list[pb.Model], name: str) -> pb.Model:
    """Return the model of this name, by default the first; `ConfigError` where it cannot chat."""
    found = next((model for model in models if name in ("", model.name)), None)
    if found is None:
        served = ", ".join(model.name for model in models)
        raise ConfigError(f"--model: {name!r} is not served here; {served} is")
    if not found.has_chat_template:
        raise ConfigError(
            f"{found.name} has no chat template, so it cannot chat; `tandem generate` continues a text"
        )
    return found


def _drawn_id() -> str:
    """Draw a name of a conversation, by which a gateway keeps it at the same replicas."""
    return f"chat-{secrets.token_hex(8)}"


@contextlib.contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C for the moment in which a request is cancelled."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
