"""A headless Chromium that shows a page, for tests of what people see.

Tests control it over a pipe, in the Chrome DevTools protocol. It finds no network but this
machine's own. CONTRIBUTING.md says how to get it, and axe-core, which checks accessibility.
"""

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
AXE = Path(__file__).parent / "browser" / "node_modules" / "axe-core" / "axe.min.js"
_FLAGS = [
    "--headless=new",
    "--no-sandbox",  # it shows our own pages only, and containers have no namespaces
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
]


def missing():
    """The missing programs, in words; None if there are none."""
    if not any(map(shutil.which, NAMES)):
        return "there is no Chromium: apt-get install chromium"
    if not AXE.exists():
        return "there is no axe-core: make browser"
    return None


class Chromium:
    """One page of it.

    :param folder: for its profile.
    """

    def __init__(self, folder):
        to_browser, self._out = (_high(end) for end in os.pipe())
        self._in, from_browser = (_high(end) for end in os.pipe())

        def pipes():
            os.dup2(to_browser, 3)
            os.dup2(from_browser, 4)

        self._process = subprocess.Popen(
            [next(filter(None, map(shutil.which, NAMES))), *_FLAGS, f"--user-data-dir={folder}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=pipes,
            close_fds=False,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest, self._session, self._events = 0, b"", None, []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.do(f"{domain}.enable")

    def do(self, method, **params):
        """A command of the protocol, and its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self._out, text) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._events.append(answer)

    def show(self, html, **look):
        """A page, as :meth:`look` says."""
        self.look(**look)
        frame = self.do("Page.getFrameTree")["frameTree"]["frame"]["id"]
        self.do("Page.setDocumentContent", frameId=frame, html=html)

    def open(self, address):
        """Open a page of a server on this machine, with all that belongs to it.

        :returns: errors, as the page's console says them.
        """
        self._events.clear()
        self.do("Page.navigate", url=address)
        self.wait()
        return [text for text in map(_complaint, self._events) if text is not None]

    def wait(self):
        """Wait until the next page, or the present one, is loaded."""
        while not any(each["method"] == "Page.loadEventFired" for each in self._events):
            self._events.append(self._next())

    def look(self, width=1100, height=900, dark=False, media="screen"):
        """A width in CSS pixels, and what people may have set."""
        self.do(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.do("Emulation.setEmulatedMedia", media=media, features=features)

    def run(self, script):
        """The value of an expression, or what its promise gives, in the page."""
        found = self.do(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def violations(self, contrast=True):
        """Axe-core's findings, by rule, with the elements.

        :param contrast: False leaves colours out, which take most of the time.
        """
        self.run(AXE.read_text() + ";0")
        rules = json.dumps({"color-contrast": {"enabled": contrast}})
        found = self.run(f"axe.run({{rules: {rules}}}).then(found => found.violations)")
        return {each["id"]: [node["html"] for node in each["nodes"]] for each in found}

    def picture(self):
        """All of the page, as PNG."""
        found = self.do("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(found["data"])

    def printed(self):
        """As PDF."""
        found = self.do("Page.printToPDF", preferCSSPageSize=True, printBackground=False)
        return base64.b64decode(found["data"])

    def close(self):
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self.do("Browser.close")
        os.close(self._out)
        os.close(self._in)
        self._process.wait(30)

    def _next(self):
        while b"\0" not in self._rest:
            part = os.read(self._in, 1 << 20)
            assert part, "Chromium has gone"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)


def _complaint(event):
    """The error in an event of the protocol, or None."""
    said = event["params"]
    if event["method"] == "Runtime.exceptionThrown":
        return said["exceptionDetails"]["text"]
    if event["method"] == "Runtime.consoleAPICalled" and said["type"] == "error":
        return str([each.get("value") for each in said["args"]])
    if event["method"] == "Log.entryAdded" and said["entry"]["level"] == "error":
        return f"{said['entry']['text']} {said['entry'].get('url', '')}"
    return None


def _high(end):
    """A file number that the browser's pipes, 3 and 4, do not meet."""
    copy = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(end)
    return copy
