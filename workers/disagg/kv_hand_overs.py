"""The ways by which sequences and their KV leave and reach one replica."""

from __future__ import annotations

from typing import NamedTuple

from workers.disagg.kv_receiver import KvReceiver
from workers.disagg.kv_sender import KvSender
from workers.disagg.migration import MigrationManager


class KvHandOvers(NamedTuple):
    """The sender of prompts, the receiver of both, and the migrations away from here."""

    sender: KvSender
    receiver: KvReceiver
    migration: MigrationManager
