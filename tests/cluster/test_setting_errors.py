"""What is wrong with a configuration is said in plain words, whatever the value and wherever it stands."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from cluster.config import ClusterConfig, parse_config
from cluster.errors import ConfigError
from cluster.setting_errors import known_keys

BASE: dict[str, Any] = {"model": "m", "pools": [{"name": "both", "role": "both"}]}
WRONG: tuple[object, ...] = ("x", "", -1, 0.5, 1e300, 1 << 80, True, None, [], [1, "a"], {}, {"a": 1})
# What pydantic itself writes.
FOREIGN = re.compile(r"Input should|Field required|Extra inputs|valid (?:string|integer|dict)|pydantic|\{")


def places(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all settings below the model, those of the first pool included."""
    for name in model.model_fields:
        yield (*path, name)
        for inner in known_keys(model, (name,)):
            if inner not in model.model_fields and len(path) < 3:
                yield (*path, name, inner)


def changed(path: tuple[str, ...], value: object) -> dict[str, Any]:
    raw = copy.deepcopy(BASE)
    at: Any = raw
    for name in path[:-1]:
        at = at.setdefault(name, {})
        at = at[0] if isinstance(at, list) else at
    at[path[-1]] = value
    return raw


def refusal(path: tuple[str, ...], value: object) -> str:
    """What is said of the value; "" where it is valid."""
    try:
        parse_config(changed(path, value), "cluster.yaml")
    except ConfigError as error:
        return str(error)
    return ""


def test_no_wrong_value_of_any_setting_is_described_in_a_librarys_words() -> None:
    said = [text for path in places(ClusterConfig) for value in WRONG if (text := refusal(path, value))]
    assert len(said) > 1000
    assert [text for text in said if FOREIGN.search(text.replace("{'a': 1}", ""))] == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("pools", "replica"), 2, "pools[0].replica: unknown key; did you mean replicas?"),
        (("gatway",), {}, "gatway: unknown key; did you mean gateway?"),
        (
            ("pools", "engine"),
            {"kv_token": 1},
            "pools[0].engine.kv_token: unknown key; did you mean kv_tokens?",
        ),
        (("inner_tls",), {"zzz": 1}, "inner_tls.zzz: unknown key; there are ca_file, cert_file, key_file"),
        (("pools", "tp"), 0, "pools[0].tp: must be at least 1, not 0"),
        (("pools", "role"), "prefil", "pools[0].role: must be 'prefill', 'decode' or 'both', not 'prefil'"),
        (("store",), {"dram_gb": "lots"}, "store.dram_gb: must be a number, not 'lots'"),
        (("pools", "engine"), 7, "pools[0].engine: must be a mapping of names to values, not 7"),
        (("scaling", "lend_roles"), True, "scaling.lend_roles: is called change_roles now; rename it"),
    ],
)
def test_an_error_says_what_to_write_instead(path: tuple[str, ...], value: object, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(changed(path, value), "cluster.yaml")
    assert f"cluster.yaml: {said}" in str(caught.value).splitlines()
