"""The page over HTTP: check who may see it, and answer read-only requests.

The browser asks for a view every two seconds (page.js) and draws what it gets. Nothing can be changed through the
page.
"""

import hmac
import json
import re
import secrets
import threading
from collections.abc import Callable
from importlib.resources import files

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semisfl.watch.views import Plain, Runs

LOOPBACK_HOST = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)
COOKIE = "semisfl-watch"
PAGE = files("semisfl.watch") / "page"
"""The folder of the page's own files."""
SCRIPTS = (
    *("tools.js", "charts.js", "tables.js", "parts.js", "views.js", "settings.js", "log.js"),
    *("details.js", "page.js"),
)
"""The page's scripts, in the order in which they are loaded."""
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "style-src-attr 'unsafe-inline'; "  # the charts' library sets attributes of what it draws
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}

PROBES = ("/healthz", "/readyz")
"""Paths that are answered without a token: they say only that the process lives."""


def page_file(name: str) -> str:
    """Return one of the page's own files."""
    return (PAGE / name).read_text(encoding="utf-8")


def plotly_script() -> str:
    """Return the script of the chart library."""
    return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def page_html(library: str) -> str:
    """Return the page's HTML, with elements that keep the chart library from adding styles for maps.

    ``library``: the chart library's script. The page draws no maps, and its security policy would refuse these styles with an error. The library
    adds one only if no element has its id.
    """
    ids = dict.fromkeys(re.findall(r'getElementById\("([0-9a-f]{40,64})"\)', library))
    styles = "".join(f'<div hidden id="{name}"></div>' for name in ids)
    return page_file("page.html").replace("<!-- styles --><!-- /styles -->", styles)


def probes() -> list[Route]:
    """Return the answers to an orchestrator such as Kubernetes."""

    async def alive(request: Request) -> Response:
        """Answer that the process lives."""
        return PlainTextResponse("ok\n")

    return [Route(path, alive, methods=["GET"]) for path in PROBES]


def make_app(runs: Runs) -> Starlette:
    """Return the app that answers with the page's own files, and with what ``runs`` shows, as JSON.

    One request is computed at a time: `Runs` is not for several threads, and training needs the interpreter too.
    """
    views: dict[str, Callable[[QueryParams], Plain]] = {
        "runs": lambda query: runs.listing(),
        "rounds": lambda query: runs.rounds(_have(query.getlist("have"))),
        "clients": lambda query: runs.clients(query["run"]),
        "devices": lambda query: runs.devices(query["run"]),
        "settings": lambda query: runs.settings(),
        "log": lambda query: runs.log(query["run"], int(query.get("from", "-1"))),
    }

    lock = threading.Lock()

    def answer(view: Callable[[QueryParams], Plain]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            try:
                with lock:
                    text = json.dumps(view(request.query_params), allow_nan=False, default=str)
            except KeyError:
                return PlainTextResponse("there is no such run here", 404)
            except ValueError as error:
                return PlainTextResponse(f"bad question: {error}", 400)
            return Response(text, media_type="application/json")

        return endpoint

    def text(content: str, kind: str) -> Callable[[Request], Response]:
        return lambda request: Response(content, media_type=kind)

    script = plotly_script()
    return Starlette(
        routes=[
            Route("/", text(page_html(script), "text/html")),
            Route("/plotly.min.js", text(script, "text/javascript")),
            *(Route(f"/api/{name}", answer(view)) for name, view in views.items()),
            *probes(),
            Mount("/", StaticFiles(directory=str(PAGE))),
        ]
    )


def _have(texts: list[str]) -> dict[str, tuple[int, int]]:
    """Parse ``epoch.count.run`` of each run: the rounds that a browser has of it."""
    parts = (text.split(".", 2) for text in texts)
    return {run: (int(epoch), int(count)) for epoch, count, run in parts}


class Guard:
    """Check who may see the page, and tell browsers what they may do with it.

    With a token, a browser needs it once, in the address or as a bearer, and gets a cookie that replaces it.
    Without one the page is on loopback, and only a request under a name of loopback is answered: a website
    could otherwise read the page by pointing its own name to 127.0.0.1 (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, token: str | None, secure: bool) -> None:
        """Guard ``app`` by ``token`` (None: none is needed); ``secure``: the cookie is for TLS only."""
        self._app, self._token, self._secure = app, token, secure
        self._session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(key.encode(), value.encode()) for key, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *more]
            await send(message)

        response = self._refusal(Request(scope))
        await (response or self._app)(scope, receive, guarded)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a refused request, or to one that just showed the token; None: let it in."""
        path = request.scope["path"]
        if path in PROBES:
            return None
        if self._token is None:
            if LOOPBACK_HOST.fullmatch(request.headers.get("host", "")):
                return None
            return PlainTextResponse("this page answers to localhost only", 403)
        if _same(request.cookies.get(COOKIE, ""), self._session):
            return None
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _same(credentials, self._token):
            return None
        if path == "/" and _same(request.query_params.get("token", ""), self._token):
            # Remove the token from the address bar, and from links copied out of it.
            response = Response(status_code=303, headers={"location": "/"})
            response.set_cookie(
                COOKIE, self._session, httponly=True, samesite="strict", secure=self._secure
            )
            return response
        return PlainTextResponse(
            "this page wants a token: open it as /?token=TOKEN",
            401,
            {"www-authenticate": "Bearer"},
        )


def _same(token: str, right: str) -> bool:
    """Return whether two texts are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(token.encode(), right.encode())
