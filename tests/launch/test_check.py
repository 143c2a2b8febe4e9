"""`tomat launch --check`: a line a question, each with its remedy, and nothing is changed."""

import json

import pytest
from json_keys import assert_keys_of_before
from pod_twin import LOGIN

from tomat.app.cli import main

WORDS = ["launch", "--config_path", "run.yaml", "--zone", "us-east5-b", "--check", "--json", "check.json"]
INTERNAL = {"name": "internal", "priority": 65534, "sourceRanges": ["10.128.0.0/9"],
            "allowed": [{"IPProtocol": "tcp", "ports": ["0-65535"]}, {"IPProtocol": "icmp"}]}  # fmt: skip
FOR_ONE_PORT = {"name": "ssh", "allowed": [{"IPProtocol": "tcp", "ports": ["22"]}], "sourceRanges": ["0.0.0.0/0"]}
FOR_PROXY = {**FOR_ONE_PORT, "sourceRanges": ["35.235.240.0/20"]}
PRECONDITION = "ERROR: HTTPError 412: At least one of the pre-conditions you specified did not hold."
QUOTA = json.dumps({"dimensionsInfos": [{"dimensions": {"zone": "us-east5-b"}, "details": {"value": "64"}}]})


def answers(world, **changed) -> None:
    answers = {
        "auth list": (0, "me@example.org"),
        "config get-value": (0, "project-1"),
        "quotas info": (0, QUOTA),
        "buckets describe": (0, "US-EAST5"),
        "firewall-rules": (0, json.dumps([INTERNAL, FOR_ONE_PORT])),
        "tpu-vm list": (0, "old"),
        "get-iam-policy": (0, "roles/tpu.admin"),
        "storage cat": (1, "The following URLs matched no objects or files"),
        "storage cp": (1, PRECONDITION),
    }
    given = {key.replace("_", " "): value for key, value in changed.items()}
    (world.folder / "asked.json").write_text(json.dumps({**answers, **given}))


@pytest.fixture(autouse=True)
def existing(world) -> None:
    """A TPU VM that ssh can be tried on."""
    (world.folder / "machines" / "old" / "host-0").mkdir(parents=True)


def checks(world) -> dict[str, dict]:
    return {line["name"]: line for line in json.loads((world.checkout / "check.json").read_text())["checks"]}


def test_a_launch_that_can_go_well_is_only_asked_about(world, capsys):
    answers(world)
    data = ["--data.source", "shards", "--data.train", "gs://bucket/train"]
    assert main([*WORDS, "--service_account", "t@p", "--subnetwork", "s", *data]) == 0
    assert_keys_of_before("launch --check", json.loads((world.checkout / "check.json").read_text()))
    lines = checks(world)
    assert {line["state"] for line in lines.values()} == {"ok"}
    assert list(lines) == [
        *("login", "project", "TPU API", "v6e-16 in us-east5-b", "software of the VM", "quota", "quota as t@p"),
        *(
            "service account",
            "right to give back",
            "ssh keys of the project",
            "network default",
            "subnetwork s",
            FOR_SSH,
            FIREWALL,
            "ssh to old",
        ),
        *("bucket bucket (data.train, output_dir)", "data.train as t@p, read", "output_dir as t@p, read"),
        *("output_dir as t@p, write", "data.train"),
    ]
    assert lines["quota"]["said"] == "limit 64, the slice has 16 chips"
    asked = [" ".join(words) for words in world.calls()]
    # One asks for a TPU VM to try, one whether the run's name is taken.
    assert len(asked) == len(lines) + 2 and world.machines() == ["old"]
    harmless = ("describe", "list", "get-value", " ls ", "--command=echo reached", "--if-generation-match=1", " cat ")
    harmless += ("get-iam-policy",)
    assert not [line for line in asked if not any(verb in line for verb in harmless)]
    assert "--project=project-1" in asked[4]
    assert capsys.readouterr().out.count("ok ") == len(lines)


IMPERSONATED = "This command is authenticated as me@example.org. Impersonation is used to impersonate t@p."
FIREWALL = "firewall, tcp 8476 (the hosts to one another)"
FOR_SSH, KEYS = "firewall, tcp 22 (ssh to the hosts)", "ssh keys of the project"
KIND, BUCKET = "v6e-16 in us-east5-b", "bucket bucket (output_dir)"


DENIED = json.dumps([INTERNAL, FOR_ONE_PORT, {"name": "deny", "priority": 900, "direction": "INGRESS",
                     "denied": [{"IPProtocol": "tcp", "ports": ["8000-9000"]}]}])  # fmt: skip
TAGGED = {**INTERNAL, "targetTags": ["web"]}


