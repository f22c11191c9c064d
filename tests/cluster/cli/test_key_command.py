"""`tandem key`, and the credentials that the other commands show."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import pytest
from authority import Authority
from callers import bearing, key_of
from gateway_harness import GatewayHarness
from typer.testing import CliRunner, Result

from cluster.cli.gateway_options import CallerOptions
from cluster.cli.main import cli
from cluster.errors import ConfigError
from cluster.identity.api_key_file import read_keys
from cluster.identity.api_keys import split_key
from cluster.identity.authenticator import Authenticator, Credentials
from cluster.identity.config import AuthConfig
from cluster.identity.key_roots import parse_key_roots
from kvtransfer.common.clock import SystemClock

NOTHING = {"TANDEM_API_KEY": "", "TANDEM_API_KEY_FILE": "", "TANDEM_CLIENT_CERTIFICATE": ""}


def command(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, [*arguments], env=NOTHING | {"COLUMNS": "120"} | (env or {}))


def test_a_key_is_made_listed_and_revoked(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.yaml")
    made = command("key", "new", "--tenant", "acme", "-f", file, "--note", "of the build", "--days", "2")
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    found = split_key(key)
    assert found is not None
    config = AuthConfig.model_validate({"mode": "required", "keys_file": file})
    identity = Authenticator(config, SystemClock()).identify(Credentials(f"Bearer {key}"))
    assert identity.tenant == "acme"
    assert identity.roles == {"user"}
    shown = command("key", "list", "-f", file).stdout
    assert found[0] in shown
    assert "of the build" in shown
    (listed,) = json.loads(command("key", "list", "-f", file, "--json").stdout)["keys"]
    assert (listed["id"], listed["roles"], listed["has_expired"]) == (found[0], ["user"], False)
    assert not {"salt", "hash"} & listed.keys()
    assert found[1] not in shown + json.dumps(listed)
    assert command("key", "revoke", found[0], "-f", file).exit_code == 0
    assert read_keys(Path(file)) == []
    assert isinstance(command("key", "revoke", found[0], "-f", file).exception, ConfigError)


def test_all_that_an_entry_says_is_an_option(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.yaml")
    more = ("--role", "operator", "--role", "user", "--max-priority", "7", "--model", "a", "--model", "b")
    made = json.loads(command("key", "new", "--tenant", "ops", "-f", file, *more, "--json").stdout)
    (entry,) = read_keys(Path(file))
    assert (entry.id, entry.roles, entry.max_priority) == (made["id"], ("user", "operator"), 7)
    assert entry.models == ("a", "b")
    assert entry.expires is None
    wrong = command("key", "new", "--tenant", "ops", "-f", file, "--role", "root")
    assert isinstance(wrong.exception, ConfigError)
    assert "'root' is none; the roles are user, viewer, operator" in str(wrong.exception)
    wrong = command("key", "new", "--tenant", "bad tenant!", "-f", file)
    assert isinstance(wrong.exception, ConfigError)
    assert str(wrong.exception).startswith("tenant: 'bad tenant!' names no tenant: 1 to 64 letters")


def test_a_key_root_is_rotated_and_the_rotation_ended(tmp_path: Path) -> None:
    file = tmp_path / "key-root"
    first = command("key", "root", str(file))
    assert first.exit_code == 0, first.output
    (old,) = parse_key_roots(file.read_bytes())
    assert old.id in first.stdout
    assert command("key", "root", str(file)).exit_code == 0
    new, kept = parse_key_roots(file.read_bytes())
    assert (kept, new.id != old.id) == (old, True)
    ended = command("key", "root", "--end", str(file))
    assert parse_key_roots(file.read_bytes()) == (new,)
    assert new.id in ended.stdout
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_key_that_has_expired_is_listed_as_such(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key_of(file, "acme", expires="2026-01-02T00:00:00Z")
    (listed,) = json.loads(command("key", "list", "-f", str(file), "--json").stdout)["keys"]
    assert listed["has_expired"]


@pytest.mark.parametrize("way", ["file", "environment"])
async def test_a_command_shows_its_key(harness: GatewayHarness, tmp_path: Path, way: str) -> None:
    keys = tmp_path / "keys.yaml"
    viewer, user = key_of(keys, "ops", "viewer"), key_of(keys, "acme")
    await harness.add_replica("d0", "decode")
    auth = {"mode": "required", "keys_file": str(keys)}
    gateway, address = await harness.add_gateway(harness.config(auth=auth))
    admin = f"127.0.0.1:{gateway.admin_port}"

    async def ask(key: str, *arguments: str) -> Result:
        given: dict[str, Any] = {}
        if key and way == "environment":
            given["env"] = {"TANDEM_API_KEY": key}
        elif key:
            (tmp_path / "key").write_text(f"{key}\n")
            arguments = (*arguments, "--api-key-file", str(tmp_path / "key"))
        return await asyncio.to_thread(command, *arguments, **given)

    status = await ask(viewer, "status", "--admin-address", admin, "--json")
    assert json.loads(status.stdout)["authentication"] == "required", status.output
    asked = ("generate", "x", "--address", address, "--max-tokens", "1", "--json")
    done = json.loads((await ask(user, *asked)).stdout)
    explained = ("explain", done["request_id"])
    assert (await ask(user, *explained, "--address", address)).exit_code == 0
    assert (await ask(viewer, *explained, "--admin-address", admin)).exit_code == 0
    bench = ("bench", "serve", "--address", address, "--requests", "2", "--output-tokens", "2", "--json")
    assert (await ask(user, *bench)).exit_code == 0
    looked = await ask(viewer, "doctor", "--admin-address", admin, "--seconds", "0", "--json")
    assert not [it for it in json.loads(looked.stdout)["findings"] if it["check"] == "gateway"]
    refused = await ask("", "status", "--admin-address", admin)
    assert "UNAUTHENTICATED" in str(refused.exception)
    for order in (("store", "stat"), ("scale", "decode=1")):
        refused = await ask(user, *order, "--admin-address", admin)
        assert "PERMISSION_DENIED" in str(refused.exception)
    assert json.loads((await ask(viewer, "traffic", "--admin-address", admin, "--json")).stdout) == {
        "app": "tandem",
        "traffic": {"tandem": 1.0},
    }
    refused = await ask(viewer, "traffic", "tandem=1", "--admin-address", admin)
    assert "PERMISSION_DENIED" in str(refused.exception)


@pytest.mark.parametrize(
    "words",
    [
        "generate",
        "explain",
        "status",
        "traffic",
        "scale",
        "doctor",
        "bench serve",
        "store ls",
        "store stat",
        "store verify",
        "store purge",
    ],
)
def test_every_command_that_calls_a_gateway_takes_the_same_credentials(words: str) -> None:
    shown = command(*words.split(), "--help").stdout
    assert "--api-key-file" in shown
    assert "--client-certificate" in shown
    assert ("--address" if words in ("generate", "explain", "bench serve") else "--admin-address") in shown


def test_the_file_with_the_key_is_read_for_each_call(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("one\n")
    shown = CallerOptions(api_key_file=file).credentials()
    assert shown.metadata() == (("authorization", "Bearer one"),)
    file.write_text("two")
    assert shown.metadata() == (("authorization", "Bearer two"),)
    both = CallerOptions(api_key=" of the environment ", api_key_file=file)
    assert both.credentials().metadata() == bearing("of the environment").metadata()
    assert CallerOptions().credentials().metadata() == ()


@pytest.mark.parametrize("content", [b"", b"\n", b"a\nb", b"\xff"])
def test_a_file_without_a_key_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--api-key-file: .*must hold one line"):
        CallerOptions(api_key_file=file).credentials()
    file.unlink()
    with pytest.raises(ConfigError, match=r"--api-key-file: .*No such file"):
        CallerOptions(api_key_file=file).credentials()


def test_a_client_certificate_comes_with_its_key(tmp_path: Path) -> None:
    cert_file, key_file = Authority("ca").issue(tmp_path, "client")
    with pytest.raises(ConfigError, match="must hold the certificate chain and its private key"):
        CallerOptions(client_certificate=cert_file).credentials()
    both = tmp_path / "both.pem"
    both.write_bytes(cert_file.read_bytes() + key_file.read_bytes())
    assert CallerOptions(client_certificate=both).credentials().private_key == both.read_bytes()
    with pytest.raises(ConfigError, match="--client-certificate: "):
        CallerOptions(client_certificate=tmp_path / "missing").credentials()
