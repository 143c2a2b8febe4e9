"""The commands of a launch through the real gcloud, against a server that answers as Google's APIs are documented."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from google_cloud import PROJECT, TRAINER, ZONE, Gcloud, GoogleError, real_gcloud

from tomat.app.cli import main
from tomat.launch.answers import Refusal, refusal
from tomat.launch.check import _ask, _of_the_account
from tomat.launch.command import run_command
from tomat.launch.gcloud import TpuLaunch
from tomat.launch.machine import Clock
from tomat.launch.pack import Pack
from tomat.launch.record import age_in_bucket
from tomat.launch.remote import watchdog_script
from tomat.launch.smoke import Smoke

GCLOUD = shutil.which("gcloud")
pytestmark = pytest.mark.skipif(GCLOUD is None, reason="gcloud is not installed")

PACK = Pack(Path("pack.tar.gz"), "0" * 64, "abc", False, "run.yaml", ())
LAUNCH = TpuLaunch("soak_1", "v5p-16", ZONE, "tomat-soak-1", "gs://bucket/runs", PACK, project=PROJECT, label="me-1")
NODE = f"projects/{PROJECT}/locations/{ZONE}/nodes/tomat-soak-1"
WORDS = ["--config_path", "run.yaml", "--slice", "v6e-4", "--zone", ZONE, "--spot", "--service_account", TRAINER]


@pytest.fixture(scope="module")
def login(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("login") / "config"


@pytest.fixture
def gcloud(world, login, tmp_path, monkeypatch) -> Iterator[Gcloud]:
    """In the place of the other tests' gcloud; their checkout and training are used."""
    assert GCLOUD is not None
    with real_gcloud(GCLOUD, tmp_path / "google", login) as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.mark.slow
def test_a_launch_goes_through_a_preemption_to_its_end(world, gcloud):
    google, over = gcloud.google, threading.Event()
    world.behave("preempt", 0)

    def preempt() -> None:
        while not over.wait(0.05):
            if (world.folder / "preempted").exists():
                (world.folder / "preempted").unlink()
                google.take_away()

    watching = threading.Thread(target=preempt)
    watching.start()
    try:
        quick = ["--poll_seconds", "0.1", "--backoff_seconds", "0.01"]
        assert main(["launch", *WORDS, *quick, "--labels", "team=dft", "--execute", "--json", "report.json"]) == 0
    finally:
        over.set()
        watching.join()
    report = json.loads(Path("report.json").read_text())
    assert report["endings"] == ["lost its machines", "finished"]
    record = json.loads(google.objects["runs/soak_1/launch.json"][0])
    assert record["ended"] == "finished" and record["login"].startswith("me@example.org as ")
    assert f"runs/soak_1/packs/{report['pack']}.tar.gz" in google.objects
    log = Path("runs/soak_1/launch/attempt-2-host-0.log").read_text()
    assert log.startswith("host 0 attempt 2: --config_path tomat-launch/run.yaml")
    assert [line for line in google.by_hosts if f"packs%2F{report['pack']}" in line]
    # What was asked for, and that nothing of it is left.
    assert google.nodes == {}
    changes = [line.partition("?")[0] for line in google.lines if "/nodes" in line and not line.startswith("GET")]
    changes = [line.replace(NODE, "NODE") for line in changes if "getGuestAttributes" not in line]
    create = f"POST /v2/{NODE.rpartition('/')[0]}"
    assert changes == [create, "PATCH /v2/NODE", "DELETE /v2/NODE"] * 2
    bodies = [body for _, _, kind, body in google.exchanged if kind == "Node"]
    first, second = [body for body in bodies if "runtimeVersion" in body and "name" not in body]
    assert first == second and first["schedulingConfig"]["spot"] and first["serviceAccount"] == {"email": TRAINER}
    assert first["acceleratorType"] == "v6e-4" and first["labels"]["team"] == "dft" and first["labels"]["tomat_launch"]
    script = first["metadata"]["startup-script"]
    assert f"tpu-vm delete tomat-soak-1 --quiet --zone={ZONE} --project={PROJECT}" in script
    assert gcloud.unlike_the_api() == []


