"""Plans as others might write them, and a real browser."""

import base64
import dataclasses
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Browser:
    """A page in Chromium, driven by the WebDriver protocol."""

    def __init__(self, address: str, profile: Path) -> None:
        self.address = address
        options = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": CHROMIUM}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        session = self.send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{session['sessionId']}"
        self.send("POST", f"{self.session}/url", {"url": "about:blank"})  # instead of the browser's own first page

    def send(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error

    def open(self, path: Path, *, width: int = 1100, dark: bool = False) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.tools("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.tools("Emulation.setEmulatedMedia", features=scheme)
        self.send("POST", f"{self.session}/url", {"url": path.as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        return self.send("POST", f"{self.session}/execute/sync", {"script": script, "args": list(arguments)})

    def keys(self, selector: str, text: str) -> None:
        found = self.send("POST", f"{self.session}/element", {"using": "css selector", "value": selector})
        (element,) = found.values()
        self.send("POST", f"{self.session}/element/{element}/value", {"text": text})

    def click(self, selector: str) -> None:
        found = self.send("POST", f"{self.session}/element", {"using": "css selector", "value": selector})
        (element,) = found.values()
        self.send("POST", f"{self.session}/element/{element}/click", {})

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def log(self, kind: str) -> list[dict[str, Any]]:
        return self.send("POST", f"{self.session}/se/log", {"type": kind})

    def tools(self, command: str, **parameters: Any) -> Any:
        return self.send("POST", f"{self.session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def screenshot(self, path: Path) -> None:
        shot = self.tools("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs Chromium and chromedriver: apt-get install chromium chromium-driver")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(
        [DRIVER, f"--port={port}", "--silent"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    opened = None
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        opened = Browser(f"http://127.0.0.1:{port}", tmp_path_factory.mktemp("profile"))
        yield opened
    finally:
        if opened is not None:
            opened.send("DELETE", opened.session)
        driver.terminate()
        driver.wait(30)


# A plan of somebody else's making: no class of xtrax is in it, only the names.
@dataclasses.dataclass
class Vmap:
    pass


@dataclasses.dataclass
class SafeMap:
    batch_size: int


@dataclasses.dataclass
class Scan:
    pass


@dataclasses.dataclass
class WhileCarry:
    pass


@dataclasses.dataclass
class Bucket:
    boundaries: Any


@dataclasses.dataclass
class DedupGather:
    index_map: Any
    k: Any
    k_bucket: Any


def foreign_decision(
    name: Any = "batch", cardinality: Any = 10, batch_size: Any = 10, strategy: Any = None, reasoning: Any = "because"
) -> Any:
    spec = SimpleNamespace(name=name, cardinality=cardinality)
    return SimpleNamespace(spec=spec, batch_size=batch_size, reasoning=reasoning, strategy=strategy or Vmap())


def foreign_plan(*decisions: Any, memory: Any = None) -> Any:
    return SimpleNamespace(decisions=list(decisions), memory=memory)


def all_kinds(budget: int = 2_000) -> Any:
    """An axis of every kind but a while loop, and 1,500 bytes: 400, 200 for each sample, 100 for each head."""
    memory = foreign_memory(1_500, budget, {"sample": 200.0, "head": 100.0}, fixed=400, compiles=3)
    return foreign_plan(
        foreign_decision("text", 4, 2, Bucket([4, 8]), "ragged"),
        foreign_decision("ligand", 6, 4, DedupGather([0, 0, 1, 2, 2, 2], 3, 4), "copies"),
        foreign_decision("sample", 10, 4, SafeMap(4), "too many"),
        foreign_decision("time", 5, 1, Scan(), "a carry"),
        foreign_decision("head", 3, 3, Vmap(), "few"),
        memory=memory,
    )


def foreign_memory(estimate: Any, budget: Any, slopes: Any = None, fixed: Any = 0, compiles: Any = 0) -> Any:
    return SimpleNamespace(
        estimate=estimate, budget=budget, slope_by_axis=slopes or {}, fixed_bytes=fixed, compiles=compiles
    )


@pytest.fixture(scope="session")
def foreign() -> Any:
    """Makers of plans that share no class with xtrax."""
    return SimpleNamespace(
        plan=foreign_plan,
        decision=foreign_decision,
        Vmap=Vmap,
        SafeMap=SafeMap,
        Scan=Scan,
        WhileCarry=WhileCarry,
        Bucket=Bucket,
        DedupGather=DedupGather,
        memory=foreign_memory,
        all_kinds=all_kinds,
        lengths={"text": [1, 4, 5, 8]},
    )
