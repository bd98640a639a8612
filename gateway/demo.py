"""`./run demo`: starts a gateway and shows its main functions through the official `openai` client.

Uses only public interfaces: the command line, the configuration file, the wire and the admin API.
Each step announces, shows and checks one thing; the first failed check ends the demo with status 1.
Invariant: no process is left running.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import yaml

from policies.durations import duration_ms, duration_s

_ADMIN_KEY = "sk-admin-demo-0123456789"
_API_KEY = "sk-sw-demo-0123456789abcdef0123456789abcdef"
_LOCAL = "smollm2"
_SUPPORT = "support"
_HITS = ("exact", "semantic", "coalesced")
_READY_WITHIN_S = 120.0
_PRICE = {"input_usd_per_mtok": 0.10, "output_usd_per_mtok": 0.40}


class DemoFailed(Exception):
    """A step's check failed."""


def main() -> int:
    """Run the demo; returns the exit status."""
    from openai import OpenAIError

    with (
        tempfile.TemporaryDirectory(prefix="sameway-demo-") as folder,
        _upstream(_Failing) as failing_port,
        _upstream(_Answering) as answering_port,
    ):
        config = Path(folder) / "sameway.yaml"
        config.write_text(yaml.safe_dump(_config(failing_port, answering_port)))
        with _gateway(config, Path(folder) / "data") as base_url:
            try:
                asyncio.run(_Demo(base_url).run())
            except (DemoFailed, OpenAIError, httpx.HTTPError) as failure:
                print(f"\n✗ {failure}", flush=True)
                return 1
            except KeyboardInterrupt:
                return 130
    print("\n✓ Everything did what it said. Nothing is left running; try ./run serve next.", flush=True)
    return 0


def _config(failing_port: int, answering_port: int) -> dict[str, Any]:
    local = {"name": "local", "backend": "local", "engine": "default", "price": _PRICE}
    failing = {
        "name": "failing-api",
        "backend": "openai",
        "model": "big-model",
        "base_url": f"http://127.0.0.1:{failing_port}/v1",
        "price": {"input_usd_per_mtok": 0.0, "output_usd_per_mtok": 0.0},
        "priority": 1,
    }
    day = {"backend": "openai", "model": "simulated", "base_url": f"http://127.0.0.1:{answering_port}/v1"}
    listed = {"name": "large-api", **day, "price": {"input_usd_per_mtok": 2.5, "output_usd_per_mtok": 10.0}}
    cheap = {"name": "small-api", **day, "price": {"input_usd_per_mtok": 0.6, "output_usd_per_mtok": 2.4}}
    return {
        "cache": {"is_audited": False},  # an audit could turn the shown hit into a miss
        "models": {
            _LOCAL: {"deployments": [local]},
            _SUPPORT: {"policy": "cheapest", "deployments": [listed, cheap]},
            "prefers-api": {"policy": "cheapest", "deployments": [failing, {**local, "name": "local-fallback"}]},
        },
    }


