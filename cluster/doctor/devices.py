"""Checks of GPUs, network devices and RDMA devices."""

from __future__ import annotations

import csv
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cluster.doctor.check_context import Check, CheckContext
from cluster.doctor.checks import CheckResult, Figures, error, note, ok, warning
from cluster.serve.machine import Machine, read, whole_number

_DEVICES = "devices"
# The GPU that a whole cluster has run on.
_VALIDATED_GPU = "NVIDIA H100"

_GPU_CLASSES = ("0x0300", "0x0302")
_NETWORK_CLASSES = ("0x0200", "0x0207")
# NVIDIA, AMD: other display devices do not compute.
_GPU_VENDORS = ("0x10de", "0x1002")
# Network devices below this are slow: their link is of no interest.
_SLOW_LINK_GT_S = 8.0
_THROTTLES = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "sw_power_cap")


class PciDevice(NamedTuple):
    """Represents a GPU or network device. Width in lanes, speed in GT/s a lane; `numa_node` -1: unknown, or
    there is one only."""

    address: str
    is_gpu: bool
    width: int
    max_width: int
    speed: float
    max_speed: float
    numa_node: int

    @property
    def name(self) -> str:
        return f"{'GPU' if self.is_gpu else 'network device'} {self.address}"


def pci_devices(machine: Machine) -> list[PciDevice]:
    """Return the GPUs and network devices on the PCI bus."""
    found = []
    for folder in sorted((machine.sys / "bus/pci/devices").glob("*")):
        kind, vendor = read(folder / "class").strip()[:6], read(folder / "vendor").strip()
        is_gpu = kind in _GPU_CLASSES and vendor in _GPU_VENDORS
        if is_gpu or kind in _NETWORK_CLASSES:
            node = whole_number(folder / "numa_node")
            found.append(
                PciDevice(
                    address=folder.name,
                    is_gpu=is_gpu,
                    width=whole_number(folder / "current_link_width") or 0,
                    max_width=whole_number(folder / "max_link_width") or 0,
                    speed=_speed(folder / "current_link_speed"),
                    max_speed=_speed(folder / "max_link_speed"),
                    numa_node=-1 if node is None else node,
                )
            )
    return found


def links(context: CheckContext) -> Iterator[CheckResult]:
    """Check the PCI-E links. An idle GPU lowers its link's speed, so only its width counts; network devices
    do not."""
    for device in pci_devices(context.machine):
        if not device.width or not device.max_width:
            continue
        seen = f"{device.name}: PCI-E x{device.width} of x{device.max_width}"
        figures: Figures = {"device": device.address, "width": device.width, "max_width": device.max_width}
        is_fast = device.is_gpu or device.max_speed >= _SLOW_LINK_GT_S
        if device.width < device.max_width and is_fast:
            yield warning(
                seen,
                f"it moves {device.width / device.max_width:.0%} of what it could",
                "reseat it, or move it to a slot with all lanes; check the BIOS for a split slot",
                **figures,
            )
        elif not device.is_gpu and is_fast and device.speed < device.max_speed:
            yield warning(
                f"{seen}, {device.speed:g} of {device.max_speed:g} GT/s",
                f"it moves {device.speed / device.max_speed:.0%} of what it could",
                "let the BIOS choose the slot's generation, or use a slot of the device's",
                **figures,
            )
        elif is_fast:
            yield ok(seen, **figures)


def gpus_present(context: CheckContext) -> Iterator[CheckResult]:
    """Compare the GPUs with those configured; in a cluster of several nodes others may have them."""
    wanted = sum(
        pool.replicas * pool.tp * pool.num_gpus_per_rank * pool.stage_devices.count("cuda")
        for pool in context.config.pools
    )
    if not wanted:
        return
    names = gpu_rows(context.machine, "name")
    if names is None:
        yield warning(
            f"{wanted:g} GPUs are configured; nvidia-smi finds none on this machine",
            "ranks with the device cuda start on nodes with GPUs only",
            "install the driver here, or see that other nodes of the Ray cluster have them",
        )
    elif len(names) < wanted:
        yield note(f"{wanted:g} GPUs are configured, this machine has {len(names)}: {_models(names)}")
    else:
        yield ok(f"{len(names)} GPUs: {_models(names)}")


