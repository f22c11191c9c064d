"""How long tests wait. Each wait is on a condition, so that a limit costs nothing where a test passes; the
limits hold on a machine that is much slower and busier than usual."""

from __future__ import annotations

# The wait for a message, an answer or the end of a process: up to a few seconds on an idle machine.
WAIT_S = 90.0
# The wait for the start of processes that import torch, or of Ray with a cluster in it. Below pytest's limit
# for a whole test.
START_S = 110.0
# The wait for a cluster that replaces or moves replicas. Below pytest's limit for a test that is marked slow.
SETTLE_S = 240.0
# The time that a busy machine may add to one that the product promises.
SLACK_S = 9.0
