"""TLS of a served engine: files that fit together before the load, and trust in exactly that certificate after it.

The certificate itself is trusted, by its bytes: neither who has signed it nor for which name it was made can let
another server pass for this one, and a server on loopback need not be called 127.0.0.1.
"""

import mmap
import re
import shlex
import ssl
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from kimigguf.engines.builds import binary_files
from kimigguf.errors import UsageError
from kimigguf.events import Listener, Notice, ignore
from kimigguf.memory.flags import spelled

KEY_FLAG: Final = "--ssl-key-file"
CERTIFICATE_FLAG: Final = "--ssl-cert-file"
_PEM: Final = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SPEAKS: Final = b"running with SSL"
_LACKS: Final = b"built without SSL support"
"""What llama.cpp's server says with and without TLS (tools/server/server-http.cpp): one of them is in the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """A private key and its certificate, in PEM."""

    key: Path
    certificate: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The names and addresses that a certificate is for, and a warning about its key."""

    names: tuple[str, ...]
    warning: str | None = None


def tls_files(extra: Sequence[str], folder: Path | None = None) -> TlsFiles | None:
    """The files that llama-server's arguments name, relative ones in ``folder``; None where there are none.

    Raises:
        UsageError: ``tls-half`` for one without the other.
    """
    found: dict[str, str] = {}
    for word, value in pairwise(extra):
        if (flag := spelled(word)) in {KEY_FLAG, CERTIFICATE_FLAG}:
            found[flag] = value
    given = {spelled(word) for word in extra} & {KEY_FLAG, CERTIFICATE_FLAG}
    if not given:
        return None
    if found.keys() != {KEY_FLAG, CERTIFICATE_FLAG}:
        raise UsageError(
            "TLS needs a key and its certificate, and one of them is missing",
            code="tls-half",
            hint=f"-- {KEY_FLAG} KEY.pem {CERTIFICATE_FLAG} CERTIFICATE.pem",
        )
    key, certificate = ((folder or Path.cwd()) / found[flag] for flag in (KEY_FLAG, CERTIFICATE_FLAG))
    return TlsFiles(key=key, certificate=certificate)


def served_certificate(extra: Sequence[str], listen: Listener = ignore) -> str | None:
    """The certificate that an engine with these arguments shows, tried beforehand; None where it speaks plain HTTP.

    Raises:
        UsageError: ``tls-half``, ``tls-unusable``.
    """
    files = tls_files(extra)
    if files is None:
        return None
    if warning := check_files(files).warning:
        listen(Notice(text=warning))
    return str(files.certificate)


def check_files(files: TlsFiles) -> Identity:
    """What the certificate is for; it and its key were read, fit together and are good today.

    The two are tried on each other, in memory, as server and client will.

    Raises:
        UsageError: ``tls-unusable``.
    """
    problem = f"TLS cannot be had with {files.certificate} and {files.key}"
    try:
        certificate = _rehearse(files)
        mode = files.key.stat().st_mode
    except ssl.SSLCertVerificationError as error:
        cause = error.verify_message
        raise UsageError(problem, code="tls-unusable", cause=cause, hint="have the certificate made anew") from error
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(
            problem,
            code="tls-unusable",
            cause=_in_words(error),
            hint="both must be PEM, the key without a password, the server's certificate first in its file",
        ) from error
    except OSError as error:
        cause = f"{error.filename or files.key}: {error.strerror}"
        raise UsageError(problem, code="tls-unusable", cause=cause) from error
    names = tuple(str(value) for kind, value in certificate.get("subjectAltName", ()) if kind in {"DNS", "IP Address"})
    open_to_others = stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH)
    warning = (
        f"others on this machine can read the TLS key: chmod 600 {shlex.quote(str(files.key))}"
        if open_to_others
        else None
    )
    return Identity(names=names, warning=warning)


def client_host(names: Sequence[str], host: str) -> str:
    """The name by which other programs reach the server: one that the certificate is for, where there is any."""
    if host in names:
        return host
    return next((name for name in names if not name.startswith("*")), host)


def _in_words(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason).lower().replace("_", " ") if reason else str(error)


def _rehearse(files: TlsFiles) -> dict[str, Any]:
    """A handshake between the files and whoever trusts the certificate; what the client then knows of it."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.certificate, files.key, password=_no_password)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trust = _context(files.certificate)
    client = trust.wrap_bio(to_client, to_server)
    behind = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client, behind):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return dict(client.getpeercert() or {})


def _no_password() -> str:
    raise ValueError("the key has a password, which the engine has nobody to ask for")


@lru_cache(maxsize=8)
def trusting(certificate: str) -> ssl.SSLContext:
    """A client's context that takes the server with this certificate, and no other.

    It is kept until a server is started: one goes on with the certificate that it was started with, whatever the file
    says later.

    Raises:
        OSError, ValueError: The file is not there, or no certificate.
    """
    return _context(Path(certificate))


def _context(certificate: Path) -> ssl.SSLContext:
    found = _PEM.search(certificate.read_text("ascii"))
    if found is None:
        raise ValueError(f"{certificate} holds no certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # The first one in the file is the server's own. It need not be one that signs others to be trusted itself.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=found[0])
    return context


def speaks_tls(program: str | None) -> bool | None:
    """Whether a llama-server was built with TLS; None where its file does not say."""
    for path in binary_files(Path(program)) if program is not None else ():
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if content.find(_SPEAKS) >= 0:
                    return True
                if content.find(_LACKS) >= 0:
                    return False
        except (OSError, ValueError):  # unreadable, or empty
            continue
    return None
