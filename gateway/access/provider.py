"""An OpenID provider: its metadata and keys, the authorization code flow, and tokens that it signed.

Sources: OpenID Connect Core 1.0, Discovery 1.0, RP-Initiated Logout 1.0 and Back-Channel Logout 1.0;
RFC 7636 (PKCE), RFC 8725 (JWT best practices), RFC 9207 (`iss` in the answer). joserfc checks
signatures; it is imported with the first token. Invariants: a token counts only with a signature of
`access.algorithms` by a key of the provider, its exact issuer, our audience and its times; metadata
that names another issuer is refused; keys of a provider that is away stay in use.
"""

import asyncio
import base64
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from gateway.loggers import get_logger
from gateway.settings import Settings, is_loopback
from gateway.transport.fetch import Fetcher
from gateway.transport.http_client import TransportError

if TYPE_CHECKING:
    from joserfc.jwk import KeySet

_FRESH_S = 3_600.0  # of metadata and keys
_AGAIN_S = 10.0  # between looks for a key that is not there
_TOKEN_CHARS_MAX = 16_384
LOGOUT_EVENT = "http://schemas.openid.net/event/backchannel-logout"
_log = get_logger()


class ProviderAway(Exception):
    """The provider does not answer, or not as OpenID Connect says; `str()` is the reason."""


class TokenRefused(Exception):
    """A token, or an answer of the provider, is not taken; `str()` is the reason, without its values."""


