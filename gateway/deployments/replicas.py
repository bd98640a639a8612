"""The replicas of a deployment: equal servers, each a deployment of its own in the router's ranking.

A replica has its breaker, its places and its estimate; budgets, bills and prices are those of the
deployment that lists it. `policies.replicas` has what is known of its queue and of its prefixes.
Knows no requests. Invariant: a list that cannot be read leaves the replicas that were known; a
replica that leaves the list gets no request any more, and ends those that it has.
"""

import asyncio
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

from gateway.deployments.deployment import Deployment
from gateway.loggers import get_logger
from gateway.settings import is_http_url
from policies.replicas import Prefixes

# about 128 tokens of most languages; vLLM's blocks have 16 tokens, and a prompt's end is new anyway
_BLOCK_BYTES = 512
_BLOCKS_MAX = 1_024
_NOWHERE = "http://replicas.invalid/v1"  # RFC 2606: where no address is known
_PROMPTS = ("messages", "prompt", "input")

_log = get_logger()


def blocks_of(body: Mapping[str, Any], salt: bytes = b"") -> tuple[bytes, ...]:
    """The digests of the blocks of a prompt, each with all before it; of those with another `salt`
    none is equal. A last block that is not full has none.
    """
    prompt = [body.get("tools"), *(body[name] for name in _PROMPTS if name in body)]
    data, chain, link = msgspec.json.encode(prompt), [], salt
    for start in range(0, min(len(data) // _BLOCK_BYTES, _BLOCKS_MAX) * _BLOCK_BYTES, _BLOCK_BYTES):
        link = blake2b(data[start : start + _BLOCK_BYTES], key=link, digest_size=8).digest()
        chain.append(link)
    return tuple(chain)


async def addresses(replicas: Sequence[str]) -> list[str]:
    """The base URLs that `replicas` mean now, each once. Raises OSError for one that cannot be read."""
    urls: list[str] = []
    for entry in replicas:
        parts = urlsplit(entry)
        if parts.scheme == "file":
            text = await asyncio.to_thread(Path(unquote(parts.path)).read_text)
            urls += [line for line in map(str.strip, text.splitlines()) if is_http_url(line)]
        elif parts.scheme == "dns":
            found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port or 80)
            hosts = sorted({str(address[0]) for *_, address in found})
            urls += [f"http://{_host(host)}:{parts.port or 80}{parts.path}" for host in hosts]
        else:
            urls.append(entry)
    return list(dict.fromkeys(urls))


def _host(address: str) -> str:
    return f"[{address}]" if ipaddress.ip_address(address).version == 6 else address


class Replicas:
    """The replicas of the deployment `name`, which `make` builds by their URL. `prefixes` are the
    alias's.
    """

    def __init__(self, name: str, listed: Sequence[str], make: Callable[[str], Deployment], prefixes: Prefixes) -> None:
        self.name = name
        self._listed = listed
        self._make = make
        self.prefixes = prefixes
        self.leaving: list[Deployment] = []
        self.by_url = {url: make(url) for url in [url for url in listed if is_http_url(url)] or [_NOWHERE]}

    @property
    def by_name(self) -> dict[str, Deployment]:
        return {replica.name: replica for replica in self.by_url.values()}

    async def reread(self) -> bool:
        """Read the list again, and close the replicas that have left it once they run nothing.

        Returns whether it has changed.
        """
        try:
            urls = await addresses(self._listed) or [_NOWHERE]
        except (OSError, ValueError) as error:
            _log.warning("replicas_not_read", deployment=self.name, reason=f"{type(error).__name__}: {error}")
            urls = list(self.by_url)
        before = self.by_url
        if has_changed := urls != list(before):
            self.leaving += [replica for url, replica in before.items() if url not in urls]
            new = {url: self._make(url) for url in urls if url not in before}
            for replica in new.values():
                await replica.backend.start()
            self.by_url = {url: before.get(url) or new[url] for url in urls}
            _log.info("replicas_changed", deployment=self.name, replicas=len(urls))
        for replica in [one for one in self.leaving if not one.answers]:
            self.leaving.remove(replica)
            self.prefixes.forget(replica.name)
            await replica.backend.aclose()
        return has_changed

    async def aclose(self) -> None:
        """Close the replicas that have left the list."""
        for replica in self.leaving:
            await replica.backend.aclose()
