"""Headless Chromium, spoken to over a pipe: no driver and no port."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 90.0


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of one browser. `complaints` are what its console got: errors, and what the page's
    own security policy refused."""

    def __init__(self, program: str, profile: str) -> None:
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()

        def place() -> None:  # it reads commands from 3 and answers on 4
            one, other = os.dup(to_child), os.dup(from_child)
            os.dup2(one, 3)
            os.dup2(other, 4)

        self._process = subprocess.Popen(
            [
                *(
                    program,
                    "--headless",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--remote-debugging-pipe",
                ),
                *("--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={profile}"),
                *("--hide-scrollbars", "--ignore-certificate-errors", "about:blank"),
            ],
            preexec_fn=place,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self.complaints: list[str] = []
        self._number, self._buffer, self._session = 0, b"", None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            answer = self._receive(until)
            self._note(answer)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser is gone"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, about = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(about["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(about["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning"):
            text = " ".join(str(item.get("value")) for item in about["args"])
            self.complaints.append(text)

    # --- what a person does ----------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Load a document anew, also if only the fragment of its address differs."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait for ``script`` to be true."""
        until = time.monotonic() + SECONDS
        while not (value := self.evaluate(script)):
            assert time.monotonic() < until, (script, self.complaints, self.text()[:2000])
            time.sleep(0.05)
        return value

    def text_of(self, view: str) -> str:
        """Go to a view by its tab, and return its text once it is filled."""
        self.evaluate(f"document.getElementById('tab-{view}').click()")
        self.until(f"(document.body.dataset.shown || '').split('/')[0] === '{view}'")
        return self.text()

    def text(self) -> str:
        return str(self.evaluate("document.body && document.body.innerText") or "")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, file: Path) -> None:
        answer = self.call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self._session = None
            self.call("Browser.close")
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    program = find()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        opened = Browser(program, profile)
        try:
            yield opened
        finally:
            opened.close()
