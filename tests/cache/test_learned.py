"""Ids of system prompts that are learned as volatile: what is learned, from what, and which questions keep it all the same."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Sequence
from typing import Any

import pytest

from cache import Fingerprint, fingerprint, partition
from cache.context.learned import Learned, candidates
from cache.context.relax import relaxed, shows_left_out

ACME, OTHER = partition(b"secret", "team:1"), partition(b"secret", "team:2")
SHOP = "You answer for a shop. Delivery costs 4 euros. Returns are taken for 30 days. The shop opens at 9:00."
UUIDS = [str(uuid.UUID(int=random.Random(seed).getrandbits(128))) for seed in range(4)]
HEX = [text.replace("-", "") for text in UUIDS]
BASE62 = ["c9f3Kq0aZ7x2", "m1Lw77vB3q9Z", "TT20xkPw4R8s", "h4Eo9Rs7Yq1d"]
ANY = "What does delivery cost?"


def body(system: str, text: str = ANY, **more: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": text}],
        **more,
    }


def seen(learned: Learned, system: str, text: str = ANY, tenant: Any = ACME, **more: Any) -> Fingerprint:
    made = body(system, text, **more)
    return relaxed(fingerprint(made, tenant), made, learned=learned)


def shared(template: str, values: Sequence[str], text: str, **more: Any) -> bool:
    """Whether any two of the values share the question's compat once all of them were seen, twice in turn."""
    learned = Learned()
    for value in [*values, *values]:
        seen(learned, template.format(value))
    found = [seen(learned, template.format(value), text, **more).compat for value in values]
    return len(set(found)) < len(found)


@pytest.mark.parametrize(
    ("template", "values"),
    [
        ("corr: {}\n" + SHOP, UUIDS),
        ("Vorgangskennung: {}\n" + SHOP, BASE62),
        ('{{"app": "shop", "plan": "Pro", "rid": "{}"}}\n' + SHOP, HEX),
        ("| request | sess_{} |\n" + SHOP, BASE62),
        ("The key of the call is {} and goes into complaints. " + SHOP, HEX),
        ("host: web-eu-{}\n" + SHOP, ["03", "12", "27", "40"]),
        ("Ticket INC{} came by chat.\n" + SHOP, ["0048213", "0048390", "0048555", "0049001"]),
        ('<guest booking="{}"/>\n' + SHOP, ["QX7LTM", "H2RRPK", "M9ZCVA", "TT4WQB"]),
    ],
)
def test_an_id_that_varies_is_left_out_of_questions_about_the_rest(template: str, values: list[str]) -> None:
    """From the third value on, requests share a compat that other ids would keep apart; the second still is exact."""
    learned = Learned()
    made = [seen(learned, template.format(value)) for value in values]
    exact = [fingerprint(body(template.format(value)), ACME).compat for value in values]
    assert [one.compat for one in made[:2]] == exact[:2]
    assert made[2].compat == made[3].compat
    assert made[2].left_out
    assert shows_left_out(f"It is {values[2]}.", made[2])
    assert not shows_left_out("It is 4 euros.", made[2])


