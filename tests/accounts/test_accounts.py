"""Teams, keys and budgets, on both databases: what is written, what is refused, and who is recognised."""

from __future__ import annotations

import asyncio
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.accounts import AlreadyExists, DoesNotExist, Identity, Invalid, LedgerRow
from gateway.accounts.accounts import Accounts
from gateway.accounts.audit import Audit, AuditRow
from gateway.accounts.database import NoAnswer
from gateway.accounts.ledger import Ledger, LedgerFilter
from policies import Budget, Usage, WindowKind
from policies.verification import Verify


async def test_a_key_is_recognised_with_its_team_and_budgets(accounts: Accounts) -> None:
    """The plaintext shown once identifies key, team and budgets; what is stored is its SHA-256."""
    team = await accounts.create_team("search", requests_per_min=60, semantic_error_max=0.02, verify=Verify.AFTER)
    made = await accounts.create_key(team.id, "laptop", models=("a", "b"), tokens_per_min=1000)
    budget = await accounts.create_budget(team.id, WindowKind.DAY, 5_000_000)
    assert accounts.identify(made.plaintext) == Identity(made.key, team, (budget,))
    assert budget == Budget(budget.id, team.id, WindowKind.DAY, 5_000_000, True)
    assert made.plaintext.startswith("sk-sw-")
    assert len(made.plaintext) == 6 + 43
    assert made.plaintext.startswith(made.key.prefix)
    assert len(made.key.prefix) == 10
    assert made.key.digest == hashlib.sha256(made.plaintext.encode()).digest()
    assert made.plaintext not in repr(made)


@pytest.mark.parametrize("stranger", ["", "sk-sw-", "nothing", "sk-sw-\ud800", "ключ", "x" * 100_000])
async def test_strangers_are_nobody(accounts: Accounts, stranger: str) -> None:
    """Anything that is not a key identifies nobody, and raises nothing."""
    await accounts.ensure_first()
    assert accounts.identify(stranger) is None


async def test_expired_revoked_and_switched_off(database_url: str) -> None:
    """A key stops at its expiry, when it is revoked, and while its team is off."""
    now_s = 1000.0
    accounts = Accounts(database_url, clock=lambda: now_s)
    await accounts.open()
    team = await accounts.create_team("t")
    brief = await accounts.create_key(team.id, "brief", expires_at_s=1010)
    lasting = await accounts.create_key(team.id, "lasting")
    assert accounts.identify(brief.plaintext)
    now_s = 1010.0
    assert accounts.identify(brief.plaintext) is None
    await accounts.update_team(team.id, is_active=False)
    assert accounts.identify(lasting.plaintext) is None
    await accounts.update_team(team.id, is_active=True)
    assert accounts.identify(lasting.plaintext)
    revoked = await accounts.revoke_key(lasting.key.id)
    assert not revoked.is_active
    assert accounts.identify(lasting.plaintext) is None
    assert [key.name for key in await accounts.list_keys()] == ["brief", "lasting"]
    await accounts.close()


class _Counting(Accounts):
    """Accounts that count how often they look whether the database has changed."""

    looks = 0

    async def refresh(self) -> bool:
        self.looks += 1
        return await super().refresh()


async def test_a_key_made_elsewhere_is_found_without_a_message(database_url: str) -> None:
    """A process that lacks a key looks once: a new key works at once, also one that was extended or whose team came back."""
    here, there = Accounts(database_url), _Counting(database_url)
    await here.open()
    await there.open()
    team = await here.create_team("a")
    made = await here.create_key(team.id, "k", expires_at_s=1.0)
    assert await there.find(made.plaintext) is None
    await here.update_key(made.key.id, expires_at_s=None)
    second = await here.create_key(team.id, "k2")
    found = await there.find(second.plaintext)
    assert found is not None
    assert found.team == team
    assert await there.find(made.plaintext)
    assert there.looks == 2
    await here.revoke_key(second.key.id)
    await there.refresh()
    assert await there.find(second.plaintext) is None
    await here.close()
    await there.close()


