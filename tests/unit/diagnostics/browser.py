"""A real Chromium without a window, steered through its debugging pipe: sizes, colour schemes and a mouse as people have."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

SECONDS = 120
"""How long a busy machine may take to answer."""


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One tab; use it in a `with` block.

    Args:
        profile: an empty folder.
    """

    def __init__(self, profile: Path) -> None:
        program = chromium()
        assert program is not None
        their_in, self._out = os.pipe()
        self._in, their_out = os.pipe()
        # The proxy leads nowhere: a page that loads anything from the network fails.
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--remote-debugging-pipe",
            "--proxy-server=127.0.0.1:9",
        ]
        # Chromium reads commands from descriptor 3 and answers on 4. Copies above 10 first: 3 and 4 may be taken here, and
        # a copy onto itself would be closed when the program starts.
        high_in, high_out = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (their_in, their_out))
        quiet = os.open(os.devnull, os.O_WRONLY)
        # A killed one leaves its folder behind. Not in the profile: the path of the socket in it would be too long.
        self._folder = tempfile.TemporaryDirectory(prefix="chromium_", ignore_cleanup_errors=True)
        self._process = os.posix_spawn(
            program,
            [program, *options, f"--user-data-dir={profile}"],
            {**os.environ, "TMPDIR": self._folder.name},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, quiet, 2),
                (os.POSIX_SPAWN_DUP2, high_in, 3),
                (os.POSIX_SPAWN_DUP2, high_out, 4),
            ],
        )
        for end in (their_in, their_out, high_in, high_out, quiet):
            os.close(end)
        self._received = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; what happens meanwhile is kept in `events`."""
        self._number += 1
        session = {} if self._session is None else {"sessionId": self._session}
        message = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, path: Path, *, width: int, height: int, dark: bool) -> None:
        """Open a file as a screen of this size shows it."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def run(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def point_at(self, selector: str) -> None:
        """Scroll an element into view and move the mouse onto its middle."""
        middle = self.run(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)}); "
            "found.scrollIntoView({block: 'center', inline: 'center'}); const box = found.getBoundingClientRect(); "
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        # Scroll events of the line above are told with the next frame; a mouse moves later than that.
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=middle[0], y=middle[1], pointerType="mouse")

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium did not answer in {SECONDS} s"
            part = os.read(self._in, 1 << 16)
            assert part, "Chromium went away"
            self._received += part
        text, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message