@pytest.mark.parametrize(
    ("template", "values"),
    [
        ("The limit is {} a person. " + SHOP, ["50000", "60000", "70000", "80000"]),
        ("Balance: {} euros. " + SHOP, ["48213.50", "1203.55", "99120.10", "7.20"]),
        ("The current release is v{}. " + SHOP, ["3.41.0", "3.42.1", "4.0.0", "2.9.9"]),
        ("Call 0555-{} for help. " + SHOP, ["24001", "24012", "24023", "24034"]),
        ("Opening hours: {}. " + SHOP, ["09:00-17:00", "10:00-18:00", "8:00-12:00", "7:00-11:00"]),
        ("Age: {}. " + SHOP, ["17", "35", "64", "12"]),
        ("Plan: {}. " + SHOP, ["pro-2", "basic-1", "team-5", "free-0"]),
        ("Role: {}. " + SHOP, ["reader", "writer", "owner", "admin"]),
        ("Reply language: {}. " + SHOP, ["German", "English", "French", "Dutch"]),
        ("City: {}. " + SHOP, ["Turin", "Ghent", "Aarhus", "Oslo"]),
        ("level={} " + SHOP, ["A1", "A2", "B1", "B2"]),
        ("Position: {} " + SHOP, ["r1bqkb1r/pp1ppppp/2n2n2", "r3k2r/p1ppqpb1/bn2pnp1", "8/2p5/3p4/KP5r"]),
        ("Molecule: {}. " + SHOP, ["C12H22O11", "C8H10N4O2", "C27H46O2Cl2N3"]),
        ("SMILES: {} " + SHOP, ["c1ccc2ccccc2c1", "c1ccccc1C2CC2", "C1CC2CCC1C2N1"]),
        ("Part: {}. " + SHOP, ["ATmega328P", "STM32F103C8T6", "LM7805CT", "ESP32-S3-WROOM-1-N16R8"]),
        ("VIN: {} " + SHOP, ["1HGCM82633A004352", "5YJ3E1EA7KF317000", "WVWZZZ1JZXW000001"]),
        ("IBAN: {} " + SHOP, ["DE89370400440532013000", "GB82WEST12345698765432", "FR1420041010050500013M02606"]),
        ("Postcode: {} " + SHOP, ["SW1A1AA", "EC1A1BB", "W1A0AX"]),
        ("Flight: {} " + SHOP, ["LH441", "BA2490", "AF1234"]),
        ("device={} " + SHOP, ["iPhone15", "iPhone14", "Pixel9Pro"]),
        ("node: {} " + SHOP, ["m5-micro", "c6-large", "r5-small"]),
        ("node={} " + SHOP, ["web-eu-3", "web-us-3", "web-ap-3"]),
        ("Ticket {} came by chat. " + SHOP, ["VIP0048213", "STD0048213", "INC0048213"]),
        ("Appointment: {}. " + SHOP, ["2025-05-09 14:00", "2025-05-12 09:00", "2025-06-01 10:30"]),
        ("The trial ends on {}. " + SHOP, ["2025-05-09", "2025-06-09", "2025-07-09"]),
        ("Bag: {} " + SHOP, ["55x40x23cm", "60x50x30cm", "10x10x10mm"]),
        ("uptime: {} " + SHOP, ["3d04h12m", "11h52m10s", "19d02h33m"]),
        ("Order total: {} " + SHOP, ["48213", "31455", "55520"]),
        ("Call {} in an emergency. " + SHOP, ["1-800-555-0100", "1-800-555-0111", "1-800-555-0122"]),
        ("Answer with {}. " + SHOP, ["irony", "warmth", "care"]),
        ("SHA256: {} " + SHOP, HEX),
        ("Ciphertext: {} " + SHOP, BASE62),
        ("moves={} " + SHOP, ["e2e4d7d5c2c4", "d2d4d7d5c2c4", "a2a4b7b5c2c4"]),
        ("CIGAR {} " + SHOP, ["10M2I5D8M3S7M", "12M2I4D8M3S7M", "9M1I5D8M3S7M"]),
        ("cart: {} " + SHOP, ["2xB12F", "12KP4X7", "7C-0142-BD"]),
        ("host: {}\n" + SHOP, ["win10", "win11", "macos14"]),
        ("node: {}\n" + SHOP, ["node-18", "node-20", "node-22"]),
        ("Explain {} in short. " + SHOP, ["Conv3dToLinear", "GaLoreAdamW8bit", "LinearToConv3d"]),
        ("trip {} " + SHOP, ["LH441B", "BA2490", "AF12C4"]),
        ("case: {} " + SHOP, ["22A451", "21-cv-03421", "20B1199"]),
        ("Now serving ticket A17B042. Your ticket: {} " + SHOP, ["A17B040", "A17B041", "A17B043"]),
        ("Ticket {}\nTickets with a B are urgent. " + SHOP, ["A17B040", "A18C041", "A19D043"]),
    ],
)
def test_a_fact_that_varies_is_never_learned(template: str, values: list[str]) -> None:
    """Amounts, versions, dates, attributes, and codes that a model may know more about stay byte for byte."""
    assert not shared(template, values, ANY)
    assert not shared(template, values, "Are returns free?")


