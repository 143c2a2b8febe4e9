"""What the dashboard answers: runs, curves, nothing that lies elsewhere, and nobody who should not ask."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from urllib.parse import unquote

import pytest

from tomat.report.dashboard import listing
from tomat.report.dashboard.listing import HEAD_BYTES, TAIL_BYTES, UNREAD, Listing
from tomat.report.dashboard.pages import runs_page
from tomat.report.dashboard.server import COOKIE, make_app
from tomat.train.runs.checkpoints import survey
from tomat.train.runs.history import append_event
from tomat.train.runs.record import read_record
from tomat.train.runs.summary import summarise

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that httpx2 is to come
    from starlette.testclient import TestClient

BEFORE = Path(__file__).parents[2] / "fixtures" / "before" / "run"


@pytest.fixture
def runs(tmp_path) -> Path:
    """A run that was trained, one without a log, one whose configuration is damaged, and a file beside them."""
    place = tmp_path / "runs"
    shutil.copytree(BEFORE, place / "a run")
    for name, text in (("empty", "run_name: empty\ntrainer: {num_train_steps: 5}\n"), ("damaged", "a: [")):
        (place / name).mkdir()
        (place / name / "config.yaml").write_text(text)
    (tmp_path / "secret.txt").write_text("secret")
    (place / "a run" / "secret.txt").write_text("secret")
    (place / "a run" / "index.html").write_text("<p>its page</p>")
    return place


def client(place: Path, **settings) -> TestClient:
    return TestClient(make_app(str(place), **settings), base_url="http://127.0.0.1", raise_server_exceptions=False)


def listed(web: TestClient) -> dict[str, dict]:
    return {row["name"]: row for row in web.get("/api/").json()["runs"]}


def list_page(place: Path) -> str:
    """The page of runs once all are read: the first answer is for no more than a part of a second's reading."""
    web = client(place)
    listed(web)
    return web.get("/").text


def test_every_run_is_a_row_and_names_are_text(runs):
    (runs / "a run" / "plan.json").write_text(json.dumps({"step_seconds": {"estimate": 2.0}}))
    shutil.copytree(BEFORE, runs / "<img src=x>")
    web = client(runs)
    found = listed(web)
    assert list(found) == ["<img src=x>", "a run", "damaged", "empty"]
    assert found["damaged"]["state"] == "damaged" and "config.yaml" in found["damaged"]["detail"]
    assert (found["empty"]["state"], found["empty"]["detail"]) == ("open", "nothing written yet")
    record = read_record(str(runs / "a run"))
    whole, partial = survey(record.url, record.temporary_url)
    expected, shown = summarise(record, whole, len(partial), 0.0).to_dict(), found["a run"]["summary"]
    keys = "steps_done", "first_loss", "last_loss", "validation_loss", "survived"
    assert [shown[key] for key in keys] == [expected[key] for key in keys]
    assert found["a run"]["planned_step_seconds"] == 2.0
    page, own = web.get("/").text, web.get("/run/%3Cimg%20src%3Dx%3E").text
    assert '<a href="/run/a%20run">a run</a>' in page and "nothing written yet" in page
    assert all("<img" not in text and "&lt;img" in text for text in (page, own))


@pytest.mark.parametrize("ran, ratio", [("4 x TPU v6 lite", True), ("8 x TPU v6 lite", False), (None, False)])
def test_a_step_is_held_against_a_plan_of_what_it_ran_on(runs, ran, ratio):
    place, said = runs / "a run", ran or "which devices ran is not on record"
    (place / "plan.json").write_text(json.dumps({"slice": "v6e-4", "step_seconds": {"estimate": 2.0}}))
    (place / "history.jsonl").unlink()
    append_event(place, "start", 0, **({} if ran is None else {"devices": ran, "hosts": 1}))
    row = listed(client(runs))["a run"]
    assert (row["planned_slice"], row["ran_as_planned"], row["summary"]["devices"]) == ("v6e-4", ratio, said)
    assert said in list_page(runs)


