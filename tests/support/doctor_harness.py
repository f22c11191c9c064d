"""A machine that is made of files below a folder, and configurations to look at on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.config import ClusterConfig, parse_config
from cluster.doctor.checks import CheckContext, CheckResult, Severity
from cluster.serve.machine import KernelClock, Machine
from cluster.serve.memory import Needs, needs_of
from kvtransfer.common.clock import Clock, SystemClock

TINY = Path(__file__).resolve().parent.parent.parent / "models" / "tiny"
_LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max processes             63000                63000                processes
Max open files            1024                 1048576              files
Max locked memory         unlimited            unlimited            bytes
"""
_MEMORY = """MemTotal:       67108864 kB
MemAvailable:   60000000 kB
HugePages_Free:        0
Hugepagesize:       2048 kB
"""
_MOUNTS = """22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/sda2 rw
40 22 0:40 / /shared rw - nfs4 host:/export rw
41 22 0:41 / /memory rw - tmpfs tmpfs rw
42 22 259:1 / /fast rw - xfs /dev/nvme0n1 rw
43 22 0:43 / /layer rw - overlay overlay rw
"""
_HEALTHY = {
    "proc/self/limits": _LIMITS,
    "proc/self/cgroup": "0::/\n",
    "proc/self/status": "Name:\tx\nCpus_allowed_list:\t0-15\n",
    "proc/self/mountinfo": _MOUNTS,
    "proc/meminfo": _MEMORY,
    "proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16\n",
    "sys/devices/system/node/node0/cpulist": "0-15\n",
    "sys/dev/block/8:2/queue/rotational": "0\n",
    "sys/dev/block/259:1/queue/rotational": "0\n",
    "dev/shm/nothing": "",
}


class FakeMachine:
    """A root with the files of a machine where all is well; `files` replace or add, None leaves one out.
    `commands` maps the beginning of a command line to what it prints."""

    def __init__(
        self, root: Path, files: Mapping[str, str | None] = {}, commands: Mapping[str, str] = {}
    ) -> None:
        self.root = root
        self.commands = dict(commands)
        self.asked: list[str] = []
        for name, text in {**_HEALTHY, **files}.items():
            if text is not None:
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)

    def view(
        self,
        programs: Iterable[str] = ("c++",),
        clock: KernelClock | None = None,
        product_rates: Mapping[str, float] | None = None,
    ) -> Machine:
        """Products are measured only where their rates are given, by dtype."""
        known = set(programs)
        return Machine(
            root=self.root,
            run=self._run,
            find_program=lambda name: f"/usr/bin/{name}" if name in known else None,
            home=self.root / "root",
            kernel_clock=lambda: clock,
            product_rates=lambda dtypes: {name: (product_rates or {})[name] for name in dtypes},
        )

    def _run(self, command: Sequence[str]) -> str | None:
        line = " ".join(command)
        self.asked.append(line)
        return next((text for start, text in self.commands.items() if line.startswith(start)), None)


def config_of(model: Path = TINY, pools: Sequence[Mapping[str, Any]] = (), **sections: Any) -> ClusterConfig:
    """One prefill and one decode pool unless `pools` says otherwise."""
    default = ({"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"})
    return parse_config({"model": str(model), "pools": list(pools or default), **sections}, "test")


def context_of(
    machine: Machine,
    config: ClusterConfig | None = None,
    *,
    needs: Needs | None = None,
    environment: Mapping[str, str] = {},
    ray_address: str = "auto",
    is_running: bool = False,
    clock: Clock | None = None,
) -> CheckContext:
    config = config or config_of()
    return CheckContext(
        machine=machine,
        config=config,
        needs=needs or needs_of(config),
        environment=environment,
        clock=clock or SystemClock(),
        ray_address=ray_address,
        is_running=is_running,
    )


def said(look: Callable[[Any], Iterable[CheckResult]], context: Any) -> list[tuple[Severity, str]]:
    """What a check says, in short."""
    return [(result.severity, result.seen) for result in look(context)]


def only(look: Callable[[Any], Iterable[CheckResult]], context: Any) -> CheckResult:
    """The one result of a check; each that is not well says why and what to do."""
    (result,) = look(context)
    if result.severity in (Severity.WARNING, Severity.ERROR):
        assert result.why
        assert result.remedy
    return result
