"""The gcloud commands of one launch on a TPU slice: pack, create, install, start, ask, stop, collect, delete.

Flags as in https://cloud.google.com/sdk/gcloud/reference/compute/tpus/tpu-vm and .../queued-resources (October 2025).
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tomat.base.errors import TomatError
from tomat.base.reporting import counted, write_text
from tomat.hardware.chips import Slice, slice_named
from tomat.launch import remote
from tomat.launch.command import Command
from tomat.launch.pack import Pack
from tomat.launch.record import NOW_FILE, RECORD_FILE
from tomat.launch.remote import ENV_FILE, FOLDER, SCRIPT_FILE, watchdog_script

RUNTIME_VERSIONS: Mapping[str, str] = {
    "v6e": "v2-alpha-tpuv6e",
    "v5p": "v2-alpha-tpuv5",
    "v5e": "v2-alpha-tpuv5-lite",
    "v4": "tpu-ubuntu2204-base",
}
"""Chip -> software of a TPU VM for JAX (https://cloud.google.com/tpu/docs/runtimes). TPU7x is missing because it is
only offered through GKE (https://cloud.google.com/tpu/docs/queued-resources)."""

LABEL = "tomat_launch"
"""Key of the label that says which run and login a slice belongs to."""
STOP_SHELL_SECONDS = 15
"""Time that `stop` gives a training beyond its own grace period, for the shell and slow disks."""


def accelerator_type(tpu_slice: Slice) -> str:
    """The slice's name in the TPU API, which calls v5e `v5litepod` (https://cloud.google.com/tpu/docs/v5e)."""
    return tpu_slice.name.replace("v5e-", "v5litepod-")


def runtime_version(tpu_slice: Slice) -> str:
    version = RUNTIME_VERSIONS.get(tpu_slice.chip.name) if tpu_slice.libtpu_topology is not None else None
    if version is None:
        offered = ", ".join(f"{chip}-N" for chip in RUNTIME_VERSIONS)
        said = f"slice is '{tpu_slice.name}', which is not offered as TPU VMs"
        raise TomatError(f"{said}; expected one of {offered} (TPU7x needs GKE; GPUs need no `tomat launch`).")
    return version


def tpu_name_for(run_name: str) -> str:
    return f"tomat-{re.sub('[^a-z0-9]+', '-', run_name.lower()).strip('-')}"[:61].rstrip("-")


def launch_folder(run_name: str) -> Path:
    """The local folder of a launch, in the checkout: the files that are sent, and the logs of the hosts."""
    return Path("runs") / run_name / "launch"


@dataclass(frozen=True)
class TpuLaunch:
    """What is launched and where. Most properties and methods are the commands of the launch."""

    run_name: str
    slice_name: str
    zone: str
    tpu_name: str
    """Name of the TPU VM. Its queued resource has the same name with `-qr` at the end."""
    output_dir: str
    pack: Pack
    project: str | None = None
    """None: the project that gcloud is configured with."""
    grace_seconds: float = 25.0
    """`preemption.grace_seconds` of the run: the time in which it saves after a SIGTERM."""
    queued_resource: bool = False
    spot: bool = False
    reserved: bool = False
    service_account: str | None = None
    """Email of the account that the hosts act as; None: the project's default account of Compute Engine."""
    network: str | None = None
    """None: `default`."""
    subnetwork: str | None = None
    internal_ips: bool = False
    """The hosts have no external addresses. Then gcloud must run inside the network too."""
    labels: Sequence[str] = field(default_factory=tuple)
    """Labels `KEY=VALUE` on the slice, for billing."""
    with_signal: bool = False
    """Send one SIGTERM to the training after its first step, to test the orderly stop."""
    label: str = ""
    """Value of the slice's label `LABEL`: the run and login it belongs to."""
    unwatched_hours: float | None = 1.0
    """The hosts give the slice back after this time without a look of a launcher; None: never."""
    boot_software: str | None = None
    """Runtime version; None: the one in `RUNTIME_VERSIONS`."""
    env_file: Path | None = None
    data_disk: str | None = None
    """Full name of a disk that every host mounts read-only at `remote.DISK_FOLDER`. Version 2 of the API can set only
    the key of the boot disk, and a disk that is attached to many hosts must be read-only
    (https://cloud.google.com/tpu/docs/setup-persistent-disk)."""

    def __post_init__(self) -> None:
        if self.reserved and self.spot:
            raise TomatError("--reserved and --spot exclude each other; leave one of them out.")
        disk = rf"projects/[^/\s]+/(zones/{re.escape(self.zone)}|regions/{self.zone[:-2]})/disks/[-a-z0-9]+"
        email = "its email, such as trainer@PROJECT.iam.gserviceaccount.com"
        full_name = f"the full name of a disk in the slice's zone, such as projects/P/zones/{self.zone}/disks/NAME"
        # https://cloud.google.com/compute/docs/labeling-resources
        name = "lower-case letters, digits and '-', a letter first"
        label = "KEY=VALUE of lower-case letters, digits, '-' and '_', a letter first"
        for flag, value, pattern, expected in (
            *(("labels", one, r"[a-z][-_a-z0-9]{0,62}=[-_a-z0-9]{0,63}", label) for one in self.labels),
            ("service_account", self.service_account, r"[^@\s]+@[^@\s]+", email),
            ("data_disk", self.data_disk, disk, full_name),
            ("tpu_name", self.tpu_name, r"[a-z]([-a-z0-9]{0,60}[a-z0-9])?", name),
            ("zone", self.zone, r"[a-z]+-[a-z]+\d+-[a-z]", "a zone such as us-east5-b"),
        ):
            if value is not None and not re.fullmatch(pattern, value):
                raise TomatError(f"--{flag} is '{value}'; expected {expected}.")
        runtime_version(self.slice)

    @property
    def slice(self) -> Slice:
        return slice_named(self.slice_name)

    @property
    def folder(self) -> Path:
        return launch_folder(self.run_name)

    @property
    def software(self) -> str:
        return self.boot_software or runtime_version(self.slice)

    @property
    def run_url(self) -> str:
        return f"{self.output_dir.rstrip('/')}/{self.run_name}"

    @property
    def read_record(self) -> Command:
        words = ("gcloud", "storage", "cat", f"{self.run_url}/{RECORD_FILE}")
        return Command("is there a launch of this run already", words, 120, quiet=True)

    @property
    def date_record(self) -> list[Command]:
        """Two commands: write an empty object now, then list it together with the record."""
        record, now = f"{self.run_url}/{RECORD_FILE}", f"{self.run_url}/{NOW_FILE}"
        write, both = ("cp", "--quiet", "-", now), ("ls", "--long", record, now)
        purpose = "how old the launch's record is, by the bucket's clock"
        return [Command(purpose, ("gcloud", "storage", *words), 120, quiet=True) for words in (write, both)]

    def write_record(self, text: str, only_new: bool = False) -> Command:
        """`only_new`: Google refuses if there is a record already, which another launcher may have just written."""
        condition = ("--if-generation-match=0",) if only_new else ()
        words = ("gcloud", "storage", "cp", "--quiet", *condition, "-", f"{self.run_url}/{RECORD_FILE}")
        return Command("say in the bucket who launches this run", words, 120, quiet=True, stdin=text)

    @property
    def stop_grace_seconds(self) -> int:
        """Seconds from SIGTERM to SIGKILL."""
        return math.ceil(self.grace_seconds) + STOP_SHELL_SECONDS

    @property
    def unwatched_words(self) -> str:
        if self.unwatched_hours is None:
            return "it is kept, at its price"
        said = f"{self.unwatched_hours:g} h after a launcher last looked, and "
        return f"its hosts stop the training in good order and give the slice back {said}15 min after its end"

    def write_watchdog(self, cap_seconds: float | None) -> None:
        """Write the start-up script of the next slice. `cap_seconds` is the time from its first boot to the cap."""
        hours = self.unwatched_hours
        text = watchdog_script(
            self.delete.argv,
            cap_seconds=cap_seconds,
            unwatched_seconds=None if hours is None else 3600 * hours,
            grace_seconds=self.stop_grace_seconds,
        )
        write_text(self.folder / SCRIPT_FILE, text)

    @property
    def sent_environment(self) -> Path:
        """A temporary copy of `env_file` on its way to the hosts; only the user can read it."""
        return self.folder / ENV_FILE

    def _gcloud(self, purpose: str, *words: str, timeout_seconds: float = 600, quiet: bool = False) -> Command:
        reach = ("--internal-ip",) if self.internal_ips and words[1] in ("scp", "ssh") else ()
        place = (f"--zone={self.zone}", *((f"--project={self.project}",) if self.project else ()))
        return Command(purpose, ("gcloud", "compute", "tpus", *words, *reach, *place), timeout_seconds, quiet)

    def _copy(self, purpose: str, *words: str) -> Command:
        return self._gcloud(purpose, "tpu-vm", "scp", *words, timeout_seconds=1200)

    def _on_all_hosts(self, purpose: str, script: str, timeout_seconds: float, quiet: bool = False) -> Command:
        words = ("tpu-vm", "ssh", self.tpu_name, "--worker=all", f"--command={script}")
        return self._gcloud(purpose, *words, timeout_seconds=timeout_seconds, quiet=quiet)

    @property
    def create(self) -> Command:
        kind = f"--accelerator-type={accelerator_type(self.slice)}"
        words = ["--spot"] if self.spot else ["--reserved"] if self.reserved else []
        for flag, value in (
            ("service-account", self.service_account),
            ("network", self.network),
            ("subnetwork", self.subnetwork),
            ("labels", ",".join((*self.labels, *([f"{LABEL}={self.label}"] if self.label else [])))),
            ("metadata-from-file", f"startup-script={self.folder}/{SCRIPT_FILE}"),
            ("data-disk", self.data_disk and f"source={self.data_disk},mode=read-only"),
        ):
            words += [f"--{flag}={value}"] if value else []
        words += ["--internal-ips"] if self.internal_ips else []
        size = f"{self.slice.n_chips} chips on {counted(self.slice.n_hosts, 'host')}"
        if self.queued_resource:
            names = ("queued-resources", "create", f"{self.tpu_name}-qr", f"--node-id={self.tpu_name}")
            return self._gcloud(f"queue for {size}", *names, kind, f"--runtime-version={self.software}", *words)
        names = ("tpu-vm", "create", self.tpu_name)
        return self._gcloud(f"create {size}", *names, kind, f"--version={self.software}", *words, timeout_seconds=1800)

    @property
    def queue_state(self) -> Command:
        words = ("queued-resources", "describe", f"{self.tpu_name}-qr")
        shown = "--format=value(state.state,state.failedData.error.message)"
        return self._gcloud("state of the queued resource: ACTIVE when it is there", *words, shown, quiet=True)

    @property
    def machine_state(self) -> Command:
        words = ("tpu-vm", "describe", self.tpu_name, f"--format=value(state,labels.{LABEL})")
        return self._gcloud("state of the slice: READY, PREEMPTED, ...", *words, timeout_seconds=120, quiet=True)

    @property
    def pack_url(self) -> str:
        return f"{self.run_url}/packs/{self.pack.sha256}.tar.gz"

    @property
    def send_pack(self) -> Command:
        """Send the pack. Its name is the hash of its content, so an existing object is the same and stays."""
        words = ("gcloud", "storage", "cp", "--quiet", "--no-clobber", str(self.pack.path), self.pack_url)
        return Command(f"keep what runs beside the run: {self.pack.words}", words, 600)

    @property
    def install(self) -> list[Command]:
        commands = [self._on_all_hosts("a folder on every host", remote.MAKE_FOLDER_SCRIPT, 600)]
        if self.env_file is not None:
            sent, target = str(self.sent_environment), f"{self.tpu_name}:{FOLDER}/{ENV_FILE}"
            module = (sys.executable, "-m", "tomat.launch.environment", str(self.env_file), sent)
            # -p keeps the mode, so that only the user can read the copy. Host by host: if an ssh agent has keys, gcloud
            # copies to several hosts at once only if gcloud's own key is among them.
            copies = [
                self._copy(f"send the environment to host {host}", sent, target, f"--worker={host}", "--scp-flag=-p")
                for host in range(self.slice.n_hosts)
            ]
            quoted = Command("the environment, quoted for the shell of the hosts", module, 60)
            commands += [quoted, *copies, Command("and keep no copy of it here", ("rm", "-f", sent), 60)]
        if self.data_disk is not None:
            commands.append(self._on_all_hosts("mount the disk on every host", remote.MOUNT_SCRIPT, 300))
        script = remote.install_script(self.pack_url, self.pack.sha256)
        return [*commands, self._on_all_hosts("install on every host", script, 1800)]

    @property
    def start(self) -> Command:
        script = remote.start_script(
            self.pack.config_path,
            self.pack.overrides,
            with_environment=self.env_file is not None,
            with_signal=self.with_signal,
        )
        return self._on_all_hosts("start the training on every host", script, 600)

    @property
    def status(self) -> Command:
        return self._on_all_hosts("ask every host", remote.STATUS_SCRIPT, 180, quiet=True)

    @property
    def packs_of_hosts(self) -> Command:
        return self._on_all_hosts("ask every host for its pack", remote.PACK_SCRIPT, 180, quiet=True)

    @property
    def give_back_by_host(self) -> Command:
        script = remote.give_back_script(self.delete.argv)
        words = ("tpu-vm", "ssh", self.tpu_name, "--worker=0", f"--command={script}")
        return self._gcloud("let a host give the slice back", *words, timeout_seconds=180)

    @property
    def stop(self) -> Command:
        return self._on_all_hosts("stop what is left of the training", remote.stop_script(self.stop_grace_seconds), 600)

    def logs(self, attempt: int) -> list[Command]:
        """Copy every host's log to the local folder, with the attempt in its name. gcloud copies from one host at a
        time and tries ten times, which takes 50 s if a host refuses at once."""
        commands = []
        for host in range(self.slice.n_hosts):
            paths = f"{self.tpu_name}:{FOLDER}/{remote.LOG_FILE}", f"{self.folder}/attempt-{attempt}-host-{host}.log"
            words = ("tpu-vm", "scp", *paths, f"--worker={host}")
            commands.append(self._gcloud(f"collect the log of host {host}", *words, timeout_seconds=90, quiet=True))
        return commands

    @property
    def delete(self) -> Command:
        words = ("tpu-vm", "delete", self.tpu_name, "--quiet")
        if self.queued_resource:
            words = ("queued-resources", "delete", f"{self.tpu_name}-qr", "--force", "--quiet")
        return self._gcloud("give the slice back", *words, timeout_seconds=1200)

    def commands(self) -> list[Command]:
        """Every command of a launch that is never interrupted, in order."""
        asked = [self.create, *([self.queue_state] if self.queued_resource else []), self.machine_state]
        begin = [self.read_record, self.send_pack, self.write_record("", only_new=True)]
        return [*begin, *asked, *self.install, self.start, self.status, *self.logs(1), self.delete]
