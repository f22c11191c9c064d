"""The Python API: what `cluster` offers, and the Serve import path that operators' configurations name."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cluster
import cluster.errors
from cluster.api import blocking_client, client

LIGHT = "import sys, cluster; print(*sorted({'ray', 'torch', 'grpc', 'numpy'} & set(sys.modules)))"
CLIENT = "import sys; from cluster import BlockingClient, CallError, Client, GenerateOptions; "


def test_the_public_names_are_those_of_the_client() -> None:
    assert cluster.Client is client.Client
    assert cluster.GenerateOptions is client.GenerateOptions
    assert cluster.BlockingClient is blocking_client.BlockingClient
    assert cluster.CallError is cluster.errors.CallError
    assert all(hasattr(cluster, name) for name in cluster.__all__)
    assert not hasattr(cluster, "no_such_name")


@pytest.mark.parametrize(("code", "loaded"), [(LIGHT, ""), (CLIENT + LIGHT, "grpc")])
def test_importing_the_client_needs_neither_ray_nor_torch(code: str, loaded: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == loaded.split()
