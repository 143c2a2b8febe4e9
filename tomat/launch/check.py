"""Checks before a launch: problems known here, and login, project, slice, quota, network and buckets at Google."""

import getpass
import ipaddress
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from rich.text import Text

from tomat.base.layout import COORDINATOR_PORT
from tomat.base.regions import same_region
from tomat.base.reporting import console
from tomat.launch.answers import Refusal, refusal
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
"""(Chip, spot) -> quota that the TPU API counts it in, as its refusals name it. Other chips have no quota check."""
IDENTITY_AWARE_PROXY = ipaddress.ip_network("35.235.240.0/20")
"""Where connections through it come from (https://cloud.google.com/iap/docs/using-tcp-forwarding)."""
TIMEOUT_SECONDS = 60
LOGIN_REMEDY = "run `gcloud auth login`"


@dataclass(frozen=True)
class CheckLine:
    name: str
    state: State
    """`unknown`: the question was not answered, so the launch may still succeed."""
    said: str
    remedy: str = ""
    """What to do about it; empty if the check is ok."""


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
    judge_failure: Callable[[str], Verdict | None] = lambda errors: None,
) -> CheckLine:
    """Run `gcloud` with `words`. `judge` gets its output, or `judge_failure` its error message if it fails. If an
    `optional` command fails, this says nothing about the launch: the line is `unknown`."""
    result = run(Command(name, ("gcloud", *words), TIMEOUT_SECONDS, quiet=True))
    if result.ok:
        state, said = judge(result.output.strip())
    else:
        failed: Verdict = ("unknown" if optional else "failed"), result.last_line
        state, said = judge_failure(result.errors or result.output) or failed
        if refusal(result.output + result.errors) is Refusal.LOGIN:
            state, remedy = "failed", LOGIN_REMEDY
    return CheckLine(name, state, said, "" if state == "ok" else remedy)


def run_checks(
    launch: TpuLaunch, places: Mapping[str, str | None], problems: Sequence[str], run: Callable[[Command], Result]
) -> Iterator[CheckLine]:
    """Yield a line for each of `problems`, which are known already, then run the checks one by one and yield a line
    for each. Without a login or a project the rest is not run. `places` are the URLs of data and output, by key."""
    yield from (CheckLine("configuration", "failed", problem) for problem in problems)
    for line in _questions(partial(_ask, run), launch, places):
        yield line
        if line.remedy == LOGIN_REMEDY:  # gcloud lists an expired login as active until it asks Google
            return


def _questions(
    ask: Callable[..., CheckLine], launch: TpuLaunch, places: Mapping[str, str | None]
) -> Iterator[CheckLine]:
    words = ("auth", "list", "--filter=status:ACTIVE", "--format=value(account)")
    yield ask("login", words, LOGIN_REMEDY, _something("active account"))
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
    return lambda output: ("ok", output) if output and output != "(unset)" else ("failed", f"no {what}")


def _of_the_slice(ask: Callable[..., CheckLine], launch: TpuLaunch, own: str) -> Iterator[CheckLine]:
    zone, kind, api = f"--zone={launch.zone}", accelerator_type(launch.slice), "tpu.googleapis.com"
    words = ("services", "list", "--enabled", f"--filter=config.name={api}", "--format=value(config.name)", own)
    remedy = f"run `gcloud services enable {api} {own}`"
    yield ask("TPU API", words, remedy, _something(f"{api} among the enabled services"))
    yield ask(
        f"{kind} in {launch.zone}",
        # `tpu-vm` is needed: without it gcloud asks version 1 of the API, which is for the older TPU nodes.
        ("compute", "tpus", "tpu-vm", "accelerator-types", "describe", kind, zone, own, "--format=value(type)"),
        f"`gcloud compute tpus tpu-vm accelerator-types list {zone}` says what the zone has",
    )
    yield ask(
        "software of the VM",
        ("compute", "tpus", "tpu-vm", "versions", "describe", launch.software, zone, own, "--format=value(version)"),
        f"`gcloud compute tpus tpu-vm versions list {zone}` says what there is; give --runtime_version",
    )
    quota = QUOTA_IDS.get((launch.slice.chip.name, launch.spot))
    if quota is not None and not launch.reserved:
        words = ("beta", "quotas", "info", "describe", quota, f"--service={api}", own, "--format=json")
        judge = partial(_judge_quota, launch=launch)
        remedy = f"ask for more of {quota} in {launch.zone} (https://cloud.google.com/tpu/docs/quota); this check "
        remedy += "needs gcloud's beta component and cloudquotas.googleapis.com"
        yield ask("quota", words, remedy, judge, optional=True)
        if (account := launch.service_account) is not None:
            remedy = "for this the account needs roles/cloudquotas.viewer, and you need "
            remedy += "roles/iam.serviceAccountTokenCreator on it; a launch from a machine that acts as you needs none"
            yield ask(f"quota as {account}", (*words, _as(account)), remedy, judge, optional=True)


