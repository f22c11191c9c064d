"""What `tandem serve` refuses before anything starts: the doctor's errors, in its words, by the names that
were given."""

from __future__ import annotations

import dataclasses
import re
import shutil
import socket
from pathlib import Path

import pytest
from doctor_harness import FakeMachine, config_of, context_of
from serving import TINY, tandem

from cluster.cli.serve_options import ServeOptions, in_options, serve_config
from cluster.doctor.preflight import preflight
from cluster.errors import ConfigError
from cluster.serve.resource_needs import needs_of


def engine(kv_tokens: int) -> list[dict[str, object]]:
    return [{"name": "both", "role": "both", "engine": {"kv_tokens": kv_tokens}}]


def found(machine: FakeMachine, **given: object) -> dict[str, str]:
    """What is refused: check to its remedy."""
    config = config_of(gateway={"port": 0, "admin_port": 0, "http": {"port": 0}}, **given)  # type: ignore[arg-type]
    needs = needs_of(config) if config.model_path == TINY else None
    findings = preflight(context_of(machine.view(), config, needs=needs))
    return {finding.check: finding.result.remedy for finding in findings}


def test_a_machine_where_all_is_well_refuses_nothing(tmp_path: Path) -> None:
    assert found(FakeMachine(tmp_path)) == {}


def test_more_kv_than_there_is_memory_is_refused_with_the_most_that_fits(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    remedy = found(machine, pools=engine(900_000_000))["memory"]
    fitting = int(re.findall(r"set kv_tokens to at most (\d+), or auto", remedy)[0])
    assert found(machine, pools=engine(fitting)) == {}
    assert "memory" in found(machine, pools=engine(fitting + fitting // 50))


@pytest.mark.parametrize(
    ("lacks", "check"),
    [
        ("model.safetensors", "model-weights"),
        ("config.json", "model-config"),
        ("tokenizer.json", "model-tokenizer"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused(tmp_path: Path, lacks: str, check: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    (model / lacks).unlink()
    context = context_of(FakeMachine(tmp_path / "machine").view(), needs=needs_of(config_of()))
    context = dataclasses.replace(context, config=config_of(model), needs=None)
    assert check in {finding.check for finding in preflight(context)}


def test_this_host_is_not_judged_where_others_run_the_replicas(tmp_path: Path) -> None:
    config = config_of(pools=engine(900_000_000), transfer={"data_host": "auto"})
    context = context_of(FakeMachine(tmp_path).view(), config, ray_address="10.0.0.7:6379")
    assert preflight(context) == []


def test_the_command_refuses_by_the_options_that_were_given() -> None:
    done = tandem("serve", str(TINY), "--kv-tokens", "900000000", "--nvme", "/proc/kv", "--nvme-gb", "1")
    text = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert "set --kv-tokens to at most" in text
    assert "nothing can be written to /proc/kv" in text
    assert "name another folder in --nvme" in text
    assert "nothing was started" in text
    assert "Errno" not in text
    assert "starting Ray" not in text


def test_a_port_that_is_taken_is_found_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = tandem("serve", "--port", str(port))
    text = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert f"--port: 127.0.0.1:{port} is taken by" in text
    assert "starting Ray" not in text


def test_a_setting_is_named_as_it_was_given(tmp_path: Path) -> None:
    text = "cluster.yaml with --dtype: pools[0].dtype: must be 'fp32'\ncluster.yaml: pools[1].tp: must be 1"
    given = ServeOptions(dtype="int8", nvme=tmp_path)
    assert in_options(text, given) == "--dtype: must be 'fp32'\ncluster.yaml: pools[1].tp: must be 1"
    assert in_options("lower store.nvme_path_x and store.nvme_path", given) == (
        "lower store.nvme_path_x and --nvme"
    )
    assert in_options("kv_tokens: too many", ServeOptions()) == "kv_tokens: too many"
    with pytest.raises(ConfigError, match=r"pools\[0\]\.dtype: must be"):
        serve_config(None, ServeOptions(model=str(TINY), dtype="int8"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("srve",), "No such command 'srve'. Did you mean 'serve'?"),
        (("run", "x"), "No such command 'run'. Did you mean 'serve'?"),
        (("serve", "--max-model-len", "4096"), "No such option: --max-model-len. Here: the context is"),
        (("serve", "./org/model"), "no such folder; name a folder in Hugging Face layout, or a model"),
        (("serve", "a", "--model", "b"), "contradict each other"),
    ],
)
def test_commands_and_options_of_other_servers_are_answered(arguments: tuple[str, ...], said: str) -> None:
    done = tandem(*arguments)
    assert done.returncode != 0
    assert said.replace(" ", "") in re.sub(r"[\s│]", "", done.stderr)


def test_a_gguf_file_that_is_cut_short_is_refused_in_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\x03\x00\x00\x00")
    done = tandem("serve", str(file))
    assert done.returncode == 1
    assert "model.gguf: cut short at 8 bytes; download it again" in done.stderr
