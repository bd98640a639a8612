"""A redis-py client from a URL: a server, a unix socket, Sentinel or Cluster. Nothing is sent until it is used."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit


def connect(url: str, timeout_s: float) -> Any:
    """A client for `redis://`, `rediss://`, `unix://`, `redis+cluster://host:port` or
    `redis+sentinel://host:port,host:port/service[/db]`, without retries: who asks decides about those. Replies are bytes."""
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    common: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
    }
    parts = urlsplit(url)
    if parts.scheme in ("redis+cluster", "rediss+cluster"):
        from redis.asyncio.cluster import RedisCluster

        return RedisCluster.from_url(url.replace("+cluster", "", 1), **common)
    if parts.scheme in ("redis+sentinel", "rediss+sentinel"):
        from redis.asyncio.sentinel import Sentinel

        credentials, _, hosts = parts.netloc.rpartition("@")
        nodes = [(host, int(port or 26_379)) for host, _, port in (node.partition(":") for node in hosts.split(","))]
        service, _, db = parts.path.strip("/").partition("/")
        username, _, password = credentials.partition(":")
        auth = {"username": username or None, "password": password} if credentials else {}
        sentinel: Any = Sentinel(nodes, sentinel_kwargs=common, **common, **auth)  # type: ignore[no-untyped-call]
        return sentinel.master_for(service, db=int(db or 0))
    return Redis.from_url(url, **common)