def _as(account: str) -> str:
    return f"--impersonate-service-account={account}"


def _judge_quota(output: str, launch: TpuLaunch) -> Verdict:
    """Compare the quota of the launch's zone with its chips (for v5p, Google counts TensorCores in some projects)."""
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
        project, member = own.removeprefix("--project="), f"serviceAccount:{account}"
        words = ("projects", "get-iam-policy", project, "--flatten=bindings[].members")
        words += (f"--filter=bindings.members:{member}", "--format=value(bindings.role)")
        remedy = "hosts need it to give the slice back if no launcher does: `gcloud projects add-iam-policy-binding "
        remedy += f"{project} --member={member} --role=roles/tpu.admin`, or a role of your own with tpu.nodes.delete"
        yield ask("right to give back", words, remedy, _may_delete, optional=True)
    words = ("compute", "project-info", "describe", own, name)
    remedy = "gcloud asks for these before each ssh: you need compute.projects.get, which roles/compute.viewer has"
    yield ask("ssh keys of the project", words, remedy)
    # In a shared VPC the network belongs to another project, so its name is a full one with "/".
    network, subnetwork = launch.network or "default", launch.subnetwork
    remedy = f"give --network and --subnetwork; `gcloud compute networks list {own}` says what there is"
    words = ("compute", "networks", "describe", network, own, name)
    yield ask(f"network {network}", words, remedy, optional="/" in network)
    if subnetwork is not None:
        remedy = f"it must be in {region}: `gcloud compute networks subnets list --filter=region:{region} {own}`"
        words = ("compute", "networks", "subnets", "describe", subnetwork, f"--region={region}", own, name)
        yield ask(f"subnetwork {subnetwork}", words, remedy, optional="/" in subnetwork)
    yield from _of_the_firewall(ask, launch, own, network)


