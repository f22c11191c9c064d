"""How long tests wait. Each wait is on a condition, so that a limit costs nothing where a test passes; the
limits hold on a machine that is much slower and busier than usual."""

from __future__ import annotations

# For what takes up to a few seconds on an idle machine: a message, an answer, the end of a process.
WAIT_S = 90.0
# For the start of processes that import torch, or of Ray with a cluster in it. Below pytest's limit for a
# whole test.
START_S = 110.0
# For a cluster that replaces or moves replicas. Below pytest's limit for a test that is marked slow.
SETTLE_S = 240.0
# What a busy machine may add to a time that the product promises.
SLACK_S = 9.0
