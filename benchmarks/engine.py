"""Prefill and decode rates of the engine alone, as JSON lines: `python benchmarks/engine.py --model DIR`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from workers.rank.engine_bench import run_engine_bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"), help="checkpoint folder")
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16 or fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefill", type=_numbers, default="512,2048", help="prompt lengths")
    parser.add_argument("--decode-batch", type=_numbers, default="1,4,8,16", help="sequences per step")
    parser.add_argument("--context", type=int, default=128, help="prompt length of the decode measurements")
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peer", choices=["transformers"], help="measure beside this, in the same run")
    args = parser.parse_args()
    run_engine_bench(
        args.model,
        args.dtype,
        args.threads,
        args.prefill,
        args.decode_batch,
        args.context,
        _print,
        args.repeat,
        peer=args.peer is not None,
        block_tokens=args.block_tokens,
        device=args.device,
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
