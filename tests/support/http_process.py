"""A gateway over scripted replicas in a process of its own, that a test can kill. Prints the HTTP port; ends
when its input does. Replicas that speak answer with words for the clients' tests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gateway_harness
import numpy as np
from child_processes import kill_family
from gateway_harness import GatewayHarness, ScriptedReplica, encode, write_model
from http_harness import EmbeddingReplica

from workers.messages.link import SampleState, Submission, TokenDelta

_PATHS = [str(Path(__file__).resolve().parent.parent.parent), str(Path(__file__).resolve().parent)]
_START = f"import sys; sys.path[:0] = {_PATHS!r}; import http_process; http_process.main()"


# Tools as Hermes' models see them, and thoughts as Qwen's: names that choose the parsers.
_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools>"
    "{# answers have <tool_call></tool_call> and <think></think> #}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
_CONTEXT = 4096


def spoken(prompt: str) -> str:
    """What a speaking replica answers."""
    last = prompt.rpartition("<|im_start|>assistant")[0].rpartition("<|im_start|>")[2]
    role, _, said = last.partition("\n")
    if role == "tool":
        return f"It is {said.removesuffix('<|im_end|>').strip()}."
    if "<tools>" in prompt and "weather" in said:
        cities = ("Paris", "Rome") if "both" in said else ("Paris",)
        calls = [
            f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{it}"}}}}\n</tool_call>'
            for it in cities
        ]
        return "\n".join(calls)
    if "person" in said:
        return '{"name": "Ada", "age": 36}'
    if "think" in said:
        return "<think>\nHm.\n</think>\n\nFour."
    return "Hello there, my friend."


class SpeakingReplica(EmbeddingReplica):
    """Answers with words, and ends when they are said."""

    def _speak(self, submission: Submission) -> None:
        ids = np.frombuffer(submission.prompt, "<u4").tolist()
        self.script.tokens = [*encode(spoken(decode_all(ids))), 0]
        self.script.eos_at = len(self.script.tokens) - 1

    def _delta(self, submission: Submission, state: SampleState, index: int) -> TokenDelta:
        self._speak(submission)
        return super()._delta(submission, state, index)

    def _finish(self, submission: Submission, state: SampleState, index: int) -> str:
        self._speak(submission)
        return super()._finish(submission, state, index)


def decode_all(ids: list[int]) -> str:
    """The text of ids, with special tokens."""
    return str(gateway_harness._TOKENIZER.decode(ids, skip_special_tokens=False))


async def _serve(folder: Path, token_s: float, *, speaks: bool) -> None:
    if speaks:
        gateway_harness.MAX_CONTEXT = _CONTEXT
    harness = GatewayHarness(write_model(folder, _TEMPLATE) if speaks else write_model(folder))
    for replica_id, role in (("p0", "prefill"), ("d0", "decode")):
        kind = SpeakingReplica if speaks else ScriptedReplica
        replica = harness.replicas[replica_id] = kind(harness, replica_id, role)
        replica.script.token_s = token_s
        await replica.start()
    gateway, _ = await harness.add_gateway()
    print(gateway.http_port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await harness.close()


def main() -> None:
    """Of the process: its arguments are `token_s`, and whether its replicas speak."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_serve(Path(folder), float(sys.argv[1]), speaks=sys.argv[2] == "True"))


@contextmanager
def http_process(token_s: float, *, speaks: bool = False) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process and its port; it decodes a token every `token_s`."""
    command = [sys.executable, "-c", _START, str(token_s), str(speaks)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        kill_family(process)
