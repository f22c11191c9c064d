"""The checks of GPUs, network and RDMA devices, on prepared machines."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_harness import FakeMachine, config_of, context_of, only, said

from cluster.doctor import devices
from cluster.doctor.checks import Severity

OK, NOTE, WARNING, ERROR = Severity
GPU, NIC = "0000:17:00.0", "0000:18:00.0"
ON_GPUS = [{"name": "d", "role": "decode", "device": "cuda", "replicas": 2}]
REASONS = "nvidia-smi --query-gpu=index,clocks_event_reasons"
OLD_REASONS = "nvidia-smi --query-gpu=index,clocks_throttle_reasons"


def pci(
    address: str, kind: str, width: int, speed: float, numa: int = 0, vendor: str = "0x10de"
) -> dict[str, str | None]:
    """A device of 16 lanes at 32 GT/s, linked with `width` lanes at `speed`."""
    folder = f"sys/bus/pci/devices/{address}"
    return {
        f"{folder}/class": f"{kind}\n",
        f"{folder}/vendor": f"{vendor}\n",
        f"{folder}/numa_node": f"{numa}\n",
        f"{folder}/current_link_width": f"{width}\n",
        f"{folder}/max_link_width": "16\n",
        f"{folder}/current_link_speed": f"{speed} GT/s PCIe\n",
        f"{folder}/max_link_speed": "32.0 GT/s PCIe\n",
    }


def gpu(width: int = 16, speed: float = 2.5, numa: int = 0) -> dict[str, str | None]:
    return pci(GPU, "0x030200", width, speed, numa)


def nic(width: int = 16, speed: float = 32.0, numa: int = 0) -> dict[str, str | None]:
    return pci(NIC, "0x020700", width, speed, numa, "0x15b3")


@pytest.mark.parametrize(
    ("files", "severity"),
    [(gpu(), OK), (gpu(width=8), WARNING), (nic(), OK), (nic(width=4), WARNING), (nic(speed=16.0), WARNING)],
)
def test_links_are_compared_with_what_the_device_can(
    tmp_path: Path, files: dict[str, str | None], severity: Severity
) -> None:
    """An idle GPU lowers its speed, which is well."""
    assert only(devices.links, context_of(FakeMachine(tmp_path, files).view())).severity is severity


def test_other_devices_are_of_no_interest(tmp_path: Path) -> None:
    graphics = pci(GPU, "0x030000", 1, 2.5, vendor="0x1a03")  # the console of a server's management board
    disk = pci(NIC, "0x010802", 2, 8.0)
    assert not said(devices.links, context_of(FakeMachine(tmp_path, graphics | disk).view()))


def test_gpus_are_counted_against_the_pools(tmp_path: Path) -> None:
    config = config_of(pools=ON_GPUS)
    names = "nvidia-smi --query-gpu=name "
    none = FakeMachine(tmp_path / "a").view()
    one = FakeMachine(tmp_path / "b", commands={names: "NVIDIA H200\n"}).view()
    two = FakeMachine(tmp_path / "c", commands={names: "NVIDIA H200\nNVIDIA H200\n"}).view()
    assert only(devices.gpus_present, context_of(none, config)).severity is WARNING
    assert only(devices.gpus_present, context_of(one, config)).severity is NOTE
    assert only(devices.gpus_present, context_of(two, config)).severity is OK
    assert not said(devices.gpus_present, context_of(none))


def test_parts_of_a_gpu_are_advised_against(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path).view()
    half = {"device": "cuda", "gpus_per_rank": 0.5}
    split = config_of(
        pools=[{"name": "p", "role": "prefill", **half}, {"name": "d", "role": "decode", **half}]
    )
    found = only(devices.gpu_shares, context_of(machine, split))
    assert (found.severity, "p 0.5, d 0.5" in found.seen) == (WARNING, True)
    assert "decode waits for prefill" in found.why
    assert "--prefill 0" in found.remedy
    both = config_of(pools=[{"name": "b", "role": "both", "replicas": 2, **half}])
    assert "fewer replicas" in only(devices.gpu_shares, context_of(machine, both)).remedy
    assert not said(devices.gpu_shares, context_of(machine, config_of(pools=ON_GPUS)))
    assert not said(devices.gpu_shares, context_of(machine))


@pytest.mark.parametrize(
    ("listed", "visible", "num_gpus"),
    [("0\n", None, 1), ("0\n1\n", None, 2), ("0\n1\n", "1", 1), ("0\n1\n", "", 0), ("", None, None)],
)
def test_gpus_of_this_host_are_counted(
    tmp_path: Path, listed: str, visible: str | None, num_gpus: int | None
) -> None:
    machine = FakeMachine(tmp_path, commands={"nvidia-smi --query-gpu=index ": listed}).view()
    assert machine.num_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == num_gpus
    assert FakeMachine(tmp_path / "none").view().num_gpus({}) is None


def test_what_has_not_been_validated_on_gpus_is_said(tmp_path: Path) -> None:
    names = "nvidia-smi --query-gpu=name "
    h200 = FakeMachine(tmp_path / "a", commands={names: "NVIDIA H200\nNVIDIA H200\n"}).view()
    h100 = FakeMachine(tmp_path / "b", commands={names: "NVIDIA H100 80GB HBM3\n"}).view()
    config = config_of(pools=ON_GPUS)
    assert (
        "NVIDIA H200 (a cluster has run on one NVIDIA H100)"
        in only(devices.cuda_validation, context_of(h200, config)).seen
    )
    assert not said(devices.cuda_validation, context_of(h100, config))
    wide = config_of(pools=[ON_GPUS[0] | {"tp": 2}])
    assert "several ranks a replica" in only(devices.cuda_validation, context_of(h100, wide)).seen
    assert not said(devices.cuda_validation, context_of(h200))


def test_persistence_mode(tmp_path: Path) -> None:
    question = "nvidia-smi --query-gpu=index,persistence_mode"
    off = FakeMachine(tmp_path / "a", commands={question: "0, Enabled\n1, Disabled\n"}).view()
    on = FakeMachine(tmp_path / "b", commands={question: "0, Enabled\n1, Enabled\n"}).view()
    assert only(devices.gpu_persistence, context_of(off)).severity is WARNING
    assert "GPU 1" in only(devices.gpu_persistence, context_of(off)).seen
    assert only(devices.gpu_persistence, context_of(on)).severity is OK
    assert not said(devices.gpu_persistence, context_of(FakeMachine(tmp_path / "c").view()))


@pytest.mark.parametrize("question", [REASONS, OLD_REASONS])
def test_what_holds_a_clock_down_is_named(tmp_path: Path, question: str) -> None:
    held = "0, Not Active, Not Active, Not Active, Active\n1, Active, Active, Not Active, Not Active\n"
    machine = FakeMachine(tmp_path, commands={question: held}).view()
    found = said(devices.gpu_clocks, context_of(machine))
    assert [severity for severity, _ in found] == [WARNING, WARNING]
    assert found[0][1].endswith("GPU 0 is held below its clock: sw_power_cap")
    assert "hw_slowdown, hw_thermal_slowdown" in found[1][1]


def test_free_clocks_are_well(tmp_path: Path) -> None:
    free = FakeMachine(tmp_path, commands={REASONS: "0, Not Active, Not Active, Not Active, Not Active\n"})
    assert only(devices.gpu_clocks, context_of(free.view())).severity is OK
    assert not any(line.startswith(OLD_REASONS) for line in free.asked)


def test_bf16_needs_capability_8(tmp_path: Path) -> None:
    question = "nvidia-smi --query-gpu=index,compute_cap"
    config = config_of(pools=ON_GPUS)
    old = FakeMachine(tmp_path / "a", commands={question: "0, 7.5\n1, 9.0\n"}).view()
    new = FakeMachine(tmp_path / "b", commands={question: "0, 10.0\n"}).view()
    odd = FakeMachine(tmp_path / "c", commands={question: "0, [N/A]\n"}).view()
    assert only(devices.gpu_capability, context_of(old, config)).severity is WARNING
    assert only(devices.gpu_capability, context_of(new, config)).severity is OK
    assert only(devices.gpu_capability, context_of(odd, config)).severity is OK
    fp16 = config_of(pools=[{**ON_GPUS[0], "dtype": "fp16"}])
    assert not said(devices.gpu_capability, context_of(old, fp16))


def test_a_gpu_far_from_every_fast_network_device_is_reported(tmp_path: Path) -> None:
    near = FakeMachine(tmp_path / "a", gpu(numa=1) | nic(numa=1)).view()
    far = FakeMachine(tmp_path / "b", gpu(numa=0) | nic(numa=1)).view()
    unknown = FakeMachine(tmp_path / "c", gpu(numa=-1) | nic(numa=-1)).view()
    assert only(devices.locality, context_of(near)).severity is OK
    assert only(devices.locality, context_of(far)).severity is NOTE
    assert not said(devices.locality, context_of(unknown))


def test_rdma_ports_must_be_active_and_named_devices_there(tmp_path: Path) -> None:
    up: dict[str, str | None] = {"sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n"}
    down: dict[str, str | None] = {"sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n"}
    active = context_of(FakeMachine(tmp_path / "a", up).view())
    assert Severity.ERROR not in [severity for severity, _ in said(devices.infiniband, active)]
    assert not any("not active" in seen for _, seen in said(devices.infiniband, active))
    half = said(devices.infiniband, context_of(FakeMachine(tmp_path / "b", up | down).view()))
    assert (WARNING, "RDMA ports that are not active: mlx5_1:1 (1: DOWN)") in half
    missing = config_of(transfer={"rdma_devices": ["mlx5_7:1"]})
    assert (
        said(devices.infiniband, context_of(FakeMachine(tmp_path / "c", up).view(), missing))[0][0] is ERROR
    )
    assert not said(devices.infiniband, context_of(FakeMachine(tmp_path / "d").view()))
    without = config_of(transfer={"transports": ["shm", "tcp"]})
    assert not said(devices.infiniband, context_of(FakeMachine(tmp_path / "e", up | down).view(), without))


def test_nvidia_smi_that_answers_nonsense_breaks_nothing(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path, commands={"nvidia-smi": "No devices were found\n"}).view()
    context = context_of(machine, config_of(pools=ON_GPUS))
    for check in (it for it in devices.CHECKS if it.group == "devices"):
        assert all(severity is not OK for severity, _ in said(check.look, context)), check.name
