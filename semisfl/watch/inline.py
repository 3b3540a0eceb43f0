"""The page as one file, for `semisfl report --html`: the code, the charts' library and the data are inside it.

Such a file can be sent by mail and opened without a network. It shows the runs as they were when it was written.
"""

import base64
import hashlib
import json
import re
from pathlib import Path

from semisfl.files import write_whole
from semisfl.watch.app import SCRIPTS, page_file, page_html, plotly_script
from semisfl.watch.views import Runs


def write_page(runs: Runs, place: Path) -> None:
    """Write a page with the present state of ``runs`` into the file ``place``."""
    write_whole(place, page(runs).encode())


def page(runs: Runs) -> str:
    """Return the page as HTML. Its security policy allows its own scripts by their hashes, and nothing else."""
    # Escape `</script>`: data from a run must not close the tag.
    data = json.dumps(runs.everything(), allow_nan=False, default=str).replace("<", "\\u003c")
    style = page_file("page.css")
    library = plotly_script()
    scripts = [_escape(library), *map(page_file, SCRIPTS)]
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


def _escape(script: str) -> str:
    """Escape the end tags inside a script's texts, so that the script is safe inside a page."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(text: str) -> str:
    """Return the hash by which a security policy allows a script or a style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
