"""The exceptions a user is meant to read."""

REFUSED_STATUS = 2
"""Exit status of a `TomatError`: the same command would be refused again."""
RETRY_STATUS = 75
"""Exit status of a `RetryableError`: EX_TEMPFAIL of sysexits.h, "temporary failure; the user is invited to retry"."""


class TomatError(Exception):
    """Input, configuration or environment that tomat refuses.

    The message says what was found, what was expected and what to do next. The command line prints it alone, without
    a traceback, and exits with status 2.
    """


class RetryableError(TomatError):
    """Something outside, such as storage, that did not answer now and may later: the same command is right.

    Printed like any `TomatError`; the exit status is 75, which `tomat launch` takes for "start it again".
    """
