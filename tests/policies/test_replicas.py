"""The work ahead of a request at a replica, and the prefixes that replicas hold."""

from __future__ import annotations

from policies import Candidate, Demand, RoutingPolicy, route
from policies.estimate import Figures
from policies.prices import FREE
from policies.replicas import Backlog, Prefixes, Reading, Work, pooled
from policies.routing import PolicyKind

FIGURES = Figures(10.0, 50.0, 1.0, 10.0)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def chain(*blocks: str) -> tuple[bytes, ...]:
    return tuple(block.encode() for block in blocks)


def test_a_prompt_waits_for_all_that_is_read_before_it() -> None:
    """Own requests until their first token, others' as they were told, and strangers' that wait by the server's own word."""
    clock = Clock()
    backlog = Backlog(clock)
    assert backlog.ttft_ms(FIGURES, 100) == 150.0
    first, second = backlog.enter(1_000), backlog.enter(500)
    assert backlog.ahead_tokens() == 1_500
    backlog.others = Work(300, 1, 2)
    assert backlog.ttft_ms(FIGURES, 100) == 150.0 + 1_800
    clock.now_s = 0.4  # 400 tokens of the first one are read
    assert backlog.ttft_ms(FIGURES, 100) == 150.0 + 1_400
    first.begun()
    assert backlog.ahead_tokens() == 800
    backlog.take(Reading(running=2, waiting=4))
    assert backlog.ahead_tokens() > 2 * 800 - 300  # two more wait than workers know of
    for place in (first, second):
        place.leave()
    backlog.take(None)
    backlog.others = Work()
    assert (backlog.sent, backlog.ttft_ms(FIGURES, 100)) == (Work(), 150.0)


def test_full_memory_makes_a_prompt_wait_for_answers_to_end() -> None:
    """Beside the prompts before it; a server with memory left makes none wait."""
    backlog = Backlog(Clock())
    backlog.answered(2_000.0)
    backlog.take(Reading(running=4, waiting=2, kv_used=0.5))
    free_ms = backlog.ttft_ms(FIGURES, 100)
    backlog.take(Reading(running=4, waiting=2, kv_used=0.99))
    assert backlog.ttft_ms(FIGURES, 100) == free_ms + 2 * 2_000 / 4


def test_equal_servers_are_judged_together_until_one_is_clearly_slower() -> None:
    """A new one has the others' figures; noise of one tells nothing; three times the time does."""
    backlog = Backlog(Clock())
    slow = Figures(10.0, 150.0, 3.0, 30.0)
    noisy = Figures(10.0, 60.0, 1.1, 11.0)
    backlog.siblings = pooled([FIGURES, FIGURES, slow, Figures(0.0, 9.0, 9.0, 9.0)])
    assert backlog.siblings is not None
    assert backlog.judged(Figures(0.0, 600.0, 0.3, 25.0)) is backlog.siblings
    assert backlog.judged(noisy) is backlog.siblings
    assert backlog.judged(slow) is slow
    assert pooled([Figures(0.0, 9.0, 9.0, 9.0)]) is None


def test_a_server_holds_the_beginning_of_what_it_has_read_until_there_is_no_room() -> None:
    """The end of what was used longest ago leaves first; a server that began anew holds nothing."""
    prefixes = Prefixes()
    prefixes.resize("a", 4 * 128)
    prefixes.note("a", chain("s", "t", "u"))
    prefixes.note("b", chain("s"))
    assert prefixes.warm(chain("s", "t", "u", "v"), 400) == {"a": 300, "b": 100}
    prefixes.note("a", chain("s", "x"))
    prefixes.note("a", chain("s", "y"))
    assert prefixes.warm(chain("s", "t", "u"), 300) == {"a": 200, "b": 100}
    prefixes.forget("a")
    assert prefixes.warm(chain("s", "t"), 200) == {"b": 100}
    assert prefixes.warm((), 50) == {}


def test_what_many_prompts_share_is_worth_reading_where_it_is_not() -> None:
    """The more often blocks were read, the more of them a new reader reads for others; a session's own blocks are its own."""
    prefixes = Prefixes()
    for number in range(12):
        prefixes.note("a", chain("s", "t", f"{number}"))
    prompt = chain("s", "t", "0", "new")
    warm = prefixes.warm(prompt, 400)
    assert warm == {"a": 300}
    assert prefixes.shared(prompt, 400, warm, ("a", "b", "c")) == {"a": 0, "b": 160, "c": 160}


def ranked(demand: Demand, *candidates: Candidate) -> str:
    return route(demand, candidates, RoutingPolicy(PolicyKind.FASTEST)).ranked[0].name


def replica(name: str, ttft_ms: float, load_ms: float = 0.0) -> Candidate:
    figures = {"tpot_ms": 10.0, "prefill_ms_per_token": 1.0, "others_ms_per_token": 1.0}
    return Candidate(name, FREE, ttft_ms=ttft_ms, load_ms=load_ms, **figures)  # type: ignore[arg-type]


def test_the_router_weighs_a_prefix_against_the_queue() -> None:
    """A long queue costs more than reading again, which others wait for too; a shared prefix spreads; load breaks ties."""
    demand = Demand(1_000, 100, 100, warm={"a": 900})
    assert ranked(demand, replica("a", 1_500), replica("b", 1_000)) == "a"
    assert ranked(demand, replica("a", 2_900), replica("b", 1_000)) == "b"
    spread = Demand(1_000, 100, 100, warm={"a": 900}, shared={"b": 700})
    assert ranked(spread, replica("a", 1_500), replica("b", 1_000)) == "b"
    assert ranked(Demand(1_000, 100, 100), replica("a", 1_000, 50), replica("b", 1_000, 20)) == "b"