class _Demo:
    """The steps, in order."""

    def __init__(self, base_url: str) -> None:
        from openai import AsyncOpenAI

        self._root = base_url.removesuffix("/v1")
        self._client = AsyncOpenAI(base_url=base_url, api_key=_API_KEY, max_retries=0, timeout=60)
        self._admin = httpx.AsyncClient(
            base_url=f"{self._root}/admin/api", headers={"authorization": f"Bearer {_ADMIN_KEY}"}, timeout=30
        )

    async def run(self) -> None:
        async with self._client, self._admin:
            await self._wait_until_ready()
            await self._streamed_answer()
            await self._exact_hit()
            await self._semantic_hit()
            await self._near_misses()
            await self._one_generation_for_four()
            await self._schema_and_tool()
            await self._failover()
            await self._budget()
            await self._stats()
            await self._simulated_day()

    async def _wait_until_ready(self) -> None:
        _step("The gateway answers already; its local model and its embedder are still loading")
        deadline = time.monotonic() + _READY_WITHIN_S
        shown = ""
        async with httpx.AsyncClient(timeout=5, headers={"authorization": f"Bearer {_ADMIN_KEY}"}) as http:
            while True:
                report = (await http.get(f"{self._root}/readyz")).json()
                report["parts"].pop("failing-api", None)  # it fails on purpose, in a later step
                states = ", ".join(f"{name}: {part['health']}" for name, part in report["parts"].items())
                if states != shown:
                    _say(states)
                    shown = states
                waiting = [name for name, part in report["parts"].items() if part["health"] != "ok"]
                if not waiting:
                    return
                if time.monotonic() > deadline:
                    raise DemoFailed(f"not ready within {duration_s(_READY_WITHIN_S)}: {', '.join(waiting)}")
                await asyncio.sleep(0.25)

    async def _ask(self, question: str, model: str = _LOCAL, client: Any = None, **more: Any) -> tuple[str, Any]:
        """The answer's text and the response's headers."""
        raw = await (client or self._client).chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": question}], temperature=0, **more
        )
        return (await _parsed(raw)).choices[0].message.content or "", raw.headers

    async def _seen(self, path: str, is_there: Callable[[Any], object], **params: str) -> Any:
        """The reply of the admin API once `is_there` accepts it: workers send counts once a second.

        Raises DemoFailed after 15 s.
        """
        for _ in range(60):
            found = (await self._admin.get(path, params=params)).raise_for_status().json()
            if is_there(found):
                return found
            await asyncio.sleep(0.25)
        raise DemoFailed(f"{path} does not show what happened: {found}")

    async def _streamed_answer(self) -> None:
        _step("A question that is new here: the local model answers, streamed")
        started = time.perf_counter()
        stream = await self._client.chat.completions.create(
            model=_LOCAL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            stream=True,
        )
        pieces: list[str] = []
        _quote_start("What is the capital of France?")
        async for chunk in stream:
            text = chunk.choices[0].delta.content if chunk.choices else None
            if text:
                pieces.append(text)
                print(text, end="", flush=True)
        self._generated_ms = (time.perf_counter() - started) * 1000
        print(flush=True)
        answer = "".join(pieces)
        _check(
            "Paris" in answer,
            f"the answer names Paris ({len(pieces)} pieces in {duration_ms(self._generated_ms)})",
            answer,
        )
        self._answer = answer

    async def _exact_hit(self) -> None:
        _step("The same question again, not streamed this time: answered from the exact cache")
        started = time.perf_counter()
        answer, headers = await self._ask("What is the capital of France?")
        took_ms = (time.perf_counter() - started) * 1000
        _show("What is the capital of France?", answer, headers)
        _check(
            headers["x-sameway-cache"] == "exact", f"an exact hit in {duration_ms(took_ms)}", headers["x-sameway-cache"]
        )
        _check(answer == self._answer, "the very same text, though the first was a stream and this is not", answer)

    async def _semantic_hit(self) -> None:
        _step("The same question in other words: answered by meaning")
        question = "Tell me, what is France's capital?"
        answer, headers = await self._ask(question)
        _show(question, answer, headers)
        _check(headers["x-sameway-cache"] == "semantic", "a semantic hit", headers["x-sameway-cache"])
        _check(answer == self._answer, "with the recorded answer", answer)

    async def _near_misses(self) -> None:
        _step("Questions that look alike and mean something else must not be answered from the cache")
        _say("of each pair the first is answered and stored; then the second finds it, and must not get its answer")
        _say("all six are asked for at most 200 tokens: the answers above, asked for without a limit, are not theirs")
        for first, other, why in (
            # an answer that is cut is not stored: these are short
            (
                "Is it safe to eat raw eggs? Answer yes or no.",
                "Is it not safe to eat raw eggs? Answer yes or no.",
                "a negation",
            ),
            ("How many minutes are 3 hours?", "How many minutes are 5 hours?", "another number"),
            ("What is the capital of France?", "What is the capital of Italy?", "another name"),
        ):
            answer, headers = await self._ask(first, max_completion_tokens=200)
            _show(first, answer, headers)
            answer, headers = await self._ask(other, max_completion_tokens=200)
            _show(other, answer, headers)
            found = await self._seen("/near-misses", lambda page: page["routes"], request_id=headers["x-request-id"])
            near = f"similarity {found['routes'][0]['similarity']:.2f} to the first"
            _check(headers["x-sameway-cache"] == "miss", f"not a hit: {why} ({near})", headers["x-sameway-cache"])

    async def _one_generation_for_four(self) -> None:
        _step("Four identical questions at the same moment: one generation, four answers")
        question = "Why is the sky blue? Answer in two sentences."
        replies = await asyncio.gather(*(self._ask(question) for _ in range(4)))
        kinds = sorted(headers["x-sameway-cache"] for _, headers in replies)
        _show(question, replies[0][0], replies[0][1])
        _check(kinds.count("miss") == 1, f"one generated, three shared it: {', '.join(kinds)}", kinds)
        _check(len({text for text, _ in replies}) == 1, "all four got the same text", kinds)

    async def _schema_and_tool(self) -> None:
        _step("An answer by a JSON schema, and a forced call of a tool: the local model is held to both")
        messages: Any = [{"role": "user", "content": "Invent a city of Finland."}]
        ask = self._client.chat.completions.create
        form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY}}
        told = await ask(model=_LOCAL, messages=messages, response_format=form)
        answer = told.choices[0].message.content or ""
        _say(f"› {messages[0]['content']}\n   ‹ {answer}")
        found = json.loads(answer)
        _check(isinstance(found, dict) and found.keys() == _CITY["properties"].keys(), "an object of the schema", found)
        _check(type(found["inhabitants"]) is int and 1 <= found["inhabitants"] <= 2_000_000, "within its bounds", found)
        tools: Any = [{"type": "function", "function": {"name": "look_up", "parameters": _CITY}}]
        told = await ask(
            model=_LOCAL, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False
        )
        calls: Any = told.choices[0].message.tool_calls or ()
        _check(len(calls) == 1 and told.choices[0].finish_reason == "tool_calls", "one call of a tool", told)
        _say(f"‹ {calls[0].function.name} {calls[0].function.arguments}")

    async def _failover(self) -> None:
        _step("An alias whose first choice is an API that is down: the local model takes over before the first token")
        question = "Name one primary colour."
        answer, headers = await self._ask(question, model="prefers-api")
        _show(question, answer, headers)
        _check(
            headers["x-sameway-backend"] == "local-fallback", "answered by local-fallback", headers["x-sameway-backend"]
        )
        found = await self._seen("/routes", lambda found: found["routes"], model="prefers-api")
        attempts = "; ".join(f"{a['name']}: {a['outcome']}" for a in found["routes"][0]["attempts"])
        _check(attempts.startswith("failing-api"), f"the record says why: {attempts}", found)

    async def _budget(self) -> None:
        from openai import AsyncOpenAI, RateLimitError

        _step("A team with a budget of $0.0002 a day")
        team = (await self._admin.post("/teams", json={"name": "thrifty"})).raise_for_status().json()
        key = (await self._admin.post(f"/teams/{team['id']}/keys", json={"name": "demo"})).raise_for_status().json()
        budget = {"window": "day", "limit_microusd": 200, "is_hard": True}
        (await self._admin.post(f"/teams/{team['id']}/budgets", json=budget)).raise_for_status()
        async with AsyncOpenAI(base_url=f"{self._root}/v1", api_key=key["plaintext"], max_retries=0) as thrifty:
            first = "What is the capital of France?"
            answer, headers = await self._ask(first, client=thrifty, max_completion_tokens=120)
            _show(first, answer, headers)
            refused = None
            for number in range(1, 40):
                try:
                    await self._ask(
                        f"Write one sentence about the number {number}.", client=thrifty, max_completion_tokens=120
                    )
                except RateLimitError as error:
                    refused = error
                    break
            if refused is None:
                raise DemoFailed("the team was never refused, however much it spent")
            body: Any = refused.body
            _say(f"after {number} more: {body['message']}")
            _check(body.get("code") == "insufficient_quota", "refused with insufficient_quota", body)
            _check(refused.response.headers.get("x-should-retry") == "false", "and the SDK is told not to retry", body)
            again, headers = await self._ask(first, client=thrifty, max_completion_tokens=120)
            _check(
                headers["x-sameway-cache"] == "exact" and again == answer, "its cached answers are still served", again
            )
        budgets = (await self._admin.get(f"/teams/{team['id']}/budgets")).json()["budgets"]
        spent = budgets[0]["spent_microusd"]
        _check(spent <= 200, f"spent ${spent / 1e6:.6f} of $0.0002: never over", budgets)

    async def _stats(self) -> None:
        _step("What the admin sees")
        wanted = {"exact": 2, "semantic": 1, "coalesced": 3, "refused": 1}

        def is_there(found: Any) -> bool:
            return all(found["total"]["by_kind"].get(kind, 0) >= count for kind, count in wanted.items())

        stats = await self._seen("/stats", is_there, window="1h")
        kinds = stats["total"]["by_kind"]
        total = stats["total"]
        _say(f"{total['requests']} requests: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
        spent, saved = total["cost_microusd"] / 1e6, total["saved_microusd"] / 1e6
        _say(
            f"hit rate {total['hit_rate']:.0%}, spent ${spent:.6f}, saved ${saved:.6f} and {duration_ms(total['saved_ms'])}"
        )
        _check({kind: kinds[kind] for kind in wanted} == wanted, "the counts are right", kinds)
        _say(f"the dashboard would be at {self._root}/admin")

    async def _simulated_day(self) -> None:
        _step("A simulated day of a help desk: what it costs, beside what it would have cost without Sameway")
        chance = random.Random(24)
        asked = [_question(chance) for _ in range(_DAY)]
        distinct = len(set(asked))
        _say(f"{_DAY} questions of made-up traffic, {distinct} different ones: most are about few subjects, in three")
        _say("wordings; one in ten is asked once. A simulated API answers at once, in 150 tokens; the alias lists a")
        _say("large model first, and its policy takes a smaller one for a quarter of the price")
        for start in range(0, _DAY, 4):
            batch = asked[start : start + 4]
            await asyncio.gather(*(self._ask(question, model=_SUPPORT) for question in batch))
        found = await self._seen("/savings", lambda found: found["requests"] >= _DAY, model=_SUPPORT)
        width = max(len(step["words"]) for step in found["steps"])
        for words, requests, amount in (
            ("Without Sameway", found["requests"], found["baseline_microusd"]),
            *((step["words"], step["requests"], -step["amount_microusd"]) for step in found["steps"]),
            ("Spent", found["requests"], found["spent_microusd"]),
        ):
            sign = "-" if amount < 0 else " "
            bar = "█" * round(30 * abs(amount) / max(1, found["baseline_microusd"]))
            _say(f"{words:{width}}  {requests:5} requests  {sign}${abs(amount) / 1e6:.4f}  {bar}")
        rest = found["baseline_microusd"] - sum(step["amount_microusd"] for step in found["steps"])
        _check(rest == found["spent_microusd"], "the baseline less each step is what was spent", found)
        baseline, factor = found["baseline_microusd"], found["factor"]
        cached = sum(one["amount_microusd"] for one in found["steps"] if one["mechanism"] in _HITS)
        alone = baseline / max(1, baseline - cached)
        words = f"{alone:.1f} to 1 by the cache alone, {factor or 0:.1f} to 1 with the cheaper route, on this traffic"
        _check(factor is not None and alone > 1, f"{words}; docs/savings.md has the method", factor)


_CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,11}$"},
        "inhabitants": {"type": "integer", "minimum": 1, "maximum": 2_000_000},
        "is_coastal": {"type": "boolean"},
    },
    "required": ["name", "inhabitants", "is_coastal"],
    "additionalProperties": False,
}
_DAY = 320
_SUBJECTS = (
    "reset my password", "change my address", "return a parcel", "pay by invoice", "close my account",
    "download a receipt", "track my order", "add a colleague", "export my data", "change my plan",
    "cancel an order", "use a voucher",
)  # fmt: skip
_WORDINGS = ("How do I {}?", "How can I {}?", "Tell me how to {}.")


