"""Certificates of the webhook: self-signed, trusted one by one through the caBundle, and renewed in steps. Pure, except
for the creation of keys.

One Secret contains the served certificate and, during a renewal, the next certificate.

Guarantees (C: the certificates in the caBundle of the webhook's configuration, which API servers trust):
- W1: a certificate is served only once C has contained it for `TRUSTED_S` and its validity has begun. Its validity may
  begin later by this machine's clock, as another machine has created it.
- W2: the served certificate is in C; if it is missing there, the next step adds it.
- W3: the next certificate is created when a third of the served certificate's life is left, when it has expired, or
  when API servers use a name that it does not contain.
- These functions do not raise for any content of Secret or configuration: unreadable parts count as absent.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFE = datetime.timedelta(days=90)
"""Life of a certificate, and so the longest time for which a stolen key can be used."""
RENEWED_AT = 2 / 3
"""Part of its life after which the next certificate is created. A month is left, during which the API server may be
away."""
TRUSTED_S = 10.0
"""Seconds for which a certificate must be in the caBundle before it is served. API servers watch their webhook
configurations, and notice a change within this time."""
_MOST = 16
"""Largest number of certificates in a caBundle."""
_CLOCKS = datetime.timedelta(days=1)
"""Largest expected difference between the clocks of the operator and of API servers."""
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion)
"""Errors of `cryptography` for bytes that it cannot read."""
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Pair:
    """Certificate and its key, in PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class Held:
    """Certificate pairs in the Secret: the served pair, and during a renewal the next pair."""

    serving: Pair | None
    coming: Pair | None


class Step(Enum):
    """Next step of a renewal."""

    NONE = "none"
    MAKE = "make"
    """Create the next pair and write it into the Secret."""
    TRUST = "trust"
    """Add the Secret's certificates to the caBundle."""
    SERVE = "serve"
    """Serve the next pair from now on."""


def host_of(client: Mapping[str, Any]) -> str:
    """Return the name or address by which API servers call the webhook, from its `clientConfig`."""
    if isinstance(url := client.get("url"), str):
        return urlsplit(url).hostname or ""
    service = client.get("service")
    service = service if isinstance(service, Mapping) else {}
    return f"{service.get('name')}.{service.get('namespace')}.svc"


def make_pair(host: str, now: datetime.datetime) -> Pair:
    """Return a new key and its self-signed certificate for a host."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sharepod-webhook")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS)
        .not_valid_after(now + LIFE)
        .add_extension(x509.SubjectAlternativeName([_general_name(host)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def held(secret: Mapping[str, Any]) -> Held:
    """Return the pairs in the Secret. A pair that cannot be served counts as absent."""
    data = secret.get("data")
    data = data if isinstance(data, Mapping) else {}
    return Held(_pair(data, "tls"), _pair(data, "next"))


def secret_data(pairs: Held) -> dict[str, str | None]:
    """Return the merge patch that gives the data of a Secret these pairs."""
    data: dict[str, str | None] = {}
    for prefix, pair in (("tls", pairs.serving), ("next", pairs.coming)):
        for suffix, content in (("crt", pair and pair.certificate), ("key", pair and pair.key)):
            data[f"{prefix}.{suffix}"] = base64.b64encode(content).decode() if content else None
    return data


def trusted(bundle: object) -> list[bytes]:
    """Return the certificates in a caBundle, which is base64 of PEM."""
    return _PEM.findall(_decoded(bundle))


def expiry(pair: Pair) -> datetime.datetime:
    """Return the time at which a certificate expires."""
    return _ends(pair.certificate)


def next_step(
    pairs: Held,
    bundle: Iterable[bytes],
    now: datetime.datetime,
    *,
    trusted_for_s: float | None,
    host: str | None = None,
) -> Step:
    """Return the next step.

    Args:
        pairs: Pairs of the Secret.
        bundle: Certificates of the caBundle.
        now: Time of day.
        trusted_for_s: Seconds for which the caBundle has contained the next certificate; None if it does not.
        host: Name by which API servers call the webhook, which the certificate must contain. None: not checked.
    """
    known = set(bundle)
    wanted = [pair for pair in (pairs.serving, pairs.coming) if pair is not None and not _ended(pair, now)]
    if any(_alone(pair.certificate) not in known for pair in wanted):
        return Step.TRUST  # W2
    coming = pairs.coming if pairs.coming in wanted and _begun(pairs.coming, now) else None
    if coming is not None:
        enough = trusted_for_s is not None and trusted_for_s >= TRUSTED_S
        return Step.SERVE if enough else Step.NONE  # W1
    serving = pairs.serving if pairs.serving in wanted else None
    return Step.MAKE if serving is None or _due(serving, now) or not _names(serving, host) else Step.NONE  # W3


def bundle_of(pairs: Held, bundle: Iterable[bytes], now: datetime.datetime) -> str:
    """Return a caBundle with the certificates of these pairs, and with the other certificates of `bundle` that are
    still valid, up to the limit.
    """
    ours = [_alone(pair.certificate) for pair in (pairs.serving, pairs.coming) if pair is not None]
    others = [one for one in bundle if one not in ours and _ends(one) > now]
    kept = [*others[-(_MOST - len(ours)) :], *ours]
    return base64.b64encode(b"".join(one if one.endswith(b"\n") else one + b"\n" for one in kept)).decode()


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pair(data: Mapping[str, Any], prefix: str) -> Pair | None:
    certificate, key = (_decoded(data.get(f"{prefix}.{suffix}")) for suffix in ("crt", "key"))
    try:
        public = x509.load_pem_x509_certificate(certificate).public_key()
        private = serialization.load_pem_private_key(key, None)
        if private.public_key() != public:
            return None
    except _UNREADABLE:
        return None
    return Pair(certificate, key)


def _decoded(text: object) -> bytes:
    try:
        return base64.b64decode(text) if isinstance(text, str) else b""
    except (ValueError, binascii.Error):
        return b""


def _alone(certificate: bytes) -> bytes:
    found = _PEM.search(certificate)
    return found.group() if found is not None else certificate


def _ends(certificate: bytes) -> datetime.datetime:
    """Return the time at which a certificate expires; a time long ago if it is unreadable."""
    try:
        return x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    except _UNREADABLE:
        return datetime.datetime.min.replace(tzinfo=datetime.UTC)


def _ended(pair: Pair, now: datetime.datetime) -> bool:
    return expiry(pair) <= now


def _begun(pair: Pair, now: datetime.datetime) -> bool:
    return x509.load_pem_x509_certificate(pair.certificate).not_valid_before_utc <= now


def _names(pair: Pair, host: str | None) -> bool:
    """Return True if a certificate contains the name that API servers use."""
    try:
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (*_UNREADABLE, x509.ExtensionNotFound):
        return False
    return host is None or _general_name(host) in names


def _due(pair: Pair, now: datetime.datetime) -> bool:
    """Return True if the next certificate is due: two thirds of this one's life have passed, or its life has not begun
    because a clock far ahead created it.
    """
    certificate = x509.load_pem_x509_certificate(pair.certificate)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return now >= begins + (ends - begins) * RENEWED_AT or now < begins
