"""The dashboard's server: which requests it answers, and for whom.

A request names a run by a name from the listing of the place, and a file by a name from a fixed list. No path is ever
built from the text of a request. Only GET and HEAD are answered.
"""

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import AsyncIterator
from functools import lru_cache
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from tomat.base.errors import RetryableError, TomatError
from tomat.base.layout import HTML_FILE, LOSS_FIGURE, PAGE_FILE
from tomat.base.reporting import console, counted, to_jsonable
from tomat.base.storage import explaining_storage, files_at
from tomat.report.dashboard.listing import Listing, RunRow, own_path
from tomat.report.dashboard.live import LiveLog, drawn_curves
from tomat.report.dashboard.pages import FIRST, compare_page, facts_of, run_page, runs_page
from tomat.report.html.document import POLICY, asset, facts_html
from tomat.report.html.plotly_program import ALWAYS, plotly_program
from tomat.train.runs.record import find_runs

LOOPBACK = "127.0.0.1"
OPEN_FILES = {HTML_FILE: "text/html", PAGE_FILE: "text/plain", LOSS_FIGURE: "image/svg+xml"}
"""Files of a run that can be opened -> their media type."""
ASSETS = dict.fromkeys(("page.js", "live.js", "plotly.js"), "text/javascript") | {"page.css": "text/css"}
MOST_RUNS = 8
"""Number of last requested runs whose curves are kept. A run of a million steps and 22 metrics takes 0.35 GB."""
COOKIE = "tomat-token"
OWN_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""Policy of the dashboard's own pages. plotly adds its own styles and scripts to the page."""
CLOSED = {
    "Content-Security-Policy": OWN_POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}  # fmt: skip
RUN_POLICY = f"{POLICY}; sandbox allow-scripts allow-downloads; frame-ancestors 'none'"
"""Policy of a run's files: they load nothing, and the sandbox gives them another origin than the dashboard."""


def make_app(place: str, *, host: str = LOOPBACK, token: str | None = None, cache_dir: Path | None = None) -> Starlette:
    """The application for a folder or URL of runs, as `tomat runs list` takes it. It refuses requests for host names
    other than `host` and localhost, so that a foreign page cannot read it by DNS rebinding (0.0.0.0 and :: allow all
    names). If there is a token, a request needs it. `cache_dir`: where rows are kept for the next dashboard."""
    listing, logs = Listing(place, cache_dir), lru_cache(MOST_RUNS)(LiveLog)

    def find(request: Request) -> RunRow | None:
        return listing.rows().get(request.path_params["name"])

    def all_runs(request: Request) -> Response:
        return HTMLResponse(runs_page(place, listing.rows(whole=False).values()))

    def one_run(request: Request) -> Response:
        row = find(request)
        if row is None:
            return _missing("run")
        with explaining_storage(f"{row.url} cannot be read"):
            return HTMLResponse(run_page(row, [name for name in OPEN_FILES if _own(row, name)]))

    def compared(request: Request) -> Response:
        there = listing.rows()
        names = [name for name in dict.fromkeys(request.query_params.getlist("run")) if name in there]
        return HTMLResponse(compare_page(names)) if names else _missing("run")

    def one_file(request: Request) -> Response:
        row, name = find(request), request.path_params["file"]
        if row is None or name not in OPEN_FILES:
            return _missing("file")
        with explaining_storage(f"{row.url}/{name} cannot be read"):
            path = _own(row, name)
            if path is None:
                return _missing("file")
            try:
                content = files_at(row.url)[0].cat_file(path)
            except FileNotFoundError:  # it went meanwhile
                return _missing("file")
        return Response(content, media_type=OPEN_FILES[name], headers={"Content-Security-Policy": RUN_POLICY})

    def runs_json(request: Request) -> Response:
        return JSONResponse({"runs": [to_jsonable(row.to_dict()) for row in listing.rows().values()]})

    def run_json(request: Request) -> Response:
        row = find(request)
        if row is None:
            return JSONResponse({"error": "no such run"}, 404)
        found = {"run": to_jsonable(row.to_dict()), "shown_html": facts_html(facts_of(row))}
        version, metrics = logs(row.url).read()
        if version != request.query_params.get("seen"):
            order = sorted(metrics.curves, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
            found |= {"version": version, "order": order, "curves": drawn_curves(metrics)}
        return JSONResponse(found)

    def one_asset(request: Request) -> Response:
        if (name := request.path_params["file"]) not in ASSETS:
            return _missing("file")
        content = plotly_program(frozenset({ALWAYS})) if name == "plotly.js" else asset(name)
        return Response(content, media_type=ASSETS[name], headers={"Cache-Control": "max-age=3600"})

    routes = [
        Route("/", all_runs),
        Route("/compare", compared),
        Route("/api/", runs_json),
        Route("/api/run/{name}", run_json),
        Route("/run/{name}", one_run),
        Route("/run/{name}/{file}", one_file),
        Route("/assets/{file}", one_asset),
    ]
    names = ["*"] if host in ("0.0.0.0", "::") else [host, "localhost"]
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)]
    if token is not None:
        middleware.append(Middleware(BaseHTTPMiddleware, dispatch=_who_knows(token)))
    middleware += [Middleware(BaseHTTPMiddleware, dispatch=_closed), Middleware(GZipMiddleware)]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # Start reading before the first request: 200 runs that are not known yet take seconds.
        threading.Thread(target=listing.look_ahead, daemon=True).start()
        yield

    return Starlette(routes=routes, middleware=middleware, exception_handlers={TomatError: _refused}, lifespan=lifespan)


