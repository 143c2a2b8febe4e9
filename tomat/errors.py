"""The one exception a user is meant to read."""


class TomatError(Exception):
    """Input, configuration or environment that tomat refuses.

    The message says what was found, what was expected and what to do next. The command line prints it alone, without
    a traceback, and exits with status 2.
    """
