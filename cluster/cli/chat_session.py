"""`tandem chat`: the conversation with the served model, whatever shows it (`cluster.cli.chat_terminal`,
`cluster.cli.chat_pipe`)."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cluster.api.blocking_client import BlockingClient
from cluster.api.client import Collector, Completion
from cluster.api.generate_options import GenerateOptions, Turn
from cluster.errors import CallError, ConfigError
from cluster.proto.tandem.v1 import inference_pb2 as pb


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