def serve(place: str, *, host: str, port: int, with_token: bool) -> None:
    if host != LOOPBACK and not with_token:
        raise TomatError(f"--host is {host}, which others may reach; give --token too, or leave --host out.")
    found = find_runs(place)
    token = secrets.token_urlsafe(24) if with_token else None
    address = f"http://{host}:{port}/" + (f"?token={token}" if token else "")
    console.print(f"{counted(len(found), 'run')} of {place}: {address}", soft_wrap=True, highlight=False)
    app = make_app(place, host=host, token=token, cache_dir=Path.home() / ".cache" / "tomat" / "runs")
    # Checked here because uvicorn would end the process with its own message where the port is taken.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise TomatError(f"cannot listen at {host}:{port}: {error.strerror}. Give another --port.") from None
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)


def _own(row: RunRow, name: str) -> str | None:
    """The path of a run's file; None where there is no such file, or it is a link that leads out of the run."""
    files, root = files_at(row.url)
    with contextlib.suppress(TomatError):
        path = own_path(files, root, name)
        return path if files.exists(path) else None
    return None


def _missing(what: str) -> Response:
    return PlainTextResponse(f"no such {what}\n", 404)


async def _refused(request: Request, error: Exception) -> Response:
    status = 503 if isinstance(error, RetryableError) else 500
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": str(error)}, status)
    return PlainTextResponse(f"{error}\n", status)


async def _closed(request: Request, answer) -> Response:
    """Add the `CLOSED` headers, which isolate the pages from other sites."""
    response = await answer(request)
    for name, value in CLOSED.items():
        response.headers.setdefault(name, value)
    return response


def _who_knows(token: str):
    """A middleware that admits requests with the token: in the address once, then in a cookie, or as a bearer."""

    def same(given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), token.encode())

    async def check(request: Request, answer) -> Response:
        bearer = request.headers.get("authorization", "")
        if same(request.cookies.get(COOKIE)) or same(bearer.removeprefix("Bearer ")):
            return await answer(request)
        if same(request.query_params.get("token")):
            # The redirect removes the token from the address bar and the history.
            response = RedirectResponse(request.url.remove_query_params("token"), 303)
            response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
            return response
        return PlainTextResponse("give the address that `tomat runs serve` printed, with its token\n", 401)

    return check
