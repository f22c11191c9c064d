"""`tandem` as the shell blocks of a page find it: `serve` runs in the background, on ports of the test.

    python documented_shell.py PORTS_FILE ARGUMENT...

`PORTS_FILE` holds free ports as JSON. The process id of each `serve` is a line of the file `serving` beside
it, and what it prints is in `serve-*.log` there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

_IS_UP = "Ctrl-C stops everything."
_START_S = 180.0


def main() -> None:
    ports_file, *arguments = sys.argv[1:]
    command = [sys.executable, "-m", "cluster", *arguments]
    if arguments[:1] != ["serve"] or {"--print-config", "--help"} & set(arguments):
        os.execv(command[0], command)
    folder = Path(ports_file).parent
    serving = folder / "serving"
    if not serving.exists() and "-f" not in arguments:  # files have ports of their own
        for option, port in json.loads(Path(ports_file).read_text()).items():
            command += [] if option in arguments else [option, str(port)]
    output = folder / f"serve-{os.getpid()}.log"
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    with serving.open("a") as file:
        print(process.pid, file=file)
    deadline = time.monotonic() + _START_S
    while _IS_UP not in output.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"serve did not come up:\n{output.read_text()}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
