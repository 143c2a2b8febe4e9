"""`tomat runs serve`: the runs of a folder or bucket in a browser of this machine."""

import argparse

from tomat.base.arguments import port_number


def register_serve(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb to those of `runs`."""
    parser = verbs.add_parser(
        "serve",
        help="runs in a browser while they train: states, losses, speeds against plans, curves",
        description="Serve the runs of a folder or bucket to a browser of this machine, until Ctrl-C. Reads only.",
        epilog="The guide is docs/guides/pages.md.",
    )
    parser.add_argument("place", nargs="?", default="runs", metavar="DIR", help="folder or gs:// URL of runs (runs)")
    parser.add_argument("--port", type=port_number, default=8080, help="port (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: this machine alone)")
    parser.add_argument("--token", action="store_true", help="make a token, and answer only those who know it")
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from tomat.report.dashboard.server import serve

    serve(args.place, host=args.host, port=args.port, with_token=args.token)
    return 0
