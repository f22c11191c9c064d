"""The Python API: what `cluster` offers, and the same objects under the old import paths, kept until API
v1."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import cluster
import cluster.errors
from cluster.api import blocking_client, client
from cluster.proto import APPLICATION_KEY

LIGHT = "import sys, cluster; print(*sorted({'ray', 'torch', 'grpc', 'numpy'} & set(sys.modules)))"
CLIENT = "import sys; from cluster import BlockingClient, CallError, Client, GenerateOptions; "


def test_the_public_names_are_those_of_the_client() -> None:
    assert cluster.Client is client.Client
    assert cluster.GenerateOptions is client.GenerateOptions
    assert cluster.BlockingClient is blocking_client.BlockingClient
    assert cluster.CallError is cluster.errors.CallError
    assert all(hasattr(cluster, name) for name in cluster.__all__)
    assert not hasattr(cluster, "no_such_name")


@pytest.mark.parametrize(
    ("path", "names", "home"),
    [
        ("cluster.client", client.__all__, "cluster.api.client"),
        ("cluster.blocking_client", ["BlockingClient"], "cluster.api.blocking_client"),
        ("cluster.options", ["GenerateOptions", "Prompt", "Turn", "generate_request"], "cluster.api.client"),
        ("cluster.declared", ["build"], "cluster.serve.entrypoint"),
    ],
)
def test_old_import_paths_give_the_same_objects(path: str, names: list[str], home: str) -> None:
    old, new = importlib.import_module(path), importlib.import_module(home)
    assert all(getattr(old, name) is getattr(new, name) for name in names)


def test_the_old_name_of_a_metadata_key() -> None:
    assert importlib.import_module("cluster.options").APPLICATION_KEY is APPLICATION_KEY


@pytest.mark.parametrize(("code", "loaded"), [(LIGHT, ""), (CLIENT + LIGHT, "grpc")])
def test_importing_the_client_needs_neither_ray_nor_torch(code: str, loaded: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == loaded.split()
