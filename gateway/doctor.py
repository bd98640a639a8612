"""`sameway doctor`: what would trouble this installation, each with its remedy.

It reads the configuration, this host's limits and disk, Redis, the database, and asks each server
for its list of models, which costs nothing. With leave it lets the gateway that runs send each
deployment one short question. Knows no requests of clients. Invariant: it changes nothing, and
spends nothing unasked.
"""

import asyncio
import json
import os
import resource
import shutil
import socket
import ssl
import sys
import time
import urllib.error
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, replace
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import sqlalchemy as sa
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from cache.redis_link import RedisLink
from gateway import console
from gateway.accounts.database import Database
from gateway.accounts.errors import AccountsError
from gateway.backends.dialect import ANTHROPIC_URL
from gateway.backends.keys import Keys
from gateway.settings import DeploymentSettings, Settings, deployment_name, keys_of, shown_variable

_FILES_MIN = 4_096  # a connection of a client and one to a deployment for each request
_FREE_BYTES_MIN = 1 << 30
_SKEW_S_MAX = 2.0
_CERTIFICATE_DAYS_MIN = 14
_WITHIN_S = 10.0


@dataclass(frozen=True)
class Finding:
    """What was looked at, and its state; `remedy` is empty where all is well. `is_serious`: it will fail."""

    about: str
    state: str
    remedy: str = ""
    is_serious: bool = False

    def where(self, is_wrong: bool) -> "Finding":
        """Itself where something is wrong; else what was seen alone."""
        return self if is_wrong else replace(self, remedy="", is_serious=False)


def doctor(settings: Settings, url: str, *, may_spend: bool, is_json: bool) -> int:
    """Look, and print what was found; 1 where something is serious."""

    async def look() -> list[Finding]:
        services = [one for looking in (_redis, _database) async for one in looking(settings)]
        servers = await asyncio.gather(*(asyncio.to_thread(_server, *one) for one in _servers(settings)))
        return [*_host(settings), *services, *(one for each in servers for one in each)]

    findings = asyncio.run(look())
    findings += _asked(url, settings, may_spend=may_spend)
    if is_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    for finding in () if is_json else findings:
        level = "error" if finding.is_serious else "note " if finding.remedy else "ok   "
        print(f"{level} {finding.about}: {finding.state}", *filter(None, [finding.remedy]), sep="\n      ")
    return int(any(finding.is_serious for finding in findings))


def _host(settings: Settings) -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = f"raise it to {16 * _FILES_MIN}: `ulimit -n`, or LimitNOFILE= of the systemd unit"
    yield Finding("open files", f"a process may have {files:,}", remedy).where(files < _FILES_MIN)
    folder = settings.data_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    is_full, is_shut = free < _FREE_BYTES_MIN, not os.access(folder, os.W_OK)
    remedy = "free some, or move `data_dir`: the ledger, files and Redis' log grow there"
    remedy = f"let this user write to {folder}, or choose another `data_dir`" if is_shut else remedy
    yield Finding("data_dir", f"{free / 2**30:,.1f} GiB free in {folder}", remedy, True).where(is_shut or is_full)


def _clock(about: str, seconds: float) -> Finding:
    remedy = "let NTP set both clocks: windows of budgets, leases and expiries follow them"
    found = Finding(f"clock of {about}", f"{seconds:+.1f} s from this host's", remedy)
    return found.where(abs(seconds) > _SKEW_S_MAX)


async def _redis(settings: Settings) -> AsyncIterator[Finding]:
    if settings.redis_url is None and not (settings.run_dir / "redis.sock").exists():
        yield Finding("Redis", "the gateway's own, which starts with it")
        return
    link = RedisLink(settings.redis_target, settings.redis_timeout_ms / 1000.0)
    try:
        began = time.perf_counter()
        seconds, micros = await link.execute_command("TIME")
        took_ms = (time.perf_counter() - began) * 1000
        remedy = "place Redis near the gateway: each request waits for it twice"
        yield Finding("Redis", f"answers in {took_ms:.1f} ms", remedy).where(took_ms > 20)
        yield _clock("Redis", int(seconds) + int(micros) / 1e6 - time.time())
        facts = await link.client.info()
        policy, is_kept = facts.get("maxmemory_policy", "noeviction"), facts.get("aof_enabled")
        remedy = "set `maxmemory-policy noeviction`: budgets and rows of the ledger are there"
        yield Finding("Redis' maxmemory-policy", policy, remedy, True).where(policy != "noeviction")
        remedy = "set `appendonly yes`: a restart loses what it does not write down"
        yield Finding("Redis' appendonly", "yes" if is_kept else "no", remedy).where(not is_kept)
    except (RedisError, OSError) as error:
        remedy = "start it, or correct `redis_url`; its user needs the permissions that docs/operations.md lists"
        yield Finding("Redis", f"{type(error).__name__}: {error}", remedy, is_serious=True)
    finally:
        await link.aclose()


async def _database(settings: Settings) -> AsyncIterator[Finding]:
    path = settings.data_dir.absolute() / "sameway.db"
    if settings.database_url is None and not path.exists():
        yield Finding("database", "a file of the gateway's own, which its first start makes")
        return
    database = Database(settings.sql_url)
    try:
        await database.check()
        yield Finding("database", "answers, with the tables of this version")
        if settings.sql_url.startswith("postgres"):
            (seconds,) = await database.scalars(sa.select(sa.extract("epoch", sa.func.clock_timestamp())))
            yield _clock("the database", float(seconds) - time.time())
    except AccountsError as error:
        what, _, remedy = str(error).partition(": ")
        yield Finding("database", what, remedy, is_serious=True)
    except (SQLAlchemyError, OSError) as error:
        remedy = "start it, or correct `database_url`"
        yield Finding("database", (str(error).splitlines() or [type(error).__name__])[0], remedy, is_serious=True)
    finally:
        await database.close()


