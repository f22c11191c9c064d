"""The Serve import path `cluster.declared:build` of operators' configurations, kept until API v1."""

from cluster.serve.entrypoint import build

__all__ = ["build"]
