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
    words: tuple[str, ...]
    """What follows `gcloud`."""
    remedy: str
    judge: Callable[[str], Verdict] = lambda output: ("ok", output)
    """Of what the command printed."""
    optional: bool = False
    """That the command fails says nothing about the launch."""

    def ask(self, run: Callable[[Command], Result]) -> CheckLine:
        result = run(Command(self.name, ("gcloud", *self.words), TIMEOUT_SECONDS, quiet=True))
        if result.ok:
            state, said = self.judge(result.output.strip())
        else:
            state, said = ("unknown" if self.optional else "failed"), result.last_line
        return CheckLine(self.name, state, said, "" if state == "ok" else self.remedy)


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
    """Ask, one question after another: a line each, those of `problems`, which are known already, first. Where nobody
    is logged in or no project is known, the rest is not asked.

    `places`: key of the configuration to URL, of data and output.
    """
    yield from (CheckLine("configuration", "failed", problem) for problem in problems)
    for question in (_login(), _project(launch)):
        line = question.ask(run)
        yield line
        if line.state != "ok":
            return
    project = launch.project or line.said
    for question in (*_of_the_slice(launch, project), *_of_the_network(launch, project), *_of_places(launch, places)):
        yield question.ask(run)


def _something(what: str) -> Callable[[str], Verdict]:
    """Judges an answer that is empty where there is nothing."""
    return lambda output: ("ok", output) if output and output != "(unset)" else ("failed", f"no {what}")


def _login() -> _Question:
    words = ("auth", "list", "--filter=status:ACTIVE", "--format=value(account)")
    return _Question("login", words, "run `gcloud auth login`", _something("active account"))


def _project(launch: TpuLaunch) -> _Question:
    if launch.project is None:
        remedy = "give --project, or run `gcloud config set project P`"
        return _Question("project", ("config", "get-value", "project"), remedy, _something("project"))
    remedy = f"check the spelling of '{launch.project}', and that your account may see it"
    return _Question("project", ("projects", "describe", launch.project, "--format=value(projectId)"), remedy)


def _of_the_slice(launch: TpuLaunch, project: str) -> Iterator[_Question]:
    own, zone = f"--project={project}", f"--zone={launch.zone}"
    api = "tpu.googleapis.com"
    yield _Question(
        "TPU API",
        ("services", "list", "--enabled", f"--filter=config.name={api}", "--format=value(config.name)", own),
        f"run `gcloud services enable {api} {own}`",
        _something(f"{api} among the enabled services"),
    )
    kind = accelerator_type(launch.slice)
    yield _Question(
        f"{kind} in {launch.zone}",
        ("compute", "tpus", "accelerator-types", "describe", kind, zone, own, "--format=value(type)"),
        f"`gcloud compute tpus accelerator-types list {zone}` says what the zone has",
    )
    yield _Question(
        "software of the VM",
        ("compute", "tpus", "tpu-vm", "versions", "describe", launch.software, zone, own, "--format=value(version)"),
        f"`gcloud compute tpus tpu-vm versions list {zone}` says what there is; give --runtime_version",
    )
    quota = QUOTA_IDS.get((launch.slice.chip.name, launch.spot))
    if quota is not None and not launch.reserved:
        yield _Question(
            "quota",
            ("beta", "quotas", "info", "describe", quota, f"--service={api}", own, "--format=json"),
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
    name = "--format=value(name)"
    if launch.service_account is not None:
        yield _Question(
            "service account",
            ("iam", "service-accounts", "describe", launch.service_account, own, "--format=value(email)"),
            "create it (`gcloud iam service-accounts create`), or check that your account may see it",
        )
    # In a shared VPC the network is another project's, as its full name says.
    network = launch.network or "default"
    yield _Question(
        f"network {network}",
        ("compute", "networks", "describe", network, own, name),
        f"give --network and --subnetwork; `gcloud compute networks list {own}` says what there is",
        optional="/" in network,
    )
    if launch.subnetwork is not None:
        region = launch.zone.rpartition("-")[0]
        yield _Question(
            f"subnetwork {launch.subnetwork}",
            ("compute", "networks", "subnets", "describe", launch.subnetwork, f"--region={region}", own, name),
            f"it must be in {region}: `gcloud compute networks subnets list --filter=region:{region} {own}`",
            optional="/" in launch.subnetwork,
        )


def _of_places(launch: TpuLaunch, places: Mapping[str, str | None]) -> Iterator[_Question]:
    region = launch.zone.rpartition("-")[0]

    def judge(output: str) -> Verdict:
        place = output.lower()
        return ("ok", f"in {place}") if same_region(place, region) else ("failed", f"in {place}, the slice in {region}")

    remote = {key: url for key, url in places.items() if url is not None and url.startswith("gs://")}
    buckets: dict[str, list[str]] = {}
    for key, url in remote.items():
        buckets.setdefault(url.removeprefix("gs://").partition("/")[0], []).append(key)
    for bucket, keys in buckets.items():
        yield _Question(
            f"bucket {bucket} ({', '.join(keys)})",
            ("storage", "buckets", "describe", f"gs://{bucket}", "--format=value(location)"),
            f"the bucket must be there, readable, and in {region}: what crosses regions is slow and paid by the byte "
            f"(`gcloud storage buckets create gs://NAME --location={region}`)",
            judge,
        )
    for key in sorted(remote.keys() & {"data.train", "data.validation"}):
        yield _Question(
            key,
            ("storage", "ls", f"{remote[key].rstrip('/')}/manifest.json"),
            f"{remote[key]} holds no whole shard set; `tomat tokenize --output {remote[key]}` makes one",
        )


def unfit_places(places: Mapping[str, str | None], data_disk: bool = False) -> list[str]:
    """What would lose work on machines that are deleted: placeholders, and folders on them."""
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
    found = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    if found.returncode != 0:
        return ["this folder is no git checkout; `tomat launch` sends the commit that is checked out."]
    changed = len(found.stdout.splitlines())
    if not changed:
        return []
    return [f"{changed} file(s) differ from the last commit, which is what is sent; commit them or give --allow_dirty."]
