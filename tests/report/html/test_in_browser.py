"""What a browser says of pages: nothing sticks out sideways, no text is too pale, and its console is empty."""

import gzip
import json
import os
import shutil
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import pytest
from browser import CHROMIUM, browser
from small_promolecule import skewed_density
from tiny_run import tomat

from tomat.app.cli import main
from tomat.data.density.outputs import write_density
from tomat.perf.plan.host import host_dict
from tomat.perf.plan.plan import Interval
from tomat.report.html.document import page_html
from tomat.report.html.kinds import page_of

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed here")
ROOT = Path(__file__).parents[3]
FIXTURES, TRACKING = ROOT / "tests" / "fixtures", ROOT / "docs" / "tracking"
LOOKS = (390, "light"), (1400, "light"), (1400, "dark")
"""Width in pixels, and theme."""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def made(tmp_path) -> Path:
    """A folder with a profile and two densities of a crystal whose cell leans."""
    profile = (FIXTURES / "profiles" / "h200_step.xplane.pb.gz").read_bytes()
    (tmp_path / "host0.xplane.pb").write_bytes(gzip.decompress(profile))
    for seed, name in enumerate(("said.cube", "true.cube")):
        write_density(skewed_density(seed=seed), tmp_path / name, "cube")
    return tmp_path


def assert_sound(chromium, url: str) -> None:
    for width, theme in LOOKS:
        found = chromium.facts(url, width, theme)
        assert found == {"overflow": 0, "width": width, "pale": [], "console": [], "undrawn": 0}, (url, theme)


def test_what_is_wrong_with_a_page_is_seen(chromium, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><meta name=viewport content='width=device-width'>"
        "<p style='width: 500px; color: #999'>pale</p><p style='color: #666'>read</p>"
        "<script>console.log('told'); throw new Error('broken')</script>"
    )
    found = chromium.facts(page.as_uri(), 390, "light")
    assert found["overflow"] > 100 and found["pale"] == ["pale: 2.85"]
    assert found["console"][0] == "told" and "broken" in found["console"][1]
    assert chromium.facts(page.as_uri(), 1400, "light")["overflow"] == 0


@pytest.mark.parametrize(
    "words",
    [
        (FIXTURES / "before" / "run",), (TRACKING / "sweeps" / "mfu-200m.json",), (TRACKING / "calibration.json",),
        (TRACKING / "lab" / "lab-demo.json",), ("host0.xplane.pb",), ("said.cube",),
        ("said.cube", "--reference", "true.cube"),
    ],
    ids=["run", "sweep of plans", "calibration", "lab", "profile", "density", "prediction"],
)  # fmt: skip
def test_a_page_is_sound(chromium, made, monkeypatch, words):
    monkeypatch.chdir(made)
    assert main(["page", *map(str, words), "--output", "page.html"]) == 0
    assert_sound(chromium, (made / "page.html").as_uri())


@pytest.mark.parametrize("fits", [True, False])
def test_the_page_of_a_plan_is_sound(chromium, tmp_path, step, memory, fits):
    memory = replace(memory, fits=fits, capacity_bytes=(4 if fits else 2) * 2**30)
    span = {"estimate": 5e-3, "low": 4e-3, "high": 6e-3}
    report = {
        "program_key": "x", "run_name": "planned", "memory": memory.to_dict(), "slice": "v6e-4", "n_chips": 4,
        "breakdown": step.to_dict() if fits else None, "step_seconds": span if fits else None,
        "mfu_full": span if fits else None, **(host_dict(1, Interval(**span)) if fits else {}),
    }  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps(report))
    (tmp_path / "page.html").write_text(page_html(page_of(str(tmp_path / "plan.json"))))
    assert_sound(chromium, (tmp_path / "page.html").as_uri())


def test_the_dashboard_is_sound(chromium, tmp_path):
    for name in ("a run", "b"):
        shutil.copytree(FIXTURES / "before" / "run", tmp_path / "runs" / name)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = tomat("runs", "serve", tmp_path / "runs", "--port", port)
    served = subprocess.Popen(command, env={**os.environ, "HOME": str(tmp_path)}, stdout=subprocess.DEVNULL)
    try:
        address, last = f"http://127.0.0.1:{port}/", time.monotonic() + 60
        while True:
            try:
                urlopen(f"{address}assets/page.css", timeout=5).close()
                break
            except OSError:
                assert served.poll() is None and time.monotonic() < last
                time.sleep(0.2)
        for path in ("", "run/a%20run", "compare?run=a+run&run=b"):
            assert_sound(chromium, address + path)
        legend = "document.querySelectorAll('[id=\"curve train/loss\"] .legend .traces').length"
        drawn = f"""new Promise((done) => {{
          const look = (left) => {legend} || !left ? done({legend}) : setTimeout(look, 100, left - 1);
          look(300);
        }})"""
        assert chromium.call("Runtime.evaluate", expression=drawn, awaitPromise=True)["result"]["value"] == 2
        chromium.facts(address, 1400, "light")
        mark = "document.querySelectorAll('tbody input').forEach((box) => box.click());"
        link = chromium.call("Runtime.evaluate", expression=f"{mark} document.querySelector('main p > a').href")
        assert link["result"]["value"] == f"{address}compare?run=a+run&run=b"
    finally:
        served.terminate()
        served.wait(30)
