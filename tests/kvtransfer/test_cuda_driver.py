"""The driver's calls against a library that stands for `libcuda`: what is mapped when, and every call that
may fail."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvtransfer.errors import PathError
from kvtransfer.transports.card_links import check_atomics
from kvtransfer.transports.cuda_driver import HANDLE_BYTES, CudaDriver

BASE, SIZE = 0x7000_0000, 1 << 20
BUS_IDS = ["0000:18:00.0", "0000:2A:00.0", "0000:3A:00.0"]
_ERROR = 217


class FakeCuda:
    """A card at each of `BUS_IDS`."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.counted: Counter[str] = Counter()
        self.mapped: dict[int, bytes] = {}
        self._cuMemcpyDtoDAsync_v2: Callable[..., int] = lambda *_: 0
        self.opens = threading.Event()
        self.opens.set()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.counted[name] += 1
            return _ERROR if name == self.fails else getattr(self, f"_{name}", lambda *_: 0)(*args)

        if not name.startswith("cu"):
            raise AttributeError(name)
        return call

    def cuGetErrorName(self, status: Any, text: Any) -> int:  # as the driver has it
        text._obj.value = b"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED" if status.value == _ERROR else None
        return 0

    @staticmethod
    def _cuDeviceGet(device: Any, index: Any) -> int:
        device._obj.value = index.value
        return 0

    @staticmethod
    def _cuDeviceGetPCIBusId(name: Any, size: Any, device: Any) -> int:
        name.value = BUS_IDS[device.value].encode()
        return 0

    @staticmethod
    def _cuMemGetAddressRange_v2(base: Any, size: Any, address: Any) -> int:
        base._obj.value, size._obj.value = BASE, SIZE
        return 0

    @staticmethod
    def _cuIpcGetMemHandle(handle: Any, base: Any) -> int:
        ctypes.memmove(
            ctypes.addressof(handle._obj), base.value.to_bytes(HANDLE_BYTES, "little"), HANDLE_BYTES
        )
        return 0

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:
        assert self.opens.wait(10)
        opened = bytes(memoryview(handle))
        assert opened not in self.mapped.values(), "a process can open a handle only once"
        address._obj.value = 0x1000 * (1 + len(self.mapped))
        self.mapped[address._obj.value] = opened
        return 0

    def _cuIpcCloseMemHandle(self, address: Any) -> int:
        del self.mapped[address.value]
        return 0


def _handle(base: int) -> bytes:
    return base.to_bytes(HANDLE_BYTES, "little")


def driver_of(cuda: FakeCuda, index: int = 0) -> CudaDriver:
    return CudaDriver(cuda, index)  # type: ignore[arg-type]


def test_memory_is_exported_as_its_allocation_and_an_offset() -> None:
    handle, offset = driver_of(FakeCuda()).export(BASE + 4096)
    assert handle == _handle(BASE)
    assert offset == 4096


def test_users_of_a_handle_share_a_mapping_until_the_last_one_ends_it() -> None:
    """Also those that ask while the first is still mapping it."""
    cuda, handle = FakeCuda(), b"h" * HANDLE_BYTES
    driver = driver_of(cuda)
    cuda.opens.clear()
    with ThreadPoolExecutor(4) as threads:
        mapping = [threads.submit(driver.map, handle) for _ in range(4)]
        cuda.opens.set()
        addresses = [each.result() for each in mapping]
    assert len(set(addresses)) == len(cuda.mapped) == cuda.counted["cuIpcOpenMemHandle_v2"] == 1
    for num_left in (3, 2, 1):
        driver.unmap(handle)
        assert len(cuda.mapped) == 1, f"{num_left} users are left"
    driver.unmap(handle)
    assert cuda.mapped == {}
    assert driver.map(handle) in cuda.mapped


def test_a_copy_is_queued_in_the_devices_context_from_source_to_target() -> None:
    """Whichever thread asks, and whoever owns the memory: only addresses are named."""
    cuda, made = FakeCuda(), []

    def copy(*arguments: Any) -> int:
        made.append([argument.value for argument in arguments])
        assert cuda.counted["cuCtxSetCurrent"] == 1
        return 0

    driver = driver_of(cuda)
    cuda._cuMemcpyDtoDAsync_v2 = copy
    driver.copy(source=BASE, target=BASE + SIZE, num_bytes=24, stream=0x55)
    assert made == [[BASE + SIZE, BASE, 24, 0x55]]
    cuda.fails = "cuMemcpyDtoDAsync_v2"
    with pytest.raises(PathError, match="cuMemcpyDtoDAsync_v2: CUDA_ERROR"):
        driver.copy(BASE, BASE + SIZE, 24, 0)


@pytest.mark.parametrize("call", ["cuMemGetAddressRange_v2", "cuIpcGetMemHandle", "cuCtxSetCurrent"])
def test_an_export_that_fails_names_the_call_and_the_error(call: str) -> None:
    cuda = FakeCuda()
    driver = driver_of(cuda)
    cuda.fails = call
    with pytest.raises(PathError, match=f"{call}: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"):
        driver.export(BASE)


def test_a_mapping_that_fails_leaves_nothing_and_may_be_tried_again() -> None:
    cuda, handle = FakeCuda("cuIpcOpenMemHandle_v2"), b"h" * HANDLE_BYTES
    driver = driver_of(cuda)
    with pytest.raises(PathError, match="PEER_ACCESS_UNSUPPORTED"):
        driver.map(handle)
    with pytest.raises(PathError, match="a handle of 3 bytes"):
        driver.map(b"abc")
    cuda.fails = ""
    assert driver.map(handle) in cuda.mapped


class FakeNvml:
    """The management library, for which the first two cards are joined."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.num_open = 0

    def nvmlInit_v2(self) -> int:
        self.num_open += self.fails != "init"
        return 9 if self.fails == "init" else 0

    def nvmlShutdown(self) -> int:
        self.num_open -= 1
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: bytes, card: Any) -> int:
        card._obj.value = 1 + BUS_IDS.index(bus_id.decode())
        return 6 if self.fails == "handle" else 0

    @staticmethod
    def nvmlDeviceGetP2PStatus(card: Any, other: Any, index: Any, status: Any) -> int:
        assert index.value == 3
        status._obj.value = 0 if {card.value, other.value} == {1, 2} else 5
        return 0


def test_a_card_reaches_itself_and_those_that_are_joined_to_it() -> None:
    driver = driver_of(FakeCuda(), 1)
    assert driver.bus_id == BUS_IDS[1]
    driver.check_atomics(BUS_IDS[1])
    nvml = FakeNvml()
    check_atomics(BUS_IDS[0], BUS_IDS[1], nvml)
    with pytest.raises(PathError, match=f"no native atomics between {BUS_IDS[1]} and {BUS_IDS[2]}"):
        check_atomics(BUS_IDS[1], BUS_IDS[2], nvml)
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    ("fails", "reason"), [("init", "nvmlInit_v2: NVML error 9"), ("handle", "BusId_v2: NVML error 6")]
)
def test_a_management_library_that_fails_is_a_reason(fails: str, reason: str) -> None:
    nvml = FakeNvml(fails)
    with pytest.raises(PathError, match=reason):
        check_atomics(BUS_IDS[0], BUS_IDS[1], nvml)
    assert nvml.num_open == 0
