"""Google's APIs as the real gcloud asks them: TPU slices whose hosts are folders of this machine, a bucket, a project.

`Google` answers as the public references of the REST APIs say (cloud.google.com/tpu/docs/reference/rest/v2, of Compute
Engine, Cloud Storage, IAM, Resource Manager, Service Usage, Cloud Quotas); what it answered and was asked can be held
against gcloud's own messages of these APIs. gcloud finds it by its properties for endpoints; `ssh` and `scp` are a
stand-in that runs commands in the folders of the hosts.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gcs_server import BucketServer, Handler

N_HOSTS = {"v6e-4": 1, "v5p-16": 2}
PROJECT, ACCOUNT, ZONE = "project-1", "me@example.org", "us-east5-b"
APIS = ("TPU", "COMPUTE", "STORAGE", "IAM", "IAMCREDENTIALS", "CLOUDRESOURCEMANAGER", "SERVICEUSAGE", "CLOUDQUOTAS")
TPU_TYPES = "type.googleapis.com/google.cloud.tpu.v2"
FIRST_ID = 10**18
HOST_TOKEN = "token-of-a-host"
CREATED = "2026-11-01T00:00:00Z"

SSH = """#!{python} -S
# ssh or scp to hosts that are folders: the options that gcloud gives, then where, and what.
import json, os, pathlib, subprocess, sys
words, options, hosts = sys.argv[1:], [], pathlib.Path("{hosts}")
while words and words[0].startswith("-"):
    options.append(words.pop(0))
    if options[-1] in ("-i", "-o", "-P", "-p") and not (sys.argv[0].endswith("scp") and options[-1] == "-p"):
        options.append(words.pop(0))

def home_of(place):
    address = hosts / place.partition("@")[2]
    if not address.is_dir():
        print(f"ssh: connect to host {{address.name}} port 22: Connection refused", file=sys.stderr)
        sys.exit(255)
    return address.resolve()

if sys.argv[0].endswith("scp"):
    places = [str(home_of(word.partition(":")[0]) / word.partition(":")[2]) if ":" in word else word for word in words]
    sys.exit(subprocess.run(["cp", *(["-p"] if "-p" in options else []), *places]).returncode)
home = home_of(words[0])
here = {{name: value for name, value in os.environ.items() if not name.startswith("CLOUDSDK_")}}
environment = here | json.loads(pathlib.Path("{folder}/host.json").read_text()) | {{"HOME": str(home)}}
sys.exit(subprocess.run(["bash", "-c", " ".join(words[2:])], cwd=home, env=environment).returncode)
"""

HELD_AGAINST = """
import json, sys
from importlib import import_module
sys.path[:0] = [f"{sys.argv[1]}/lib", f"{sys.argv[1]}/lib/third_party"]
from apitools.base.py import encoding
from apitools.base.protorpclite import messages

def unknown(message, path):
    found = [f"{path}.{name}" for name in message.all_unrecognized_fields()]
    for field in message.all_fields():
        value = getattr(message, field.name)
        if isinstance(field, messages.MessageField):
            for one in value if isinstance(value, list) else [value]:
                found += unknown(one, f"{path}.{field.name}") if isinstance(one, messages.Message) else []
    return found

for line in sys.stdin:
    api, version, kind, body = json.loads(line)
    module = import_module(f"googlecloudsdk.generated_clients.apis.{api}.{version}.{api}_{version}_messages")
    print(*unknown(encoding.JsonToMessage(getattr(module, kind), json.dumps(body)), f"{api} {kind}"), sep="\\n")
"""
"""Lists the fields and values of JSON that gcloud's messages of an API do not have."""


class GoogleError(Exception):
    def __init__(self, code: int, status: str, message: str) -> None:
        super().__init__(message)
        self.code, self.body = code, {"error": {"code": code, "message": message, "status": status}}


def not_found(name: str) -> GoogleError:
    return GoogleError(404, "NOT_FOUND", f"Resource '{name}' was not found")


