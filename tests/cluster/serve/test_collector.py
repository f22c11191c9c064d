"""What the garbage collector of a process that serves looks through, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

PROGRAM = """
import gc, weakref
from cluster.serve.collector import leave_out_started

class Node:
    def __init__(self):
        self.me = self
        self.young = [[] for _ in range(10)]

started = [[] for _ in range(800_000)]
leave_out_started()
alive = weakref.WeakSet()
running = []
most = 0
for number in range(3000):
    node = Node()
    alive.add(node)
    running.append(node)  # for longer than young objects are looked at
    if len(running) > 200:
        del running[0]
    short_lived = [[] for _ in range(1000)]
    most = max(most, len(alive))
print(gc.get_freeze_count() > 800_000, most)
"""


def test_cycles_of_old_objects_are_found_soon_in_a_process_of_many_objects() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    is_frozen, most = done.stdout.split()
    assert is_frozen == "True"
    assert int(most) < 700, most
