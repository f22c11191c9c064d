"""A writer process of `cuda_ipc` without a device: it connects, is let in, and then does what it is told.

`unix_writer.py <address> <file of the secret> <message in hex>`: the message is its `ChannelHello`. Each line
on standard input is a frame in hex to send, or "hang-up" to close the socket; it answers each with a line.
"""

from __future__ import annotations

import contextlib
import socket
import sys

from kvtransfer.errors import PeerGoneError
from kvtransfer.rpc.handshake import receive_frame, send_frame
from kvtransfer.rpc.trust import Trust, TrustFiles
from kvtransfer.transports.stream_sockets import HELLO_CODEC, ChannelHello, greet


def main() -> None:
    address, secret_file, encoded = sys.argv[1:]
    hello = HELLO_CODEC.decode(bytes.fromhex(encoded))
    assert isinstance(hello, ChannelHello)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(f"\0{address}")
    greet(contextlib.ExitStack(), sock, Trust.read(TrustFiles(secret_file)), hello)
    receive_frame(sock)  # the offer
    print(flush=True)
    for line in sys.stdin:
        if line.strip() == "hang-up":
            sock.close()
        else:
            send_frame(sock, bytes.fromhex(line))
            with contextlib.suppress(PeerGoneError):  # the target has closed its end
                receive_frame(sock)
        print(flush=True)


if __name__ == "__main__":
    main()
