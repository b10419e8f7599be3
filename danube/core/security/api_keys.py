"""API keys as texts: ``dnb_<id>_<43 characters of 62>``, which hold 256 random bits.

A key is a secret that its holder presents as it is, wherever a token may stand.  Only its hash is kept.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final

from danube.core.metadata.roles import Access
from danube.core.security.principals import Identity, Principal
from danube.errors import NotAuthenticated, TokenExpired

RANDOM_BYTES: Final = 32
_DIGITS: Final = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SECRET_CHARACTERS: Final = 43  # of 62, as many as 256 bits need
_KEY: Final = re.compile(rf"dnb_([A-Za-z0-9-]{{1,64}})_[A-Za-z0-9]{{{_SECRET_CHARACTERS}}}")


def looks_like_api_key(text: str) -> bool:
    """Whether a credential is to be read as an API key, and not as a token."""
    return text.startswith("dnb_")


def api_key_text(key_id: str, random: bytes) -> str:
    """The key of this id, from 32 random bytes."""
    number, digits = int.from_bytes(random, "big"), ""
    for _ in range(_SECRET_CHARACTERS):
        number, digit = divmod(number, len(_DIGITS))
        digits += _DIGITS[digit]
    return f"dnb_{key_id}_{digits}"


def hash_of_key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def identity_of_key(access: Access, text: str, now_us: int) -> Identity:
    """The identity that holds this API key; raises NotAuthenticated or TokenExpired."""
    match = _KEY.fullmatch(text)
    key = access.credentials.find_key(match[1]) if match is not None else None
    if key is None or not hmac.compare_digest(key.secret_hash, hash_of_key(text)):
        raise NotAuthenticated("the credential is not accepted", hint="ask the operator for one that is")
    if 0 < key.expires_us <= now_us:
        raise TokenExpired("the credential has expired", hint="get a new one")
    kind, _, name = key.principal.partition(":")
    token_key = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return Identity(Principal(kind, name), "key", key.expires_us, key.id, token_key, "", key.created_us)
