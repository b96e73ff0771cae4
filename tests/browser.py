"""A headless Chromium, driven over a pipe with the DevTools protocol; and what a screenshot holds."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_DECODE = """(async () => {
  const image = new Image(), canvas = document.createElement("canvas"), parts = [];
  image.src = %s;
  await image.decode();
  [canvas.width, canvas.height] = [image.width / 2, image.height / 2];
  const g2 = canvas.getContext("2d");
  g2.imageSmoothingEnabled = false;
  g2.drawImage(image, 0, 0, canvas.width, canvas.height);
  const bytes = g2.getImageData(0, 0, canvas.width, canvas.height).data;
  for (let i = 0; i < bytes.length; i += 32768) parts.push(String.fromCharCode(...bytes.subarray(i, i + 32768)));
  return [canvas.width, canvas.height, btoa(parts.join(""))];
})()"""
_HANGS = 240.0  # seconds: of a browser that says nothing
_NEVER = 60.0  # seconds: of a page that does not come to what is waited for
Pixels = npt.NDArray[np.uint8]


class Browser:
    """One page. `errors` are the exceptions and the refused requests of the page."""

    def __init__(self, folder: Path, width: int = 1400, height: int = 900) -> None:
        found = next((path for name in _NAMES if (path := shutil.which(name))), None)
        if found is None:
            pytest.skip(f"no Chromium is installed ({', '.join(_NAMES)})")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += ["--no-first-run", "--disable-extensions", "--disable-background-networking", "--mute-audio"]
        options += [f"--user-data-dir={folder}", f"--window-size={width},{height}", "--remote-debugging-pipe"]
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # the browser reads file 3 and writes file 4; sanitizers are ours, not its own
        command = f'exec 8<&{to_browser} 9>&{from_browser} 3<&8 4>&9; exec "$0" "$@"'
        env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "ASAN_OPTIONS", "UBSAN_OPTIONS")}
        self._process = subprocess.Popen(
            ["bash", "-c", command, found, *options, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**env, "HOME": str(folder)},
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._n, self._session = b"", 0, ""
        self.errors: list[str] = []
        self._origins = ["file:", "data:", "about:"]  # what a page may ask for
        pages = [t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self.send("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = attached["sessionId"]
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def send(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol, and wait for what it returns."""
        self._n += 1
        message = {"id": self._n, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            got = self._read()
            if got.get("method") == "Runtime.exceptionThrown":
                self.errors.append(str(got["params"]["exceptionDetails"]))
            if got.get("method") == "Network.requestWillBeSent" and not got["params"]["request"]["url"].startswith(
                tuple(self._origins)
            ):
                self.errors.append(f"asks for {got['params']['request']['url']}")
            if got.get("id") == self._n:
                if "error" in got:
                    raise RuntimeError(f"{method}: {got['error']}")
                return got["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], _HANGS)
            data = os.read(self._in, 1 << 16) if ready else b""
            if not data:
                raise RuntimeError("the browser ended, or hangs")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(text)

    def js(self, code: str) -> Any:
        """The value of an expression in the page (of its promise)."""
        got = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in got:
            raise RuntimeError(f"{code}: {got['exceptionDetails']}")
        return got["result"].get("value")

    def open(self, path: Path) -> None:
        """Open a file, and wait until its scripts have run."""
        self.send("Page.navigate", url=path.as_uri())
        end = time.monotonic() + _HANGS
        while not self.js("document.readyState == 'complete' && location.protocol == 'file:'"):
            assert time.monotonic() < end, "the page does not load"
            time.sleep(0.05)

    def visit(self, url: str, ready: str) -> None:
        """Open a page of a server, which alone it may ask, and wait until an expression holds."""
        self._origins.append(url)
        self.send("Page.navigate", url=url)
        self.until(f"location.href == {json.dumps(url)} && ({ready})")

    def until(self, code: str) -> None:
        """Wait until an expression holds."""
        end = time.monotonic() + _NEVER
        while not self.js(code):
            assert time.monotonic() < end, f"{code} does not come true; {self.errors}"
            time.sleep(0.02)

    def settle(self) -> None:
        """Wait until what was drawn is on the screen."""
        self.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def click(self, x: float, y: float) -> None:
        """Press and release the left button."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def wheel(self, x: float, y: float, dy: float) -> None:
        """Turn the wheel."""
        self.send("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=dy)
        self.settle()

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.send("Input.insertText", text=text)

    def key(self, name: str) -> None:
        """Press a key such as Enter."""
        code = {"Enter": 13, "Escape": 27}[name]
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)
        self.settle()

    def centre(self, selector: str) -> tuple[float, float]:
        """Where the middle of an element is."""
        x, y = self.js(
            f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        return x, y

    def screenshot(self, path: Path) -> Pixels:
        """Every second pixel of the page in both directions [height, width, 3]; all of them in `path`, as PNG."""
        self.settle()
        data: str = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))
        width, height, rgba = self.js(_DECODE % json.dumps(f"data:image/png;base64,{data}"))
        return np.frombuffer(base64.b64decode(rgba), np.uint8).reshape(height, width, 4)[..., :3]
