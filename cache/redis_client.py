"""The methods of a Redis client that the cache uses, and a redis-py client from a URL.

Knows no keys. Nothing is sent until a client is used.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol
from urllib.parse import urlsplit

from redis.exceptions import RedisError

REDIS_FAILURES = (RedisError, OSError, TimeoutError)


class Redis(Protocol):
    """The methods of redis.asyncio.Redis (decode_responses=False), or of a batching client, that
    the cache uses.

    Replies are as redis-py parses them: HSCAN a cursor and a dict, XRANGE pairs of id and dict.
    """

    def execute_command(self, *args: Any) -> Awaitable[Any]: ...
    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Awaitable[Any]: ...


class Subscription(Protocol):
    """The part of redis-py's PubSub that the cache uses: messages are dicts with `type` and `data`."""

    def listen(self) -> AsyncIterator[dict[str, Any]]: ...


Subscribe = Callable[[str], AbstractAsyncContextManager[Subscription]]


def connect(url: str, timeout_s: float) -> Any:
    """A client for `redis://`, `rediss://`, `unix://`, `redis+cluster://host:port,host:port` or
    `redis+sentinel://host:port,host:port/service[/db]`.

    It does not retry; its callers decide about that. Replies are bytes. `timeout_s` is in seconds.
    """
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    common_options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
    }
    parts = urlsplit(url)
    if parts.scheme in ("redis+cluster", "rediss+cluster"):
        from redis.asyncio.cluster import ClusterNode, RedisCluster

        urls = cluster_nodes(url)
        known = [ClusterNode(one.hostname or "", one.port or 6_379) for one in map(urlsplit, urls)]
        return RedisCluster.from_url(urls[0], startup_nodes=known, **common_options)
    if parts.scheme in ("redis+sentinel", "rediss+sentinel"):
        from redis.asyncio.sentinel import Sentinel

        credentials, _, hosts = parts.netloc.rpartition("@")
        nodes = [(host, int(port or 26_379)) for host, _, port in (node.partition(":") for node in hosts.split(","))]
        service, _, db = parts.path.strip("/").partition("/")
        username, _, password = credentials.partition(":")
        auth = {"username": username or None, "password": password} if credentials else {}
        sentinel: Any = Sentinel(nodes, sentinel_kwargs=common_options, **common_options, **auth)  # type: ignore[no-untyped-call]
        return sentinel.master_for(service, db=int(db or 0))
    return Redis.from_url(url, **common_options)


def cluster_nodes(url: str) -> list[str]:
    """The URL of each node that a cluster's URL names; those of any other URL are itself."""
    parts = urlsplit(url.replace("+cluster", "", 1))
    if parts.geturl() == url:
        return [url]
    credentials, at, hosts = parts.netloc.rpartition("@")
    return [parts._replace(netloc=f"{credentials}{at}{host}").geturl() for host in hosts.split(",")]
