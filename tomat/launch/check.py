"""What may be wrong with a launch: here, and as Google answers of login, project, slice, quota, network and buckets."""

import json
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
"""Chip and whether spot, to the quota that the TPU API counts it in, as its refusals name it; no other is guessed."""
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


def print_line(line: CheckLine) -> None:
    colour = {"ok": "green", "failed": "red", "unknown": "yellow"}[line.state]
    said = Text.assemble((f"{line.state:7}", colour), f" {line.name}: {line.said}")
    console.print(said, soft_wrap=True)
    if line.remedy:
        console.print(f"        {line.remedy}", highlight=False, soft_wrap=True)


def _ask(
    run: Callable[[Command], Result],
    name: str,
    words: Sequence[str],
    remedy: str,
    judge: Callable[[str], Verdict] = lambda output: ("ok", output),
    optional: bool = False,
) -> CheckLine:
    """Put a question: `words` follow `gcloud`, `judge` is of what it prints. Of an `optional` one it says nothing about
    the launch that the command fails."""
    result = run(Command(name, ("gcloud", *words), TIMEOUT_SECONDS, quiet=True))
    state, said = ("unknown" if optional else "failed"), result.last_line
    if result.ok:
        state, said = judge(result.output.strip())
    return CheckLine(name, state, said, "" if state == "ok" else remedy)


def run_checks(
    launch: TpuLaunch, places: Mapping[str, str | None], problems: Sequence[str], run: Callable[[Command], Result]
) -> Iterator[CheckLine]:
    """Ask, one question after another: a line each, those of `problems`, which are known already, first. Where nobody
    is logged in or no project is known, the rest is not asked. `places` are the URLs of data and output, by key."""
    ask = partial(_ask, run)
    yield from (CheckLine("configuration", "failed", problem) for problem in problems)
    words = ("auth", "list", "--filter=status:ACTIVE", "--format=value(account)")
    yield (line := ask("login", words, "run `gcloud auth login`", _something("active account")))
    if line.state != "ok":
        return
    if launch.project is None:
        remedy = "give --project, or run `gcloud config set project P`"
        line = ask("project", ("config", "get-value", "project"), remedy, _something("project"))
    else:
        remedy = f"check the spelling of '{launch.project}', and that your account may see it"
        line = ask("project", ("projects", "describe", launch.project, "--format=value(projectId)"), remedy)
    yield line
    if line.state == "ok":
        own = f"--project={launch.project or line.said}"
        yield from _of_the_slice(ask, launch, own)
        yield from _of_the_network(ask, launch, own)
        yield from _of_places(ask, launch, places)


def _something(what: str) -> Callable[[str], Verdict]:
    """Judges an answer that is empty where there is nothing."""
    return lambda output: ("ok", output) if output and output != "(unset)" else ("failed", f"no {what}")


def _of_the_slice(ask: Callable[..., CheckLine], launch: TpuLaunch, own: str) -> Iterator[CheckLine]:
    zone, kind, api = f"--zone={launch.zone}", accelerator_type(launch.slice), "tpu.googleapis.com"
    words = ("services", "list", "--enabled", f"--filter=config.name={api}", "--format=value(config.name)", own)
    remedy = f"run `gcloud services enable {api} {own}`"
    yield ask("TPU API", words, remedy, _something(f"{api} among the enabled services"))
    yield ask(
        f"{kind} in {launch.zone}",
        ("compute", "tpus", "accelerator-types", "describe", kind, zone, own, "--format=value(type)"),
        f"`gcloud compute tpus accelerator-types list {zone}` says what the zone has",
    )
    yield ask(
        "software of the VM",
        ("compute", "tpus", "tpu-vm", "versions", "describe", launch.software, zone, own, "--format=value(version)"),
        f"`gcloud compute tpus tpu-vm versions list {zone}` says what there is; give --runtime_version",
    )
    quota = QUOTA_IDS.get((launch.slice.chip.name, launch.spot))
    if quota is not None and not launch.reserved:
        yield ask(
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


def _of_the_network(ask: Callable[..., CheckLine], launch: TpuLaunch, own: str) -> Iterator[CheckLine]:
    name, region = "--format=value(name)", launch.zone.rpartition("-")[0]
    if (account := launch.service_account) is not None:
        words = ("iam", "service-accounts", "describe", account, own, "--format=value(email)")
        remedy = "create it (`gcloud iam service-accounts create`), or check that your account may see it"
        yield ask("service account", words, remedy)
    # In a shared VPC the network is another project's, as its full name says.
    network, subnetwork = launch.network or "default", launch.subnetwork
    remedy = f"give --network and --subnetwork; `gcloud compute networks list {own}` says what there is"
    words = ("compute", "networks", "describe", network, own, name)
    yield ask(f"network {network}", words, remedy, optional="/" in network)
    if subnetwork is not None:
        remedy = f"it must be in {region}: `gcloud compute networks subnets list --filter=region:{region} {own}`"
        words = ("compute", "networks", "subnets", "describe", subnetwork, f"--region={region}", own, name)
        yield ask(f"subnetwork {subnetwork}", words, remedy, optional="/" in subnetwork)


def _of_places(
    ask: Callable[..., CheckLine], launch: TpuLaunch, places: Mapping[str, str | None]
) -> Iterator[CheckLine]:
    region = launch.zone.rpartition("-")[0]

    def judge(output: str) -> Verdict:
        place = output.lower()
        return ("ok", f"in {place}") if same_region(place, region) else ("failed", f"in {place}, the slice in {region}")

    remote = {key: url for key, url in places.items() if url is not None and url.startswith("gs://")}
    buckets: dict[str, list[str]] = {}
    for key, url in remote.items():
        buckets.setdefault(url.removeprefix("gs://").partition("/")[0], []).append(key)
    remedy = f"the bucket must be there, readable, and in {region}: what crosses regions is slow and paid by the byte "
    remedy += f"(`gcloud storage buckets create gs://NAME --location={region}`)"
    for bucket, keys in buckets.items():
        words = ("storage", "buckets", "describe", f"gs://{bucket}", "--format=value(location)")
        yield ask(f"bucket {bucket} ({', '.join(keys)})", words, remedy, judge)
    for key in sorted(remote.keys() & {"data.train", "data.validation"}):
        url = remote[key]
        remedy = f"{url} holds no whole shard set; `tomat tokenize --output {url}` makes one"
        yield ask(key, ("storage", "ls", f"{url.rstrip('/')}/manifest.json"), remedy)


def unfit_places(places: Mapping[str, str | None], data_disk: bool = False) -> list[str]:
    """What would lose work on machines that are deleted: placeholders, and folders on them."""
    problems = []
    for key, place in places.items():
        on_disk = data_disk and key.startswith("data.") and (place or "").startswith(f"{DISK_FOLDER}/")
        if place is not None and place.startswith("gs://BUCKET"):
            found = f"{place}; put your bucket in the place of BUCKET"
        elif place is not None and "://" not in place and not on_disk:
            found = f"the folder '{place}', which other hosts do not see and which goes with the machine; give a bucket"
        else:
            continue
        problems.append(f"{key} is {found}, as in --{key} gs://my-bucket/...")
    return problems


def local_changes() -> list[str]:
    found = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    if found.returncode != 0:
        return ["this folder is no git checkout; `tomat launch` sends the commit that is checked out."]
    changed = len(found.stdout.splitlines())
    if not changed:
        return []
    return [f"{changed} file(s) differ from the last commit, which is what is sent; commit them or give --allow_dirty."]
