"""Train the bundled model `models/tiny` on the standard library's Python sources.

Data, tokenizer, weights and schedule follow from the settings and the seed alone; a run that is
stopped continues from its last checkpoint when the same command is given again.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import re
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress, TimeElapsedColumn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

BUNDLED = Path(__file__).resolve().parent / "tiny"
CONFIG_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
END_OF_TEXT, IM_START, IM_END, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SYSTEM_PROMPT = "You are a helpful assistant that writes Python."
HELD_OUT_CONTEXTS = (512, 1536)
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
NOT_CODE = re.compile(r"pydoc_data/topics\.py$|_sysconfigdata|lib2to3/tests/data/")


@dataclasses.dataclass(frozen=True)
class Settings:
    """With the model's config.json, all that the result depends on besides the sources."""

    seed: int = 1234
    num_steps: int = 2400
    step_tokens: int = 4096
    short_tokens: int = 512
    long_every_steps: int = 4
    learning_rate: float = 3e-3
    final_fraction: float = 0.02
    warmup_steps: int = 100
    weight_decay: float = 0.1
    clip_norm: float = 1.0


def read_sources() -> list[tuple[str, str]]:
    """Return (relative path, text) of the standard library's sources, without generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[tuple[str, str]] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if NOT_STDLIB.intersection(name.split("/")) or NOT_CODE.search(name):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        is_table = name.startswith("encodings/") and re.search(r"decoding_(table|map)", text)
        if text.strip() and not is_table:
            found.append((name, text.replace("\r\n", "\n")))
    return found


def is_held_out(name: str) -> bool:
    """Hold out about one file in twenty, chosen by a hash of its path."""
    return hashlib.sha256(name.encode()).digest()[0] < 13


def chat_turns(text: str) -> list[tuple[str, str]]:
    """Make (request, answer) pairs from a file's functions and classes of moderate length."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines = text.split("\n")
    turns: list[tuple[str, str]] = []
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if not 60 <= len(code) <= 1500:
            continue
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        summary = (ast.get_docstring(node) or "").strip().split("\n")[0]
        requests = [code.split("\n")[0], f"Write a Python {kind} named {node.name}."]
        if summary:
            requests += [summary, f"Write a {kind}: {summary}", f"{node.name}: {summary}"]
        turns.append((requests[hashlib.sha256(code.encode()).digest()[0] % len(requests)], code))
    return turns


def chat_documents(text: str) -> list[str]:
    """Write a file's pairs as chats of one to three turns, every other one with a system prompt."""
    turns = chat_turns(text)
    documents: list[str] = []
    while turns:
        choice = hashlib.sha256(turns[0][1].encode()).digest()[1]
        num_turns = 1 + choice % 3
        chat = f"{IM_START}system\n{SYSTEM_PROMPT}{IM_END}\n" if choice & 64 else ""
        for request, answer in turns[:num_turns]:
            chat += f"{IM_START}user\n{request}{IM_END}\n{IM_START}assistant\n{answer}{IM_END}\n"
        documents.append(chat)
        turns = turns[num_turns:]
    return documents


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE; with all 256 bytes in its alphabet it is lossless on any UTF-8."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, IM_START, IM_END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def pack(tokenizer: Tokenizer, documents: list[str]) -> Tensor:
    """Encode documents into one stream [num_tokens], each one led by the end-of-text token."""
    stream: list[int] = []
    for encoding in tokenizer.encode_batch([END_OF_TEXT + text for text in documents]):
        stream.extend(encoding.ids)
    return torch.tensor(stream, dtype=torch.long)


