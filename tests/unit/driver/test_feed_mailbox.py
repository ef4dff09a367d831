"""The mailbox between the program that makes batches and the workers that ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from raytf.driver.feed import Mailbox, Offer, Wish


def batch(step: int, steps: int = 1) -> Offer:
    return Offer(step, [32] * steps, [step])


async def settled(task: asyncio.Task[Any]) -> bool:
    """Whether a call has returned, when all others have had their turn."""
    for _ in range(10):
        await asyncio.sleep(0)
    return task.done()


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


def test_nothing_is_made_before_somebody_asks_and_then_some_ahead():
    async def story() -> None:
        mailbox = Mailbox(total=100, ahead=2)
        wish = asyncio.create_task(mailbox.wish(0))
        assert not await settled(wish)
        ask = asyncio.create_task(mailbox.ask(40))  # a run that goes on
        assert await wish == Wish(40, 0)
        await mailbox.offer(batch(40))
        assert await ask == batch(40)
        for step in (41, 42):
            assert await mailbox.wish(step) == Wish(step, 0)
            await mailbox.offer(batch(step))
        assert not await settled(asyncio.create_task(mailbox.wish(43)))

    run(story())


def test_what_is_there_is_had_at_once_and_again():
    async def story() -> None:
        mailbox = Mailbox(total=10, ahead=3)
        for step in range(4):
            await mailbox.offer(batch(step))
        # Ranks ask in any order, and a group that starts again asks for steps that others have had.
        assert [await mailbox.ask(step) for step in (2, 0, 3, 1)] == [batch(step) for step in (2, 0, 3, 1)]

    run(story())


def test_batches_that_travel_together_are_one_answer():
    async def story() -> None:
        mailbox = Mailbox(total=100, ahead=8)
        asks = [asyncio.create_task(mailbox.ask(step)) for step in (4, 6)]
        assert await mailbox.wish(0) == Wish(4, 0)
        await mailbox.offer(batch(4, 4))
        assert [await ask for ask in asks] == [batch(4, 4)] * 2
        assert await mailbox.wish(8) == Wish(8, 0)
        await mailbox.saved(6)
        assert await mailbox.ask(7) == batch(4, 4), "it has step 7, too"

    run(story())


def test_the_step_that_cannot_be_made_is_answered_with_why():
    async def story() -> None:
        mailbox = Mailbox(total=100, ahead=8)
        await mailbox.offer(Offer(0, [32], [0], "gone"))
        assert (await mailbox.ask(1)).failure == "gone"
        ask = asyncio.create_task(mailbox.ask(2))
        assert not await settled(ask)

    run(story())


def test_steps_before_a_checkpoint_go_and_are_wished_for_where_it_is_damaged():
    async def story() -> None:
        mailbox = Mailbox(total=10, ahead=1)
        for step in range(6):
            await mailbox.offer(batch(step))
        await mailbox.saved(4)
        ask = asyncio.create_task(mailbox.ask(2))
        assert await mailbox.wish(6) == Wish(2, 4)
        await mailbox.offer(batch(2))
        assert await ask == batch(2)

    run(story())


def test_a_mailbox_that_was_killed_asks_the_driver_for_what_is_missing():
    async def story() -> None:
        another = Mailbox(total=100, ahead=2)  # knows nothing
        ask = asyncio.create_task(another.ask(7))  # which Ray sends again
        assert await another.wish(12) == Wish(7, 0)
        await another.offer(batch(7))
        assert await ask == batch(7)

    run(story())


def test_no_batch_is_wished_for_after_the_last_step():
    async def story() -> None:
        mailbox = Mailbox(total=3, ahead=5)
        await mailbox.offer(batch(2))
        await mailbox.ask(2)
        wish = asyncio.create_task(mailbox.wish(3))
        assert not await settled(wish)
        await mailbox.close()
        assert await wish == Wish(None, 0)

    run(story())