class GoogleHandler(Handler):
    server: "Google"

    def _route(self, method: str, path: str, silent: bool = False) -> None:
        self.silent = silent
        server = self.server
        with server.lock:
            server.lines.append(f"{method} {self.path}")
            if self.headers.get("Authorization") == f"Bearer {HOST_TOKEN}":
                server.by_hosts.append(server.lines[-1])
            said = server.scripted(f"{method} {self.path}")
            if said is None and ("/storage/v1/" in path or "computeMetadata" in path):
                return super()._route(method, path, silent)
            try:
                code, body = said or (200, self._answer_of(method, urllib.parse.unquote(path)))
            except GoogleError as error:
                code, body = error.code, error.body
        self._answer(code, json.dumps(body).encode(), headers={"Content-Type": "application/json"})

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = Handler.do_GET

    def _answer_of(self, method: str, path: str) -> Any:
        body = json.loads(self.content) if self.content.startswith(b"{") else {}
        for pattern, kind, api, answer in ROUTES:
            if (found := re.fullmatch(pattern, f"{method} {path}")) is not None:
                said = answer(self.server, found, body, self.query)
                if kind:
                    name, _, version = api.partition(" ")
                    self.server.exchanged.append((name, version, kind, said))
                return said
        raise GoogleError(404, "NOT_FOUND", f"no such method here: {method} {path}")