def _servers(settings: Settings) -> Iterator[tuple[str, DeploymentSettings, str]]:
    """Each server that is asked over HTTP, with its deployment and its name."""
    for alias, model in settings.models.items():
        for deployment in model.deployments:
            default = [ANTHROPIC_URL] if deployment.backend == "anthropic" else []
            for url in [deployment.base_url] if deployment.base_url else deployment.replicas or default:
                if url.startswith("http") and "//unix:/" not in url:
                    yield deployment_name(alias, deployment), deployment, url.rstrip("/")


def _server(name: str, deployment: DeploymentSettings, url: str) -> list[Finding]:
    """Whether a server can be reached and takes its key, by its list of models; its clock and certificate."""
    findings, parts = list[Finding](), urlsplit(url)
    if parts.scheme == "https" and parts.hostname:
        findings.append(_certificate(name, parts.hostname, parts.port or 443))
    key = Keys(keys_of(deployment)).take()
    headers = dict(deployment.headers)
    if key and deployment.backend == "anthropic":
        headers |= {"x-api-key": key, "anthropic-version": "2023-06-01"}
    elif key:
        headers |= {"authorization": f"Bearer {key}", "api-key": key}
    path = "/v1/models" if deployment.backend == "anthropic" and not url.endswith("/v1") else "/models"
    try:
        with console.opened(url + path, headers, within_s=_WITHIN_S) as reply:
            date = reply.headers.get("date")
        findings.append(Finding(name, "takes its key" if key else "answers"))
    except urllib.error.HTTPError as error:
        date = error.headers.get("date")
        is_denied = error.code in (401, 403)
        variable = deployment.api_key_env and shown_variable(deployment.api_key_env, os.environ)
        remedy = f"put a key of {parts.hostname} into {variable or 'its `api_key_env` or `api_key_file`'}"
        told = "refuses the key" if key else "wants a key"
        state = f"{told} ({error.code})" if is_denied else f"answers {error.code} to a request for its models"
        findings.append(Finding(name, state, remedy, True).where(is_denied))
    except console.UNREACHABLE as error:
        remedy = f"start it, correct its `base_url`, or let this host reach {parts.netloc.rpartition('@')[2]}"
        return [*findings, Finding(name, f"cannot be reached: {error}", remedy, is_serious=True)]
    skew = parsedate_to_datetime(date).timestamp() - time.time() if date else 0.0
    return [*findings, *([_clock(name, skew)] if abs(skew) > _SKEW_S_MAX else [])]


def _certificate(name: str, host: str, port: int) -> Finding:
    about, context = f"certificate of {name}", ssl.create_default_context()
    try:
        with (
            socket.create_connection((host, port), _WITHIN_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as wrapped,
        ):
            ends_at = ssl.cert_time_to_seconds(str((wrapped.getpeercert() or {})["notAfter"]))
    except (OSError, KeyError, ValueError) as error:
        if isinstance(error, ssl.SSLError):
            remedy = "renew it, or trust its authority: SSL_CERT_FILE names a file of them"
            return Finding(about, f"is not trusted: {error}", remedy, is_serious=True)
        return Finding(about, f"cannot be read: {error}", f"let this host reach {host}:{port}")
    days = (ends_at - time.time()) / 86_400
    return Finding(about, f"ends in {days:,.0f} days", "renew it").where(days < _CERTIFICATE_DAYS_MIN)


def _asked(url: str, settings: Settings, *, may_spend: bool) -> list[Finding]:
    """What came of one short question to each deployment, if a gateway runs and may be asked."""
    try:
        headers = {**console.admin_headers(settings.data_dir), "content-type": "application/json"}
        with console.opened(f"{url}/admin/api/deployments", headers, within_s=_WITHIN_S) as reply:
            names = [one["name"] for one in json.load(reply)["deployments"] if not one["model"].endswith("*")]
    except (console.CommandError, KeyError, *console.UNREACHABLE) as error:
        remedy = "start it, and name its address with --url, to ask each deployment"
        return [Finding("gateway", f"not asked: {error}", remedy)]
    if not may_spend and sys.stdin.isatty():
        sys.stderr.write(f"Ask each of {len(names)} deployments one short question, which costs its price? [y/N] ")
        may_spend = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not may_spend:
        remedy = "--yes asks each one short question"
        return [Finding("deployments", "not asked, as a question costs its price", remedy)]
    findings = []
    for name in names:
        body = json.dumps({"name": name}).encode()
        try:
            with console.opened(f"{url}/admin/api/deployments/try", headers, "POST", body) as reply:
                tried = json.load(reply)
        except console.UNREACHABLE as error:
            tried = {"is_ok": False, "problem": str(error)}
        state = str(tried["problem"])
        if tried["is_ok"]:
            state = f"answers in {tried['duration_ms']:,.0f} ms for {tried['cost_microusd'] / 1e6:.6f} USD"
        remedy = "see its errors at /admin/deployments"
        findings.append(Finding(f"question to {name}", state, remedy, True).where(not tried["is_ok"]))
    return findings
