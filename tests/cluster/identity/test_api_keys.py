"""The file of API keys: who writes it, who may read it, and what a key opens."""

from __future__ import annotations

import hashlib
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from callers import CREATED, key_of

from cluster.errors import ConfigError, UnauthenticatedError
from cluster.identity.api_key_file import add_key, parse_keys, read_keys, revoke_key
from cluster.identity.api_keys import KeyEntry, split_key
from cluster.identity.authenticator import Authenticator, Credentials
from cluster.identity.config import AuthConfig
from kvtransfer.common.clock import ManualClock

ENTRY = {
    "id": "abcdefgh",
    "salt": "00" * 16,
    "hash": "00" * 32,
    "tenant": "t",
    "created": "2026-01-01T00:00:00Z",
}


def opened(path: Path, clock: ManualClock | None = None, **tenants: object) -> Authenticator:
    config = AuthConfig.model_validate({"mode": "required", "keys_file": path, "tenants": tenants})
    return Authenticator(config, clock or ManualClock())


def shown(token: str) -> Credentials:
    return Credentials(f"Bearer {token}")


def test_a_key_opens_what_its_entry_says(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    plain = key_of(path, "acme")
    special = key_of(path, "acme", "user", "operator", max_priority=7, models=("m",))
    known = opened(path, acme={"max_priority": 3, "models": ["a", "b"], "sharing_group": "firm"})
    identity = known.identify(shown(plain))
    assert identity.name == f"key:{split_key(plain)[0]}"  # type: ignore[index]
    assert (identity.tenant, identity.sharing_group, identity.max_priority) == ("acme", "firm", 3)
    assert identity.roles == {"user"}
    assert identity.models == frozenset({"a", "b"})
    assert not identity.has_role("viewer")
    other = known.identify(shown(special))
    assert other.max_priority == 7
    assert other.models == frozenset({"m"})
    assert other.has_role("viewer")
    assert other.has_role("operator")


def test_an_operator_is_no_user() -> None:
    entry = KeyEntry.model_validate(ENTRY | {"roles": ["operator"]})
    identity = entry.identity(AuthConfig())
    assert not identity.has_role("user")
    assert identity.models is None
    assert identity.max_priority == 0


def test_a_key_is_42_or_more_random_characters_and_not_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key = key_of(path, "acme", note="of the build")
    found = split_key(key)
    assert found is not None
    assert (len(found[0]), len(found[1])) == (8, 43)
    text = path.read_text()
    assert found[0] in text
    assert found[1] not in text
    assert "of the build" in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_equal_secrets_have_unequal_hashes(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    drawn = iter([b"\1" * 5, b"s" * 32, b"a" * 16, b"\2" * 5, b"s" * 32, b"b" * 16])
    for _ in range(2):
        add_key(path, lambda _: next(drawn), tenant="t", roles=("user",), created=CREATED)
    first, second = read_keys(path)
    assert first.hash != second.hash


@pytest.mark.parametrize(
    "wrong",
    [
        "tandem_abcdefgh_" + "A" * 43,
        "tandem_abcdefgh_",
        "tandem_",
        "tandem_ABCDEFGH_" + "A" * 43,
        "x" * 10_000,
        "ünïcode",
        "a b",
    ],
)
def test_what_is_no_key_is_refused(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "keys.yaml"
    key_of(path, "acme")
    with pytest.raises(UnauthenticatedError):
        opened(path).identify(shown(wrong))


def test_a_wrong_secret_and_an_unknown_id_are_refused_alike(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key = key_of(path, "acme")
    known = opened(path)
    told = set()
    for wrong in (key[:-1] + ("A" if key[-1] != "A" else "B"), key.replace(key[7:15], "aaaaaaaa")):
        with pytest.raises(UnauthenticatedError) as refused:
            known.identify(shown(wrong))
        told.add(str(refused.value))
    assert told == {"the key or token is not valid here"}


@pytest.mark.parametrize("authorization", ["", "Basic eA==", "Bearer", "Bearer ", "bearer\tx", "Bearer a\nb"])
def test_other_credentials_are_refused(tmp_path: Path, authorization: str) -> None:
    path = tmp_path / "keys.yaml"
    key_of(path, "acme")
    with pytest.raises(UnauthenticatedError, match="send the metadata `authorization: Bearer KEY`"):
        opened(path).identify(Credentials(authorization))


def test_a_key_expires(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    clock = ManualClock(1000.0)
    key = key_of(path, "acme", expires=datetime.fromtimestamp(1010, UTC))
    known = opened(path, clock)
    assert known.identify(shown(key)).expires_at == 1010
    clock.advance(10)
    with pytest.raises(UnauthenticatedError, match=r"the key \w{8} has expired"):
        known.identify(shown(key))


def test_a_time_without_a_zone_is_utc() -> None:
    entry = KeyEntry.model_validate(ENTRY | {"expires": datetime(1970, 1, 2)})
    assert entry.expires_at == 24 * 3600


def test_several_keys_are_valid_until_one_is_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    old, new = key_of(path, "acme"), key_of(path, "acme")
    known = opened(path)
    assert known.identify(shown(old)) != known.identify(shown(new))
    revoke_key(path, old[7:15])
    known.reload()
    with pytest.raises(UnauthenticatedError):
        known.identify(shown(old))
    assert known.identify(shown(new)).tenant == "acme"
    with pytest.raises(ConfigError, match="has no key"):
        revoke_key(path, old[7:15])


def test_a_session_is_over_when_its_key_is_revoked(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key = key_of(path, "acme", "viewer")
    known = opened(path)
    entry = known.key_entry(key)
    assert known.recheck(entry.id, entry.mark) == known.identify(shown(key))
    revoke_key(path, key[7:15])
    known.reload()
    with pytest.raises(UnauthenticatedError, match="not valid any more"):
        known.recheck(entry.id, entry.mark)


def test_a_broken_file_leaves_the_last_good_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.yaml"
    key = key_of(path, "acme")
    known, text = opened(path), path.read_text()
    for broken in ("keys: [", "keys: 5", "other: []"):
        path.write_text(broken)
        known.reload()
        known.reload()
        assert known.identify(shown(key)).tenant == "acme"
    path.unlink()
    known.reload()
    assert known.identify(shown(key)).tenant == "acme"
    assert caplog.text.count("the last good content stays in use") == 1, "once, not every second"
    path.write_text(text)
    known.reload()
    assert "can be read again" in caplog.text
    path.write_text("keys: []")
    known.reload()
    with pytest.raises(UnauthenticatedError):
        known.identify(shown(key))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a", "must be a mapping"),
        ("keys: {a: 1}", r"keys: "),
        ("keys: [{id: x}]", r"keys\[0\]\.\w+: "),
        ("a: &a [*a]", "a: "),
        (yaml.safe_dump({"keys": [ENTRY, ENTRY]}), "an id is there more than once"),
        (yaml.safe_dump({"keys": [ENTRY | {"roles": ["root"]}]}), r"keys\[0\]\.roles\[0\]: "),
        (yaml.safe_dump({"keys": [ENTRY | {"tenant": ""}]}), r"keys\[0\]\.tenant: "),
        (yaml.safe_dump({"keys": [ENTRY | {"secret": "x"}]}), r"keys\[0\]\.secret: "),
        ("\x00", "not YAML"),
        ("!!python/object:os.system {}", "not YAML"),
    ],
)
def test_a_wrong_file_names_its_field(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_keys(text.encode())


def test_a_file_that_cannot_be_used_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"auth\.keys_file: .*missing\.yaml"):
        opened(tmp_path / "missing.yaml")
    (tmp_path / "torn.yaml").write_text("keys: [")
    with pytest.raises(ConfigError, match=r"auth\.keys_file: .*torn\.yaml: not YAML"):
        opened(tmp_path / "torn.yaml")


def test_a_wrong_field_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    key_of(path, "acme")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="tenant: "):
        key_of(path, "a tenant")
    with pytest.raises(ConfigError, match="max_priority: "):
        key_of(path, "acme", max_priority=101)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir() if not file.name.startswith(".")] == ["keys.yaml"]


def test_writers_at_once_lose_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    with ThreadPoolExecutor(4) as pool:
        keys = list(pool.map(lambda number: key_of(path, f"t{number}"), range(12)))
    known = opened(path)
    assert [known.identify(shown(key)).tenant for key in keys] == [f"t{number}" for number in range(12)]


def test_a_key_can_be_made_with_a_shell(tmp_path: Path) -> None:
    """The chart draws its first keys so: the salt is a text, and its hexadecimal form is in the file."""
    salt, secret = "saltsaltsaltsalt", "A" * 43
    hashed = hashlib.sha256(f"{salt}{secret}".encode()).hexdigest()
    entry = ENTRY | {"salt": salt.encode().hex(), "hash": hashed, "tenant": "acme"}
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": [entry]}))
    assert opened(path).identify(shown(f"tandem_abcdefgh_{secret}")).tenant == "acme"
