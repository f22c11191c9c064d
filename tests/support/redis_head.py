"""A Ray head whose GCS keeps its tables in Redis (RAY_REDIS_ADDRESS), with a Serve proxy.

Run as a process with the Redis server's password: it prints one JSON line, and for each line that it reads it
kills its GCS, starts another and prints a line; at the end of its input it ends.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from typing import TextIO

import ray
from ray import serve


def main() -> None:
    # Ray also writes to the standard output, which is for the reports: send that to the standard error.
    with os.fdopen(os.dup(1), "w") as reports:
        os.dup2(2, 1)
        run(reports)


def run(reports: TextIO) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    context = ray.init(
        address="local",
        include_dashboard=True,
        object_store_memory=128 << 20,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _redis_password=sys.argv[1],
    )
    serve.start(proxy_location="HeadOnly", http_options={"port": port, "host": "127.0.0.1"})
    send(
        reports, {"ray": context.address_info["gcs_address"], "dashboard": f"http://{context.dashboard_url}"}
    )
    node = ray._private.worker._global_node
    assert node is not None
    for _ in sys.stdin:
        node.kill_gcs_server()
        node.start_gcs_server()
        send(reports, {"gcs": "restarted"})


def send(reports: TextIO, fields: dict[str, str]) -> None:
    print(json.dumps(fields), file=reports, flush=True)


if __name__ == "__main__":
    main()
