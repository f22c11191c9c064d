"""A cluster of a prefill and a decode replica that share one card, which must answer within two minutes.

With `--tp 2` two ranks of the decode replica share it, too.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
from pathlib import Path
from types import FrameType

from benchmarks.served import ROOT, serving
from cluster import BlockingClient, GenerateOptions

WAIT_S = 120
CONFIG = """
model: {model}
gateway: {{port: 0, admin_port: 0, console_port: null}}
pools:
  - {{name: prefill, role: prefill, device: cuda, dtype: bf16, cpus_per_rank: 1, gpus_per_rank: 0.3}}
  - {{name: decode, role: decode, device: cuda, dtype: bf16, tp: {tp}, cpus_per_rank: 1, gpus_per_rank: 0.3}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tp", type=int, default=1, help="ranks of the decode replica")
    tp: int = parser.parse_args().tp
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(WAIT_S)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(CONFIG.format(model=ROOT / "models" / "tiny", tp=tp))
        with serving("-f", str(file)) as service, BlockingClient(service.address) as client:
            options = GenerateOptions(max_tokens=32)
            prompt = "def read_file(path):\n" * 20
            first, again = (client.complete(prompt, options, timeout_s=30) for _ in range(2))
    assert len(first.texts[0]) > 0
    assert first.texts == again.texts, "the same prompt twice, greedily"
    print("the cluster answered, twice the same")


def give_up(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"no answer within {WAIT_S} s")


if __name__ == "__main__":
    main()
