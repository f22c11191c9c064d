"""The blocking client under its old import path, kept until API v1; new code imports from `cluster`."""

from cluster.api.blocking_client import BlockingClient

__all__ = ["BlockingClient"]
