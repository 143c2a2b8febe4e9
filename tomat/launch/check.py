"""What may be wrong with a launch: here, and as Google answers of login, project, slice, quota, network and buckets.

No question changes anything.
"""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.text import Text

from tomat.base.regions import same_region
from tomat.base.reporting import console
from tomat.launch.command import Command, Result
from tomat.launch.gcloud import TpuLaunch, accelerator_type
from tomat.launch.remote import DISK_FOLDER

State = Literal["ok", "failed", "unknown"]
Verdict = tuple[State, str]

QUOTA_IDS: Mapping[tuple[str, bool], str] = {
    ("v6e", False): "TPUV6EPerProjectPerZoneForTPUAPI",
    ("v6e", True): "TPUV6EPreemptiblePerProjectPerZoneForTPUAPI",
    ("v5p", False): "TPUV5PPerProjectPerZoneForTPUAPI",
    ("v5p", True): "TPUV5PPreemptiblePerProjectPerZoneForTPUAPI",
    ("v5e", False): "TPUV5sLitepodPerProjectPerZoneForTPUAPI",
    ("v5e", True): "TPUV5sPreemptibleLitepodPerProjectPerZoneForTPUAPI",
}
"""Chip and whether spot, to the quota that the TPU API counts it in, as its refusals name it. What is not there has no
answer and not a guessed one."""
TIMEOUT_SECONDS = 60


@dataclass(frozen=True)
class CheckLine:
    """The answer to one question."""

    name: str
    """What was asked after."""
    state: State
    """`unknown`: the question itself was not answered, and the launch may still go well."""
    said: str
    """What was found."""
    remedy: str = ""
    """What to do about it; empty where it is ok."""


@dataclass(frozen=True)
class _Question:
    name: str
    command: Command
    remedy: str
    judge: Callable[[str], Verdict] = lambda output: ("ok", output)
    """Of what the command printed."""
    optional: bool = False
    """That the command fails says nothing about the launch."""


def print_line(line: CheckLine) -> None:
    """Show an answer, and below it what to do."""
    colour = {"ok": "green", "failed": "red", "unknown": "yellow"}[line.state]
    said = Text.assemble((f"{line.state:7}", colour), f" {line.name}: {line.said}")
    console.print(said, soft_wrap=True)
    if line.remedy:
        console.print(f"        {line.remedy}", highlight=False, soft_wrap=True)


def run_checks(
    launch: TpuLaunch, places: Mapping[str, str | None], problems: Sequence[str], run: Callable[[Command], Result]
) -> Iterator[CheckLine]:
    """Ask, one question after another.

    Args:
        launch: What is to be launched.
        places: Key of the configuration to URL, of data and output.
        problems: What is known to be wrong already; each a line.
        run: Carries a command out.

    Yields:
        A line a question. Where nobody is logged in or no project is known, the rest is not asked.
    """
    yield from (CheckLine("configuration", "failed", problem) for problem in problems)
    for question in (_login(), _project(launch)):
        line = _ask(question, run)
        yield line
        if line.state != "ok":
            return
    project = launch.project or line.said
    for question in (*_of_the_slice(launch, project), *_of_the_network(launch, project), *_of_places(launch, places)):
        yield _ask(question, run)


def _ask(question: _Question, run: Callable[[Command], Result]) -> CheckLine:
    result = run(question.command)
    if result.ok:
        state, said = question.judge(result.output.strip())
    else:
        state, said = ("unknown" if question.optional else "failed"), result.last_line
    return CheckLine(question.name, state, said, "" if state == "ok" else question.remedy)


def _gcloud(purpose: str, *words: str) -> Command:
    return Command(purpose, ("gcloud", *words), TIMEOUT_SECONDS, quiet=True)


def _something(what: str) -> Callable[[str], Verdict]:
    """Judges an answer that is empty where there is nothing."""
    return lambda output: ("ok", output) if output and output != "(unset)" else ("failed", f"no {what}")


def _login() -> _Question:
    command = _gcloud("who is logged in", "auth", "list", "--filter=status:ACTIVE", "--format=value(account)")
    return _Question("login", command, "run `gcloud auth login`", _something("active account"))


def _project(launch: TpuLaunch) -> _Question:
    if launch.project is None:
        command = _gcloud("gcloud's own project", "config", "get-value", "project")
        return _Question(
            "project", command, "give --project, or run `gcloud config set project P`", _something("project")
        )
    command = _gcloud("the project", "projects", "describe", launch.project, "--format=value(projectId)")
    return _Question("project", command, f"check the spelling of '{launch.project}', and that your account may see it")


def _of_the_slice(launch: TpuLaunch, project: str) -> Iterator[_Question]:
    place = (f"--zone={launch.zone}", f"--project={project}")
    service = (
        "services",
        "list",
        "--enabled",
        "--filter=config.name=tpu.googleapis.com",
        "--format=value(config.name)",
    )
    yield _Question(
        "TPU API",
        _gcloud("whether the TPU API is on", *service, f"--project={project}"),
        f"run `gcloud services enable tpu.googleapis.com --project={project}`",
        _something("tpu.googleapis.com among the enabled services"),
    )
    kind = accelerator_type(launch.slice)
    yield _Question(
        f"{kind} in {launch.zone}",
        _gcloud("the slice", "compute", "tpus", "accelerator-types", "describe", kind, *place, "--format=value(type)"),
        f"`gcloud compute tpus accelerator-types list --zone={launch.zone}` says what the zone has",
    )
    words = ("compute", "tpus", "tpu-vm", "versions", "describe", launch.software, *place, "--format=value(version)")
    yield _Question(
        "software of the VM",
        _gcloud("the runtime version", *words),
        f"`gcloud compute tpus tpu-vm versions list --zone={launch.zone}` says what there is; give --runtime_version",
    )
    quota = QUOTA_IDS.get((launch.slice.chip.name, launch.spot))
    if quota is not None and not launch.reserved:
        words = ("beta", "quotas", "info", "describe", quota, "--service=tpu.googleapis.com", f"--project={project}")
        yield _Question(
            "quota",
            _gcloud("the quota", *words, "--format=json"),
            f"ask for more of {quota} in {launch.zone} (https://cloud.google.com/tpu/docs/quota); the question needs "
            "gcloud's beta component and cloudquotas.googleapis.com",
            lambda output: _judge_quota(output, launch),
            optional=True,
        )


