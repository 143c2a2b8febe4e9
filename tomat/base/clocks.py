"""Clocks of machines, compared with one another and with Cloud Storage's."""

import email.utils
import os
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

from tomat.base.errors import TomatError

REFUSED_CLOCK_SKEW_SECONDS = 300.0
"""Google refuses the tokens of a service account (`invalid_grant`) if the clock of the machine that asks is five
minutes off, so a run with such a clock ends at its first save."""

STORAGE_HOST = "https://storage.googleapis.com"
CLOCK_TIMEOUT_SECONDS = 5.0


def clock_warnings(hosts: Sequence[float], skews: Sequence[float | None], limit: float) -> list[str]:
    """What to say of the clocks.

    Args:
        hosts: Each host's clock at one moment, seconds since 1970.
        skews: Each host's clock less Cloud Storage's, seconds; None where that is not known.
        limit: Seconds above which a clock is warned of.

    Raises:
        TomatError: A clock is beyond `REFUSED_CLOCK_SKEW_SECONDS`.
    """
    middle = statistics.median(hosts)
    offs = [(time - middle, f"the clock of host {i}", "the median of all hosts") for i, time in enumerate(hosts)]
    offs += [(skew, f"the clock of host {i}", "Cloud Storage") for i, skew in enumerate(skews) if skew is not None]
    warnings = []
    for off, whose, against in offs:
        if abs(off) <= limit:
            continue
        found = f"{whose} is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} {against}"
        if abs(off) > REFUSED_CLOCK_SKEW_SECONDS:
            raise TomatError(
                f"{found}; beyond {REFUSED_CLOCK_SKEW_SECONDS:.0f} s Google refuses its tokens, and the times of "
                "checkpoints mean nothing. Set the clock (`sudo chronyc makestep`, or restart the machine)."
            )
        warnings.append(f"{found}; set it with `sudo chronyc makestep`.")
    return warnings


def storage_clock_skew(now: Callable[[], float] = time.time) -> float | None:
    """This machine's clock less Cloud Storage's in seconds, to about one; None where the server does not answer.

    The server is the one of `STORAGE_EMULATOR_HOST`, as in Google's own libraries, where that is set.
    """
    host = os.environ.get("STORAGE_EMULATOR_HOST", STORAGE_HOST)
    before = now()
    try:
        with urllib.request.urlopen(f"{host}/", timeout=CLOCK_TIMEOUT_SECONDS) as answer:
            date = answer.headers.get("Date")
    except urllib.error.HTTPError as error:  # nothing lies at `/`; the answer has a date all the same
        date = error.headers.get("Date")
    except (urllib.error.URLError, OSError, ValueError):
        return None
    if date is None:
        return None
    try:
        # The header has whole seconds: on average it is half a second old.
        server = email.utils.parsedate_to_datetime(date).timestamp() + 0.5
    except ValueError:
        return None
    return (before + now()) / 2 - server