def gpu_shares(context: CheckContext) -> Iterator[CheckResult]:
    """Find pools whose ranks may share a GPU: processes on one GPU take time slices."""
    shared = [
        pool for pool in context.config.pools if "cuda" in pool.stage_devices and pool.num_gpus_per_rank % 1
    ]
    if not shared:
        return
    asked = ", ".join(f"{pool.name} {pool.num_gpus_per_rank:g}" for pool in shared)
    is_split = {"prefill", "decode"} <= {pool.role for pool in shared}
    yield warning(
        f"ranks ask for a part of a GPU (gpus_per_rank): {asked}",
        "processes on one GPU take time slices: decode waits for prefill"
        if is_split
        else "processes on one GPU take time slices: each waits while the others compute",
        "one pool of the role both, with a whole GPU for each rank (`tandem serve --prefill 0`), which "
        "batches prefill and decode together and holds the weights once"
        if is_split
        else "a whole GPU for each rank, and fewer replicas: one replica batches what several would compute "
        "in turn, and holds the weights once",
    )


def cuda_validation(context: CheckContext) -> Iterator[CheckResult]:
    """Note how pools use GPUs as has not been validated (docs/architecture.md, "Validated on a card")."""
    pools = [pool for pool in context.config.pools if "cuda" in pool.stage_devices]
    if not pools:
        return
    names = dict.fromkeys(row[0] for row in gpu_rows(context.machine, "name") or ())
    unrun = [name for name in names if _VALIDATED_GPU not in name]
    if any(pool.pp * pool.tp > 1 for pool in pools):
        unrun.append("several ranks a replica")
    if unrun:
        yield note(
            f"not yet validated on GPUs: {', '.join(unrun)} (a cluster has run on one {_VALIDATED_GPU})",
            "kernels, graphs, offloading and `cuda_ipc` have run on one GPU",
            "run tests/gpu/run on one of the GPUs first",
        )


def gpu_persistence(context: CheckContext) -> Iterator[CheckResult]:
    rows = gpu_rows(context.machine, "index", "persistence_mode")
    off = [index for index, mode in rows or () if mode == "Disabled"]
    if off:
        yield warning(
            f"persistence mode is off on GPU {', '.join(off)}",
            "the driver is unloaded with the last process: a replica that starts waits seconds for it",
            "`nvidia-smi -pm 1`, or the service nvidia-persistenced",
        )
    elif rows:
        yield ok(f"persistence mode is on ({len(rows)} GPUs)")


def gpu_clocks(context: CheckContext) -> Iterator[CheckResult]:
    """Check whether something limits the clock now; that an idle GPU clocks low is no reason."""
    rows = gpu_rows(context.machine, "index", *(f"clocks_event_reasons.{name}" for name in _THROTTLES))
    if rows is None:  # drivers before 535
        rows = gpu_rows(context.machine, "index", *(f"clocks_throttle_reasons.{name}" for name in _THROTTLES))
    for index, *states in rows or ():
        active = [name for name, state in zip(_THROTTLES, states, strict=False) if state == "Active"]
        if active:
            yield warning(
                f"GPU {index} is held below its clock: {', '.join(active)}",
                "every step is slower, and replicas of one pool differ",
                "sw_power_cap: raise the limit (`nvidia-smi -pl`); the others: see to cooling and power",
            )
    if rows and all("Active" not in row[1:] for row in rows):
        yield ok(f"nothing holds down the clocks of {len(rows)} GPUs")


def gpu_capability(context: CheckContext) -> Iterator[CheckResult]:
    """Check for compute capability 8.0, which bf16 needs."""
    uses_bf16 = any(
        "cuda" in pool.stage_devices and pool.dtype in ("auto", "bf16") for pool in context.config.pools
    )
    rows = gpu_rows(context.machine, "index", "compute_cap")
    old = [index for index, capability in rows or () if re.match(r"[1-7]\.", capability)]
    if uses_bf16 and old:
        yield warning(
            f"GPU {', '.join(old)} has a compute capability below 8.0",
            "it has no bf16 products",
            "dtype: fp16 for all pools that exchange KV",
        )
    elif uses_bf16 and rows:
        yield ok(f"{len(rows)} GPUs compute in bf16")


