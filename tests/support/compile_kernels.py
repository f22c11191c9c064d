"""Compile the CPU kernels that the fast suite runs, unless this machine has them: beside the linters, while a
core is idle, instead of in the first tests that need them.

    PYTHONPATH=.:tests/support python tests/support/compile_kernels.py
"""

from __future__ import annotations

from workers.model import native
from workers.model.native.isa import available_isas


def main() -> None:
    native.load()
    every = available_isas()
    for isa in dict.fromkeys((*every[:1], *every[-1:])):
        native.compiled(isa)


if __name__ == "__main__":
    main()
