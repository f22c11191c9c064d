"""Runs one peer of the engine benchmark, in that peer's interpreter: only the standard library and the peer's
own packages are imported, and this file is started by its path.

The only argument is a JSON object, `Settings`. Answers are JSON objects, one a line, on the descriptor that
was standard output; whatever the peer prints goes to standard error. The first is {"ready": version,
"detail": text} or {"missing": package}. Then each command on standard input is answered with {"seconds": s}:
"prefill TOKENS", one random prompt up to its first token, or "decode BATCH CONTEXT STEPS", as many steps of
as many sequences, each of which has CONTEXT tokens before them. A failure ends the process.
"""

from __future__ import annotations

import copy
import ctypes
import importlib
import importlib.util
import json
import mmap
import os
import random
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

_PR_SET_PDEATHSIG = 1
_MOST_STEP_TOKENS = 2048
_UBATCH_TOKENS = 512


@dataclass(frozen=True)
class Settings:
    """The request of the benchmark to a peer. `max_tokens` is the longest sequence, `max_batch` and
    `max_batch_tokens` (context and steps) the largest decode step; files go to `cache_dir`. llama.cpp loads
    the file `gguf`, if it is named, in place of one with the weights of `model_dir`."""

    peer: str
    model_dir: str
    dtype: str
    threads: int
    max_tokens: int
    max_batch: int
    max_batch_tokens: int
    cache_dir: str
    gguf: str = ""


class Peer(Protocol):
    """An engine that is loaded."""

    version: str
    detail: str

    def prefill_s(self, num_tokens: int) -> float:
        """Return the seconds that a random prompt takes up to its first token."""

    def decode_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        """Return the seconds of `num_steps` steps of `batch` sequences of `context_tokens` tokens."""


class Prompts:
    """Draws random prompts: new ones for prefill, the same for each slot of a decode batch."""

    def __init__(self, model_dir: Path) -> None:
        self._vocab_size = int(json.loads((model_dir / "config.json").read_text())["vocab_size"])
        self._fresh = random.Random(1)

    def fresh(self, num_tokens: int) -> list[int]:
        return self._draw(self._fresh, num_tokens)

    def of_slot(self, slot: int, num_tokens: int) -> list[int]:
        return self._draw(random.Random(f"{slot} {num_tokens}"), num_tokens)

    def _draw(self, generator: random.Random, num_tokens: int) -> list[int]:
        return [generator.randrange(self._vocab_size) for _ in range(num_tokens)]


# ------------------------------------------------------------------------------------------ transformers


class TransformersPeer:
    """`transformers`, greedy: the model's own forward pass over its own cache, without `generate`'s work
    between the steps."""

    def __init__(self, settings: Settings) -> None:
        self._torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self._torch.set_num_threads(settings.threads)
        self._torch.set_grad_enabled(False)
        dtype = getattr(
            self._torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[settings.dtype]
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(settings.model_dir, dtype=dtype)
        self._model: Any = model.eval()
        self._prompts = Prompts(Path(settings.model_dir))
        self._decoding: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.version = str(transformers.__version__)
        self.detail = f"torch {self._torch.__version__}, attention {model.config._attn_implementation}"

    def prefill_s(self, num_tokens: int) -> float:
        prompt = self._torch.tensor([self._prompts.fresh(num_tokens)])
        started_at = perf_counter()
        self._step(prompt, None)
        return perf_counter() - started_at

    def decode_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        cache, tokens = self._decoding.get((batch, context_tokens), (None, None))
        if cache is None:
            prompts = [self._prompts.of_slot(slot, context_tokens) for slot in range(batch)]
            tokens, cache = self._step(self._torch.tensor(prompts), None)
            self._decoding[batch, context_tokens] = cache, tokens
        # Recurrent states cannot be cropped: what is decoded changes a copy.
        is_cropped = all(hasattr(layer, "keys") for layer in cache.layers)
        if not is_cropped:
            cache = copy.deepcopy(cache)
        started_at = perf_counter()
        for _ in range(num_steps):
            tokens, cache = self._step(tokens, cache)
        elapsed_s = perf_counter() - started_at
        if is_cropped:
            cache.crop(-num_steps)
        return elapsed_s

    def _step(self, tokens: Any, cache: Any) -> tuple[Any, Any]:
        output = self._model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1:].argmax(-1), output.past_key_values


# ------------------------------------------------------------------------------------------ vLLM


