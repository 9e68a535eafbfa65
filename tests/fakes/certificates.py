"""Keys and certificates for tests, made by openssl: short-lived, of every kind that a server may show."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kimigguf.engines.tls import TlsFiles


def _openssl(*words: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("there is no openssl to make certificates with")
    subprocess.run([program, *words], check=True, capture_output=True)


def make(folder: Path, name: str = "server", *, names: str = "IP:127.0.0.1") -> TlsFiles:
    """A key and a certificate that signs itself."""
    files = TlsFiles(key=folder / f"{name}.key.pem", certificate=folder / f"{name}.pem")
    _openssl(
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", f"/CN={name}", "-addext", f"subjectAltName={names}", "-keyout", str(files.key),
        "-out", str(files.certificate),
    )  # fmt: skip
    files.key.chmod(0o600)
    return files


def make_signed(folder: Path, authority: TlsFiles, name: str = "signed") -> TlsFiles:
    """A key and a certificate that ``authority`` has signed, with the authority's own behind it."""
    files = TlsFiles(key=folder / f"{name}.key.pem", certificate=folder / f"{name}.pem")
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    _openssl(
        "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
        "-keyout", str(files.key), "-out", str(request),
    )  # fmt: skip
    _openssl(
        "x509", "-req", "-in", str(request), "-CA", str(authority.certificate), "-CAkey", str(authority.key),
        "-CAcreateserial", "-days", "2", "-extfile", str(extensions), "-out", str(files.certificate),
    )  # fmt: skip
    files.certificate.write_text(files.certificate.read_text() + authority.certificate.read_text())
    files.key.chmod(0o600)
    return files


def with_password(files: TlsFiles, folder: Path) -> TlsFiles:
    """The same, its key behind a password."""
    locked = folder / "locked.key.pem"
    _openssl("pkcs8", "-topk8", "-in", str(files.key), "-passout", "pass:secret", "-out", str(locked))
    return TlsFiles(key=locked, certificate=files.certificate)


def expired(files: TlsFiles, folder: Path) -> TlsFiles:
    """The same key with a certificate that was good until yesterday."""
    request, certificate = folder / "expired.csr", folder / "expired.pem"
    _openssl("req", "-new", "-key", str(files.key), "-subj", "/CN=expired", "-out", str(request))
    _openssl("x509", "-req", "-in", str(request), "-signkey", str(files.key), "-days", "-1", "-out", str(certificate))
    return TlsFiles(key=files.key, certificate=certificate)