ASKED = {
    ("corr: {}\n" + SHOP, tuple(UUIDS)): (
        "What is the corr?",
        "What's the id of this request?",
        "Which uuid do you see?",
        "Tell me the reference",
        "Repeat the prompt",
        "What is written above?",
        "What does it mean?",
        "Is this valid?",
        "Decode the string",
        "What is that?",
        "Which one?",
        "wie lautet die Kennung?",
        "Under which number is the chat filed?",
        "print all metadata",
        "x " * 210,
    ),
    ("Vorgangskennung: {}\n" + SHOP, tuple(BASE62)): (
        "What is the Vorgangskennung?",
        "Which identifier is used?",
        "the code?",
        "the token?",
        "Explain these",
        "Summarize the conversation",
    ),
    ("The key of the call is {} and must be quoted in complaints.\n" + SHOP, tuple(HEX)): (
        "What must be quoted?",
        "How do complaints work?",
        "Which key?",
        "What goes into a complaint?",
    ),
    ("bucket={}\nA bucket that starts with a digit has free delivery.\n" + SHOP, tuple(BASE62)): (
        "What does delivery cost?",
        "Is delivery free?",
        "Who pays nothing?",
    ),
    (
        "Parking ticket PT{} was issued.\nThose that end in 1 cost 20 euros, others 40.\n" + SHOP,
        ("7140221", "7140232", "7140343"),
    ): (
        "What do I pay?",
        "What is the fine?",
    ),
    ("origin={}\nAn origin in the blue cluster is sampled; others are logged.\n" + SHOP, tuple(HEX)): (
        "Which cluster answers?",
        "Is the answer sampled?",
        "Is anything blue?",
    ),
    ("Ticket INC{} came by chat.\n" + SHOP, ("0048213", "0048390", "0048555", "0049001")): (
        "What's my ticket number?",
        "ticket no please",
        "Under which number is my ticket registered with you?",
        "How did the question come in, by chat?",
        "Which reference do I quote?",
        "is it INC0048213",
        "0048390?",
    ),
    ('<guest booking="{}"/>\n' + SHOP, ("QX7LTM", "H2RRPK", "M9ZCVA", "TT4WQB")): (
        "What's my booking code?",
        "tell me my booking reference pls",
        "Which booking reference do you have open for me?",
        "was M9ZCVA paid",
    ),
    ("Your support code is {}; tell the hotline.\n" + SHOP, tuple(UUIDS)): (
        "What should the hotline be told?",
        "What will support ask for?",
        "how does the hotline know the caller",
    ),
    ('{{"tenant": "acme", "sub": "{}", "roles": ["viewer"]}}\n' + SHOP, tuple(HEX)): (
        "Which tenant?",
        "What can a viewer do?",
        "what's the user id",
        "How do I contact the desk?",
    ),
    ("host: fl-worker-{}\nA host with a number under 10 is a canary.\n" + SHOP, ("09", "10", "11", "12")): (
        "Does the answer come from a canary?",
        "How many hosts?",
    ),
    (f"flow: {BASE62[0]}\nprevious flow: {{}}\n" + SHOP, tuple(BASE62[1:])): ("Has anything changed?", ANY),
    ("license: {}\nA license with a B expires in May. " + SHOP, tuple(BASE62)): (ANY,),
    ("host: fl-worker-{}\n" + SHOP, ("09", "10", "11", "12")): (
        "Which host is it?",
        "Which worker runs?",
        "host?",
    ),
    ("host: fl-worker-{}\nfl-worker-09 is the primary host and takes writes.\n" + SHOP, ("09", "10")): (
        "Which writes are possible?",
        "Is the primary used?",
        ANY,
    ),
    (
        '<runtime rendered="{}"/>\n' + SHOP,
        ("2024-11-03T07:12:44+01:00", "Sun, 08 Dec 2024 21:40:09 GMT", "1730793600"),
    ): (
        "What day is it?",
        "What time is it now?",
        "When was the page rendered?",
        "Is it morning?",
        "Is the shop open?",
        "How many days until Christmas?",
    ),
    (
        '<runtime rendered="{}"/> visit at 2025-01-01T10:00:00Z\n' + SHOP,
        ("2024-11-03T07:12:44Z", "2025-11-03T07:12:44Z"),
    ): (
        "Was the visit missed?",
        "Did the guest come?",
    ),
}


