"""Keys that another worker made."""

from __future__ import annotations

from gateway.accounts.accounts import Accounts
from tests.world import World


async def test_a_key_of_another_worker_works_at_once(world: World) -> None:
    """A key that was made by another process a moment ago is no stranger; one that nothing made still is."""
    elsewhere = Accounts(world.sql_url)
    await elsewhere.open()
    team = await elsewhere.create_team("new")
    made = await elsewhere.create_key(team.id, "key")
    assert (await world.ask(key="sk-sw-a-guess")).status == 401
    assert (await world.ask(key=made.plaintext)).status == 200
    await elsewhere.close()
