"""A Chromium without a window, told what to do through a pipe of its DevTools protocol: no library is needed for it."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""None where there is none."""

SCROLL = """new Promise((done) => {
  let y = 0;
  const go = () => { scrollTo(0, y); y += 800; setTimeout(y < document.body.scrollHeight + 800 ? go : done, 50); };
  go();
})"""
# Densities are drawn seconds after they come into view where Chromium draws by the processor.
DRAWN = """new Promise((done) => {
  const left = () => [...document.querySelectorAll("[data-panel]")]
    .filter((node) => node.checkVisibility() && !node.querySelector("svg.main-svg")).length;
  const look = (times) => left() && times ? setTimeout(look, 100, times - 1) : done(left());
  look(200);
})"""
# Texts whose colour stands out too little from what is behind them: 4.5, or 3 where they are large (WCAG 2.2, 1.4.3).
# Those of figures are plotly's, and a control that cannot be used may be pale.
FACTS = """(() => {
  const rgba = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const over = (front, back) => [0, 1, 2].map((k) => front[k] * (front[3] ?? 1) + back[k] * (1 - (front[3] ?? 1)));
  const behind = (node) => {
    if (!node) return [255, 255, 255];
    const own = rgba(getComputedStyle(node).backgroundColor);
    return own[3] === undefined ? own : over(own, own[3] === 1 ? own : behind(node.parentElement));
  };
  const pale = [];
  for (const node of document.querySelectorAll("body *")) {
    const text = [...node.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join("");
    if (!text || !node.checkVisibility({visibilityProperty: true})) continue;
    if (node.closest("svg, .js-plotly-plot, :disabled, script, style")) continue;
    const style = getComputedStyle(node), back = behind(node), front = over(rgba(style.color), back);
    const [a, b] = [light(front), light(back)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) pale.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  const page = document.documentElement;
  const overflow = page.scrollWidth - page.clientWidth;
  return JSON.stringify({overflow, width: page.clientWidth, pale: [...new Set(pale)]});
})()"""


class Browser:
    def __init__(self, to: int, of: int) -> None:
        self._to, self._of = os.fdopen(to, "wb", buffering=0), os.fdopen(of, "rb", buffering=0)
        self._rest, self._asked, self._events = b"", 0, []
        target = self.call("Target.createTarget", session=None, url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", session=None, targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, session: str | None = "", **params: Any) -> dict[str, Any]:
        """What the browser answers; what it tells meanwhile is kept."""
        self._asked += 1
        message = {"id": self._asked, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._asked:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not (more := self._of.read(2**20)):
                raise RuntimeError("the browser has ended")
            self._rest += more
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def facts(self, url: str, width: int, theme: str) -> dict[str, Any]:
        """Of a page of that width in pixels, `light` or `dark`: how many pixels it is too wide, texts that are too
        pale, what its console says, and how many densities are not drawn after 20 s."""
        self._events = []
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.call("Page.navigate", url=url)
        while not any(each.get("method") == "Page.loadEventFired" for each in self._events):
            self._events.append(self._read())
        # Figures are drawn as they come into view, and a frame after.
        self.call("Runtime.evaluate", expression=SCROLL, awaitPromise=True)
        undrawn = self.call("Runtime.evaluate", expression=DRAWN, awaitPromise=True)["result"]["value"]
        found = json.loads(self.call("Runtime.evaluate", expression=FACTS)["result"]["value"])
        told = []
        for each in self._events:
            params = each.get("params", {})
            if each.get("method") == "Runtime.exceptionThrown":
                told.append(params["exceptionDetails"].get("exception", {}).get("description", "an exception"))
            elif each.get("method") == "Runtime.consoleAPICalled":
                told.append(" ".join(str(one.get("value")) for one in params["args"]))
            # Of a canvas of plotly's Chromium says how it would be faster.
            elif each.get("method") == "Log.entryAdded" and not params["entry"]["text"].startswith(
                "Canvas2D: Multiple"
            ):
                told.append(params["entry"]["text"])
        return found | {"console": told, "undrawn": undrawn}


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, in that folder, which ends with the context."""
    assert CHROMIUM is not None
    (its_in, to), (of, its_out) = os.pipe(), os.pipe()

    flags = ["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars",
             "--no-first-run", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]  # fmt: skip
    # It reads from 3 and writes to 4.
    command = [
        "bash",
        "-c",
        f'exec "$@" 3<&{its_in} 4>&{its_out}',
        "bash",
        CHROMIUM,
        *flags,
        f"--user-data-dir={profile}",
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, pass_fds=(its_in, its_out), **quiet)
    os.close(its_in)
    os.close(its_out)
    try:
        yield Browser(to, of)
    finally:
        with suppress(OSError):
            os.close(to)
        process.terminate()
        process.wait(30)