class Google(BucketServer):
    """Its state is that of a project with the TPU API enabled; tests change it, and script answers."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.RequestHandlerClass = GoogleHandler
        self.folder = folder
        self.hosts = folder / "addresses"
        """Of the hosts, as links to their home directories, `machines/N/host-I`."""
        self.hosts.mkdir(parents=True)
        self.nodes: dict[str, dict[str, Any]] = {}
        """By full name, as the API's `Node`."""
        self.queued: dict[str, dict[str, Any]] = {}
        """By full name, as the API's `QueuedResource`."""
        self.operations: dict[str, dict[str, Any]] = {}
        self.script: list[tuple[str, int, Any]] = []
        """Pattern of a request, and the status and JSON of its answer, each for one request."""
        self.lines: list[str] = []
        """Method and URL of every request."""
        self.by_hosts: list[str] = []
        """Of those that were made as the hosts' service account."""
        self.worker_zone, self.machine = ZONE, METADATA
        hosts = "GCE_METADATA_HOST", "GCE_METADATA_IP", "GCE_METADATA_ROOT"
        self.host_environment = self.endpoints | dict.fromkeys(hosts, self.url.removeprefix("http://"))
        (folder / "host.json").write_text(json.dumps(self.host_environment))
        self.exchanged: list[tuple[str, str, str, Any]] = []
        """API, version, message and JSON, of requests and answers."""
        self._born = 0

    @property
    def endpoints(self) -> dict[str, str]:
        return {f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{api}": f"{self.url}/" for api in APIS}

    def scripted(self, line: str) -> tuple[int, Any] | None:
        for at, (pattern, code, body) in enumerate(self.script):
            if re.search(pattern, line):
                del self.script[at]
                return code, body
        return None

    def operation(self, parent: str, verb: str, target: str, **ends: Any) -> dict[str, Any]:
        """One that is done at the first look; `ends`: its `response` or `error`."""
        name = f"{parent}/operations/operation-{len(self.operations)}"
        metadata = {"@type": f"{TPU_TYPES}.OperationMetadata", "createTime": CREATED, "target": target, "verb": verb}
        begun = {"name": name, "metadata": {**metadata, "cancelRequested": False, "apiVersion": "v2"}, "done": False}
        self.operations[name] = {**begun, "done": True, **ends}
        return begun

    def create(self, name: str, node: dict[str, Any]) -> dict[str, Any]:
        """A slice that is READY, its hosts running their start-up script."""
        self._born += 1
        count = N_HOSTS[node["acceleratorType"]]
        inside = [f"10.202.{self._born}.{host + 2}" for host in range(count)]
        outside = [f"198.51.{self._born}.{host + 2}" for host in range(count)]
        has_outside = node["networkConfig"]["enableExternalIps"]
        endpoints = [
            {"ipAddress": here, "port": 8470, **({"accessConfig": {"externalIp": there}} if has_outside else {})}
            for here, there in zip(inside, outside, strict=True)
        ]
        made = {"name": name, "state": "READY", "health": "HEALTHY", "apiVersion": "V2", "createTime": CREATED,
                "id": str(FIRST_ID + self._born), "networkEndpoints": endpoints}  # fmt: skip
        self.nodes[name] = {**node, **made}
        for host, addresses in enumerate(zip(inside, outside, strict=True)):
            home = self.folder / "machines" / str(self._born) / f"host-{host}"
            home.mkdir(parents=True)
            for address in addresses:
                (self.hosts / address).symlink_to(home)
            self._boot(home, node.get("metadata", {}).get("startup-script", ""))
        return self.nodes[name]

    def _boot(self, home: Path, script: str) -> None:
        """As a host does, with the host's folders in the place of those of the system."""
        system = home.parent / "system" / home.name
        system.mkdir(parents=True)
        script = script.replace("/var/lib/", f"{system}/").replace("/home/*/", f"{home}/")
        # systemd gives a service of root no HOME; the folder would be root's of this machine.
        environment = {"PATH": SYSTEM_PATH, "CLOUDSDK_CONFIG": f"{system}/gcloud", **self.host_environment}
        with (system / "startup.log").open("w") as log:
            streams = {"stdout": log, "stderr": log, "start_new_session": True}
            booted = subprocess.Popen(["bash", "-c", script], cwd="/", env=environment, **streams)
        (system / "startup.pid").write_text(str(booted.pid))

    def take_away(self) -> None:
        """Every slice, as another customer's need does."""
        with self.lock:
            for node in self.nodes.values():
                node["state"] = "PREEMPTED"
                self._end(node)

    def _end(self, node: dict[str, Any]) -> None:
        machine = self.folder / "machines" / str(int(node["id"]) - FIRST_ID)
        for path in (*machine.glob("host-*/tomat-launch/pid"), *machine.glob("system/*/startup.pid")):
            with suppress(OSError, ValueError):
                os.killpg(int(path.read_text()), signal.SIGKILL)
        shutil.rmtree(machine, ignore_errors=True)

    def delete(self, name: str) -> dict[str, Any]:
        node = self.nodes.pop(name, None)
        if node is None:
            raise not_found(name)
        self._end(node)
        empty = {"@type": "type.googleapis.com/google.protobuf.Empty"}
        return self.operation(name.partition("/nodes/")[0], "delete", name, response=empty)

    def close(self) -> None:
        for node in self.nodes.values():
            self._end(node)
        self.nodes.clear()


def default_firewall() -> list[dict[str, Any]]:
    """What Google makes with the network called default (cloud.google.com/firewall/docs/firewalls)."""
    network = f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/global/networks/default"
    inside = [{"IPProtocol": "tcp", "ports": ["0-65535"]}, {"IPProtocol": "udp", "ports": ["0-65535"]},
              {"IPProtocol": "icmp"}]  # fmt: skip
    rules = (
        ("default-allow-internal", inside, "10.128.0.0/9"),
        ("default-allow-ssh", [{"IPProtocol": "tcp", "ports": ["22"]}], "0.0.0.0/0"),
        ("default-allow-icmp", [{"IPProtocol": "icmp"}], "0.0.0.0/0"),
    )
    return [
        {"kind": "compute#firewall", "name": name, "network": network, "priority": 65534, "direction": "INGRESS",
         "disabled": False, "allowed": allowed, "sourceRanges": [source], "logConfig": {"enable": False}}
        for name, allowed, source in rules
    ]  # fmt: skip


Route = Callable[[Google, re.Match[str], dict[str, Any], dict[str, str]], Any]


def _create_node(google: Google, found: re.Match[str], node: dict[str, Any], query: dict[str, str]) -> Any:
    google.exchanged.append(("tpu", "v2", "Node", node))
    name = f"{found[1]}/nodes/{query['nodeId']}"
    if name in google.nodes:
        raise GoogleError(409, "ALREADY_EXISTS", f"Resource '{name}' already exists")
    made = google.create(name, node)
    return google.operation(found[1], "create", name, response={"@type": f"{TPU_TYPES}.Node", **made})


def _node(google: Google, found: re.Match[str], body: dict[str, Any], query: dict[str, str]) -> Any:
    if found[1] not in google.nodes:
        raise not_found(found[1])
    return google.nodes[found[1]]


def _update_node(google: Google, found: re.Match[str], body: dict[str, Any], query: dict[str, str]) -> Any:
    google.exchanged.append(("tpu", "v2", "Node", body))
    node = _node(google, found, body, query)
    node.update({key: body[key] for key in query["updateMask"].split(",")})
    response = {"@type": f"{TPU_TYPES}.Node", **node}
    return google.operation(found[1].partition("/nodes/")[0], "update", found[1], response=response)


def _guest_attributes(google: Google, found: re.Match[str], body: dict[str, Any], query: dict[str, str]) -> Any:
    google.exchanged.append(("tpu", "v2", "GetGuestAttributesRequest", body))
    endpoints = _node(google, found, body, query)["networkEndpoints"]
    wanted = [int(one) for one in body.get("workerIds", []) if one] or range(len(endpoints))
    keys = [{"namespace": "hostkeys", "key": "ssh-ed25519", "value": f"AAAAC3Nz{host:06d}"} for host in wanted]
    return {"guestAttributes": [{"queryPath": "", "queryValue": {"items": [key]}} for key in keys]}


def _queue(google: Google, found: re.Match[str], body: dict[str, Any], query: dict[str, str]) -> Any:
    google.exchanged.append(("tpu", "v2", "QueuedResource", body))
    name = f"{found[1]}/queuedResources/{query['queuedResourceId']}"
    if name in google.queued:
        raise GoogleError(409, "ALREADY_EXISTS", f"Resource '{name}' already exists")
    state = {"state": "WAITING_FOR_RESOURCES", "stateInitiator": "SERVICE"}
    google.queued[name] = {**body, "name": name, "createTime": CREATED, "state": state}
    response = {"@type": f"{TPU_TYPES}.QueuedResource", **google.queued[name]}
    return google.operation(found[1], "create", name, response=response)


def _queued(google: Google, found: re.Match[str], body: dict[str, Any], query: dict[str, str]) -> Any:
    if found[1] not in google.queued:
        raise not_found(found[1])
    return google.queued[found[1]]


def _unqueue(google: Google, found: re.Match[str], body: dict[str, Any], query: dict[str, str]) -> Any:
    queued = _queued(google, found, body, query)
    spec = queued["tpu"]["nodeSpec"][0]
    node = f"{spec['parent']}/nodes/{spec['nodeId']}"
    if node in google.nodes:
        if query.get("force") != "True":
            raise GoogleError(400, "FAILED_PRECONDITION", "a queued resource with nodes is deleted by force alone")
        google.delete(node)
    del google.queued[found[1]]
    empty = {"@type": "type.googleapis.com/google.protobuf.Empty"}
    return google.operation(spec["parent"], "delete", found[1], response=empty)


def _quota(google: Google, found: re.Match[str], body: dict[str, Any], query: dict[str, str]) -> Any:
    info = {"dimensions": {"zone": ZONE}, "details": {"value": "64"}, "applicableLocations": [ZONE]}
    other = {"details": {"value": "0"}, "applicableLocations": ["us-central1-a"]}
    return {"name": found[1], "quotaId": found[2], "service": "tpu.googleapis.com", "containerType": "PROJECT",
            "dimensions": ["zone"], "dimensionsInfos": [info, other]}  # fmt: skip


def _bindings(google: Google, found: re.Match[str], body: dict[str, Any], query: dict[str, str]) -> Any:
    theirs = {"role": "roles/owner", "members": [f"user:{ACCOUNT}"]}
    trainers = {"role": "roles/tpu.admin", "members": [f"serviceAccount:{TRAINER}"]}
    return {"version": 1, "etag": "BwX=", "bindings": [theirs, trainers]}


def _impersonated(google: Google, found: re.Match[str], body: dict[str, Any], query: dict[str, str]) -> Any:
    return {"accessToken": "token-of-the-account", "expireTime": "2099-01-01T00:00:00Z"}


SCOPE = "https://www.googleapis.com/auth/cloud-platform"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TRAINER = f"trainer@{PROJECT}.iam.gserviceaccount.com"
METADATA = {
    "service-accounts/": f"default/\n{TRAINER}/\n",
    "service-accounts/default/email": TRAINER,
    f"service-accounts/{TRAINER}/email": TRAINER,
    f"service-accounts/{TRAINER}/": json.dumps({"email": TRAINER, "scopes": [SCOPE], "aliases": ["default"]}),
    f"service-accounts/{TRAINER}/token": json.dumps({"access_token": HOST_TOKEN, "expires_in": 3599}),
}
"""What a host hears of its service account (cloud.google.com/compute/docs/metadata/predefined-metadata-keys)."""
_PLACE = r"(projects/[^/]+/locations/[^/]+)"
_NODE, _QUEUED = rf"({_PLACE[1:-1]}/nodes/[^/:]+)", rf"({_PLACE[1:-1]}/queuedResources/[^/:]+)"
_SERVICE = {"name": "projects/1/services/tpu.googleapis.com", "parent": "projects/1", "state": "ENABLED",
            "config": {"name": "tpu.googleapis.com", "title": "Cloud TPU API"}}  # fmt: skip
_COMMON = {"kind": "compute#metadata", "fingerprint": "YQ==", "items": []}

ROUTES: Sequence[tuple[str, str, str, Route]] = (
    (rf"POST /v2/{_PLACE}/nodes", "Operation", "tpu v2", _create_node),
    (rf"GET /v2/{_PLACE}/nodes", "ListNodesResponse", "tpu v2", lambda g, f, b, q: {"nodes": list(g.nodes.values())}),
    (rf"GET /v2/{_NODE}", "Node", "tpu v2", _node),
    (rf"PATCH /v2/{_NODE}", "Operation", "tpu v2", _update_node),
    (rf"DELETE /v2/{_NODE}", "Operation", "tpu v2", lambda g, f, b, q: g.delete(f[1])),
    (rf"POST /v2/{_NODE}:getGuestAttributes", "GetGuestAttributesResponse", "tpu v2", _guest_attributes),
    (rf"GET /v2/({_PLACE[1:-1]}/operations/.+)", "Operation", "tpu v2", lambda g, f, b, q: g.operations[f[1]]),
    (rf"POST /v2/{_PLACE}/queuedResources", "Operation", "tpu v2", _queue),
    (rf"GET /v2/{_QUEUED}", "QueuedResource", "tpu v2", _queued),
    (rf"DELETE /v2/{_QUEUED}", "Operation", "tpu v2", _unqueue),
    (rf"GET /v2/({_PLACE[1:-1]}/runtimeVersions/([^/]+))", "RuntimeVersion", "tpu v2",
     lambda g, f, b, q: {"name": f[1], "version": f[2]}),
    (rf"GET /v2/({_PLACE[1:-1]}/acceleratorTypes/([^/]+))", "AcceleratorType", "tpu v2",
     lambda g, f, b, q: {"name": f[1], "type": f[2]}),
    (r"GET /v1/projects/[^/]+/services", "ListServicesResponse", "serviceusage v1",
     lambda g, f, b, q: {"services": [_SERVICE]}),
    (r"GET /v1(?:beta)?/(projects/[^/]+/locations/global/services/tpu.googleapis.com/quotaInfos/(\w+))", "QuotaInfo",
     "cloudquotas v1", _quota),
    (r"GET /v1/projects/([^/]+)/serviceAccounts/([^/:]+)", "ServiceAccount", "iam v1",
     lambda g, f, b, q: {"name": f[0][8:], "projectId": PROJECT, "email": f[2], "uniqueId": "1"}),
    (r"POST /v1/projects/-/serviceAccounts/([^/:]+):generateAccessToken", "GenerateAccessTokenResponse",
     "iamcredentials v1", _impersonated),
    (r"GET /v1/projects/([^/:]+)", "Project", "cloudresourcemanager v1",
     lambda g, f, b, q: {"projectId": f[1], "projectNumber": "1", "lifecycleState": "ACTIVE", "name": f[1]}),
    (r"POST /v1/projects/([^/:]+):getIamPolicy", "Policy", "cloudresourcemanager v1", _bindings),
    (r"GET /compute/v1/projects/([^/]+)", "Project", "compute v1",
     lambda g, f, b, q: {"kind": "compute#project", "name": f[1], "commonInstanceMetadata": _COMMON}),
    (r"GET /compute/v1/projects/[^/]+/global/networks/([^/]+)", "Network", "compute v1",
     lambda g, f, b, q: {"kind": "compute#network", "name": f[1], "autoCreateSubnetworks": True}),
    (r"GET /compute/v1/projects/[^/]+/regions/([^/]+)/subnetworks/([^/]+)", "Subnetwork", "compute v1",
     lambda g, f, b, q: {"kind": "compute#subnetwork", "name": f[2], "ipCidrRange": "10.202.0.0/20"}),
    (r"GET /compute/v1/projects/[^/]+/global/firewalls", "FirewallList", "compute v1",
     lambda g, f, b, q: {"kind": "compute#firewallList", "id": "1", "items": default_firewall()}),
    (r"POST /token", "", "", lambda g, f, b, q: {"access_token": "token", "expires_in": 3600, "token_type": "Bearer"}),
)  # fmt: skip
"""Request, the message of its answer and the API's version, and the answer."""


@dataclass(frozen=True)
class Gcloud:
    """The real one, logged in at a `Google`."""

    google: Google
    program: str
    environment: dict[str, str]

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **self.environment}
        return subprocess.run([self.program, *words], input="", text=True, capture_output=True, env=environment)

    def unlike_the_api(self) -> list[str]:
        """Fields and values of all that was asked and answered that gcloud's messages of the APIs do not have."""
        root = Path(self.program).resolve().parents[1]
        lines = "\n".join(json.dumps(one) for one in self.google.exchanged)
        words = [sys.executable, "-c", HELD_AGAINST, str(root)]
        done = subprocess.run(words, input=lines, text=True, capture_output=True, check=True)
        return sorted(set(done.stdout.split("\n")) - {""})