def _judge_quota(output: str, launch: TpuLaunch) -> Verdict:
    """The limit of the launch's zone, beside its chips (of v5p Google counts TensorCores in some projects)."""
    try:
        infos: Sequence[Mapping[str, Any]] = json.loads(output).get("dimensionsInfos", [])
        limits = {info.get("dimensions", {}).get("zone", ""): info.get("details", {}).get("value") for info in infos}
        limit = limits.get(launch.zone, limits.get(""))
        limit = None if limit is None else int(limit)
    except (ValueError, AttributeError):
        return "unknown", "an answer that is not understood"
    if limit is None:
        return "unknown", f"no limit stated for {launch.zone}"
    said = f"limit {limit}, the slice has {launch.slice.n_chips} chips"
    return ("ok" if limit < 0 or limit >= launch.slice.n_chips else "failed"), said


def _of_the_network(launch: TpuLaunch, project: str) -> Iterator[_Question]:
    own = f"--project={project}"
    if launch.service_account is not None:
        words = ("iam", "service-accounts", "describe", launch.service_account, own, "--format=value(email)")
        yield _Question(
            "service account",
            _gcloud("the service account", *words),
            "create it (`gcloud iam service-accounts create`), or check that your account may see it",
        )
    # In a shared VPC the network is another project's, as its full name says.
    network = launch.network or "default"
    yield _Question(
        f"network {network}",
        _gcloud("the network", "compute", "networks", "describe", network, own, "--format=value(name)"),
        f"give --network and --subnetwork; `gcloud compute networks list {own}` says what there is",
        optional="/" in network,
    )
    if launch.subnetwork is not None:
        region = launch.zone.rpartition("-")[0]
        words = ("compute", "networks", "subnets", "describe", launch.subnetwork, f"--region={region}", own)
        yield _Question(
            f"subnetwork {launch.subnetwork}",
            _gcloud("the subnetwork", *words, "--format=value(name)"),
            f"it must be in {region}: `gcloud compute networks subnets list --filter=region:{region} {own}`",
            optional="/" in launch.subnetwork,
        )


def _of_places(launch: TpuLaunch, places: Mapping[str, str | None]) -> Iterator[_Question]:
    region = launch.zone.rpartition("-")[0]
    buckets: dict[str, list[str]] = {}
    for key, url in places.items():
        if url is not None and url.startswith("gs://"):
            buckets.setdefault(url.removeprefix("gs://").partition("/")[0], []).append(key)
    for bucket, keys in buckets.items():
        words = ("storage", "buckets", "describe", f"gs://{bucket}", "--format=value(location)")
        yield _Question(
            f"bucket {bucket} ({', '.join(keys)})",
            _gcloud("the bucket", *words),
            f"the bucket must be there, readable, and in {region}: what crosses regions is slow and paid by the byte "
            f"(`gcloud storage buckets create gs://NAME --location={region}`)",
            lambda output: (
                ("ok", f"in {output.lower()}")
                if same_region(output.lower(), region)
                else ("failed", f"in {output.lower()}, the slice in {region}")
            ),
        )
    for key in ("data.train", "data.validation"):
        url = places.get(key)
        if url is not None and url.startswith("gs://"):
            yield _Question(
                key,
                _gcloud("the shard set", "storage", "ls", f"{url.rstrip('/')}/manifest.json"),
                f"{url} holds no whole shard set; `tomat tokenize --output {url}` makes one",
            )


def unfit_places(places: Mapping[str, str | None], data_disk: bool = False) -> list[str]:
    """What would lose work on machines that are deleted: placeholders, and folders on them.

    Args:
        places: Key of the configuration to folder or URL, of data and output.
        data_disk: Whether every host has a disk with data at `DISK_FOLDER`.
    """
    problems = []
    for key, place in places.items():
        if place is not None and place.startswith("gs://BUCKET"):
            problems.append(
                f"{key} is {place}; put your bucket in the place of BUCKET, as in --{key} gs://my-bucket/..."
            )
        elif data_disk and key.startswith("data.") and place is not None and place.startswith(f"{DISK_FOLDER}/"):
            continue
        elif place is not None and "://" not in place:
            problems.append(
                f"{key} is the folder '{place}', which other hosts do not see and which is lost with the machine; "
                f"expected a bucket, as in --{key} gs://my-bucket/..."
            )
    return problems


def local_changes() -> list[str]:
    """Why the commit that is sent is not what is seen here."""
    found = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    if found.returncode != 0:
        return ["this folder is no git checkout; `tomat launch` sends the commit that is checked out."]
    changed = len(found.stdout.splitlines())
    if not changed:
        return []
    return [f"{changed} file(s) differ from the last commit, which is what is sent; commit them or give --allow_dirty."]
