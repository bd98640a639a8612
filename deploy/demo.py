"""`./run demo`: starts a gateway and shows its main functions through the official `openai` client.

Uses only public interfaces: the command line, the configuration file, the wire and the admin API.
Each step announces, shows and checks one thing; the first failed check ends the demo with status 1.
Invariant: no process is left running.
"""

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
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import yaml
from openai import InternalServerError, OpenAI, OpenAIError, RateLimitError, pydantic_function_tool
from pydantic import BaseModel, Field

ADMIN_KEY, API_KEY = "sk-admin-demo-0123456789", "sk-sw-demo-0123456789abcdef0123456789abcdef"
CAPITAL = "What is the capital of France?"
NEAR_MISSES = (  # an answer that is cut is not stored: these are short
    (
        "Is it safe to eat raw eggs? Answer yes or no.",
        "Is it not safe to eat raw eggs? Answer yes or no.",
        "a negation",
    ),
    ("How many minutes are 3 hours?", "How many minutes are 5 hours?", "another number"),
    (CAPITAL, "What is the capital of Italy?", "another name"),
)
STORED, REWORDED = "My parcel never came. What should I do?", "what to do about a delivery that has not arrived?"
DAY = 320
SUBJECTS = (
    "reset my password", "change my address", "return a parcel", "pay by invoice", "close my account",
    "download a receipt", "track my order", "add a colleague", "export my data", "change my plan",
    "cancel an order", "use a voucher",
)  # fmt: skip
WORDINGS = ("How do I {}?", "How can I {}?", "Tell me how to {}.")


class City(BaseModel):
    """A city."""

    name: Annotated[str, Field(pattern="^[A-Z][a-z]{2,11}$")]
    inhabitants: Annotated[int, Field(ge=1, le=2_000_000)]
    is_coastal: bool