@pytest.mark.slow
def test_every_question_of_check_is_understood(world, gcloud, capsys):
    google = gcloud.google
    google.create(NODE, {"acceleratorType": "v6e-4", "networkConfig": {"enableExternalIps": True}})
    words = [*WORDS, "--subnetwork", "s", "--project", PROJECT, "--check", "--json", "check.json"]
    assert main(["launch", *words]) == 0
    lines = {line["name"]: line for line in json.loads(Path("check.json").read_text())["checks"]}
    assert {name: line["said"] for name, line in lines.items() if line["state"] != "ok"} == {}
    assert lines["quota"]["said"] == "limit 64, the slice has 4 chips"
    assert lines["firewall, tcp 22 (ssh to the hosts)"]["said"] == "rule default-allow-ssh, from 0.0.0.0/0"
    assert lines["ssh to tomat-soak-1"]["said"] == "reached" and "output_dir as trainer" in str(list(lines))
    assert [name for _, name in google.stored] == []
    assert gcloud.unlike_the_api() == []


@pytest.mark.slow
def test_an_account_without_rights_is_told_from_one_that_cannot_be_tried(world, gcloud):
    """gcloud says of every failure whom it impersonates."""

    def asked(pattern: str, permission: str) -> list[str]:
        error = GoogleError(403, "PERMISSION_DENIED", f"{TRAINER} does not have {permission} access")
        google.script = [(pattern, *answer_of(error))] * 2
        places = {"output_dir": LAUNCH.output_dir}
        return [line.state for line in _of_the_account(partial(_ask, run_command), TRAINER, places)]

    google = gcloud.google
    assert asked("GET .*/b/bucket/o.*includeFolders|POST .*/upload/", "storage.objects") == ["failed", "failed"]
    assert asked("POST .*generateAccessToken", "iam.serviceAccounts.getAccessToken") == ["unknown", "unknown"]


@pytest.mark.slow
def test_the_record_in_the_bucket_is_written_once_and_has_an_age(world, gcloud):
    assert run_command(LAUNCH.write_record("{}", only_new=True)).ok
    second = run_command(LAUNCH.write_record("{}", only_new=True))
    assert not second.ok and "412" in second.last_line
    listing = [run_command(command).output for command in LAUNCH.date_record][-1]
    assert 0 <= age_in_bucket(listing) < 60
    assert Smoke(LAUNCH, run_command, Clock())._listed() == ["launch.json", "launch.now"]


@pytest.mark.slow
def test_what_google_says_of_a_slice_is_understood(world, gcloud, monkeypatch, tmp_path):
    google = gcloud.google
    LAUNCH.write_watchdog(None)
    operation = {"name": f"{NODE.partition('/nodes')[0]}/operations/o", "done": True}
    no_capacity = 'There is no more capacity in the zone "us-east5-b"; you can try in another zone'
    google.script = [("POST .*/nodes", 200, operation | {"error": {"code": 8, "message": no_capacity}})]
    result = run_command(LAUNCH.create)
    assert refusal(result.output) is Refusal.NO_CAPACITY
    assert result.last_line == f"ERROR: (gcloud.compute.tpus.tpu-vm.create) {no_capacity}"
    quota = "Quota limit 'TPUV5PPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone us-east5-b."
    google.script = [("POST .*/nodes", *answer_of(GoogleError(429, "RESOURCE_EXHAUSTED", quota)))]
    assert refusal(run_command(LAUNCH.create).output) is Refusal.QUOTA
    cached = tmp_path / "google" / "config" / "access_tokens.db"
    cached.unlink(missing_ok=True)
    expired = {"error": "invalid_grant", "error_description": "reauth related error (invalid_rapt)"}
    google.script = [("POST /token", 400, expired | {"error_subtype": "invalid_rapt"})]
    expired_login = run_command(LAUNCH.machine_state)
    assert refusal(expired_login.errors) is Refusal.LOGIN and "Reauthentication failed" in expired_login.last_line
    # A network that is cut as the token of the hour before is renewed is told of as of a login, too.
    cached.unlink(missing_ok=True)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("CLOUDSDK_AUTH_TOKEN_HOST", f"http://127.0.0.1:{closed.getsockname()[1]}/token")
        cut = run_command(LAUNCH.machine_state)
    assert "gcloud auth login" in cut.errors and refusal(cut.errors) is Refusal.UNREACHABLE


def answer_of(error: GoogleError) -> tuple[int, object]:
    return error.code, error.body