@contextmanager
def real_gcloud(program: str, folder: Path, login: Path) -> Iterator[Gcloud]:
    """`program` is gcloud; its login, keys and configuration are below `folder`, and so are the hosts. `login` keeps
    the configuration of one who has logged in, for the next time."""
    google, programs = Google(folder), folder / "bin"
    programs.mkdir()
    (programs / "gcloud").symlink_to(Path(program).resolve())
    for name in ("ssh", "scp"):
        text = SSH.format(python=sys.executable, hosts=google.hosts, folder=folder)
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    home = folder / "laptop"
    home.mkdir()
    environment = google.endpoints | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "CLOUDSDK_CONFIG": str(folder / "config"),
        "CLOUDSDK_AUTH_TOKEN_HOST": f"{google.url}/token",
        "CLOUDSDK_CORE_PROJECT": PROJECT,
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "1",
        "SSH_AUTH_SOCK": "",
    }
    with google, ThreadPoolExecutor(1) as thread:
        thread.submit(google.serve_forever)
        try:
            made = Gcloud(google, program, environment)
            if not login.exists():
                made("auth", "activate-refresh-token", ACCOUNT, "refresh-token").check_returncode()
                shutil.copytree(folder / "config", login)
            else:
                shutil.copytree(login, folder / "config")
            yield made
        finally:
            google.close()
            google.closed.set()
            google.shutdown()