async def test_guesses_cannot_keep_the_database_busy(tmp_path: Path) -> None:
    """Twenty looks at once and ten a second: no more for other guesses, none for one that was looked for; memory is bounded."""
    now_s = [1_000.0]
    accounts = _Counting(f"sqlite:///{tmp_path / 'sameway.db'}", clock=lambda: now_s[0])
    await accounts.open()
    for _ in range(50):
        assert await accounts.find("sk-sw-the-same") is None
    assert accounts.looks == 1
    for number in range(3_000):
        assert await accounts.find(f"sk-sw-{number}") is None
    assert accounts.looks == 20
    now_s[0] += 1.0
    assert await accounts.find("sk-sw-the-same") is None
    await asyncio.gather(*(accounts.find(f"sk-sw-later-{number}") for number in range(100)))
    assert accounts.looks == 30
    for number in range(1_500):
        now_s[0] += 0.125
        await accounts.find(f"sk-sw-slow-{number}")
    assert accounts.looks == 1_530
    assert len(accounts.unknown) <= 1_024
    await accounts.close()


async def test_an_unknown_key_waits_for_no_database_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that does not end is given up, others do not queue behind it, and known keys never wait."""
    accounts = Accounts(f"sqlite:///{tmp_path / 'sameway.db'}")
    await accounts.open()
    key = await accounts.ensure_first()
    assert key is not None
    monkeypatch.setattr("gateway.accounts.accounts.LOOK_TIMEOUT_S", 0.05)
    hangs = asyncio.Event()

    async def refresh() -> bool:
        await hangs.wait()
        raise NoAnswer("gone")

    monkeypatch.setattr(accounts, "refresh", refresh)
    found = await asyncio.gather(*(accounts.find(f"sk-sw-{number}") for number in range(20)), accounts.find(key))
    assert [one is not None for one in found] == [False] * 20 + [True]
    hangs.set()
    await asyncio.sleep(0)
    await accounts.close()


async def test_a_process_that_was_paused_asks_before_it_accepts_a_key(database_url: str) -> None:
    """After a pause the worker asks the database once before it serves a key: it refuses a revoked one, others pass."""
    now_s = [1_000.0]
    here, there = Accounts(database_url), _Counting(database_url, clock=lambda: now_s[0])
    await here.open()
    team = await here.create_team("t")
    revoked, kept = await here.create_key(team.id, "revoked"), await here.create_key(team.id, "kept")
    await there.open()
    await here.revoke_key(revoked.key.id)
    await here.update_key(kept.key.id, models=("small",))
    now_s[0] += 1.9
    assert await there.find(revoked.plaintext)
    assert there.looks == 0
    for pause_s in (0.2, -3_600.0):
        now_s[0] += pause_s
        found = await asyncio.gather(*(there.find(key.plaintext) for key in (revoked, kept) for _ in range(30)))
        assert [one and one.key.models for one in found] == [None] * 30 + [("small",)] * 30
        assert there.looks == 1
        there.looks = 0
    now_s[0] += 60.0
    await here.revoke_key(kept.key.id)
    assert await there.of_key(kept.key.id) is None
    await here.close()
    await there.close()


async def test_a_pause_while_the_database_is_away_refuses_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it hangs, the first requests wait for one look and later ones not at all; memory answers them."""
    now_s = [1_000.0]
    accounts = Accounts(f"sqlite:///{tmp_path / 'sameway.db'}", clock=lambda: now_s[0])
    await accounts.open()
    key = await accounts.ensure_first()
    assert key is not None
    monkeypatch.setattr("gateway.accounts.accounts.LOOK_TIMEOUT_S", 0.05)
    hangs, looks = asyncio.Event(), []

    async def refresh() -> bool:
        looks.append(now_s[0])
        await hangs.wait()
        raise NoAnswer("gone")

    monkeypatch.setattr(accounts, "refresh", refresh)
    for _ in range(3):
        now_s[0] += 10.0
        assert all(await asyncio.gather(*(accounts.find(key) for _ in range(30))))
    assert looks == [1_010.0]
    hangs.set()
    await asyncio.sleep(0)
    await accounts.close()


async def test_changes_are_made_listed_and_heard_of(database_url: str) -> None:
    """Each change is seen by this process at once, by another after its message or its next look, and notified once."""
    heard: list[int] = []

    async def notify() -> None:
        heard.append(1)

    here, there = Accounts(database_url, notify=notify), Accounts(database_url)
    await here.open()
    await there.open()
    team = await here.create_team("a")
    made = await here.create_key(team.id, "k")
    assert len(heard) == 2
    assert there.identify(made.plaintext) is None
    assert await there.refresh()
    assert await there.find(made.plaintext)
    assert not await there.refresh()
    budget = await here.create_budget(team.id, WindowKind.TOTAL, 1, is_hard=False)
    await here.update_budget(budget.id, limit=2, is_hard=True)
    await here.update_key(made.key.id, name="k2", models=("m",), requests_per_min=3)
    renamed = await here.update_team(team.id, name="b", tokens_per_min=10)
    await there.reload()
    found = await there.find(made.plaintext)
    assert found is not None
    assert (found.team, found.key.name, found.key.models, found.key.requests_per_min) == (renamed, "k2", ("m",), 3)
    assert found.budgets == (Budget(budget.id, team.id, WindowKind.TOTAL, 2, True),)
    assert await there.list_budgets(team.id) == list(found.budgets)
    await here.delete_budget(budget.id)
    assert await there.list_budgets() == []
    assert len(heard) == 7
    await here.close()
    await there.close()