@pytest.fixture
def agent(tmp_path) -> Iterator[str]:
    """The socket of an ssh agent with a key, which is not gcloud's."""
    key, address = tmp_path / "another", str(tmp_path / "agent")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    with subprocess.Popen(["ssh-agent", "-D", "-a", address], stdout=subprocess.DEVNULL) as process:
        while not os.path.exists(address):
            time.sleep(0.01)
        added = ["ssh-add", "-q", key]
        subprocess.run(added, check=True, env={**os.environ, "SSH_AUTH_SOCK": address})
        yield address
        process.terminate()


@pytest.mark.slow
def test_secrets_reach_every_host_whatever_the_ssh_agent_holds_and_a_host_gives_back(world, gcloud, agent, monkeypatch):
    google = gcloud.google
    google.create(NODE, {"acceleratorType": "v5p-16", "networkConfig": {"enableExternalIps": True}})
    monkeypatch.setenv("SSH_AUTH_SOCK", agent)
    secrets = Path("train.env")
    secrets.write_text("A_SECRET='b c'\n")
    secrets.chmod(0o600)
    launch = dataclasses.replace(LAUNCH, env_file=secrets)
    launch.folder.mkdir(parents=True)
    for command in launch.install[:-1]:
        assert run_command(command).ok
    sent = [home / "tomat-launch" / "env" for home in sorted((google.folder / "machines" / "1").glob("host-*"))]
    assert [(path.read_text(), path.stat().st_mode & 0o777) for path in sent] == [("A_SECRET='b c'\n", 0o600)] * 2
    assert not launch.sent_environment.exists()
    assert run_command(launch.give_back_by_host).ok
    deadline = time.monotonic() + 60
    while google.nodes and time.monotonic() < deadline:
        time.sleep(0.1)
    assert google.nodes == {} and gcloud.unlike_the_api() == []


@pytest.mark.slow
def test_the_start_up_script_gives_back_as_root_of_a_host_that_knows_no_login(world, gcloud):
    google = gcloud.google
    times = {"cap_seconds": 1, "unwatched_seconds": None, "grace_seconds": 1, "poll_seconds": 0.2}
    metadata = {"startup-script": watchdog_script(LAUNCH.delete.argv, **times)}
    place = {"networkConfig": {"enableExternalIps": True}, "metadata": metadata}
    google.create(NODE, {"acceleratorType": "v6e-4", **place})
    log = google.folder / "machines" / "1" / "system" / "host-0" / "startup.log"
    deadline, said = time.monotonic() + 60, ""
    while google.nodes and time.monotonic() < deadline:
        said = log.read_text() if log.exists() else said
        time.sleep(0.1)
    assert google.nodes == {}, said
    assert [line for line in google.by_hosts if line.startswith("DELETE")] == [f"DELETE /v2/{NODE}?alt=json"]


@pytest.mark.slow
def test_a_queued_resource_is_asked_for_looked_at_and_given_back(world, gcloud):
    google, disk = gcloud.google, f"projects/{PROJECT}/zones/{ZONE}/disks/shards"
    wanted = {"queued_resource": True, "spot": True, "internal_ips": True, "data_disk": disk, "network": "n"}
    launch = dataclasses.replace(LAUNCH, **wanted)
    launch.write_watchdog(3600)
    assert run_command(launch.create).ok
    assert refusal(run_command(launch.create).output) is Refusal.EXISTS
    assert run_command(launch.queue_state).output.strip() == "WAITING_FOR_RESOURCES"
    [queued] = google.queued.values()
    [spec] = queued["tpu"]["nodeSpec"]
    assert queued["spot"] == {} and spec["nodeId"] == launch.tpu_name
    assert spec["node"]["dataDisks"] == [{"sourceDisk": disk, "mode": "READ_ONLY"}]
    assert spec["node"]["networkConfig"] == {"network": "n", "enableExternalIps": False}
    assert "startup-script" in spec["node"]["metadata"]
    queued["state"] = {"state": "FAILED", "failedData": {"error": {"code": 8, "message": "Quota 'A' exhausted."}}}
    assert run_command(launch.queue_state).output == "FAILED\tQuota 'A' exhausted.\n"
    assert run_command(launch.delete).ok and google.queued == {}
    assert gcloud.unlike_the_api() == []