class Demo:
    """The steps, in order."""

    def __init__(self, base_url: str) -> None:
        self.client = OpenAI(base_url=base_url, api_key=API_KEY, max_retries=0, timeout=60)
        self.root = base_url.removesuffix("/v1")
        self.operator = OpenAI(base_url=self.root, api_key=ADMIN_KEY, max_retries=0, timeout=30)
        self.pool = ThreadPoolExecutor(4)

    def ask(self, question: str, model: str = "smollm2", client: OpenAI | None = None, **more: Any) -> tuple[str, Any]:
        """The answer's text and the response's headers."""
        raw = (client or self.client).chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": question}], temperature=0, **more
        )
        return raw.parse().choices[0].message.content or "", raw.headers

    def show(self, question: str, **more: Any) -> tuple[str, str, Any]:
        """Ask, and print the question and its answer; the answer, how it came, and the headers."""
        started = time.perf_counter()
        answer, headers = self.ask(question, **more)
        took = f"{(time.perf_counter() - started) * 1000:.0f} ms"
        kind, similarity = headers["x-sameway-cache"], headers.get("x-sameway-similarity")
        note = f"{kind}, similarity {similarity}" if kind == "semantic" else kind
        say(f"› {question}\n   ‹ {' '.join(answer.split())[:140]}")
        say(f"  \033[2m[{note}, {headers['x-sameway-backend']}, {took}]\033[0m")
        return answer, kind, headers

    def admin(self, path: str, sent: Any = None, **params: str) -> Any:
        """The admin API's reply to a POST of `sent`, or to a GET."""
        if sent:
            return self.operator.post(f"/admin/api{path}", body=sent, cast_to=object)
        return self.operator.get(f"/admin/api{path}", options={"params": params}, cast_to=object)

    def ready(self) -> Any:
        """What `/readyz` says once it is 200; else None."""
        try:
            return self.operator.get("/readyz", cast_to=object)
        except InternalServerError:  # 503: parts still load
            return None

    def seen(self, path: str, is_there: Callable[[Any], object], **params: str) -> Any:
        """The admin API's reply once `is_there` accepts it: workers send counts once a second."""
        return until(lambda: self.admin(path, **params), is_there, f"{path} shows what happened", within_s=15)

    def run(self) -> None:
        step("The gateway answers already; its local model and its embedder are still loading")
        parts = until(self.ready, bool, "the gateway gets ready")["parts"].items()
        check(True, "ready: " + ", ".join(f"{name} {part['health']}" for name, part in parts))
        self.streamed_answer()
        self.cache_hits()
        self.near_misses()
        self.verified_hit()
        self.one_generation_for_four()
        self.schema_and_tool()
        self.failover()
        self.budget()
        self.stats()
        self.simulated_day()

    def streamed_answer(self) -> None:
        step("A question that is new here: the local model answers, streamed")
        print(f"   › {CAPITAL}\n   ‹ ", end="", flush=True)
        asked: Any = {"model": "smollm2", "messages": [{"role": "user", "content": CAPITAL}], "temperature": 0}
        pieces = []
        for chunk in self.client.chat.completions.create(**asked, stream=True):
            pieces.append(chunk.choices[0].delta.content or "" if chunk.choices else "")
            print(pieces[-1], end="", flush=True)
        print()
        self.answer = "".join(pieces)
        check("Paris" in self.answer, f"the answer names Paris ({len(pieces)} chunks)", self.answer)

    def cache_hits(self) -> None:
        for title, question, wanted in (
            ("The same question again, not streamed this time: answered from the exact cache", CAPITAL, "exact"),
            ("The same question in other words: answered by meaning", "Tell me, what is France's capital?", "semantic"),
        ):
            step(title)
            answer, kind, _ = self.show(question)
            check(kind == wanted, f"a hit, {wanted}", kind)
            check(answer == self.answer, "with the very text of the stream", answer)

    def verified_hit(self) -> None:
        step(
            "Other words altogether: the rule can't tell, and a verifier is asked. It is played here, and knows this one pair"
        )
        answer, *_ = self.show(STORED, model="asks-first")

        def is_verified() -> bool:
            again, kind, headers = self.show(REWORDED, model="asks-first")
            return kind == "semantic" and headers.get("x-sameway-verified") == "true" and again == answer

        check(is_verified(), "it calls the stored answer right, and that is served", None)

    def near_misses(self) -> None:
        step("Questions that look alike and mean something else must not be answered from the cache")
        say("of each pair the first is answered and stored; then the second finds it, and must not get its answer")
        say("all six are asked for at most 200 tokens: the answers above, asked for without a limit, are not theirs")
        for first, other, why in NEAR_MISSES:
            self.show(first, max_completion_tokens=200)
            _, kind, headers = self.show(other, max_completion_tokens=200)
            page = self.seen("/near-misses", lambda page: page["routes"], request_id=headers["x-request-id"])
            near = f"similarity {page['routes'][0]['similarity']:.2f} to the first"
            check(kind == "miss", f"not a hit: {why} ({near})", kind)

    def one_generation_for_four(self) -> None:
        step("Four identical questions at the same moment: one generation, four answers")
        question = "Why is the sky blue? Answer in two sentences."
        replies = list(self.pool.map(self.ask, [question] * 4))
        kinds = sorted(headers["x-sameway-cache"] for _, headers in replies)
        say(f"› {question}\n   ‹ {replies[0][0][:140]}")
        check(kinds == ["coalesced"] * 3 + ["miss"], f"one generated, three shared it: {', '.join(kinds)}", kinds)
        check(len({text for text, _ in replies}) == 1, "all four got the same text", replies)

    def schema_and_tool(self) -> None:
        step("An answer by a JSON schema, and a forced call of a tool: the local model is held to both")
        asked: Any = {"model": "smollm2", "messages": [{"role": "user", "content": "Invent a city of Finland."}]}
        parse = self.client.chat.completions.parse  # raises ValidationError for what is not of the schema
        message = parse(**asked, response_format=City).choices[0].message
        say(f"› {asked['messages'][0]['content']}\n   ‹ {message.content}")
        check(isinstance(message.parsed, City), "an object of the schema, within its bounds", message.content)
        tools = [pydantic_function_tool(City, name="look_up")]
        choice = parse(**asked, tools=tools, tool_choice="required", parallel_tool_calls=False).choices[0]
        calls = choice.message.tool_calls or ()
        check(len(calls) == 1 and choice.finish_reason == "tool_calls", "one call of a tool", choice)
        say(f"‹ {calls[0].function.name} {calls[0].function.arguments}")

    def failover(self) -> None:
        step("An alias whose first choice is an API that is down: the local model takes over before the first token")
        backend = self.show("Name one primary colour.", model="prefers-api")[2]["x-sameway-backend"]
        check(backend == "local-fallback", "answered by local-fallback", backend)
        page = self.seen("/routes", lambda page: page["routes"], model="prefers-api")
        attempts = "; ".join(f"{attempt['name']}: {attempt['outcome']}" for attempt in page["routes"][0]["attempts"])
        check(attempts.startswith("failing-api"), f"the record says why: {attempts}", page)

    def budget(self) -> None:
        step("A team with a budget of $0.0002 a day")
        team = f"/teams/{self.admin('/teams', {'name': 'thrifty'})['id']}"
        key = self.admin(f"{team}/keys", {"name": "demo"})["plaintext"]
        self.admin(f"{team}/budgets", {"window": "day", "limit_microusd": 200, "is_hard": True})
        thrifty: Any = {"client": self.client.with_options(api_key=key), "max_completion_tokens": 120}
        answer, *_ = self.show(CAPITAL, **thrifty)
        try:
            for number in range(1, 40):
                self.ask(f"Write one sentence about the number {number}.", **thrifty)
            check(False, "the team is refused once its budget is spent", "39 answers")
        except RateLimitError as refused:
            say(f"after {number - 1} more: {refused.body['message']}")
            check(refused.code == "insufficient_quota", "refused with insufficient_quota", refused.body)
            retry = refused.response.headers.get("x-should-retry")
            check(retry == "false", "and the SDK is told not to retry", retry)
        again, kind, _ = self.show(CAPITAL, **thrifty)
        check(kind == "exact" and again == answer, "its cached answers are still served", f"{kind}: {again}")
        spent = self.admin(f"{team}/budgets")["budgets"][0]["spent_microusd"]
        check(spent <= 200, f"spent ${spent / 1e6:.6f} of $0.0002: never over", spent)

    def stats(self) -> None:
        step("What the admin sees")
        wanted = {"exact": 2, "semantic": 2, "coalesced": 3, "refused": 1}
        page = self.seen("/stats", lambda page: wanted.items() <= page["total"]["by_kind"].items(), window="1h")
        total = page["total"]
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(total["by_kind"].items()))
        check(True, f"the counts are right: {total['requests']} requests, {kinds}")
        spent, saved, saved_s = total["cost_microusd"] / 1e6, total["saved_microusd"] / 1e6, total["saved_ms"] / 1000
        say(f"hit rate {total['hit_rate']:.0%}, spent ${spent:.6f}, saved ${saved:.6f} and {saved_s:.1f} s")
        say(f"the dashboard would be at {self.root}/admin")

    def simulated_day(self) -> None:
        step("A simulated day of a help desk: what it costs, beside what it would have cost without Sameway")
        chance = random.Random(24)
        questions = [simulated_question(chance) for _ in range(DAY)]
        say(
            f"{DAY} questions of made-up traffic, {len(set(questions))} different ones: most are about few subjects, in"
        )
        say(
            "three wordings; one in ten is asked once. A simulated API answers at once, in 150 tokens; the alias lists a"
        )
        say("large model first, and its policy takes a smaller one for a quarter of the price")
        list(self.pool.map(lambda question: self.ask(question, model="support"), questions))
        page = self.seen("/savings", lambda page: page["requests"] >= DAY, model="support")
        baseline, spent, steps = page["baseline_microusd"], page["spent_microusd"], page["steps"]
        rows = [("Without Sameway", DAY, baseline)]
        rows += [(row["words"], row["requests"], -row["amount_microusd"]) for row in steps]
        for words, requests, amount in (*rows, ("Spent", DAY, spent)):
            bar = "█" * round(30 * abs(amount) / baseline)
            say(f"{words:20} {requests:5} requests  {'-' if amount < 0 else ' '}${abs(amount) / 1e6:.4f}  {bar}")
        check(sum(amount for *_, amount in rows) == spent, "the baseline less each step is what was spent", page)
        cached = sum(r["amount_microusd"] for r in steps if r["mechanism"] in ("exact", "semantic", "coalesced"))
        alone, factor = baseline / (baseline - cached), page["factor"] or 0
        words = f"{alone:.1f} to 1 by the cache alone, {factor:.1f} to 1 with the cheaper route, on this traffic"
        check(factor > alone > 1, f"{words}; docs/savings.md has the method", page)


