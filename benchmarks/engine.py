"""The engine beside other engines, as JSON lines: `python -m benchmarks.engine --model DIR --peer vllm`.

The same as `tandem bench engine --json`, which describes the options.
"""

from __future__ import annotations

import sys

from cluster.cli.bench import cli


def main() -> None:
    cli(["engine", "--json", *sys.argv[1:]])


if __name__ == "__main__":
    main()
