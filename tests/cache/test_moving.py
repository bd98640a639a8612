"""Which questions depend on the moment, by their words, and how long such answers live."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from cache import CacheLimits, ExactCache
from cache.moving import moves
from tests.cache.fakes import Clock, ask, entry_for


@pytest.mark.parametrize(
    "text",
    [
        "Is the ferry running right now?",
        "How many tickets have been sold so far?",
        "Has the parcel left yet?",
        "Are the pumps still off?",
        "What is the current pollen count in Graz?",
        "Hello! My flat is cold. Is the heating plant down this morning?",
        "queue at the museum at the moment",
        "Ist die Fähre gerade unterwegs?",
        "Wie ist der Strompreis heute?",
        "¿Está abierto ahora?",
        "¿Cuántas entradas se han vendido hasta ahora?",
        "La ligne est-elle fermée en ce moment ?",
        "If the lift is out of order today, which way is open?",
        "Why is the museum closed today?",
        "Quel temps fait-il aujourd\u2019hui ?",
    ],
)
def test_questions_that_are_placed_in_time_move(text: str) -> None:
    """A word or a phrase of each language, at any place of a question."""
    assert moves(text)


@pytest.mark.parametrize(
    "text",
    [
        "How do I reset the router?",
        'What does "current load" on the display mean?',
        "Where can I see which pumps are off right now?",
        "I have been a member since yesterday. How do I pay?",
        "What does the status mean that my order has now?",
        "Please send my bills by mail from now on. What do I need to do?",
        "My dough did not rise, what now?",
        "If we book the hall today, when is the deposit due?",
        "When can I see tomorrow's menu?",
        "why can't i find today's photos in the album?",
        "Guten Morgen! Wie kündige ich den Vertrag?",
        "Wo kann ich sehen, welche Säulen gerade frei sind?",
        "¿Dónde puedo ver qué puestos están libres ahora?",
        "Où puis-je voir le prix actuel ?",
        "Buenas, quiero pagar con otra cuenta a partir de ahora. ¿Qué hago?",
        "",
    ],
)
def test_look_alikes_stay(text: str) -> None:
    """Quotations, reports beside the question, and questions for a place to look something up."""
    assert not moves(text)


async def test_an_answer_found_to_move_lives_a_minute(redis: Redis) -> None:
    """Here and in Redis; the next answer to its request as well, and one that is older is gone at once."""
    clock = Clock()
    exact = ExactCache(redis, CacheLimits(moving_ttl_s=60.0), clock=lambda: clock.now)
    entry = entry_for(ask("pulse price?"), clock.now, ttl_s=86_400.0)
    await exact.store(entry)
    exact.store_local(entry)
    await exact.moves(entry)
    for cache in (exact, ExactCache(redis, clock=lambda: clock.now)):
        lookup = await cache.lookup(ask("pulse price?"))
        assert lookup.entry is not None
        assert lookup.entry.ttl_s == 60.0
    clock.now += 61.0
    assert (await exact.lookup(ask("pulse price?"))).entry is None
    again = entry_for(ask("pulse price?"), clock.now, ttl_s=86_400.0)
    await exact.store(again)
    lookup = await exact.lookup(ask("pulse price?"))
    assert lookup.entry is not None
    assert lookup.entry.expires_at == clock.now + 60.0
    old = entry_for(ask("Is it open?"), clock.now - 100.0, ttl_s=86_400.0)
    await exact.store(old)
    await exact.moves(old)
    assert (await exact.lookup(ask("Is it open?"))).entry is None
