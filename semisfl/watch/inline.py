"""The page as one file: our code, the charts' library and what they show, inside it."""

import base64
import hashlib
import json
import re
from pathlib import Path

from semisfl.files import write_whole
from semisfl.watch.app import SCRIPTS, page_file, page_html, plotly_script
from semisfl.watch.views import Runs


def write_page(runs: Runs, place: Path) -> None:
    """Write a page with the present state of ``runs``."""
    try:
        write_whole(place, page(runs).encode())
    except OSError as error:
        raise ValueError(
            f"cannot write {place}: {error.strerror or error}; choose another --html"
        ) from error


def page(runs: Runs) -> str:
    # Inside a script nothing may look like its end, whatever a run's directory holds.
    data = json.dumps(runs.everything(), allow_nan=False, default=str).replace("<", "\\u003c")
    style = page_file("page.css")
    library = plotly_script()
    scripts = [_complete(library), *map(page_file, SCRIPTS)]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; "
        "style-src-attr 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    html = page_html(library)
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    )
    body = f'<script type="application/json" id="data">{data}</script>\n'
    body += "".join(f"<script>{script}</script>\n" for script in scripts)
    html = re.sub(r"<!-- head -->.*<!-- /head -->", lambda _: head, html, flags=re.DOTALL)
    return re.sub(r"<!-- body -->.*<!-- /body -->", lambda _: body, html, flags=re.DOTALL)


def _complete(script: str) -> str:
    """Return a script that is safe inside a page: its texts may contain a script's end tag."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