@pytest.mark.parametrize(
    ("changed", "name", "state", "said", "remedy"),
    [
        ({"auth_list": (0, "")}, "login", "failed", "no active account", "gcloud auth login"),
        ({"config_get-value": (0, "")}, "project", "failed", "no project", "--project"),
        ({"services_list": (0, "")}, "TPU API", "failed", "no tpu.googleapis.com", "services enable"),
        ({"accelerator-types": (1, "ERROR: NOT_FOUND")}, KIND, "failed", "NOT_FOUND", "accelerator-types list"),
        ({"quotas_info": (0, QUOTA.replace("64", "8"))}, "quota", "failed", "limit 8", "TPUV6EPerProject"),
        ({"quotas_info": (0, "{}")}, "quota", "unknown", "no limit stated", "TPUV6EPerProject"),
        ({"quotas_info": (0, "[")}, "quota", "unknown", "not understood", "TPUV6EPerProject"),
        ({"quotas_info": (1, "API not enabled")}, "quota", "unknown", "not enabled", "cloudquotas"),
        ({"networks_describe": (1, "not found")}, "network default", "failed", "not found", "--network"),
        ({"firewall-rules": (0, json.dumps([FOR_ONE_PORT]))}, FIREWALL, "failed", "no rule lets tcp 8476", "8470-8476"),
        ({"firewall-rules": (0, DENIED)}, FIREWALL, "failed", "rule deny denies tcp 8476", "firewall-rules create"),
        ({"firewall-rules": (0, json.dumps([FOR_ONE_PORT, TAGGED]))}, FIREWALL, "failed", "no rule", "create"),
        ({"firewall-rules": (0, json.dumps([INTERNAL]))}, FOR_SSH, "failed", "no rule lets tcp 22 in", "0.0.0.0/0"),
        ({"firewall-rules": (0, json.dumps([INTERNAL, FOR_PROXY]))}, FOR_SSH, "failed", "no rule lets tcp", "0.0.0"),
        ({"project-info": (1, "'compute.projects.get'")}, KEYS, "failed", "projects.get", "roles/compute.viewer"),
        ({"tpu-vm_list": (0, "")}, "ssh", "unknown", "not tried: there is no TPU VM", "when it installs"),
        ({"buckets_describe": (0, "EUROPE-WEST4")}, BUCKET, "failed", "in europe-west4, the slice", "--location"),
        ({"buckets_describe": (1, "403")}, BUCKET, "failed", "403", "readable"),
    ],
)
def test_each_fault_is_a_line_with_its_remedy(world, changed, name, state, said, remedy):
    answers(world, **changed)
    assert main(WORDS) == (1 if state == "failed" else 0)
    line = checks(world)[name]
    assert line["state"] == state and said in line["said"] and remedy in line["remedy"]
    assert {other["state"] for key, other in checks(world).items() if key != name} <= {"ok"}


@pytest.mark.parametrize("user", ["root", "me"])
def test_a_root_is_told_that_ssh_refuses_it(world, monkeypatch, user):
    """By `PermitRootLogin` of Google's images: in a container without another user the launch would end at `install`,
    with a slice that is paid for."""
    answers(world, **{"tpu-vm_list": (0, "")})
    monkeypatch.setenv("LOGNAME", user)
    main(WORDS)
    assert ("You are root" in checks(world)["ssh"]["remedy"]) is (user == "root")


def test_each_zone_is_asked(world):
    answers(world)
    assert main([*WORDS, "--zone", "us-east5-b,us-central1-b"]) == 1
    failed = {line["name"]: line["said"] for line in checks(world).values() if line["state"] == "failed"}
    assert failed == {f"us-central1-b: {BUCKET}": "in us-east5, the slice in us-central1"}
    assert "us-central1-b: v6e-16 in us-central1-b" in checks(world) and "us-central1-b: login" not in checks(world)


def test_a_login_that_has_expired_is_one_line(world):
    """gcloud lists its account as active all the same."""
    answers(world, **{"services list": (1, LOGIN)})
    assert main(WORDS) == 1
    assert list(checks(world)) == ["login", "project", "TPU API"]
    line = checks(world)["TPU API"]
    assert "Reauthentication failed" in line["said"] and line["remedy"] == "run `gcloud auth login`"


@pytest.mark.parametrize(
    ("key", "answer", "name", "state", "said"),
    [
        (
            "storage cp",
            f"HTTPError 403: t@p does not have storage.objects.create access. {IMPERSONATED}",
            "write",
            "failed",
            "create access",
        ),
        # The number in the name of a bucket is no answer.
        ("storage cp", "HTTPError 403: t@p has no create access to gs://b-412/x.", "write", "failed", "create access"),
        ("storage cp", "PERMISSION_DENIED: Failed to impersonate [t@p].", "write", "unknown", "you may not act as t@p"),
        ("storage ls", f"t@p does not have permission: list access. {IMPERSONATED}", "read", "failed", "list access"),
        ("storage cp", "a network that is cut", "write", "unknown", "a network that is cut"),
    ],
)
def test_the_hosts_account_is_tried_on_the_bucket(world, key, answer, name, state, said):
    answers(world, **{key: (1, f"ERROR: {answer}")})
    assert main([*WORDS, "--service_account", "t@p"]) == (1 if state == "failed" else 0)
    line = checks(world)[f"output_dir as t@p, {name}"]
    assert (line["state"], said in line["said"]) == (state, True) and "storage.objectUser" in line["remedy"]


@pytest.mark.parametrize(
    ("roles", "state"),
    [("", "failed"), ("roles/tpu.viewer", "failed"), ("projects/p/roles/mine", "unknown"), ("roles/editor", "ok")],
)
def test_an_account_that_cannot_give_back_is_told(world, roles, state):
    answers(world, **{"get-iam-policy": (0, roles)})
    main([*WORDS, "--service_account", "t@p"])
    line = checks(world)["right to give back"]
    assert line["state"] == state and ("--role=roles/tpu.admin" in line["remedy"]) is (state != "ok")


def test_what_is_wrong_here_is_a_line_too_and_spot_chips_have_a_quota_of_their_own(world):
    answers(world)
    assert main([*WORDS, "--spot", "--output_dir", "runs"]) == 1
    assert [words for words in world.calls() if "TPUV6EPreemptiblePerProjectPerZoneForTPUAPI" in words]
    assert "is lost with the machine" in checks(world)["configuration"]["said"]