def _question(chance: random.Random) -> str:
    """A question of the simulated day: subjects are asked as often as 1 / rank, and one in ten only once."""
    if chance.random() < 0.1:
        return f"Where is order {chance.randrange(10**9)}?"
    subject = chance.choices(_SUBJECTS, [1 / rank for rank in range(1, len(_SUBJECTS) + 1)])[0]
    return chance.choices(_WORDINGS, (6, 3, 1))[0].format(subject)


async def _parsed(raw: Any) -> Any:
    parsed = raw.parse()
    return await parsed if asyncio.iscoroutine(parsed) else parsed


# -- what surrounds it ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _gateway(config: Path, data_dir: Path) -> Iterator[str]:
    """A gateway process; yields its base_url.

    Raises DemoFailed with its log if it does not start.
    """
    log = data_dir.with_suffix(".log")
    argv = [sys.executable, "-m", "gateway", "serve", "--port", "0"]
    argv += ["--config", str(config), "--data-dir", str(data_dir)]
    keys = {"SAMEWAY_ADMIN_KEY": _ADMIN_KEY, "SAMEWAY_API_KEY": _API_KEY, "SAMEWAY_LOG_FORMAT": "json"}
    started = time.perf_counter()
    with log.open("w") as errors:
        process = subprocess.Popen(
            argv, env={**os.environ, **keys}, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            found = re.search(r"base_url\s+(http\S+)", line)
            if found:
                print(
                    f"\033[1mSameway\033[0m serves at {found[1]} after {duration_s(time.perf_counter() - started)}",
                    flush=True,
                )
                threading.Thread(target=process.stdout.read, daemon=True).start()
                yield found[1]
                return
        raise DemoFailed(f"the gateway did not start:\n{log.read_text()}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(45)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class _Failing(BaseHTTPRequestHandler):
    """An API that answers every request with 500."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.reply(self.rfile.read(int(self.headers.get("content-length", 0))))

    def reply(self, _: bytes) -> None:
        self.send_response(500)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        return


class _Answering(_Failing):
    """A simulated API: an answer of 150 tokens to each question, at once."""

    def reply(self, body: bytes) -> None:
        question = json.loads(body)["messages"][-1]["content"]
        message = {"role": "assistant", "content": f"This is the simulated answer to: {question} " + "And so on. " * 40}
        answer = {
            "id": "chatcmpl-simulated",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "simulated",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 400, "completion_tokens": 150, "total_tokens": 550},
        }
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def _upstream(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """An API on this host that answers by `handler`; yields its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()


# -- narration ------------------------------------------------------------------------------------------------------------

_number = iter(range(1, 100))


def _step(what: str) -> None:
    print(f"\n\033[1m{next(_number)}. {what}\033[0m", flush=True)


def _say(what: str) -> None:
    print(f"   {what}", flush=True)


def _quote_start(question: str) -> None:
    print(f"   › {question}\n   ‹ ", end="", flush=True)


def _show(question: str, answer: str, headers: Any) -> None:
    short = " ".join(answer.split())
    short = short if len(short) <= 140 else short[:139] + "…"
    similarity = headers.get("x-sameway-similarity")
    note = f"{headers['x-sameway-cache']}{f' {similarity}' if similarity else ''}, {headers['x-sameway-backend']}"
    _say(f"› {question}\n   ‹ {short}\n     \033[2m[{note}]\033[0m")


def _check(is_good: bool, what: str, found: object) -> None:
    if not is_good:
        raise DemoFailed(f"expected: {what}; found: {found}")
    _say(f"\033[32m✓\033[0m {what}")
