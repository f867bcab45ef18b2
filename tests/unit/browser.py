"""A real headless browser: one that the machine has, or Debian's, fetched once with apt and unpacked beside the models (no root needed)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from websockets.sync.client import ClientConnection, connect

CACHE = Path(os.environ.get("PASYNC_CACHE", Path.home() / ".cache" / "pasync")) / "chromium"
PACKAGE = "chromium-headless-shell"
WAIT_S = 30


class NoBrowser(Exception):
    """There is none, and none can be had."""


class Page:
    """One tab, driven by the DevTools protocol (https://chromedevtools.github.io/devtools-protocol)."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._number = socket, 0
        self.complaints: list[str] = []
        """Console messages, uncaught errors and what the browser says of the page, since it was opened."""
        self.requests: list[str] = []
        """Every URL asked for, since it was opened."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, width: int, height: int = 900) -> None:
        """Load a file in a window of this size and wait for all of it."""
        self.complaints, self.requests = [], []
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        self.call("Page.navigate", url=path.as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while (message := self._receive()).get("id") != self._number:
            pass
        assert "error" not in message, message
        return message["result"]

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def point_at(self, selector: str) -> None:
        """Move the mouse to the middle of the first such element."""
        self.call("Runtime.evaluate", expression=f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
        box = self.value(f"(b => [b.x + b.width / 2, b.y + b.height / 2])(document.querySelector('{selector}').getBoundingClientRect())")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv(timeout=WAIT_S))
        match message.get("method"):
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded":
                self.complaints.append(json.dumps(message["params"]))
            case "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
        return message


@contextmanager
def browser() -> Iterator[Page]:
    """An empty tab of a browser of its own. Raises NoBrowser."""
    command, env = _found()
    with TemporaryDirectory() as profile:
        flags = ["--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        if "headless-shell" not in command:
            flags.insert(0, "--headless=new")
        process = subprocess.Popen([command, *flags], stderr=subprocess.PIPE, text=True, env=os.environ | env)
        try:
            assert process.stderr
            port = next(line for line in process.stderr if "DevTools listening" in line).split(":")[-1].split("/")[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=WAIT_S) as answer:
                url = next(tab["webSocketDebuggerUrl"] for tab in json.load(answer) if tab["type"] == "page")
            with connect(url, max_size=None) as socket:
                yield Page(socket)
        finally:
            process.kill()
            process.wait(WAIT_S)


def _found() -> tuple[str, dict[str, str]]:
    """(command, environment) of the machine's browser, or of the unpacked one."""
    for name in (PACKAGE, "chromium", "google-chrome"):
        if command := shutil.which(name):
            return command, {}
    if not CACHE.exists():
        try:
            _fetch()
        except (OSError, subprocess.SubprocessError) as error:
            raise NoBrowser(f"no browser on this machine, and {PACKAGE} cannot be had from Debian's packages: {error}") from error
    libraries = next((CACHE / "usr" / "lib").glob("*-linux-gnu"))
    return str(CACHE / "usr/lib/chromium" / PACKAGE), {"LD_LIBRARY_PATH": f"{libraries}:{libraries}/pulseaudio"}


def _fetch() -> None:
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    try:
        _unpack()
    except subprocess.CalledProcessError:  # no package lists, or old ones
        _run("apt-get", "update")
        _unpack()


def _unpack() -> None:
    """The package and what it needs that is not installed; appears in the cache complete or not at all."""
    plan = _run("apt-get", "install", "--simulate", "--no-install-recommends", PACKAGE)
    names = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
    with TemporaryDirectory(dir=CACHE.parent) as place:
        _run("apt-get", "download", *names, cwd=place)
        for package in Path(place).glob("*.deb"):
            _run("dpkg", "-x", str(package), f"{place}/whole")
        Path(place, "whole").rename(CACHE)


def _run(*command: str, cwd: str | None = None) -> str:
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, timeout=240).stdout
