"""Certificates: an authority of one's own, what it signs, and the facts of what others signed.

The door to X.509 in ``cryptography``.  Nothing here touches a file, so that every word of it can be tested
with bytes.  Keys are ECDSA over P-256, which every TLS library of the official clients reads.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from danube.errors import InvalidArgument

SERVER: Final = "server"
CLIENT: Final = "client"
CLOCK_SKEW: Final = timedelta(minutes=5)  # a certificate is valid at once on hosts whose clocks go behind
RSA_BITS_MIN: Final = 2_048
_USES: Final = {SERVER: ExtendedKeyUsageOID.SERVER_AUTH, CLIENT: ExtendedKeyUsageOID.CLIENT_AUTH}
_USE_NAMES: Final = {oid: use for use, oid in _USES.items()}


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, both PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Wanted:
    """Content of a certificate: ``hosts`` are names and addresses, ``uses`` some of SERVER and CLIENT."""

    name: str
    uses: Sequence[str]
    hosts: Sequence[str] = ()
    uris: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of one certificate; ``names`` are its alternative names as ``DNS:a``, ``IP:b`` and ``URI:c``."""

    subject: str
    issuer: str
    serial: str
    not_before: datetime
    not_after: datetime
    authority: bool
    names: tuple[str, ...]
    uses: tuple[str, ...]
    key: str
    fingerprint: str

    def names_of(self, kind: str) -> list[str]:
        """The alternative names of one kind, without it."""
        return [name.partition(":")[2] for name in self.names if name.startswith(kind + ":")]


def make_authority(name: str, days: int, now: datetime) -> Pair:
    """A new authority, which signs certificates of hosts, clients and nodes but no other authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    made = (
        _begun(subject, subject, key.public_key(), days, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pair(made, key)


def sign(authority: Pair, wanted: Wanted, days: int, now: datetime) -> Pair:
    """A new key and its certificate by ``authority``, which lives no longer than the authority."""
    (issuer, *_), issuer_key = read_certificates(authority.certificate), read_key(authority.key)
    key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=False, crl_sign=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    left = max(1, (issuer.not_valid_after_utc - now).days)
    issuer_id = x509.SubjectKeyIdentifier.from_public_key(issuer.public_key())
    made = (
        _begun(_name(wanted.name), issuer.subject, key.public_key(), min(days, left), now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([_USES[use] for use in wanted.uses]), critical=False)
        .add_extension(x509.SubjectAlternativeName(_alternatives(wanted)), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_id), critical=False
        )
        .sign(issuer_key, hashes.SHA256())
    )
    return _pair(made, key)


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Pair(certificate.public_bytes(serialization.Encoding.PEM), pem)


def _name(text: str) -> x509.Name:
    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
    except ValueError as error:
        raise InvalidArgument(f"{text[:80]!r} cannot be the name of a certificate", why=str(error)) from None


def _alternatives(wanted: Wanted) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    try:
        for host in wanted.hosts:
            try:
                found.append(x509.IPAddress(ipaddress.ip_address(host)))
            except ValueError:
                found.append(x509.DNSName(host.encode("idna").decode("ascii") if host else ""))
        found += [x509.UniformResourceIdentifier(uri) for uri in wanted.uris]
    except (ValueError, UnicodeError) as error:
        raise InvalidArgument(
            f"a certificate cannot name {', '.join(wanted.hosts)}", why=str(error), hint="write plain names"
        ) from None
    return found


def read_certificates(pem: bytes) -> list[x509.Certificate]:
    """Every certificate of a PEM file; InvalidArgument if there is none, or one that cannot be read."""
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise InvalidArgument(
            "there is no certificate that can be read",
            why=str(error),
            hint="a PEM file begins with -----BEGIN CERTIFICATE-----",
        ) from None
    return found


def read_key(pem: bytes) -> CertificateIssuerPrivateKeyTypes:
    """The private key of a PEM file; InvalidArgument if there is none, or one that no broker can use."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except TypeError:
        raise InvalidArgument(
            "the key is encrypted",
            why="a broker has no password for it",
            hint="decrypt it with `openssl pkey`",
        ) from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidArgument(
            "there is no private key that can be read",
            why=str(error),
            hint="a PEM file begins with -----BEGIN PRIVATE KEY-----",
        ) from None
    if isinstance(key, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey):
        return key
    if isinstance(key, ed448.Ed448PrivateKey):
        return key
    raise InvalidArgument("the key is of a kind that TLS does not use", hint="make an EC, RSA or Ed25519 key")


def describe(pem: bytes) -> list[Facts]:
    """Facts of every certificate of a PEM file."""
    return [facts_of(one) for one in read_certificates(pem)]


def facts_of(certificate: x509.Certificate) -> Facts:
    """Facts of a certificate; an extension that it lacks is an empty fact."""
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        authority = constraints.ca
    except (x509.ExtensionNotFound, ValueError):
        authority = False
    return Facts(
        subject=certificate.subject.rfc4514_string(),
        issuer=certificate.issuer.rfc4514_string(),
        serial=f"{certificate.serial_number:x}",
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
        authority=authority,
        names=tuple(_names_of(certificate)),
        uses=tuple(_uses_of(certificate)),
        key=_key_kind(certificate),
        fingerprint=certificate.fingerprint(hashes.SHA256()).hex(),
    )


def _names_of(certificate: x509.Certificate) -> Iterable[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return
    for name in names:
        if isinstance(name, x509.DNSName):
            yield f"DNS:{name.value}"
        elif isinstance(name, x509.IPAddress):
            yield f"IP:{name.value}"
        elif isinstance(name, x509.UniformResourceIdentifier):
            yield f"URI:{name.value}"


def _uses_of(certificate: x509.Certificate) -> Iterable[str]:
    try:
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return [_USE_NAMES.get(use, use.dotted_string) for use in uses]


def _key_kind(certificate: x509.Certificate) -> str:
    try:
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm):
        return "unknown"
    if isinstance(key, rsa.RSAPublicKey):
        return f"RSA {key.key_size}"
    if isinstance(key, ec.EllipticCurvePublicKey):
        return f"EC {key.curve.name}"
    return type(key).__name__.removesuffix("PublicKey").lstrip("_")


def key_fits(certificate: x509.Certificate, key: CertificateIssuerPrivateKeyTypes) -> bool:
    """Whether the key is that of the certificate."""
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return certificate.public_key().public_bytes(*form) == key.public_key().public_bytes(*form)


def signed_by(certificate: x509.Certificate, authorities: Iterable[x509.Certificate]) -> bool:
    """Whether one of the authorities signed the certificate, by name and by signature."""
    return any(_signed(certificate, one) for one in authorities)


def _signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def weak_key(certificate: x509.Certificate) -> str:
    """Why the key is too weak; "" if it is not."""
    key = certificate.public_key()
    if isinstance(key, rsa.RSAPublicKey) and key.key_size < RSA_BITS_MIN:
        return f"its RSA key has {key.key_size} bits, fewer than {RSA_BITS_MIN}"
    return ""


def now_utc(wall_us: int) -> datetime:
    """The instant of microseconds since 1970."""
    return datetime.fromtimestamp(wall_us / 1_000_000, UTC)