def test_a_run_has_a_page_with_its_curves_and_its_own_files(runs):
    web = client(runs)
    page = web.get("/run/a%20run").text
    assert 'data-api="/api/run/a%20run"' in page and 'href="/run/a%20run/index.html"' in page
    assert "README.md</a>" not in page
    found = web.get("/api/run/a%20run").json()
    rows = read_record(str(runs / "a run")).rows
    assert found["curves"]["train/loss"]["y"] == [row["train/loss"] for row in rows]
    assert found["order"][0] == "train/loss" and set(found["order"]) == set(found["curves"])
    assert "curves" not in web.get(f"/api/run/a%20run?seen={found['version']}").json()
    with (runs / "a run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 900, "train/loss": 1.5}\n')
    assert web.get(f"/api/run/a%20run?seen={found['version']}").json()["curves"]["train/loss"]["y"][-1] == 1.5
    own = web.get("/run/a%20run/index.html")
    assert own.text == "<p>its page</p>" and "sandbox" in own.headers["content-security-policy"]


def test_a_damaged_run_says_so_and_no_other_suffers(runs):
    web = client(runs)
    assert "config.yaml" in web.get("/run/damaged").text and web.get("/api/run/empty").json()["curves"] == {}
    (runs / "a run" / "metrics.jsonl").unlink()
    (runs / "a run" / "metrics.jsonl").mkdir()
    answer = web.get("/api/run/a%20run")
    assert answer.status_code == 500 and "metrics.jsonl" in answer.json()["error"]


def test_nothing_else_can_be_had(runs):
    app = make_app(str(runs))
    for path in (
        "/run/..%2Fsecret.txt", "/run/..", "/run/../secret.txt", "/run/%2e%2e/secret.txt",
        "/run/a%20run/..%2F..%2Fsecret.txt", "/run/a%20run/../../secret.txt", "/run/a%20run/secret.txt",
        "/run/a%20run/config.yaml", "/run/a%20run/%2Fetc%2Fpasswd", "/assets/..%2F..%2F__init__.py",
        "/assets/%2Fetc%2Fpasswd", "/api/run/..%2Fa%20run", "/run/a%20run%00/index.html", "//etc/passwd",
    ):  # fmt: skip

        async def asked(scope, receive, send, path=path):
            """Past the client, which would take `..` out of the path before it asks."""
            await app(scope | {"path": unquote(path), "raw_path": path.encode()}, receive, send)

        answer = TestClient(asked, base_url="http://127.0.0.1").get("/")
        assert answer.status_code == 404 and "secret" not in answer.text, path
    web = client(runs)
    assert {web.request(verb, "/").status_code for verb in ("POST", "PUT", "DELETE", "PATCH")} == {405}
    assert web.get("/", headers={"host": "attacker.example"}).status_code == 400
    headers = web.get("/").headers
    assert "default-src 'none'" in headers["content-security-policy"] and headers["cache-control"] == "no-store"
    for path in ("page.css", "page.js", "live.js", "plotly.js"):
        assert web.get(f"/assets/{path}").status_code == 200


def test_a_token_is_asked_of_everyone(runs):
    web = client(runs, host="0.0.0.0", token="t-1")
    for path in ("/", "/api/", "/run/a%20run", "/assets/page.css", "/nothing", "/?token=t-2", "/?token="):
        assert web.get(path).status_code == 401
    assert web.get("/api/", headers={"authorization": "Bearer t-1"}).status_code == 200
    answer = web.get("/?token=t-1", follow_redirects=False)
    assert answer.status_code == 303 and "t-1" not in answer.headers["location"]
    assert "httponly" in answer.headers["set-cookie"].lower() and web.cookies[COOKIE] == "t-1"
    assert web.get("/").status_code == 200


def test_many_runs_are_read_once(runs, monkeypatch):
    for number in range(3):
        shutil.copytree(BEFORE, runs / f"run-{number}")
    read, real = [], listing._read_row
    monkeypatch.setattr(listing, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(listing, "SURVEY_SECONDS", float("inf"))
    monkeypatch.setattr(listing, "ANSWER_SECONDS", float("inf"))  # on a slow machine a look ends, and the next begins
    monkeypatch.setattr(listing, "_read_row", lambda name, url: read.append(name) or real(name, url))
    looked = Listing(str(runs))
    assert len(looked.rows()) == len(read) == 6
    (runs / "run-2" / "metrics.jsonl").write_text('{"step": 3, "train/loss": 1.0}\n')
    read.clear()
    assert looked.rows()["run-2"].summary.steps_done == 4
    # What is damaged is tried again each time.
    assert sorted(read) == ["damaged", "run-2"]


def test_what_is_known_of_runs_is_kept_for_the_next_dashboard_and_new_ones_are_there_at_once(runs, monkeypatch):
    read, real, cache = [], listing._read_row, runs.parent / "cache"
    monkeypatch.setattr(listing, "REREAD_SECONDS", -1.0)  # nothing but what is new
    monkeypatch.setattr(listing, "_read_row", lambda name, url: read.append(name) or real(name, url))
    (runs / "empty" / "metrics.jsonl").write_text('{"step": 3, "train/loss": 1.0}\n')
    first = Listing(str(runs), cache).rows()
    read.clear()
    kept = Listing(str(runs), cache)
    assert kept.rows().keys() == first.keys() and kept.rows()["a run"] == first["a run"] and read == ["damaged"]
    shutil.copytree(BEFORE, runs / "just started")
    assert "just started" in kept.rows() and read.count("just started") == 1
    # An age is that of now, also of what was read an hour ago.
    [file] = cache.glob("*.json")
    content = json.loads(file.read_text())
    content[str(runs / "empty")]["row"]["summary"]["written_utc"] -= 3600 * 5
    file.write_text(json.dumps(content))
    assert Listing(str(runs), cache).rows()["empty"].detail == "last written 5 h ago"
    file.write_text("{")
    assert Listing(str(runs), cache).rows().keys() == kept.rows().keys()


def test_of_a_long_log_the_ends_are_read(runs):
    n = (HEAD_BYTES + TAIL_BYTES) // 40 + 2000
    rows = [{"step": step, "train/loss": 10.0 - step / n, "step_seconds": 0.5} for step in range(n)]
    (runs / "a run" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = Listing(str(runs)).rows()["a run"]
    assert (row.summary.steps_done, row.summary.first_loss, row.step_seconds) == (n, 10.0, 0.5)
    assert row.summary.last_loss == pytest.approx(10.0 - (n - 5.5) / n)


# TensorStore reads the address of the service from the environment once, so this is a process.
SERVE_BUCKET = """
import json, warnings
from tomat.report.dashboard.server import make_app

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient
web = TestClient(make_app("gs://bucket/served"), base_url="http://127.0.0.1")
print(json.dumps({
    "runs": web.get("/api/").json()["runs"],
    "curves": web.get("/api/run/a%20run").json()["curves"],
    "page": web.get("/run/a%20run/index.html").text,
}))
"""


def test_a_bucket_is_served_as_a_folder_is(runs, bucket):
    for path in runs.rglob("*"):
        if path.is_file():
            bucket.put("bucket", f"served/{path.relative_to(runs).as_posix()}", path.read_bytes())
    command, env = [sys.executable, "-c", SERVE_BUCKET], {**os.environ, **bucket.environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found, folder = json.loads(done.stdout.splitlines()[-1]), client(runs)
    assert [row["state"] for row in found["runs"]] == [row["state"] for row in listed(folder).values()]
    assert found["curves"] == folder.get("/api/run/a%20run").json()["curves"]
    assert found["page"] == "<p>its page</p>"


def test_what_a_link_leads_to_outside_is_not_served(runs):
    secret = runs.parent / "secret.txt"
    inside = runs / "a run" / "real.html"
    inside.write_text("<p>its own</p>")
    (runs / "a run" / "index.html").unlink()
    (runs / "a run" / "index.html").symlink_to(inside)
    for name in ("README.md", "loss.svg"):
        (runs / "a run" / name).symlink_to(secret)
    for name in ("config.yaml", "metrics.jsonl", "plan.json"):
        shutil.copytree(BEFORE, runs / f"by-{name}")
        (runs / f"by-{name}" / name).unlink(missing_ok=True)
        (runs / f"by-{name}" / name).symlink_to(secret)
    os.mkfifo(runs / "empty" / "index.html")  # which nobody waits for
    far = Path(shutil.copytree(BEFORE, runs.parent / "elsewhere" / "far"))
    (far / "index.html").write_text("<p>far</p>")
    for name, target in (("linked", far), ("to nothing", far / "nowhere"), ("to itself", runs / "to itself")):
        (runs / name).symlink_to(target)
    web = client(runs)
    assert web.get("/run/linked/index.html").text == "<p>far</p>"  # a run may be a link
    assert web.get("/run/empty/index.html").status_code == 404
    assert web.get("/run/a%20run/index.html").text == "<p>its own</p>"
    page = web.get("/run/a%20run").text
    assert "README.md</a>" not in page and "index.html</a>" in page
    assert web.get("/run/a%20run/loss.svg").status_code == 404
    found = listed(web)
    assert found["linked"]["state"] == "finished" and not {"to nothing", "to itself"} & set(found)
    for name in ("config.yaml", "metrics.jsonl", "plan.json"):
        assert found[f"by-{name}"]["state"] == "damaged" and "leads out of the run" in found[f"by-{name}"]["detail"]
        assert '"secret' not in web.get(f"/api/run/by-{name}").text
    assert web.get("/api/run/by-metrics.jsonl").status_code == 500


def test_a_list_that_takes_long_begins_with_names(runs, monkeypatch):
    monkeypatch.setattr(listing, "ANSWER_SECONDS", -1.0)
    looked = Listing(str(runs))
    names = looked.rows(whole=False)
    # One a look is read, whatever the time.
    assert [row.state for row in names.values()].count(UNREAD) == len(names) - 1
    assert "reading" in runs_page(str(runs), names.values())
    [first] = [row.name for row in names.values() if row.state != UNREAD]
    read, real = [], listing._read_row
    monkeypatch.setattr(listing, "_read_row", lambda name, url: read.append(name) or real(name, url))
    whole = looked.rows()
    assert list(whole) == list(names) and {*names} - {*read} <= {first}
    assert {row.state for row in whole.values()} == {"finished", "damaged", "open"}


def test_states_are_coloured_and_worded_and_have_an_age(runs):
    page = list_page(runs)
    for state, shade in (("finished", "good"), ("damaged", "bad")):
        assert f'<b class="{shade}">{state}</b>' in page
    os.utime(runs / "a run" / "metrics.jsonl", (0, 0))
    [row] = [row for row in list_page(runs).split("<tr>") if ">a run</a>" in row]
    assert re.search(r'data-v="\d{10}\.\d+">[\d.]+ d ago<', row)


def test_runs_are_drawn_over_one_another(runs):
    shutil.copytree(BEFORE, runs / "<b>")
    web = client(runs)
    page = web.get("/compare", params={"run": ["a run", "<b>", "a run", "../secret"]}).text
    assert page.count('data-api="/api/run/') == 2 and 'data-api="/api/run/%3Cb%3E">&lt;b&gt;</a>' in page
    assert "secret" not in page and 'data-page="compare"' in page
    assert web.get("/compare").status_code == web.get("/compare?run=nothing").status_code == 404


def test_the_runs_are_read_before_anyone_asks(runs, monkeypatch):
    read = threading.Event()
    monkeypatch.setattr(Listing, "rows", lambda self, real=Listing.rows: (real(self), read.set())[0])
    with client(runs):
        assert read.wait(60)