def locality(context: CheckContext) -> Iterator[CheckResult]:
    """Find GPUs whose NUMA node has no fast network device."""
    found = [device for device in pci_devices(context.machine) if device.numa_node >= 0]
    networks = [item for item in found if not item.is_gpu and item.max_speed >= _SLOW_LINK_GT_S]
    near = {device.numa_node for device in networks}
    far = [device for device in found if device.is_gpu and device.numa_node not in near]
    if networks and far:
        yield note(
            f"{', '.join(device.name for device in far)} and the network devices "
            f"{', '.join(device.address for device in networks)} are on different NUMA nodes",
            "KV that these GPUs send crosses from one processor to the other first",
            "let such GPUs decode rather than prefill, or add a network device on their node",
        )
    elif networks and any(device.is_gpu for device in found):
        yield ok("every GPU has a network device on its NUMA node")


def infiniband(context: CheckContext) -> Iterator[CheckResult]:
    """Check whether `rdma` can be offered, and whether the configured devices exist."""
    transfer, folder = context.config.transfer, context.machine.sys / "class/infiniband"
    if "rdma" not in transfer.transports:
        return
    for name in transfer.rdma_devices:
        device = name.partition(":")[0]
        if not (folder / device).exists() and not (context.machine.sys / "class/net" / device).exists():
            yield error(
                f"transfer.rdma_devices names {name}, which this machine does not have",
                "ranks here do not offer rdma",
                "correct the name (`ls /sys/class/infiniband`), or leave the list empty",
            )
    ports = {
        f"{state.parts[-4]}:{state.parts[-2]}": read(state).strip()
        for state in sorted(folder.glob("*/ports/*/state"))
    }
    down = [f"{name} ({state})" for name, state in ports.items() if "ACTIVE" not in state]
    if down:
        yield warning(
            f"RDMA ports that are not active: {', '.join(down)}",
            "KV goes over another port or another transport",
            "check the cable and the subnet manager; `rdma link` shows the state",
        )
    if not ports and not transfer.rdma_devices:
        return
    if importlib.util.find_spec("nixl") is None and importlib.util.find_spec("nixl_cu12") is None:
        yield warning(
            "there are RDMA devices, but NIXL is not installed",
            "ranks do not offer rdma, and KV goes over TCP",
            "pip install '.[rdma]' on every node",
        )
    elif len(down) < len(ports):
        yield ok(
            f"RDMA ports are active: {', '.join(name for name, state in ports.items() if 'ACTIVE' in state)}"
        )


def gpu_rows(machine: Machine, *fields: str) -> list[list[str]] | None:
    """Return a row for each GPU; None without nvidia-smi, or when it does not know a field."""
    shown = machine.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
    if shown is None:
        return None
    rows = [[cell.strip() for cell in row] for row in csv.reader(shown.splitlines()) if row]
    return rows if rows and all(len(row) == len(fields) for row in rows) else None


def _models(rows: list[list[str]]) -> str:
    return ", ".join(sorted({row[0] for row in rows}))


def _speed(path: Path) -> float:
    """Parse `16.0 GT/s PCIe` as 16.0; 0: unknown."""
    found = re.match(r"([\d.]+) GT/s", read(path))
    return float(found[1]) if found else 0.0


CHECKS = (
    Check("gpus", _DEVICES, "GPUs that nvidia-smi finds against those configured", gpus_present),
    Check(
        "gpu-shares", _DEVICES, "Whether pools ask for a part of a GPU, so that ranks take turns", gpu_shares
    ),
    Check(
        "cuda-validation",
        _DEVICES,
        "Whether pools use GPUs in a way that has not been validated",
        cuda_validation,
    ),
    Check("gpu-persistence", _DEVICES, "Persistence mode of GPUs", gpu_persistence),
    Check("gpu-clocks", _DEVICES, "Whether heat or power limits a GPU's clock", gpu_clocks),
    Check("gpu-capability", _DEVICES, "Whether GPUs compute in the pools' dtype", gpu_capability),
    Check(
        "pcie-links",
        _DEVICES,
        "PCI-E width and speed of GPUs and network devices against what each device can do",
        links,
    ),
    Check("locality", _DEVICES, "Whether each GPU has a network device on its NUMA node", locality),
    Check("rdma", _DEVICES, "RDMA devices, their ports, and NIXL", infiniband),
)
