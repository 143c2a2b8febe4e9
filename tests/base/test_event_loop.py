"""What starts an event loop runs beside another one, as in a notebook."""

import asyncio
import threading

import pytest

from tomat.base.event_loop import outside_event_loop


async def answer():
    return threading.current_thread()


def test_a_loop_is_started_with_and_without_another():
    async def in_a_notebook():
        return outside_event_loop(lambda: asyncio.run(answer()))

    assert outside_event_loop(lambda: asyncio.run(answer())) is threading.current_thread()
    assert asyncio.run(in_a_notebook()) is not threading.current_thread()


def test_what_is_raised_comes_through():
    def refuse():
        raise KeyError("x")

    async def in_a_notebook():
        outside_event_loop(refuse)

    with pytest.raises(KeyError, match="x"):
        asyncio.run(in_a_notebook())
