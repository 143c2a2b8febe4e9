"""What starts an event loop runs beside another one, as in a notebook."""

import asyncio
import threading

import pytest

from tomat.predict.inference.trained import outside_event_loop


async def in_a_notebook(work):
    return outside_event_loop(work)


def test_a_loop_is_started_with_and_without_another():
    async def answer():
        return threading.current_thread()

    def work():
        return asyncio.run(answer())

    assert outside_event_loop(work) is threading.current_thread()
    assert asyncio.run(in_a_notebook(work)) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_a_notebook(lambda: 1 / 0))
