"""The exceptions a user is meant to read."""

import errno
from collections.abc import Iterator

PASSING_ERRNOS = frozenset({
    errno.EAGAIN, errno.EBUSY, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN,
    errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
})  # fmt: skip
"""What the operating system reports for a network, a mounted bucket or NFS that does not answer, and for a machine
short of handles or memory. None of these is the fault of a file."""

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the operating system reports where no room is left: on the disk, in the quota, or for one file."""


STORAGE_TRIES = 7
"""How often a request to a bucket is tried before the place counts as unreachable: 6 waits of 0.5 to 16 s, half a
minute in all. TensorStore's own default, 32 waits of up to 32 s, would hide an outage for a quarter of an hour."""


class TomatError(Exception):
    """Input, configuration or environment that tomat refuses.

    The message says what was found, what was expected and what to do next. The command line prints it alone, without
    a traceback, and exits with status 2.
    """


class RetryableError(TomatError):
    """Something outside, such as storage, does not answer now and may later: run the same command again.

    Printed like any `TomatError`; the exit status is 75, which `tomat launch` takes for "start it again".
    """


def refuse(*rules: tuple[object, str]) -> None:
    """Raise a TomatError for the first rule whose first part is true; its second part is the message."""
    for wrong, words in rules:
        if wrong:
            raise TomatError(words)


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