async def test_a_failed_change_changes_and_tells_nothing(database_url: str) -> None:
    """A refused change leaves no trace, not even a message."""
    heard: list[int] = []

    async def notify() -> None:
        heard.append(1)

    accounts = Accounts(database_url, notify=notify)
    await accounts.open()
    team = await accounts.create_team("a")
    other = await accounts.create_team("b")
    key = (await accounts.create_key(team.id, "k")).key
    await accounts.create_key(team.id, "l")
    await accounts.create_key(other.id, "k")
    told = len(heard)
    with pytest.raises(AlreadyExists, match="a team named 'a' exists already"):
        await accounts.create_team("a")
    with pytest.raises(AlreadyExists, match="a team named 'b' exists already"):
        await accounts.update_team(team.id, name="b")
    with pytest.raises(AlreadyExists, match="a key named 'k' in this team exists already"):
        await accounts.create_key(team.id, "k")
    with pytest.raises(AlreadyExists):
        await accounts.update_key(key.id, name="l")
    for missing in (
        accounts.update_team(99, name="x"),
        accounts.delete_team(99),
        accounts.create_key(99, "k"),
        accounts.revoke_key(99),
        accounts.create_budget(99, WindowKind.DAY, 1),
        accounts.update_budget(99, is_hard=True),
        accounts.delete_budget(99),
    ):
        with pytest.raises(DoesNotExist, match="99"):
            await missing
    assert len(heard) == told
    assert [t.name for t in await accounts.list_teams()] == ["a", "b"]
    assert not await accounts.refresh()
    await accounts.close()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("name", ["", " a", "a\n", "a\x00", "x" * 201]),
        ("time_zone", ["Europe/Atlantis", "../etc"]),
    ],
)
async def test_wrong_texts_name_their_field(tmp_path, field: str, values: list[object]) -> None:
    """A wrong text of a team is refused with the field's name, before anything is asked of the database."""
    accounts = Accounts(f"sqlite:///{tmp_path / 'never'}")
    for value in values:
        with pytest.raises(Invalid) as caught:
            await accounts.update_team(1, **{field: value})
        assert caught.value.field == field


async def test_wrong_keys_and_budgets_are_refused(accounts: Accounts) -> None:
    """A key's models and a budget's axis and value are checked too."""
    team = await accounts.create_team("a")
    with pytest.raises(Invalid, match="models"):
        await accounts.create_key(team.id, "k", models=("a", ""))
    for wrong in (
        {"axis": "tag:"},
        {"axis": "user", "value": "a\n"},
        {"axis": "user", "value": "x" * 201},
        {"value": ""},
    ):
        with pytest.raises(Invalid, match=r"^(axis|value): "):
            await accounts.create_budget(team.id, WindowKind.DAY, 1, **wrong)
    assert await accounts.list_keys() == await accounts.list_budgets() == []


async def test_a_team_has_one_budget_of_a_kind(accounts: Accounts) -> None:
    """However many ask at once: one is made, the others hear that it is there, and none becomes its twin later."""
    team, other = await accounts.create_team("a"), await accounts.create_team("b")
    racing = [accounts.create_budget(team.id, WindowKind.DAY, limit) for limit in (5, 6, 7)]
    made = await asyncio.gather(*racing, return_exceptions=True)
    (budget,) = [one for one in made if not isinstance(one, AlreadyExists)]
    assert [str(one) for one in made if one is not budget] == ["a hard day budget of this team exists already"] * 2
    soft = await accounts.create_budget(team.id, WindowKind.DAY, 1, is_hard=False)
    await accounts.create_budget(other.id, WindowKind.DAY, 1)
    with pytest.raises(AlreadyExists):
        await accounts.update_budget(soft.id, is_hard=True)
    assert await accounts.list_budgets(team.id) == [budget, soft]


