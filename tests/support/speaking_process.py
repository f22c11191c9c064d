"""Gateways in a process of their own, whose scripted replicas answer with words, for the clients' tests: one
serves everybody, the other asks for keys."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import gateway_harness
import numpy as np
from callers import key_of
from gateway_harness import GatewayHarness, encode, write_model
from http_harness import EmbeddingReplica
from http_process import started_process

from workers.messages.link import SampleState, Submission, TokenDelta

# Tools as Hermes' models see them, and thoughts as Qwen's: names that choose the parsers.
_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools>"
    "{# answers have <tool_call></tool_call> and <think></think> #}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTEXT = 8192
_TOKEN_S = 0.001
_NUM_SLOW_WORDS = 1000


def spoken(prompt: str) -> str:
    """Return the replicas' answer."""
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
    if "slow" in said:
        return "word " * _NUM_SLOW_WORDS
    return "Hello there, my friend."


class SpeakingReplica(EmbeddingReplica):
    """Answers with words, and ends when they are said."""

    def _speak(self, submission: Submission) -> None:
        self.script.tokens = _answer(submission.prompt)
        self.script.eos_at = len(self.script.tokens) - 1

    def _delta(self, submission: Submission, state: SampleState, index: int) -> TokenDelta:
        self._speak(submission)
        return super()._delta(submission, state, index)

    def _finish(self, submission: Submission, state: SampleState, index: int) -> str:
        self._speak(submission)
        return super()._finish(submission, state, index)


@functools.lru_cache
def _answer(prompt: bytes) -> list[int]:
    ids = np.frombuffer(prompt, "<u4").tolist()
    text = str(gateway_harness._TOKENIZER.decode(ids, skip_special_tokens=False))
    return [*encode(spoken(text)), 0]


class SpeakingGateways(NamedTuple):
    """The addresses of the gateways."""

    port: int
    grpc_address: str
    # The port of the gateway that asks for keys, and the keys by tenant: `acme`; `hasty`, whose quota is
    # one request at once and two a second; `elsewhere`, which may use another model.
    guarded_port: int
    keys: dict[str, str]


async def _serve(folder: Path) -> None:
    gateway_harness.MAX_CONTEXT = _CONTEXT
    harness = GatewayHarness(write_model(folder, _TEMPLATE))
    for replica_id, role in (("p0", "prefill"), ("d0", "decode")):
        replica = harness.replicas[replica_id] = SpeakingReplica(harness, replica_id, role)
        replica.script.token_s = _TOKEN_S
        await replica.start()
    keys_file = folder / "keys.yaml"
    keys = {
        "acme": key_of(keys_file, "acme"),
        "hasty": key_of(keys_file, "hasty"),
        "elsewhere": key_of(keys_file, "elsewhere", models=("other",)),
    }
    tenants = {"hasty": {"requests_per_s": 2.0, "burst_s": 0.5}}
    auth = {"mode": "required", "keys_file": str(keys_file), "tenants": tenants}
    gateway, address = await harness.add_gateway()
    guarded, _ = await harness.add_gateway(harness.config(auth=auth))
    print(json.dumps(SpeakingGateways(gateway.http_port, address, guarded.http_port, keys)), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await harness.close()


def main() -> None:
    """Run the process."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_serve(Path(folder)))


@contextmanager
def speaking_gateways() -> Iterator[SpeakingGateways]:
    """Start the gateways, and stop them at the end."""
    with started_process("speaking_process") as (_, line):
        yield SpeakingGateways(*json.loads(line))
