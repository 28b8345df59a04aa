"""Certificates and keys for a deployment, made on the spot: TLS for the server, and a key pair for every node."""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modicum.deploy.silo.signing import write_pair, write_secret
from modicum.errors import MissingExtraError, UserError

DAYS = 365  # of the server's certificate, which `renew` makes anew under the same authority
AUTHORITY = "ca.key"  # signs the server's next certificate; best kept on another machine
AUTHORITY_DAYS = 3650  # of the authority, which every node holds


@dataclass(frozen=True)
class Tls:
    """Files of the server's TLS identity: its own authority, certificate and key."""

    ca: Path
    certificate: Path
    key: Path


def make_tls(folder: Path, hosts: Sequence[str] = ("127.0.0.1", "localhost"), *, days: float = DAYS) -> Tls:
    """This deployment's own certificate authority, and a certificate for these hosts; kept if there already."""
    tls = Tls(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    if all(path.exists() for path in (tls.ca, tls.certificate, tls.key)):
        return tls
    x509, ec, hashes, serialization = _cryptography()
    _check_hosts(hosts)
    folder.mkdir(parents=True, exist_ok=True)
    key, name = ec.generate_private_key(ec.SECP384R1()), _name(x509, "modicum authority")
    ca = _certificate(x509, hashes, name, name, key.public_key(), key, AUTHORITY_DAYS, None)
    tls.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    write_secret(folder / AUTHORITY, _pem(serialization, key))
    _issue(tls, ca, key, hosts, days)
    return tls


def renew(folder: Path, hosts: Sequence[str] = ()) -> datetime.datetime:
    """A new certificate and key for the server under the authority that nodes hold already; says until when.

    Args:
        folder: Where `ca.crt` and `ca.key` are.
        hosts: Names of the server; none: those of the present certificate.

    Raises:
        UserError: The authority's files are not there, do not belong together, or have expired.
    """
    x509, _, _, serialization = _cryptography()
    _check_hosts(hosts)
    tls = Tls(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    try:
        ca = x509.load_pem_x509_certificate(tls.ca.read_bytes())
        key = serialization.load_pem_private_key((folder / AUTHORITY).read_bytes(), None)
        own = x509.load_pem_x509_certificate(tls.certificate.read_bytes()) if not hosts else None
    except (OSError, ValueError, TypeError):
        raise UserError(
            f"renewing takes ca.crt, {AUTHORITY} and server.crt in {folder}: put the authority's key back from "
            "where it is kept; without it all nodes need a new ca.crt"
        ) from None
    if key.public_key() != ca.public_key():
        raise UserError(f"{folder / AUTHORITY} is not the key of {tls.ca}: put the right one back")
    if ca.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise UserError(f"the authority {tls.ca} has expired: make a new one, and give all nodes its ca.crt")
    if own is not None:
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = tuple(str(name.value) for name in names)
    return _issue(tls, ca, key, hosts, DAYS)


def _issue(tls: Tls, ca: Any, ca_key: Any, hosts: Sequence[str], days: float) -> datetime.datetime:
    """The server's own pair; its certificate ends with the authority's at the latest."""
    x509, ec, hashes, serialization = _cryptography()
    key = ec.generate_private_key(ec.SECP384R1())
    left = (ca.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400
    issuer = ca.subject
    own = _certificate(
        x509, hashes, _name(x509, hosts[0]), issuer, key.public_key(), ca_key, min(days, left), hosts
    )
    write_secret(tls.key, _pem(serialization, key))
    tls.certificate.write_bytes(own.public_bytes(serialization.Encoding.PEM))
    until: datetime.datetime = own.not_valid_after_utc
    return until


def _pem(serialization: Any, key: Any) -> bytes:
    content: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return content


def check_tls(tls: Tls) -> None:
    """Expired or missing files end here, in one line, before anything is started."""
    x509, _, _, serialization = _cryptography()
    for path in (tls.ca, tls.certificate, tls.key):
        if not path.is_file():
            raise UserError(f"there is no {path}: make it with `modicum flower keys make`")
    for path in (tls.ca, tls.certificate):
        try:
            until = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
        except ValueError:
            raise UserError(
                f"{path} is no PEM certificate: make it anew with `modicum flower keys make`"
            ) from None
        if until < datetime.datetime.now(datetime.UTC):
            how = (
                "`modicum flower keys renew` makes a new one, and nodes keep their ca.crt"
                if path == tls.certificate
                else "delete it and make it anew with `modicum flower keys make`"
            )
            raise UserError(f"the certificate {path} expired on {until:%Y-%m-%d}: {how}")
    own = x509.load_pem_x509_certificate(tls.certificate.read_bytes())
    try:
        key = serialization.load_pem_private_key(tls.key.read_bytes(), None)
    except (ValueError, TypeError):
        key = None
    if key is None or key.public_key() != own.public_key():
        raise UserError(
            f"{tls.key} is not the key of {tls.certificate}, as after a renewal that was cut off or a restored "
            "half: `modicum flower keys renew` makes both anew"
        )


def _check_hosts(hosts: Sequence[str]) -> None:
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9.:-]{1,64}", host):
            raise UserError(f"{host!r} is no machine's name or address: write one like study.example.org")


def make_node_key(path: Path) -> Path:
    """A P-384 key pair in OpenSSH format, as Flower's node authentication takes it; `path.pub` is public."""
    if not path.exists():
        _, ec, _, serialization = _cryptography()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_pair(path, ec.generate_private_key(ec.SECP384R1()), serialization)
        except OSError as error:
            raise UserError(f"cannot write {path} ({error.strerror}): choose another file") from None
    return path


def _name(x509: Any, text: str) -> Any:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _certificate(
    x509: Any,
    hashes: Any,
    subject: Any,
    issuer: Any,
    key: Any,
    signer: Any,
    days: float,
    hosts: Sequence[str] | None,
) -> Any:
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - datetime.timedelta(minutes=5))
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=hosts is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if hosts is None:
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = builder.add_extension(usage, critical=True)
    else:
        names = [_host(x509, host) for host in hosts]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(signer, hashes.SHA384())


def _host(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _cryptography() -> tuple[Any, Any, Any, Any]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise MissingExtraError("cryptography", "deploy", "making keys and certificates") from None
    return x509, ec, hashes, serialization