class Provider:
    """The provider `settings.access.issuer`, which may change. `clock` gives unix seconds."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._fetcher = Fetcher()
        self._reading = asyncio.Lock()
        self._of = ""  # the issuer that the rest is of
        self._metadata: dict[str, Any] = {}
        self._keys: KeySet | None = None
        self._read_at_s = self._tried_at_s = 0.0

    def aclose(self) -> None:
        self._fetcher.aclose()

    # -- the authorization code flow

    async def authorization_url(self, redirect_uri: str, *, state: str, nonce: str, challenge: str) -> str:
        """Where a browser goes to sign in. Raises ProviderAway."""
        metadata, access = await self.metadata(), self._settings.access
        query = {
            "response_type": "code",
            "client_id": access.client_id,
            "redirect_uri": redirect_uri,
            "scope": " ".join(access.scopes),
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        return _with_query(_endpoint(metadata, "authorization_endpoint"), query)

    async def exchange(
        self, code: str, redirect_uri: str, *, verifier: str, nonce: str, issuer: str | None
    ) -> dict[str, Any]:
        """The claims of the ID token for a `code`; `issuer` is the answer's `iss`.

        Raises ProviderAway, TokenRefused.
        """
        metadata, access = await self.metadata(), self._settings.access
        if issuer is None and metadata.get("authorization_response_iss_parameter_supported") is True:
            raise TokenRefused("the answer has no `iss`, which this provider sends")
        if issuer is not None and issuer != access.issuer:
            raise TokenRefused("the answer is of another issuer")
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": verifier,
            "client_id": access.client_id,
        }
        fields = {"content-type": "application/x-www-form-urlencoded"}
        if secret := self._settings.access_secret:
            pair = f"{quote(access.client_id, safe='')}:{quote(secret, safe='')}"  # RFC 6749 section 2.3.1
            fields["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
            del form["client_id"]
        url = _endpoint(metadata, "token_endpoint")
        answer = await self._object(url, fields, urlencode(form).encode())
        token = answer.get("id_token")
        if not isinstance(token, str):
            raise TokenRefused(f"the provider gave no ID token for the code ({str(answer.get('error', '?'))[:40]})")
        claims = await self.claims(token, access.client_id)
        if claims.get("nonce") != nonce:
            raise TokenRefused("its nonce is not that of this sign-in")
        audiences, party = claims.get("aud"), claims.get("azp")
        if party != access.client_id and (party is not None or (isinstance(audiences, list) and len(audiences) > 1)):
            raise TokenRefused("it is for another client")
        return claims

    async def logout_url(self, back: str) -> str | None:
        """Where a browser logs out at the provider, to return to `back`; None where it cannot."""
        try:
            url = _endpoint(await self.metadata(), "end_session_endpoint")
        except ProviderAway:
            return None
        query = {"client_id": self._settings.access.client_id, "post_logout_redirect_uri": back}
        return _with_query(url, query)

    async def ended(self, token: str) -> tuple[str, str, float]:
        """The `sub` and the `sid` of which a back-channel logout token ends a session, all without `sid`, and when
        by the provider's clock, in unix seconds; one of both may be empty. Raises ProviderAway, TokenRefused.
        """
        claims = await self.claims(token, self._settings.access.client_id)
        events = claims.get("events")
        if not isinstance(events, dict) or LOGOUT_EVENT not in events or "nonce" in claims or not claims.get("jti"):
            raise TokenRefused("it is no logout token")
        subject, sid = (value if isinstance(value := claims.get(name), str) else "" for name in ("sub", "sid"))
        if not subject and not sid:
            raise TokenRefused("it names neither a subject nor a session")
        return subject, sid, float(claims["iat"])

    # -- tokens

    async def claims(self, token: str, audience: str) -> dict[str, Any]:
        """What a token says that the provider signed for `audience`. Raises ProviderAway, TokenRefused."""
        # decision: sign-in-on-joserfc
        from joserfc import jwt
        from joserfc.errors import InvalidKeyIdError, JoseError

        if not token or len(token) > _TOKEN_CHARS_MAX:
            raise TokenRefused(f"it has {len(token):,} characters, at most {_TOKEN_CHARS_MAX:,} are read")
        access = self._settings.access
        try:
            try:
                read = jwt.decode(token, await self.keys(), algorithms=list(access.algorithms))
            except InvalidKeyIdError:  # the provider may have new keys
                read = jwt.decode(token, await self.keys(is_missing=True), algorithms=list(access.algorithms))
        except (JoseError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise TokenRefused(f"its signature does not hold ({type(error).__name__})") from None
        claims: Any = read.claims
        if not isinstance(claims, dict):
            raise TokenRefused("it has no claims")
        self._check(claims, audience)
        return claims

    def _check(self, claims: Mapping[str, Any], audience: str) -> None:
        """Refuse claims of another issuer or time, or for another audience. Raises TokenRefused."""
        now_s, leeway_s = self._clock(), self._settings.access.leeway_s
        audiences = claims.get("aud")
        audiences = audiences if isinstance(audiences, list) else [audiences]
        if claims.get("iss") != self._settings.access.issuer:
            raise TokenRefused("it is of another issuer")
        if not audience or audience not in audiences:
            raise TokenRefused("it is for another audience")
        if not _is_moment(claims.get("exp")) or not _is_moment(claims.get("iat")):
            raise TokenRefused("it does not say when it was issued and expires")
        if claims["exp"] + leeway_s <= now_s:
            raise TokenRefused("it has expired")
        begins = [claims["iat"], claims.get("nbf", 0)]
        if not all(_is_moment(moment) and moment - leeway_s <= now_s for moment in begins):
            raise TokenRefused("it is of the future")

    # -- what the provider says of itself

    async def metadata(self) -> dict[str, Any]:
        """Its configuration (Discovery 1.0, section 4). Raises ProviderAway."""
        await self._read(is_missing=False)
        return self._metadata

    async def keys(self, *, is_missing: bool = False) -> "KeySet":
        """Its signing keys; with `is_missing` read again, unless they just were. Raises ProviderAway."""
        await self._read(is_missing=is_missing)
        assert self._keys is not None
        return self._keys

    async def _read(self, *, is_missing: bool) -> None:
        issuer = self._settings.access.issuer or ""
        if not is_missing and self._has_keys(issuer, is_missing=False):  # also while they are read again
            return
        async with self._reading:
            if self._of != issuer:
                self._of, self._metadata, self._keys, self._read_at_s, self._tried_at_s = issuer, {}, None, 0.0, 0.0
            if self._has_keys(issuer, is_missing=is_missing):
                return
            now_s = self._clock()
            if self._keys is None and now_s - self._tried_at_s < 1.0:
                raise ProviderAway("it did not answer a moment ago")
            self._tried_at_s = now_s
            try:
                await self._read_anew(issuer)
                self._read_at_s = now_s
            except ProviderAway as error:
                _log.warning("provider_away", issuer=issuer, reason=str(error))
                if self._keys is None:
                    raise

    def _has_keys(self, issuer: str, *, is_missing: bool) -> bool:
        """Whether the keys are of `issuer` and not to be read again now."""
        if self._of != issuer or self._keys is None:
            return False
        now_s = self._clock()
        is_fresh = not is_missing and now_s - self._read_at_s <= _FRESH_S
        return is_fresh or now_s - self._tried_at_s < _AGAIN_S

    async def _read_anew(self, issuer: str) -> None:
        from joserfc.errors import JoseError
        from joserfc.jwk import KeySet

        metadata = await self._object(issuer.rstrip("/") + "/.well-known/openid-configuration")
        if metadata.get("issuer") != issuer:
            raise ProviderAway(f"its configuration names another issuer: {str(metadata.get('issuer'))[:100]!r}")
        found = await self._object(_endpoint(metadata, "jwks_uri"))
        listed = found.get("keys")
        public = [key for key in listed if isinstance(key, dict) and _may_sign(key)] if isinstance(listed, list) else []
        try:
            keys = KeySet.import_key_set({"keys": public})
        except (JoseError, ValueError, TypeError, KeyError) as error:
            raise ProviderAway(f"its keys can't be read ({type(error).__name__})") from None
        self._metadata, self._keys = metadata, keys

    async def _object(
        self, url: str, fields: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> dict[str, Any]:
        """The JSON object at `url`. Raises ProviderAway."""
        try:
            status, data = await self._fetcher.fetch(url, fields or {}, body)
            value = msgspec.json.decode(data)
        except (TransportError, TimeoutError, msgspec.DecodeError, RecursionError) as error:
            host = urlsplit(url).netloc
            raise ProviderAway(f"{host} did not answer with JSON ({type(error).__name__}: {error})"[:300]) from None
        if not isinstance(value, dict) or (status != 200 and body is None) or status >= 500:
            raise ProviderAway(f"{urlsplit(url).netloc} answered {status}")
        return value


def _may_sign(key: Mapping[str, Any]) -> bool:
    """Whether a key of the provider's may prove a signature: it is public, and not for encryption."""
    return key.get("kty") in ("RSA", "EC") and key.get("use", "sig") == "sig"


def _is_moment(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e11


def _endpoint(metadata: Mapping[str, Any], name: str) -> str:
    """The URL of an endpoint, which others cannot read on its way. Raises ProviderAway."""
    url = metadata.get(name)
    parts = urlsplit(url) if isinstance(url, str) else None
    if parts is None or not (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))):
        raise ProviderAway(f"its configuration has no https URL as `{name}`")
    return str(url)


def _with_query(url: str, query: Mapping[str, str]) -> str:
    return f"{url}{'&' if '?' in url else '?'}{urlencode(query)}"
