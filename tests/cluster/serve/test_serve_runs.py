"""How a command finds the cluster that it is pointed at, among those of this user that run here."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest
from ray._private import services
from serving import TINY
from stranger import NOBODY, Stranger, needs_root

from cluster.config import ClusterConfig, parse_config
from cluster.errors import StartError
from cluster.serve.joined_ray import AWAY_S, REFUSED_S, GcsWatch, RayTarget, find_target, running_target
from cluster.serve.private_folder import PrivateFolder
from cluster.serve.ray_owner import listener_at, own_ray_clusters, split_address
from cluster.serve.serve_runs import ServeRun, living_runs, only_run, record


def run(app: str = "tandem", port: int = 8780, file: str = "", ray: str = "127.0.0.1:6379") -> ServeRun:
    return ServeRun(
        app=app,
        process_id=os.getpid(),
        started_at=1.0,
        file=file,
        gateways=(f"127.0.0.1:{port}",),
        admins=(f"127.0.0.1:{port + 2}",),
        ray=ray,
        dashboard="http://127.0.0.1:8265",
        token_file=f"/run/{port}/ray-token",
    )


def config(app: str = "tandem", port: int = 0) -> ClusterConfig:
    raw = {"app": app, "model": str(TINY), "gateway": {"port": port}}
    return parse_config({**raw, "pools": [{"name": "all", "role": "both"}]}, "test")


def test_a_run_that_serves_is_found_by_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    starting, serving, broken = PrivateFolder(), PrivateFolder(), PrivateFolder()
    record(serving, run())
    broken.write("run.json", "{")
    assert living_runs() == [run()]
    for folder in (starting, serving, broken):
        folder.close()
    assert living_runs() == []


def test_runs_of_another_users_folder_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"tandem-runs-{os.getuid()}").write_text("no folder")
    with pytest.raises(StartError, match="cannot be looked up"):
        living_runs()


def test_the_application_decides_then_the_port_then_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    first, second = run(port=8780, file=str(file)), run(port=9000)
    other = run(app="tandem-v2", port=9100)
    runs = [first, second, other]
    assert only_run(config("tandem-v2"), None, runs) == other
    assert only_run(config(port=9000), None, runs) == second
    assert only_run(config(), file, runs) == first
    assert only_run(config(port=9000), file, runs) == second, "the port goes before the file"
    assert only_run(config(port=9999), file, runs) == first, "a port that changes"
    assert only_run(config("third"), None, runs) is None


def test_several_clusters_are_a_question_and_none_is_an_error() -> None:
    runs = [run(port=8780), run(port=9000)]
    with pytest.raises(StartError, match=r"2 clusters .*8780.*9000.*--ray-address HOST:PORT"):
        running_target("", config(), None, runs, {})
    with pytest.raises(StartError, match=r"no `tandem serve` of this user .*'third'.*8780.*--ray-address"):
        running_target("", config("third"), None, runs, {})
    with pytest.raises(StartError, match=r"running: none"):
        running_target("", config(), None, [], {})


def test_the_token_is_that_of_the_run_unless_another_is_named() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    runs = [run(port=9000), run(port=8780, ray=address)]
    found = find_target(address, runs, {})
    assert found is not None
    assert (found.token_file, found.address) == ("/run/8780/ray-token", address)
    assert running_target("", config(port=8780), None, runs, {}) == found
    for variable in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        named = find_target(address, runs, {variable: "named"})
        assert named is not None
        assert named.token_file == ""
    assert find_target("local", runs, {}) is None
    listener.close()


@pytest.mark.parametrize(("host", "bound"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1")])
def test_the_kernel_says_who_listens(host: str, bound: str) -> None:
    with socket.create_server((bound, 0)) as listener:
        port = listener.getsockname()[1]
        owner = listener_at(host, port)
        assert owner is not None
        assert owner.process is not None
        assert (owner.user_id, owner.process.pid) == (os.geteuid(), os.getpid())
        assert owner.text.startswith(f"process {os.getpid()}, started by ")
        assert owner.is_trusted
    assert listener_at(host, port) is None


def test_the_socket_of_the_address_goes_before_that_of_all() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            found = listener_at(host, port)
            assert found is not None
            assert found.process is not None
            assert found.process.pid == os.getpid()


def test_nobody_here_listens_at_another_host() -> None:
    assert listener_at("192.0.2.1", 6379) is None


@pytest.mark.parametrize("address", ["nowhere", "host:", ":1", "ray://host:10001", "127.0.0.1:99999", "auto"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(address)
    assert split_address("[::1]:6379") == ("::1", 6379)


@needs_root
def test_a_process_of_another_user_is_never_found() -> None:
    """Whatever it calls itself. Ray's own discovery, which counts names alone, would send it the token."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    address = f"127.0.0.1:{port}"
    for program in ("raylet", "gcs_server"):
        with Stranger(address, program) as stranger:
            services.find_gcs_addresses.cache_clear()
            assert (address in services.find_gcs_addresses()) == (program == "raylet")
            assert address not in own_ray_clusters()
            owner = listener_at("127.0.0.1", port)
            assert owner is not None
            assert owner.user_id == NOBODY
            assert not owner.is_trusted
            assert stranger.close() == []


@needs_root
def test_the_token_of_this_user_goes_to_no_other_user_by_a_name_either() -> None:
    """Such as when a Ray cluster has ended and somebody else listens at its port now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with Stranger(address) as stranger:
        for runs in ([], [run(ray=address)]):
            with pytest.raises(
                StartError, match=r"would get the Ray token of this user.*RAY_AUTH_TOKEN_PATH"
            ):
                find_target(address, runs, {})
        named = find_target(address, [], {"RAY_AUTH_TOKEN_PATH": "/shared/token"})
        assert named is not None
        assert named.owner is not None
        assert named.owner.user_id == NOBODY
        assert all(line == "connected: b''\n" for line in stranger.close())


def test_a_target_says_whose_it_is() -> None:
    assert RayTarget("head:6379").text == "the Ray cluster at head:6379"


def test_a_gcs_has_ended_when_nobody_listens_in_its_place_any_more() -> None:
    watch = GcsWatch(0.0, may_return=False)
    assert not watch.see(1.0, "refused")
    assert not watch.see(REFUSED_S - 0.1, "refused")
    assert watch.see(REFUSED_S, "refused")
    assert REFUSED_S < 5.0


def test_a_gcs_that_may_return_or_whose_host_is_away_has_more_time() -> None:
    returning, away = GcsWatch(0.0, may_return=True), GcsWatch(0.0, may_return=False)
    for watch, state in ((returning, "refused"), (away, "silent")):
        assert not watch.see(AWAY_S - 1, state)
        assert not watch.see(AWAY_S, "up")
        assert not watch.see(AWAY_S + AWAY_S / 2, state)
        assert watch.see(2 * AWAY_S, state)
    assert AWAY_S < 60.0, "then Ray's library ends this process"


def test_a_record_is_read_as_it_is_written() -> None:
    assert msgspec.json.decode(msgspec.json.encode(run()), type=ServeRun) == run()