def batch_at(stream: Tensor, step: int, block_tokens: int, s: Settings) -> tuple[Tensor, Tensor]:
    """Return a step's inputs and targets [num_sequences, num_tokens]; every few steps long ones.

    An epoch visits every block of the stream [num_tokens] once, at an offset and in an order
    drawn for it; both follow from the step, so that a stopped run has nothing more to restore.
    """
    num_blocks = len(stream) // block_tokens - 2
    per_step = s.step_tokens // block_tokens
    starts: list[int] = []
    for index in range(step * per_step, (step + 1) * per_step):
        epoch, position = divmod(index, num_blocks)
        generator = torch.Generator().manual_seed(s.seed + 1000 + epoch)
        offset = int(torch.randint(block_tokens, (1,), generator=generator))
        order = torch.randperm(num_blocks, generator=generator)
        starts.append(int(order[position]) * block_tokens + offset)
    is_long = step % s.long_every_steps == s.long_every_steps - 1
    blocks = torch.stack([stream[i : i + block_tokens + 1] for i in starts])
    length = block_tokens if is_long else s.short_tokens
    return blocks[:, :-1].reshape(-1, length), blocks[:, 1:].reshape(-1, length)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [batch, num_heads, num_tokens, head_dim] by their positions."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Layer(nn.Module):
    """One decoder layer: attention with grouped key and value heads, gated feed-forward."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.head_dim = config["head_dim"]
        self.group = config["num_attention_heads"] // config["num_key_value_heads"]
        q_size = config["num_attention_heads"] * self.head_dim
        kv_size = config["num_key_value_heads"] * self.head_dim
        heads = {"q": (hidden, q_size), "k": (hidden, kv_size), "v": (hidden, kv_size)}
        heads["o"] = (q_size, hidden)
        gated = {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
        linear = functools.partial(nn.Linear, bias=False)
        self.input_layernorm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.self_attn = nn.ModuleDict({f"{k}_proj": linear(*v) for k, v in heads.items()})
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=config["rms_norm_eps"])
        self.mlp = nn.ModuleDict({f"{k}_proj": linear(*v) for k, v in gated.items()})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [batch, num_tokens, hidden] to the same shape."""
        attention, mlp = self.self_attn, self.mlp
        y = self.input_layernorm(x)
        q, k, v = (
            attention[name](y).view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        k, v = (z.repeat_interleave(self.group, dim=1) for z in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attention["o_proj"](y.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x)
        out: Tensor = x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))
        return out


class TrainableDecoder(nn.Module):
    """Llama decoder with tied embeddings; parameter names are those of Hugging Face."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"])
        dims = torch.arange(0, config["head_dim"], 2, dtype=torch.float32) / config["head_dim"]
        positions = torch.arange(config["max_position_embeddings"], dtype=torch.float32)
        angles = torch.outer(positions, config["rope_theta"] ** -dims).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / math.sqrt(2 * len(self.layers)) if is_output else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids [batch, num_tokens] to logits [batch, num_tokens, vocab_size]."""
        num_tokens = tokens.shape[1]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:num_tokens], self.sin[:num_tokens])
        return F.linear(self.norm(x), self.embed_tokens.weight)