def _of_the_firewall(ask: Callable[..., CheckLine], launch: TpuLaunch, own: str, network: str) -> Iterator[CheckLine]:
    """Check that hosts can reach one another and gcloud the hosts. If the zone has a TPU VM, try ssh on it."""
    name = network.rpartition("/")[2]
    words = ("compute", "firewall-rules", "list", f"--filter=network~/{name}$", own, "--format=json")
    asked = [(22, "ssh to the hosts", "the address of this machine, or 0.0.0.0/0")]
    if launch.slice.n_hosts > 1:
        asked.append((COORDINATOR_PORT, "the hosts to one another", "SUBNETWORK_RANGE"))
    for port, whom, sources in asked:
        ports = "22" if port == 22 else "8470-8476"
        remedy = f"let {whom} pass: `gcloud compute firewall-rules create tomat-{port} --network={name} "
        remedy += f"--allow=tcp:{ports} --source-ranges=...` ({sources}) {own}"
        outside = port == 22 and not launch.internal_ips
        judge = partial(_judge_firewall, port=port, account=launch.service_account, from_outside=outside)
        yield ask(f"firewall, tcp {port} ({whom})", words, remedy, judge, optional="/" in network)
    words = ("compute", "tpus", "tpu-vm", "list", f"--zone={launch.zone}", own, "--filter=state:READY")
    found = ask("a TPU VM to try ssh on", (*words, "--format=value(name.basename())", "--limit=1"), "", optional=True)
    if found.state != "ok" or not found.said:
        said = "not tried: there is no TPU VM in the zone" if found.state == "ok" else f"not tried: {found.said}"
        remedy = "the launch tries it when it installs; firewall and OS Login decide it"
        if getpass.getuser() == "root":  # https://cloud.google.com/compute/docs/connect/root-ssh
            remedy += ". You are root here, whom Google's images refuse unless OS Login gives you another name: start "
            remedy += "the launch as another user"
        yield CheckLine("ssh", "unknown", said, remedy)
        return
    reach = ("--internal-ip",) if launch.internal_ips else ()
    words = ("compute", "tpus", "tpu-vm", "ssh", found.said, f"--zone={launch.zone}", own, "--worker=0", *reach)
    remedy = f"`gcloud compute tpus tpu-vm ssh {found.said} --zone={launch.zone} {own} --troubleshoot` says more"
    words = (*words, "--command=echo reached")
    # The very first ssh creates a key and prints that, so only the last line of the output counts.
    yield ask(f"ssh to {found.said}", words, remedy, lambda output: ("ok", output.rpartition("\n")[2]))


def _judge_firewall(output: str, port: int, account: str | None, from_outside: bool) -> Verdict:
    """Whether the rules of a network allow tcp to `port` of a TPU VM; `from_outside`: from outside of the network, like
    ssh from here. Of the matching rules the one with the smallest priority number decides; at equal priority, a rule
    that denies (https://cloud.google.com/firewall/docs/firewalls)."""
    try:
        rules = [rule for rule in json.loads(output or "[]") if _fits(rule, port, account)]
        rules = [rule for rule in rules if not _is_of_others(rule, from_outside)]
    except (ValueError, AttributeError, TypeError):
        return "unknown", "an answer that is not understood"
    if not rules:
        return "failed", f"no rule lets tcp {port} in"
    first = min(rules, key=lambda rule: (int(rule.get("priority", 1000)), "allowed" in rule))
    if "allowed" not in first:
        return "failed", f"rule {first.get('name')} denies tcp {port}"
    sources = first.get("sourceRanges") or first.get("sourceTags") or first.get("sourceServiceAccounts") or ["anywhere"]
    return "ok", f"rule {first.get('name')}, from {', '.join(sources)}"


def _is_of_others(rule: Mapping[str, Any], from_outside: bool) -> bool:
    """Whether a rule is only for sources that no connection of a launch comes from: Identity-Aware Proxy, which its ssh
    does not use, and, `from_outside`, a network's own addresses, like Google's rule `default-allow-internal`."""
    sources = [ipaddress.ip_network(source, strict=False) for source in rule.get("sourceRanges") or ()]
    return bool(sources) and all(one == IDENTITY_AWARE_PROXY or (from_outside and one.is_private) for one in sources)


def _fits(rule: Mapping[str, Any], port: int, account: str | None) -> bool:
    """Whether a firewall rule applies to tcp on a port of a TPU VM. TPU VMs have no tags."""
    if rule.get("disabled") or rule.get("direction", "INGRESS") != "INGRESS" or rule.get("targetTags"):
        return False
    if (accounts := rule.get("targetServiceAccounts")) and account not in accounts:
        return False
    for one in (*rule.get("allowed", ()), *rule.get("denied", ())):
        if one.get("IPProtocol") == "all":
            return True
        spans = [[int(end) for end in span.split("-")] for span in one.get("ports", ["0-65535"])]
        if one.get("IPProtocol") in ("tcp", "6") and any(span[0] <= port <= span[-1] for span in spans):
            return True
    return False


