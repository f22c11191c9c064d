"""Turn the errors of TLS handshakes into the errors of connections."""

from __future__ import annotations

import ssl

from kvtransfer.errors import PeerGoneError, ProofError


def refusal(error: ssl.SSLError, name: str) -> ProofError:
    """Return why TLS with `name` failed, with the setting to look at."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return ProofError(
            f"the certificate of {name} is refused: {error.verify_message}; look at inner_tls.cert_file "
            "there and at inner_tls.ca_file here"
        )
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return ProofError(f"{name} shows no certificate; look at inner_tls.cert_file there")
    if "alert" in reason:
        return ProofError(f"{name} refuses the certificate of inner_tls.cert_file here: {reason}")
    return ProofError(f"no TLS with {name}: {reason}")


def lost_in_handshake(name: str) -> PeerGoneError:
    """Return the error of a connection that ended before both sides had accepted each other."""
    return PeerGoneError(
        f"{name} ended the connection in the TLS handshake; does it accept the certificate of "
        "inner_tls.cert_file here?"
    )