def simulated_question(chance: random.Random) -> str:
    """A question of the simulated day: subjects are asked as often as 1 / rank, and one in ten only once."""
    if chance.random() < 0.1:
        return f"Where is order {chance.randrange(10**9)}?"
    subject = chance.choices(SUBJECTS, [1 / rank for rank in range(1, len(SUBJECTS) + 1)])[0]
    return chance.choices(WORDINGS, (6, 3, 1))[0].format(subject)


# -- what surrounds it ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Run the demo; ends the process with its status."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the gateway is ended, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    upstream = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="sameway-demo-") as folder:
        try:
            with gateway(Path(folder), f"http://127.0.0.1:{upstream.server_port}/v1") as base_url:
                Demo(base_url).run()
        except (OpenAIError, ValueError) as error:  # pydantic's ValidationError is a ValueError
            sys.exit(f"\n✗ {error}")
        except KeyboardInterrupt:
            sys.exit(130)
    print("\n✓ Everything did what it said. Nothing is left running; try ./run serve next.")


def configuration(upstream: str) -> dict[str, Any]:
    """The gateway's configuration file; `upstream` is the base URL of the simulated API."""

    def deployment(name: str, price_in: float, price_out: float, **more: Any) -> dict[str, Any]:
        return {"name": name, "price": {"input_usd_per_mtok": price_in, "output_usd_per_mtok": price_out}, **more}

    local = {"backend": "local", "engine": "default"}
    api = {"backend": "openai", "model": "simulated", "base_url": upstream}
    down = deployment("failing-api", 0, 0, **api | {"base_url": "http://127.0.0.1:9/v1"}, priority=1)
    support = [deployment("large-api", 2.5, 10.0, **api), deployment("small-api", 0.6, 2.4, **api)]
    return {
        "cache": {"check_share": 0},  # checks are drawn by chance, and the sums shown would vary
        "models": {
            "smollm2": {"deployments": [deployment("local", 0.1, 0.4, **local)]},
            "support": {"policy": "cheapest", "deployments": support},
            "asks-first": {"verifier": "played-verifier", "deployments": [deployment("asked-api", 2.5, 10.0, **api)]},
            "played-verifier": {"deployments": [deployment("played", 0.1, 0.4, **api | {"model": "played"})]},
            "prefers-api": {
                "policy": "cheapest",
                "deployments": [down, deployment("local-fallback", 0.1, 0.4, **local)],
            },
        },
    }