def _may_delete(output: str) -> Verdict:
    roles = output.split()
    if {"roles/tpu.admin", "roles/editor", "roles/owner"} & set(roles):
        return "ok", ", ".join(roles)
    if any(not role.startswith("roles/") for role in roles):
        return "unknown", f"{', '.join(roles)}; a role of your own must have tpu.nodes.delete"
    return "failed", f"{', '.join(roles) or 'no role'} in the project, and none may delete a slice"


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
    remedy = f"the bucket must exist, be readable, and be in {region}: crossing regions is slow and paid by the byte "
    remedy += f"(`gcloud storage buckets create gs://NAME --location={region}`)"
    for bucket, keys in buckets.items():
        words = ("storage", "buckets", "describe", f"gs://{bucket}", "--format=value(location)")
        yield ask(f"bucket {bucket} ({', '.join(keys)})", words, remedy, judge)
    if (account := launch.service_account) is not None:
        yield from _of_the_account(ask, account, remote)
    for key in sorted(remote.keys() & {"data.train", "data.validation"}):
        url = remote[key]
        remedy = f"{url} holds no whole shard set; `tomat tokenize --output {url}` makes one"
        yield ask(key, ("storage", "ls", f"{url.rstrip('/')}/manifest.json"), remedy)


def _of_the_account(ask: Callable[..., CheckLine], account: str, remote: Mapping[str, str]) -> Iterator[CheckLine]:
    """Check that the hosts' account can read what the run reads and write where it writes. The write check sends an
    object with a condition that is never fulfilled: Google refuses it for the condition, or for a missing right."""

    def judge(errors: str, *, writes: bool) -> Verdict | None:
        last = Result(1, "", errors).last_line
        if "failed to impersonate" in errors.lower():  # the bare word is in every failure of an impersonated command
            return "unknown", f"you may not act as {account} to try it"
        if writes and any(words in errors for words in ("HTTPError 412", "pre-conditions", "PreconditionFailed")):
            return "ok", "may write"
        return ("failed", last) if "403" in errors or "permission" in errors.lower() else ("unknown", last)

    token = f"to try it: `gcloud iam service-accounts add-iam-policy-binding {account} --member=user:YOU "
    token += "--role=roles/iam.serviceAccountTokenCreator`"
    for key, url in sorted(remote.items()):
        bucket = f"gs://{url.removeprefix('gs://').partition('/')[0]}"
        role = "storage.objectViewer" if key.startswith("data.") else "storage.objectUser"
        remedy = f"`gcloud storage buckets add-iam-policy-binding {bucket} --member=serviceAccount:{account} "
        remedy += f"--role=roles/{role}`; {token}"
        words, reads = ("storage", "ls", f"{bucket}/", _as(account)), partial(judge, writes=False)
        yield ask(f"{key} as {account}, read", words, remedy, lambda _: ("ok", "may read"), judge_failure=reads)
        if not key.startswith("data."):
            words = ("storage", "cp", "-", f"{url.rstrip('/')}/tomat-check", "--if-generation-match=1", _as(account))
            writes = partial(judge, writes=True)
            yield ask(f"{key} as {account}, write", words, remedy, lambda _: ("ok", "may write"), judge_failure=writes)


def unfit_places(places: Mapping[str, str | None], data_disk: bool = False) -> list[str]:
    """Problems with places that would lose work when the machines are deleted: placeholders and local folders."""
    problems = []
    for key, place in places.items():
        on_disk = data_disk and key.startswith("data.") and (place or "").startswith(f"{DISK_FOLDER}/")
        if place is not None and place.startswith("gs://BUCKET"):
            found = f"{place}; put your bucket in the place of BUCKET"
        elif place is not None and "://" not in place and not on_disk:
            found = f"the folder '{place}', which other hosts do not see and is lost with the machine; give a bucket"
        else:
            continue
        problems.append(f"{key} is {found}, as in --{key} gs://my-bucket/...")
    return problems
