"""A headless Chromium, driven by Chromium's own protocol: opens pages, types, clicks, reads, takes pictures.

    python -m tests.cluster.browser STEPS.json

STEPS.json is a list of steps: ["open", URL], ["see", TEXT], ["type", SELECTOR, TEXT], ["click", LABEL], ["shoot", PNG],
["do", SCRIPT], ["is", SCRIPT] (wait until it is true), ["tell", SCRIPT], ["phone"], ["dark"], ["key", NAME].
Prints the text of the page at each "see", and the value at each "tell" in JSON, as a list in JSON; a text that does not
come is an error that shows the page.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

PATIENCE = 120.0
_FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
_WINDOW = "--window-size=1400,1400"
_KEYS = {
    "Tab": {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9},
    "Space": {"key": " ", "code": "Space", "windowsVirtualKeyCode": 32, "text": " "},
    "Enter": {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"},
}
#: React's inputs take a new value only from the setter that they replace.
_TYPE = """(() => {
  const field = document.querySelector(%s);
  if (!field) return false;
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(field, %s);
  field.dispatchEvent(new Event("input", {bubbles: true}));
  return true;
})()"""
_CLICK = """(() => {
  const named = e => e.innerText.trim().toLowerCase() === %s && !e.disabled;
  const found = [...document.querySelectorAll("button, a")].find(named);
  if (found) found.click();
  return Boolean(found);
})()"""


class Refusal(RuntimeError):
    """Chromium does not do it."""


class Page:
    """A page of a browser that runs."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket, self._calls = socket, 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Chromium's answer to a command."""
        self._calls += 1
        await self._socket.send_json({"id": self._calls, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=PATIENCE)
            if message.get("id") == self._calls:
                if "error" in message:
                    raise Refusal(f"{method}: {message['error']}")
                return message["result"]

    async def evaluate(self, script: str) -> Any:
        """A script's value; None while the page gives way to the next one."""
        try:
            answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        except Refusal:
            return None
        return answer["result"].get("value")

    async def text(self) -> str:
        return await self.evaluate("document.body ? document.body.innerText : ''") or ""

    async def until(self, script: str, what: str) -> None:
        """Evaluate until it is true."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE
        while not await self.evaluate(script):
            if loop.time() > deadline:
                raise RuntimeError(f"{what}: not within {PATIENCE:.0f} s; the page says:\n{await self.text()}")
            await asyncio.sleep(0.1)


async def first_page(session: aiohttp.ClientSession, address: str) -> dict[str, Any]:
    """Chromium's description of its first page, which may come later than its protocol."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while True:
        async with session.get(f"http://{address}/json/list") as answer:
            for target in await answer.json():
                if target["type"] == "page":
                    return target
        if asyncio.get_running_loop().time() > deadline:
            raise RuntimeError("Chromium has no page")
        await asyncio.sleep(0.1)


async def play(steps: list[list[str]], address: str) -> list[str]:
    """Play steps in the first page of a browser; the page's text at each step "see"."""
    seen = []
    async with aiohttp.ClientSession() as session:
        target = await first_page(session, address)
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            page = Page(socket)
            for name, *values in steps:
                if name == "open":
                    await page.call("Page.navigate", url=values[0])
                elif name == "see":
                    wanted = json.dumps(values[0])
                    await page.until(f"document.body && document.body.innerText.includes({wanted})", f"see {wanted}")
                    seen.append(await page.text())
                elif name == "type":
                    await page.until(_TYPE % tuple(map(json.dumps, values)), f"type into {values[0]}")
                elif name == "click":
                    await page.until(_CLICK % json.dumps(values[0].lower()), f"click {values[0]}")
                elif name == "do":
                    await page.evaluate(values[0])
                elif name == "is":
                    await page.until(values[0], f"is {values[0]}")
                elif name == "tell":
                    seen.append(json.dumps(await page.evaluate(values[0])))
                elif name == "phone":
                    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
                    await page.call("Emulation.setDeviceMetricsOverride", **size)
                elif name == "dark":
                    wanted = [{"name": "prefers-color-scheme", "value": "dark"}]
                    await page.call("Emulation.setEmulatedMedia", features=wanted)
                elif name == "key":
                    for kind in ("keyDown", "keyUp"):
                        await page.call("Input.dispatchKeyEvent", type=kind, **_KEYS[values[0]])
                elif name == "shoot":
                    picture = await page.call("Page.captureScreenshot", format="png")
                    Path(values[0]).write_bytes(base64.b64decode(picture["data"]))
                else:
                    raise ValueError(f"no such step: {name}")
    return seen


def look(steps: list[list[Any]], folder: Path, seconds: float = 300.0) -> list[str]:
    """Play steps in a browser of their own, which is a process; what it has seen.

    Args:
        steps: see the module.
        folder: for the list of steps.
        seconds: for all of them.
    """
    path = folder / "steps.json"
    path.write_text(json.dumps(steps))
    command = [sys.executable, "-m", "tests.cluster.browser", str(path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def main() -> None:
    steps = json.loads(Path(sys.argv[1]).read_text())
    profile = tempfile.mkdtemp(prefix="chromium-")
    command = ["chromium", *_FLAGS, _WINDOW, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    browser = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert browser.stderr is not None
        said = []
        for line in browser.stderr:
            said.append(line)
            if found := re.search(r"DevTools listening on ws://([\d.:]+)/", line):
                break
        else:
            raise RuntimeError(f"Chromium has ended: {''.join(said)}")
        print(json.dumps(asyncio.run(play(steps, found.group(1)))))
    finally:
        browser.kill()
        browser.wait()
        shutil.rmtree(profile, ignore_errors=True)


if __name__ == "__main__":
    main()
