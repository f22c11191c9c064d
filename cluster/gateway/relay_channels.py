"""Connections to the gateways of another application, with TLS where they speak it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import grpc
import grpc.aio
from cryptography import x509
from cryptography.x509.oid import NameOID

from cluster.proto.tandem.v1 import inference_pb2_grpc
from cluster.roster.messages import GatewayRecord

_CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]


class OwnCertificate(Protocol):
    """The certificate of this gateway, which it shows to gateways that ask clients for one."""

    def pair(self) -> tuple[bytes, bytes]:
        """Return PEM of the chain in use and of its key."""


class _Opened(NamedTuple):
    """A channel, and the certificates that it was opened with."""

    channel: Any
    certificate: str
    own: tuple[bytes, bytes] | None


class RelayChannels:
    """Channels to the gateways that requests are relayed to, one each.

    A gateway's certificate is trusted because the roster has it, whoever signed it and for whatever name.
    """

    def __init__(self, own: OwnCertificate | None) -> None:
        self._own = own
        self._opened: dict[str, _Opened] = {}
        self._closing: list[Any] = []

    def stub(self, gateway: GatewayRecord) -> Any:
        """Return the stub of `tandem.v1.Inference` at this gateway."""
        own = self._own.pair() if self._own is not None and gateway.certificate else None
        known = self._opened.get(gateway.address)
        if known is None or (known.certificate, known.own) != (gateway.certificate, own):
            if known is not None:  # calls may still run over it
                self._closing.append(known.channel)
            known = _Opened(_open(gateway, own), gateway.certificate, own)
            self._opened[gateway.address] = known
        return inference_pb2_grpc.InferenceStub(known.channel)

    async def close(self) -> None:
        """Close all channels."""
        for channel in (*self._closing, *(it.channel for it in self._opened.values())):
            await channel.close()


def _open(gateway: GatewayRecord, own: tuple[bytes, bytes] | None) -> Any:
    if not gateway.certificate:
        return grpc.aio.insecure_channel(gateway.address, options=_CHANNEL_OPTIONS)
    chain = gateway.certificate.encode()
    certificate, key = own or (None, None)
    credentials = grpc.ssl_channel_credentials(chain, key, certificate)
    options = _CHANNEL_OPTIONS
    if name := shown_name(chain):
        options = [*options, ("grpc.ssl_target_name_override", name)]
    return grpc.aio.secure_channel(gateway.address, credentials, options=options)


def shown_name(chain: bytes) -> str:
    """Return a name that the first certificate of a PEM chain is valid for; "" where it has none."""
    certificate = x509.load_pem_x509_certificate(chain)
    names: Sequence[str] = ()
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = [*found.get_values_for_type(x509.DNSName)]
        names += [str(address) for address in found.get_values_for_type(x509.IPAddress)]
    except x509.ExtensionNotFound:
        common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        names = [str(attribute.value) for attribute in common]
    return names[0].replace("*", "gateway") if names else ""