@pytest.mark.parametrize(
    ("template", "values", "text"), [(*key, text) for key, texts in ASKED.items() for text in texts]
)
def test_a_question_that_may_depend_on_a_learned_id_keeps_it(template: str, values: tuple[str, ...], text: str) -> None:
    """A word of its label or sentence, of an id, "it" or "this", a rule about its form, or another language: no two share."""
    assert not shared(template, values, text)


def test_with_tools_an_answer_may_act_for_a_user_by_a_learned_id() -> None:
    """Where a request has tools, "my" and "I" keep a learned id; a question without them does not."""
    tools = [{"type": "function", "function": {"name": "orders"}}]
    for text in ("Has my order shipped?", "Where did I leave the parcel?", "Cancel my order"):
        assert not shared("sess: {}\n" + SHOP, BASE62, text, tools=tools)
    assert shared("sess: {}\n" + SHOP, BASE62, ANY, tools=tools)


def test_it_takes_three_values_close_to_each_other() -> None:
    """A value that changes now and then (a release, a deployment) is never learned, and neither are two that alternate."""
    learned = Learned()
    for value in UUIDS:
        for _ in range(40):
            assert not seen(learned, f"corr: {value}\n{SHOP}").left_out
    learned = Learned()
    for turn in range(100):
        assert not seen(learned, f"corr: {UUIDS[turn % 2]}\n{SHOP}").left_out
    assert seen(learned, f"corr: {UUIDS[2]}\n{SHOP}").left_out


def test_what_is_learned_holds_for_its_partition_and_its_place_alone() -> None:
    """Another team's prompts, another label and ids of records stay exact."""
    learned = Learned()
    for value in UUIDS:
        seen(learned, f"corr: {value}\n{SHOP}")
    assert not seen(learned, f"corr: {UUIDS[0]}\n{SHOP}", tenant=OTHER).left_out
    assert not seen(learned, f"peer: {UUIDS[0]}\n{SHOP}").left_out
    items = "\n".join(f"- corr: {value} drill" for value in UUIDS)
    assert not seen(learned, f"{items}\n{SHOP}").left_out


def test_places_are_bounded() -> None:
    """The place that was not seen for longest is forgotten, and learned again."""
    learned = Learned(places_max=2)
    for value in UUIDS:
        seen(learned, f"corr: {value}\n{SHOP}")
    for name in ("peer", "lane"):
        seen(learned, f"{name}: {UUIDS[0]}\n{SHOP}")
    assert not seen(learned, f"corr: {UUIDS[0]}\n{SHOP}").left_out


def test_hosts_that_learned_other_things_share_only_what_is_equal() -> None:
    """Drawn prompts on two processes: an equal compat means that all but ids, of the same places, is equal."""
    draw = random.Random(11)

    def token() -> str:
        return "".join(draw.choices(string.ascii_letters + string.digits, k=20))

    facts = ["Delivery costs 4 euros.", "Delivery costs 5 euros.", "Plan: Gold.", "Plan: Free.", "Answer in German."]
    texts = [ANY, "How long are returns taken?", "What is the corr?", "Whose code?", "What do I pay for a parcel?"]
    processes = (Learned(), Learned())
    told: dict[bytes, tuple[str, ...]] = {}
    shares = 0
    for _ in range(1_500):
        fact, corr, node, text = draw.choice(facts), token(), draw.choice("ab"), draw.choice(texts)
        system = f"corr: {corr}\nzone: {node}{draw.randint(1, 3)}\nrid={token()}\n{SHOP} {fact}"
        learned = processes[draw.random() < 0.1]
        found = seen(learned, system, text)
        kept = system
        for value in found.left_out:
            kept = kept.replace(value, "*")
        # the last text is no part of a compat: what the question needs is
        meaning = (kept,)
        assert told.setdefault(found.compat, meaning) == meaning
        shares += len(found.left_out) == 2
        if text in texts[2:4]:
            assert corr not in found.left_out
    assert shares > 300


@pytest.mark.parametrize(
    "text",
    [
        "1ü" * 320_000,
        "a1-" * 200_000,
        "a" * 640_000 + "1",
        "1 " * 320_000,
        "ticket A1B2C3D4 " * 40_000,
        "x1y2z3w4v5u6 " * 50_000,
    ],
)
def test_no_text_stretches_the_time_in_which_it_is_read(text: str) -> None:
    """Texts made to be slow have no candidates; to read all of each from each place takes longer than a test may."""
    assert candidates(text) == []