@contextlib.contextmanager
def gateway(folder: Path, upstream: str) -> Iterator[str]:
    """A gateway process that keeps its files in `folder`; yields its base URL."""
    config, log = folder / "sameway.yaml", folder / "sameway.log"
    config.write_text(yaml.safe_dump(configuration(upstream)))
    argv = [sys.executable, "-m", "gateway", "serve", "--port", "0", "--config", config, "--data-dir", folder / "data"]
    keys = {"SAMEWAY_ADMIN_KEY": ADMIN_KEY, "SAMEWAY_API_KEY": API_KEY}
    with log.open("w") as output:  # in a session of its own, Ctrl-C ends it only through the lines below
        process = subprocess.Popen(argv, env=os.environ | keys, stdout=output, stderr=output, start_new_session=True)
    try:
        address = re.compile(r"base_url\s+(http\S+)")
        text = until(log.read_text, lambda text: address.search(text) or process.poll() is not None, "a base_url")
        printed = address.search(text)
        if printed is None:
            sys.exit(f"✗ the gateway did not start:\n{text}")
        print(f"\033[1mSameway\033[0m serves at {printed[1]}", flush=True)
        yield printed[1]
    finally:
        process.terminate()
        try:
            process.wait(45)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Upstream(BaseHTTPRequestHandler):
    """A simulated API: an answer of 150 tokens to each question, at once; and the played verifier, a model of it."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        question = asked["messages"][-1]["content"]
        content = f"The simulated answer to: {question} " + "And so on. " * 40
        message = {"role": "assistant", "content": played(question) if asked["model"] == "played" else content}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        usage = {"prompt_tokens": 400, "completion_tokens": 150, "total_tokens": 550}
        about = {"id": "chatcmpl-simulated", "object": "chat.completion", "created": 0, "model": "simulated"}
        body = json.dumps({**about, "choices": choices, "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def played(question: str) -> str:
    """The played verifier's word: the number of the candidate that it knows to be right, else 0; of that one alone SAME."""
    told = json.loads(question)
    if "new_request" in told:
        return "SAME" if (told["new_request"], told["old_request"]) == (REWORDED, STORED) else "DIFFERENT"
    knows = [told.get("request") == REWORDED and one["request"] == STORED for one in told.get("candidates", ())]
    return str(knows.index(True) + 1 if True in knows else 0)


# -- narration ------------------------------------------------------------------------------------------------------------

numbers = iter(range(1, 100))


def step(what: str) -> None:
    print(f"\n\033[1m{next(numbers)}. {what}\033[0m", flush=True)


def say(what: str) -> None:
    print(f"   {what}", flush=True)


def check(is_good: bool, what: str, actual: object = None) -> None:
    """Tell what was checked; end the demo with status 1 if it is not so."""
    if not is_good:
        sys.exit(f"\n✗ expected: {what}; found: {actual}")
    say(f"\033[32m✓\033[0m {what}")


def until(read: Callable[[], Any], is_there: Callable[[Any], object], what: str, within_s: float = 120) -> Any:
    """What `read` returns once `is_there` accepts it; ends the demo after `within_s`."""
    deadline = time.monotonic() + within_s
    while not is_there(value := read()):
        if time.monotonic() > deadline:
            check(False, what, value)
        time.sleep(0.25)
    return value


if __name__ == "__main__":
    main()
