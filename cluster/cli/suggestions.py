"""What people who come from other servers type, and what it is here."""

from __future__ import annotations

from collections.abc import Mapping

# Commands of vLLM, SGLang, Ollama and llama.cpp.
COMMANDS: Mapping[str, str] = {
    "run": "serve",
    "start": "serve",
    "up": "serve",
    "launch": "serve",
    "launch_server": "serve",
    "complete": "generate",
    "ps": "status",
    "list": "models",
    "ls": "models",
    "benchmark": "bench",
    "restart": "update",
}
_CONTEXT = "the context is the model's; `--kv-tokens` bounds what a replica holds"
_MEMORY = "`--kv-tokens auto` takes what memory is left; engine.memory_share in a file is the share of it"
# Options of vLLM and SGLang, and the option or setting that does it here.
OPTIONS: Mapping[str, str] = {
    "--max-model-len": _CONTEXT,
    "--context-length": _CONTEXT,
    "--ctx-size": _CONTEXT,
    "--gpu-memory-utilization": _MEMORY,
    "--mem-fraction-static": _MEMORY,
    "--tensor-parallel-size": "use --tp",
    "--tp-size": "use --tp",
    "--enable-expert-parallel": "use --ep, with how many parts the experts are divided into",
    "--ep-size": "use --ep",
    "--expert-parallel-size": "use --ep",
    "--pipeline-parallel-size": "use --pp",
    "--pp-size": "use --pp",
    "--data-parallel-size": "replicas are counted by --prefill and --decode",
    "--served-model-name": "use --model-name",
    "--model-path": "use --model",
    "--api-key": "`tandem key new` makes keys; name their file with --keys-file",
    "--max-num-seqs": "engine.max_sequences of a pool, in a file",
    "--max-running-requests": "engine.max_sequences of a pool, in a file",
    "--max-num-batched-tokens": "engine.max_batch_tokens of a pool, in a file",
    "--chunked-prefill-size": "engine.max_batch_tokens of a pool, in a file",
    "--block-size": "engine.block_tokens of a pool, in a file",
    "--page-size": "engine.block_tokens of a pool, in a file",
    "--quantization": "weight_dtype of a pool, in a file; quantized checkpoints are read as they are",
    "--enable-prefix-caching": "prefixes are always cached",
    "--trust-remote-code": "code of a checkpoint is never run",
    "--config": "use --file",
}