async def test_a_deleted_team_takes_its_keys_and_leaves_its_ledger(accounts: Accounts) -> None:
    """Keys and budgets go, ledger rows stay, and the id is never used again."""
    ledger = Ledger(accounts.database)
    team = await accounts.create_team("a")
    made = await accounts.create_key(team.id, "k")
    await accounts.create_budget(team.id, WindowKind.DAY, 1)
    row = LedgerRow(
        id="h",
        at_ms=1,
        request_id="r",
        team_id=team.id,
        key_id=made.key.id,
        alias="m",
        deployment="d",
        usage=Usage(1, 1),
        cost_microusd=5,
        kind="generation",
    )
    await ledger.append([row])
    await accounts.delete_team(team.id)
    assert accounts.identify(made.plaintext) is None
    assert await accounts.list_keys() == []
    assert await accounts.list_budgets() == []
    assert (await ledger.rows(LedgerFilter(team_id=team.id))).rows == (row,)
    assert (await accounts.create_team("a")).id > team.id


async def test_the_first_key_is_made_once(database_url: str) -> None:
    """Of several processes that start at once, one makes the first key; later starts make none, nor after deletions."""
    several = [Accounts(database_url) for _ in range(4)]
    await asyncio.gather(*(accounts.open() for accounts in several))
    made = [key for key in await asyncio.gather(*(accounts.ensure_first() for accounts in several)) if key]
    assert len(made) == 1
    await several[0].reload()
    found = await several[0].find(made[0])
    assert found is not None
    assert found.team.name == "default"
    await several[0].delete_team(found.team.id)
    assert await several[1].ensure_first() is None
    assert await several[1].list_teams() == []
    for accounts in several:
        await accounts.close()


async def test_the_first_key_may_be_given(accounts: Accounts) -> None:
    """A preset key works as it is; one that could be guessed is refused and does not use up the first time."""
    for weak in ("short", "with spaces in it all", "ünïcode-that-is-long"):
        with pytest.raises(Invalid, match="api_key"):
            await accounts.ensure_first(plaintext=weak)
    preset = "sk-preset-0123456789"
    assert await accounts.ensure_first(preset) == preset
    found = await accounts.find(preset)
    assert found is not None
    assert (found.team.name, found.key.prefix) == ("default", "sk-preset-")


async def test_last_use_is_written_now_and_then(database_url: str) -> None:
    """`identify` only notes the time; saving writes the latest, and an older note of another worker does not undo it."""
    now_s = 50.0
    one, other = Accounts(database_url, clock=lambda: now_s), Accounts(database_url, clock=lambda: now_s)
    await one.open()
    key = await one.ensure_first()
    assert key is not None
    await other.open()
    assert await other.find(key)
    now_s = 70.0
    assert await one.find(key)
    await one.save_last_used()
    await other.save_last_used()
    await other.save_last_used()
    assert [k.last_used_at_s for k in await one.list_keys()] == [70.0]
    await one.close()
    await other.close()


def test_naming_the_values_costs_no_sqlalchemy() -> None:
    """`gateway.accounts` and `policies` import neither sqlalchemy, alembic nor a Redis client."""
    code = "import sys, gateway.accounts, policies; print([m for m in ('sqlalchemy','alembic','redis') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


async def test_people_tokens_and_old_secrets_are_in_every_database(accounts: Accounts) -> None:
    """What ends a person's access is written, and written again, by both databases, and the next snapshot has it."""
    team = await accounts.create_team("people", new_keys={"requests_per_min": 3})
    made = await accounts.create_key(team.id, "laptop", owner="ada")
    assert (made.key.requests_per_min, team.new_keys.requests_per_min) == (3, 3)
    rotated = await accounts.rotate_key(made.key.id, 60)
    accounts.saw("ada")
    await accounts.save_last_used()
    for _ in range(2):
        await accounts.disable("ada")
        await accounts.end_tokens(["sid 1", "alone ada"], 5.0, 60)
    assert await accounts.find(rotated.plaintext) is None
    await accounts.let_in("ada")
    assert [await accounts.find(key) is not None for key in (made.plaintext, rotated.plaintext)] == [True, True]
    assert [accounts.persons.is_ended({"sub": "ada", "iat": iat}) for iat in (5, 6)] == [True, False]
    log = Audit(accounts.database)
    await log.add(AuditRow(at_ms=5, action="cache_purged", team_id=0, request_id="", entry="", client="", way="api"))
    assert [row.at_ms async for row in log.between(5, 6)] == [5]
    await log.forget(1, 90_000.0)
    assert [row.at_ms async for row in log.between(0, 6)] == []
