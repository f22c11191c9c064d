"""Files of trust with certificates, and their renewal."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from authority import Authority
from msgspec.structs import replace
from trust_files import FILES

from kvtransfer.rpc.mutual_tls import TlsFiles
from kvtransfer.rpc.trust import TrustFiles

_FOLDER = TemporaryDirectory(prefix="tandem-test-tls-")
AUTHORITY = Authority("inside")


def certified(
    folder: Path,
    *,
    signed_by: Authority = AUTHORITY,
    accepts: Authority = AUTHORITY,
    num_days: float = 100,
) -> TrustFiles:
    """Write a certificate into the folder, in place of the one before; the secret is that of `FILES`."""
    folder.mkdir(exist_ok=True)
    cert_file, key_file = signed_by.issue(folder, "process", num_days=num_days)
    tls = TlsFiles(str(cert_file), str(key_file), str(accepts.write(folder)))
    return replace(FILES, tls=tls)


# The files for tests of one cluster with certificates.
TLS_FILES = certified(Path(_FOLDER.name))