class VllmPeer:
    """vLLM, greedy: its engine core in this process, driven step by step."""

    def __init__(self, settings: Settings) -> None:
        cpus = sorted(os.sched_getaffinity(0))[: settings.threads]
        kv_bytes = _kv_bytes(settings)
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE=str(1 + (kv_bytes >> 30)),
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cpus)),
            VLLM_LOGGING_LEVEL="ERROR",
            VLLM_CACHE_ROOT=os.path.join(settings.cache_dir, "vllm"),
        )
        self._vllm: Any = importlib.import_module("vllm")
        self._prompts = Prompts(Path(settings.model_dir))
        self._num_requests = 0
        model = self._vllm.LLM(
            settings.model_dir,
            dtype={"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[settings.dtype],
            skip_tokenizer_init=True,
            max_model_len=settings.max_tokens,
            max_num_batched_tokens=_MOST_STEP_TOKENS,
            max_num_seqs=settings.max_batch,
            disable_log_stats=True,
        )
        self._engine: Any = model.llm_engine
        self.version = str(self._vllm.__version__)
        self.detail = f"compiled, prefix cache on, {'with' if _preloads() else 'without'} LD_PRELOAD"

    def prefill_s(self, num_tokens: int) -> float:
        prompts = [self._prompts.fresh(num_tokens)]
        started_at = perf_counter()
        self._start(prompts, 1)
        self._finish()
        return perf_counter() - started_at

    def decode_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        # From the second time on, the prompts are in vLLM's prefix cache: only the steps are timed.
        self._start([self._prompts.of_slot(slot, context_tokens) for slot in range(batch)], num_steps + 1)
        request_to_tokens: dict[str, int] = {}
        while len(request_to_tokens) < batch:
            for output in self._engine.step():
                request_to_tokens[output.request_id] = len(output.outputs[0].token_ids)
        num_timed = batch * (num_steps + 1) - sum(request_to_tokens.values())
        started_at = perf_counter()
        self._finish()
        # Prompts that were begun in different steps leave less than all steps to the clock.
        return (perf_counter() - started_at) * batch * num_steps / num_timed

    def _start(self, prompts: Sequence[Sequence[int]], num_new: int) -> None:
        params = self._vllm.SamplingParams(
            temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False
        )
        for prompt in prompts:
            self._num_requests += 1
            self._engine.add_request(str(self._num_requests), {"prompt_token_ids": list(prompt)}, params)

    def _finish(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()


def preload_for_vllm() -> None:
    """Start this program again with the libraries that vLLM wants to be loaded before all others, as it does
    for its own worker processes."""
    found = importlib.util.find_spec("torch")
    vllm = importlib.util.find_spec("vllm")
    if _preloads() or found is None or found.origin is None or vllm is None or vllm.origin is None:
        return
    torch_dir, vllm_dir = Path(found.origin).parent, Path(vllm.origin).parent
    libraries = [
        *sorted((torch_dir / "lib").glob("libgomp*.so*"))[:1],
        *sorted(vllm_dir.glob("libs/libtcmalloc*.so*"))[:1],
    ]
    if libraries:
        environment = {**os.environ, "LD_PRELOAD": ":".join(map(str, libraries))}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def _preloads() -> bool:
    return "libgomp" in os.environ.get("LD_PRELOAD", "")


def _kv_bytes(settings: Settings) -> int:
    config = json.loads((Path(settings.model_dir) / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    item_bytes = 4 if settings.dtype == "fp32" else 2
    token_bytes = 2 * config["num_hidden_layers"] * heads * head_dim * item_bytes
    return int(token_bytes * (settings.max_tokens + 2 * settings.max_batch * settings.max_batch_tokens))


# ------------------------------------------------------------------------------------------ llama.cpp


class LlamaCppPeer:
    """llama.cpp, greedy: through its C interface, with the checkpoint's weights in a GGUF file, quantized by
    its own program where the dtype is one of `_FILE_TYPES`."""

    def __init__(self, settings: Settings) -> None:
        self._library: Any = importlib.import_module("llama_cpp")
        self._numpy: Any = importlib.import_module("numpy")
        library = self._library
        library.llama_backend_init()
        path = Path(settings.gguf or gguf_file(Path(settings.model_dir), Path(settings.cache_dir)))
        if settings.dtype in _FILE_TYPES:
            path = self._quantized(path, settings.dtype)
        self._model: Any = library.llama_model_load_from_file(
            str(path).encode(), library.llama_model_default_params()
        )
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._prompts = Prompts(Path(settings.model_dir))
        self._vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._batch: Any = library.llama_batch_init(_MOST_STEP_TOKENS, 0, 1)
        self._prompt_context = self._new_context(settings, settings.max_tokens, 1)
        self._decode_context = self._new_context(settings, settings.max_batch_tokens, settings.max_batch)
        self._started: dict[tuple[int, int], int] = {}
        self.version = str(library.__version__)
        system = library.llama_print_system_info().decode()
        self.detail = ", ".join(part.strip() for part in system.split("|") if part.strip().endswith("= 1"))

    def _quantized(self, path: Path, kind: str) -> Path:
        """Return the file with its matrices quantized, which is written if it is not there."""
        quantized = path.with_name(f"{path.stem}-{kind}.gguf")
        if not quantized.exists():
            params = self._library.llama_model_quantize_default_params()
            params.ftype = _FILE_TYPES[kind]
            unfinished = quantized.with_suffix(f".{os.getpid()}")
            names = str(path).encode(), str(unfinished).encode()
            if code := self._library.llama_model_quantize(*names, ctypes.byref(params)):
                raise SystemExit(f"llama.cpp cannot quantize {path} to {kind}: {code}")
            unfinished.rename(quantized)
        return quantized

    def _new_context(self, settings: Settings, num_tokens: int, num_sequences: int) -> Any:
        """Make a context in which every sequence has a stream of its own of `num_tokens` tokens."""
        params = self._library.llama_context_default_params()
        params.n_ctx = -(-num_tokens // 256) * 256 * num_sequences
        params.n_batch, params.n_ubatch, params.n_seq_max = _MOST_STEP_TOKENS, _UBATCH_TOKENS, num_sequences
        params.n_threads = params.n_threads_batch = settings.threads
        params.kv_unified = False
        context = self._library.llama_init_from_model(self._model, params)
        if not context:
            raise SystemExit(f"llama.cpp has no memory for {params.n_ctx} tokens")
        return context

    def prefill_s(self, num_tokens: int) -> float:
        prompt = self._prompts.fresh(num_tokens)
        self._remove(self._prompt_context, 0, 0)
        started_at = perf_counter()
        self._prefill(self._prompt_context, 0, prompt)
        return perf_counter() - started_at

    def decode_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        context = self._decode_context
        for slot in range(batch):
            if (slot, context_tokens) not in self._started:
                self._remove(context, slot, 0)
                self._started = {key: value for key, value in self._started.items() if key[0] != slot}
                prompt = self._prompts.of_slot(slot, context_tokens)
                self._started[slot, context_tokens] = self._prefill(context, slot, prompt)
        tokens = [self._started[slot, context_tokens] for slot in range(batch)]
        started_at = perf_counter()
        for step in range(num_steps):
            rows = [(token, context_tokens + step, slot, True) for slot, token in enumerate(tokens)]
            self._decode(context, rows)
            tokens = [self._argmax(context, row) for row in range(batch)]
        elapsed_s = perf_counter() - started_at
        for slot in range(batch):
            self._remove(context, slot, context_tokens)
        return elapsed_s

    def _prefill(self, context: Any, slot: int, prompt: Sequence[int]) -> int:
        last = len(prompt) - 1
        for begin in range(0, len(prompt), _MOST_STEP_TOKENS):
            part = prompt[begin : begin + _MOST_STEP_TOKENS]
            positions = range(begin, begin + len(part))
            self._decode(context, [(token, at, slot, at == last) for token, at in zip(part, positions)])  # noqa: B905
        return self._argmax(context, -1)

    def _decode(self, context: Any, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Compute rows of (token, position, slot, whether its logits are wanted)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, slot, wants_logits) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, slot
            batch.logits[index] = wants_logits
        if code := self._library.llama_decode(context, batch):
            raise SystemExit(f"llama_decode failed with {code}")

    def _argmax(self, context: Any, row: int) -> int:
        logits = self._library.llama_get_logits_ith(context, row)
        return int(self._numpy.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())

    def _remove(self, context: Any, slot: int, begin: int) -> None:
        """Forget a sequence's tokens from position `begin` on."""
        self._library.llama_memory_seq_rm(self._library.llama_get_memory(context), slot, begin, -1)


# `llama_ftype` of the mixes of quantized types.
_FILE_TYPES = {"q8_0": 7, "q4_k_m": 15}
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
}
_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
# The products of an expert, which are in one tensor for all experts of a layer.
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_GGUF_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_file(model_dir: Path, cache_dir: Path) -> Path:
    """Return the checkpoint's weights as a bf16 GGUF file in `cache_dir`, written if it is not there.

    The file has no vocabulary: the benchmark's prompts are token ids.
    """
    config = json.loads((model_dir / "config.json").read_text())
    architecture = _ARCHITECTURES.get(config["architectures"][0])
    if architecture is None:
        known = ", ".join(_ARCHITECTURES)
        raise SystemExit(f"only {known} are converted for llama.cpp, not {config['architectures'][0]}")
    files = sorted(model_dir.glob("*.safetensors"))
    stamp = "-".join(f"{file.stat().st_mtime_ns:x}" for file in files[:1])
    path = cache_dir / f"{model_dir.resolve().name}-{stamp}-bf16.gguf"
    if not path.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        _write_gguf(unfinished, architecture, config, files)
        unfinished.rename(path)
    return path


def _write_gguf(path: Path, architecture: str, config: dict[str, Any], files: Sequence[Path]) -> None:
    gguf: Any = importlib.import_module("gguf")
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default":
        raise SystemExit(f"rope scaling {rope['rope_type']!r} is not converted for llama.cpp")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.get("rope_theta") or rope.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if architecture == "qwen3moe":
        if not config.get("norm_topk_prob"):
            raise SystemExit("norm_topk_prob false is not converted for llama.cpp")
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    is_tied = config.get("tie_word_embeddings", False)
    name_to_experts: dict[str, dict[int, Any]] = {}
    for file in files:
        for name, dtype, shape, raw in read_safetensors(file):
            if is_tied and name == "lm_head.weight":
                continue
            numbers = bf16_bits(raw, dtype).reshape(shape)
            if expert := _EXPERT.fullmatch(name):
                layer, number, product = expert.groups()
                of_all = f"blk.{layer}.ffn_{product}_exps.weight"
                name_to_experts.setdefault(of_all, {})[int(number)] = numbers
                continue
            if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
                numbers = interleave_halves(numbers, num_heads if "q_proj" in name else num_kv_heads)
            if len(shape) == 1 or name.endswith(".mlp.gate.weight"):
                writer.add_tensor(gguf_name(name), _widened(numbers))
            else:
                data = numbers.view("uint8")
                writer.add_tensor(gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    numpy: Any = importlib.import_module("numpy")
    for name, experts in name_to_experts.items():
        data = numpy.stack([experts[number] for number in range(len(experts))]).view("uint8")
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Return the GGUF name of a tensor of a checkpoint."""
    if name in _GGUF_TOP_NAMES:
        return _GGUF_TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_NAMES[module]}.{kind}"


def read_safetensors(path: Path) -> Iterator[tuple[str, str, list[int], Any]]:
    """Yield name, dtype ("BF16"), shape and bytes (uint8, mapped) of each tensor of a safetensors file."""
    numpy: Any = importlib.import_module("numpy")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    begin = 8 + int.from_bytes(mapped[:8], "little")
    for name, entry in json.loads(mapped[8:begin]).items():
        if name == "__metadata__":
            continue
        first, end = entry["data_offsets"]
        raw = numpy.frombuffer(mapped, numpy.uint8, end - first, begin + first)
        yield name, entry["dtype"], entry["shape"], raw


def bf16_bits(raw: Any, dtype: str) -> Any:
    """Return numbers of a safetensors dtype as the bits of bf16, uint16, rounded to the nearest even."""
    if dtype == "BF16":
        return raw.view("<u2")
    wide = raw.view({"F32": "<f4", "F16": "<f2"}[dtype]).astype("<f4").view("<u4")
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype("<u2")


def interleave_halves(rows: Any, num_heads: int) -> Any:
    """Reorder the rows of a query or key projection from halves to pairs of rotated dimensions."""
    num_rows, num_columns = rows.shape
    halves = rows.reshape(num_heads, 2, num_rows // num_heads // 2, num_columns)
    return halves.swapaxes(1, 2).reshape(num_rows, num_columns)


def _widened(bits: Any) -> Any:
    return (bits.astype("<u4") << 16).view("<f4")


# ------------------------------------------------------------------------------------------ the protocol

_PEERS: dict[str, type[TransformersPeer] | type[VllmPeer] | type[LlamaCppPeer]] = {
    "transformers": TransformersPeer,
    "vllm": VllmPeer,
    "llama.cpp": LlamaCppPeer,
}
_PACKAGES = {
    "transformers": ("torch", "transformers"),
    "vllm": ("torch", "vllm"),
    "llama.cpp": ("numpy", "gguf", "llama_cpp"),
}


def serve(peer: Peer, answers: int) -> None:
    """Answer commands until standard input ends."""
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "prefill":
            seconds = peer.prefill_s(*map(int, numbers))
        else:
            seconds = peer.decode_s(*map(int, numbers))
        _answer(answers, {"seconds": seconds})


def _answer(answers: int, fields: dict[str, Any]) -> None:
    os.write(answers, json.dumps(fields).encode() + b"\n")


def main() -> None:
    """Load the peer and serve it on the standard streams."""
    del sys.path[0]  # this file's folder: its modules are not the peer's
    settings = Settings(**json.loads(sys.argv[1]))
    if sys.platform == "linux":  # do not outlive the benchmark, which may have stopped this process
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for package in _PACKAGES[settings.peer]:
        if importlib.util.find_spec(package) is None:
            _answer(1, {"missing": package})
            return
    os.environ.update(OMP_NUM_THREADS=str(settings.threads), HF_HUB_OFFLINE="1")
    if settings.peer == "vllm":
        preload_for_vllm()
    answers = os.dup(1)
    os.dup2(2, 1)
    peer = _PEERS[settings.peer](settings)
    _answer(answers, {"ready": peer.version, "detail": peer.detail})
    serve(peer, answers)


if __name__ == "__main__":
    main()
