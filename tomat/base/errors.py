"""The exceptions a user is meant to read."""

from collections.abc import Iterator


class TomatError(Exception):
    """Input, configuration or environment that tomat refuses.

    The message says what was found, what was expected and what to do next. The command line prints it alone, without
    a traceback, and exits with status 2.
    """


class RetryableError(TomatError):
    """Something outside, such as storage, that did not answer now and may later: the same command is right.

    Printed like any `TomatError`; the exit status is 75, which `tomat launch` takes for "start it again".
    """


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