@torch.no_grad()
def bits_per_byte(model: TrainableDecoder, stream: Tensor, num_bytes: int, context_tokens: int) -> float:
    """Score the stream [num_tokens] in windows that do not overlap; end-of-text tokens count."""
    nats = 0.0
    for start in range(0, len(stream) - 1, context_tokens):
        window = stream[start : start + context_tokens + 1]
        nats += float(F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum"))
    return nats / math.log(2) / num_bytes


def save_atomically(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file under a temporary name, then move it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata=metadata)
    partial.chmod(0o644)
    os.replace(partial, path)


def load_checkpoint(
    path: Path, model: TrainableDecoder, optimizer: torch.optim.AdamW, made_by: str
) -> tuple[int, float]:
    """Restore a checkpoint of the same settings; return its step and the seconds spent so far."""
    if not path.exists():
        return 0, 0.0
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata()
    if metadata["made_by"] != made_by:
        return 0, 0.0
    tensors = load_file(path)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(tensors[f"weight.{name}"])
        keys = ("step", "exp_avg", "exp_avg_sq")
        optimizer.state[parameter] = {key: tensors[f"{key}.{name}"] for key in keys}
    return int(metadata["step"]), float(metadata["elapsed_s"])


def export(out: Path, model: TrainableDecoder, tokenizer: Tokenizer) -> None:
    """Write the model in Hugging Face layout, its weights rounded to bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    for name in CONFIG_FILES if out.resolve() != BUNDLED else ():
        (out / name).write_bytes((BUNDLED / name).read_bytes())
    tokenizer.save(str(out / "tokenizer.json"))
    weights = {f"model.{k}": v.detach().bfloat16() for k, v in model.named_parameters()}
    save_atomically(weights, out / "model.safetensors", {"format": "pt"})


def learning_rate_at(step: int, s: Settings) -> float:
    """Linear warm-up, then a cosine down to a fraction of the peak."""
    if step < s.warmup_steps:
        return s.learning_rate * (step + 1) / s.warmup_steps
    progress = (step - s.warmup_steps) / (s.num_steps - s.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return s.learning_rate * (s.final_fraction + (1 - s.final_fraction) * cosine)


def train(
    args: argparse.Namespace, s: Settings, config: dict[str, Any], tokenizer: Tokenizer,
    stream: Tensor, sample: Tensor,
) -> float | None:  # fmt: skip
    """Train to the last step and export; return the seconds spent, or None when time ran out.

    `stream` [num_tokens] is trained on; `sample` [num_tokens] is scored at every checkpoint.
    """
    model = TrainableDecoder(config, s.seed)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=s.weight_decay, fused=True)
    checkpoint: Path = args.work / "checkpoint.safetensors"
    made_by = json.dumps([dataclasses.asdict(s), config], sort_keys=True)
    first, earlier_s = load_checkpoint(checkpoint, model, optimizer, made_by)
    started_s = time.monotonic() - earlier_s
    num_sample_bytes = len(tokenizer.decode(sample.tolist()).encode())
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        progress.print(f"{first} of {s.num_steps} steps done; {len(stream)} tokens in an epoch")
        task = progress.add_task("training", total=s.num_steps, completed=first)
        for step in range(first, s.num_steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, s)
            inputs, targets = batch_at(stream, step, config["max_position_embeddings"], s)
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(inputs)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), s.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            num_done, elapsed_s = step + 1, time.monotonic() - started_s
            progress.update(task, completed=num_done, description=f"loss {loss.item():.3f}")
            is_late = elapsed_s - earlier_s > args.minutes * 60 and num_done < s.num_steps
            if num_done % args.checkpoint_steps == 0 or is_late:
                tensors = {f"weight.{k}": p.detach() for k, p in model.named_parameters()}
                for name, p in model.named_parameters():
                    tensors |= {f"{key}.{name}": v for key, v in optimizer.state[p].items()}
                metadata = {"made_by": made_by, "step": str(num_done), "elapsed_s": str(elapsed_s)}
                save_atomically(tensors, checkpoint, metadata)
                export(args.out, model, tokenizer)
                bits = bits_per_byte(model, sample, num_sample_bytes, s.short_tokens)
                progress.print(f"step {num_done}: held-out sample {bits:.3f} bits per byte")
            if is_late:
                progress.print("out of time; the same command continues from here")
                return None
    export(args.out, model, tokenizer)
    return time.monotonic() - started_s


def main() -> None:
    """Parse the command line, prepare the data, train, and record the held-out scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=BUNDLED, help="folder of the model")
    parser.add_argument("--work", type=Path, default=BUNDLED.parent / ".train", help="checkpoints")
    parser.add_argument("--minutes", type=float, default=45.0, help="stop this run after so long")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--checkpoint-steps", type=int, default=150, help="steps per checkpoint")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--steps", type=int, default=Settings.num_steps)
    parser.add_argument("--evaluate", action="store_true", help="only score the model in --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    s = Settings(seed=args.seed, num_steps=args.steps)
    config: dict[str, Any] = json.loads((BUNDLED / "config.json").read_text(encoding="utf-8"))
    sources = read_sources()
    kept = [text for name, text in sources if not is_held_out(name)]
    held = [text for name, text in sources if is_held_out(name)]
    record: dict[str, object] = {"python_version": platform.python_version()}
    if not args.evaluate:
        tokenizer = train_tokenizer(kept, config["vocab_size"])
        documents = kept + [chat for text in kept for chat in chat_documents(text)]
        order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(s.seed))
        stream = pack(tokenizer, [documents[i] for i in order.tolist()])
        sample = pack(tokenizer, held)[: 32 * s.short_tokens]
        train_s = train(args, s, config, tokenizer, stream, sample)
        if train_s is None:
            return
        record |= {
            "settings": dataclasses.asdict(s),
            "num_train_files": len(kept),
            "num_train_bytes": sum(len(text.encode()) for text in kept),
            "num_train_chats": len(documents) - len(kept),
            "num_epoch_tokens": len(stream),
            "num_tokens_seen": s.num_steps * s.step_tokens,
            "train_s": round(train_s),
        }
    # The scores are those of the weights as they were saved.
    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    model, tensors = TrainableDecoder(config, s.seed), load_file(args.out / "model.safetensors")
    model.load_state_dict({k.removeprefix("model."): v.float() for k, v in tensors.items()})
    stream, num_bytes = pack(tokenizer, held), sum(len(text.encode()) for text in held)
    bits = {str(n): bits_per_byte(model, stream, num_bytes, n) for n in HELD_OUT_CONTEXTS}
    record |= {
        "num_held_out_files": len(held),
        "num_held_out_bytes": num_bytes,
        "num_held_out_tokens": len(stream),
        "held_out_bits_per_byte_by_context_tokens": bits,
    }
    print(json.dumps(record, indent=2))
    if not args.evaluate:
        (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
