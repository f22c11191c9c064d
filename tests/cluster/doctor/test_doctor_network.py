"""The checks of ports, addresses, clock and Ray's token, on real sockets and files."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from doctor_harness import FakeMachine, config_of, context_of, only, said

from cluster.config import ClusterConfig
from cluster.doctor import network
from cluster.doctor.checks import Severity
from cluster.serve.machine import KernelClock, Machine, read_kernel_clock

OK, NOTE, WARNING, ERROR = Severity
TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock


def with_port(port: int, console: int | None = None, host: str = "127.0.0.1") -> ClusterConfig:
    gateway = {"port": port, "console_port": console, "admin_port": 0, "host": host, "http": {"port": 0}}
    return config_of(gateway=gateway, auth={"insecure": True})


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_a_free_port_is_well_and_a_taken_one_names_its_process(listening: socket.socket) -> None:
    taken = listening.getsockname()[1]
    assert only(network.ports, context_of(Machine(), with_port(free_port()))).severity is OK
    result = only(network.ports, context_of(Machine(), with_port(taken)))
    assert result.severity is ERROR
    assert f"(process {os.getpid()})" in result.seen
    assert only(network.ports, context_of(Machine(), with_port(taken), is_running=True)).severity is OK


def test_the_port_of_the_console_is_looked_at_too(listening: socket.socket) -> None:
    found = said(network.ports, context_of(Machine(), with_port(free_port(), listening.getsockname()[1])))
    assert [severity for severity, _ in found] == [OK, ERROR]
    assert found[1][1].startswith("gateway.console_port")


def test_the_port_for_probes_is_looked_at_too(listening: socket.socket) -> None:
    gateway = {"port": 0, "console_port": None, "health_port": listening.getsockname()[1]}
    result = only(network.ports, context_of(Machine(), config_of(gateway=gateway)))
    assert result.severity is ERROR
    assert result.seen.startswith("gateway.health_port")


def test_free_ports_of_the_systems_choice_are_not_looked_at() -> None:
    assert not said(network.ports, context_of(Machine(), with_port(0)))


def test_addresses_must_be_of_this_machine() -> None:
    other_place = "192.0.2.7"  # of no network, by RFC 5737
    assert only(network.ports, context_of(Machine(), with_port(8780, host=other_place))).severity is ERROR
    config = config_of(gateway={"port": 0, "console_port": None}, transfer={"data_host": other_place})
    result = only(network.ports, context_of(Machine(), config))
    assert result.severity is ERROR
    assert result.seen.startswith("transfer.data_host")


def test_the_clock_is_synchronized_or_not(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    good, bad = KernelClock(True, 0.002), KernelClock(False, 16.0)
    result = only(network.clock, context_of(machine.view(clock=good)))
    assert (result.severity, result.seen) == (OK, "the clock is synchronized, within 2 ms")
    assert only(network.clock, context_of(machine.view(clock=bad))).severity is NOTE
    several = config_of(transfer={"data_host": "auto"})
    assert only(network.clock, context_of(machine.view(clock=bad), several)).severity is WARNING
    assert not said(network.clock, context_of(machine.view(clock=None)))


def test_the_kernel_is_asked_for_its_clock() -> None:
    clock = read_kernel_clock()
    assert clock is None or 0 <= clock.max_error_s < 1e6


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that other users may enter, which no folder of pytest's is."""
    places = [Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")]
    base = next(place for place in places if all(it.stat().st_mode & 0o011 for it in (place, *place.parents)))
    with tempfile.TemporaryDirectory(dir=base) as name:
        Path(name).chmod(0o755)
        yield Path(name)


def token_file(folder: Path, text: str, mode: int) -> dict[str, str]:
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    return {"RAY_AUTH_TOKEN_PATH": str(path)}


@pytest.mark.parametrize(
    ("text", "mode", "severities"),
    [
        (TOKEN, 0o600, [OK]),
        (TOKEN, 0o644, [WARNING, OK]),
        ("", 0o600, [ERROR]),
        ("short\n", 0o600, [WARNING]),
    ],
)
def test_the_token_is_there_and_its_owners_alone(
    open_folder: Path, text: str, mode: int, severities: list[Severity]
) -> None:
    context = context_of(Machine(), environment=token_file(open_folder, text, mode))
    assert [severity for severity, _ in said(network.ray_token, context)] == severities


def test_a_shut_folder_keeps_a_token_too(tmp_path: Path) -> None:
    shut = tmp_path / "shut"
    shut.mkdir(mode=0o700)
    context = context_of(Machine(), environment=token_file(shut, TOKEN, 0o644))
    assert [severity for severity, _ in said(network.ray_token, context)] == [NOTE, OK]


def test_a_token_of_the_environment_goes_first(tmp_path: Path) -> None:
    environment = {"RAY_AUTH_TOKEN": TOKEN, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}
    assert only(network.ray_token, context_of(Machine(), environment=environment)).severity is OK


def test_no_token_matters_where_a_cluster_is_to_be_joined(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path).view()
    assert only(network.ray_token, context_of(machine)).severity is OK
    assert only(network.ray_token, context_of(machine, ray_address="auto")).severity is NOTE
    assert only(network.ray_token, context_of(machine, ray_address="head:6379")).severity is ERROR
    named = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}
    assert only(network.ray_token, context_of(machine, environment=named)).severity is ERROR
    home = tmp_path / "root/.ray"
    home.mkdir(parents=True)
    (home / "auth_token").write_text(TOKEN)
    (home / "auth_token").chmod(0o600)
    assert only(network.ray_token, context_of(machine, ray_address="head:6379")).severity is OK


def test_no_authentication_is_a_warning() -> None:
    assert (
        only(network.ray_token, context_of(Machine(), environment={"RAY_AUTH_MODE": "disabled"})).severity
        is WARNING
    )


def test_the_ray_cluster_to_join_answers_or_not(listening: socket.socket) -> None:
    there = f"127.0.0.1:{listening.getsockname()[1]}"
    assert only(network.ray_cluster, context_of(Machine(), ray_address=there)).severity is OK
    away = f"127.0.0.1:{free_port()}"
    assert only(network.ray_cluster, context_of(Machine(), ray_address=away)).severity is ERROR
    assert only(network.ray_cluster, context_of(Machine(), ray_address="head")).severity is ERROR
    assert not said(network.ray_cluster, context_of(Machine()))
