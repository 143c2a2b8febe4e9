"""The gcloud commands of one launch on a TPU slice: create, send, install, start, ask, stop, collect, delete.

Flags as in https://cloud.google.com/sdk/gcloud/reference/compute/tpus/tpu-vm and .../queued-resources (October 2025).
"""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tomat.base.errors import TomatError
from tomat.base.reporting import counted
from tomat.hardware.chips import Slice, slice_named
from tomat.launch.command import Command
from tomat.launch.remote import (
    ENV_FILE,
    FOLDER,
    INSTALL_SCRIPT,
    LOG_FILE,
    MAKE_FOLDER_SCRIPT,
    MOUNT_SCRIPT,
    STATUS_SCRIPT,
    start_script,
    stop_script,
    training_command,
)

RUNTIME_VERSIONS: Mapping[str, str] = {
    "v6e": "v2-alpha-tpuv6e",
    "v5p": "v2-alpha-tpuv5",
    "v5e": "v2-alpha-tpuv5-lite",
    "v4": "tpu-ubuntu2204-base",
}
"""Chip -> software of a TPU VM for JAX (https://cloud.google.com/tpu/docs/runtimes). TPU7x is not there: it is offered
through GKE only (https://cloud.google.com/tpu/docs/queued-resources)."""

STOP_GRACE_SECONDS = 40
"""What `stop` gives a training: its own 25 s (`preemption.grace_seconds`) and 15 s for the shell and slow disks."""


def accelerator_type(tpu_slice: Slice) -> str:
    """The slice's name in the TPU API, which calls v5e `v5litepod` (https://cloud.google.com/tpu/docs/v5e)."""
    return tpu_slice.name.replace("v5e-", "v5litepod-")


def runtime_version(tpu_slice: Slice) -> str:
    """The software that the slice's hosts boot with.

    Raises:
        TomatError: The slice is not offered as TPU VMs.
    """
    version = RUNTIME_VERSIONS.get(tpu_slice.chip.name) if tpu_slice.libtpu_topology is not None else None
    if version is None:
        raise TomatError(
            f"slice is '{tpu_slice.name}', which is not offered as TPU VMs; expected one of "
            f"{', '.join(f'{chip}-N' for chip in RUNTIME_VERSIONS)} (TPU7x needs GKE; GPUs need no `tomat launch`)."
        )
    return version


def tpu_name_for(run_name: str) -> str:
    """A name that the TPU API accepts, made from a run's name."""
    return f"tomat-{re.sub('[^a-z0-9]+', '-', run_name.lower()).strip('-')}"[:61].rstrip("-")


@dataclass(frozen=True)
class TpuLaunch:
    """What is launched, and where; the properties and methods are the commands."""

    run_name: str
    slice_name: str
    zone: str
    """Zone of the slice, such as us-east5-b."""
    tpu_name: str
    """Name of the TPU VM; a queued resource gets it with `-qr` behind."""
    config_path: str
    """The configuration, as seen from the checkout."""
    overrides: Sequence[str] = field(default_factory=tuple)
    """What follows the configuration on the training's command line."""
    project: str | None = None
    """None: gcloud's own."""
    queued_resource: bool = False
    """Queue for the slice instead of asking once."""
    spot: bool = False
    """Capacity that can be taken away."""
    reserved: bool = False
    """Capacity of a reservation of the project."""
    service_account: str | None = None
    """Email of the account that the hosts act as; None: the project's default one of Compute Engine."""
    network: str | None = None
    """None: `default`."""
    subnetwork: str | None = None
    internal_ips: bool = False
    """No external addresses; then gcloud, too, must run inside the network."""
    labels: Sequence[str] = field(default_factory=tuple)
    """`KEY=VALUE`, for the bill."""
    boot_software: str | None = None
    """Runtime version; None: that of `RUNTIME_VERSIONS`."""
    env_file: Path | None = None
    """Variables of the training's environment, sent as a file."""
    data_disk: str | None = None
    """Full name of a disk that every host has read-only, mounted at `remote.DISK_FOLDER`. The API's version 2 sets
    nothing of the boot disk but its key, and attaches to many hosts only what none of them writes
    (https://cloud.google.com/tpu/docs/setup-persistent-disk)."""

    def __post_init__(self) -> None:
        if self.reserved and self.spot:
            raise TomatError("--reserved and --spot exclude each other; leave one of them out.")
        for label in self.labels:
            # https://cloud.google.com/compute/docs/labeling-resources
            if not re.fullmatch(r"[a-z][-_a-z0-9]{0,62}=[-_a-z0-9]{0,63}", label):
                raise TomatError(
                    f"--labels has '{label}'; expected KEY=VALUE of lower-case letters, digits, '-' and '_', "
                    "a letter first."
                )
        if self.service_account is not None and not re.fullmatch(r"[^@\s]+@[^@\s]+", self.service_account):
            raise TomatError(
                f"--service_account is '{self.service_account}'; expected its email, such as "
                "trainer@PROJECT.iam.gserviceaccount.com."
            )
        own = rf"projects/[^/\s]+/(zones/{re.escape(self.zone)}|regions/{self.zone[:-2]})/disks/[-a-z0-9]+"
        if self.data_disk is not None and not re.fullmatch(own, self.data_disk):
            raise TomatError(
                f"--data_disk is '{self.data_disk}'; expected the full name of a disk in the slice's zone, such as "
                f"projects/P/zones/{self.zone}/disks/NAME."
            )
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,60}[a-z0-9])?", self.tpu_name):
            raise TomatError(
                f"--tpu_name is '{self.tpu_name}'; expected lower-case letters, digits and '-', a letter first."
            )
        if not re.fullmatch(r"[a-z]+-[a-z]+\d+-[a-z]", self.zone):
            raise TomatError(f"--zone is '{self.zone}'; expected a zone such as us-east5-b.")
        runtime_version(self.slice)

    @property
    def slice(self) -> Slice:
        """The slice."""
        return slice_named(self.slice_name)

    @property
    def folder(self) -> Path:
        """Local folder of this launch, of what is sent and of the logs."""
        return Path("runs") / self.run_name / "launch"

    @property
    def queue_name(self) -> str:
        """Name of the queued resource."""
        return f"{self.tpu_name}-qr"

    def _gcloud(
        self, purpose: str, words: tuple[str, ...], *, timeout_seconds: float = 600, quiet: bool = False
    ) -> Command:
        place = (f"--zone={self.zone}", *((f"--project={self.project}",) if self.project else ()))
        return Command(purpose, ("gcloud", "compute", "tpus", *words, *place), timeout_seconds, quiet)

    @property
    def software(self) -> str:
        """Runtime version that the hosts boot with."""
        return self.boot_software or runtime_version(self.slice)

    @property
    def _where(self) -> tuple[str, ...]:
        """What both ways of asking for a slice take alike."""
        words = ["--spot"] if self.spot else ["--reserved"] if self.reserved else []
        for flag, value in (
            ("service-account", self.service_account),
            ("network", self.network),
            ("subnetwork", self.subnetwork),
            ("labels", ",".join(self.labels)),
            ("data-disk", self.data_disk and f"source={self.data_disk},mode=read-only"),
        ):
            words += [f"--{flag}={value}"] if value else []
        return (*words, *(["--internal-ips"] if self.internal_ips else []))

    @property
    def _reach(self) -> tuple[str, ...]:
        """How ssh and scp find the hosts."""
        return ("--internal-ip",) if self.internal_ips else ()

    def _on_all_hosts(self, purpose: str, script: str, *, timeout_seconds: float, quiet: bool = False) -> Command:
        words = ("tpu-vm", "ssh", self.tpu_name, "--worker=all", f"--command={script}", *self._reach)
        return self._gcloud(purpose, words, timeout_seconds=timeout_seconds, quiet=quiet)

    @property
    def create(self) -> Command:
        """Ask for the slice."""
        kind, version = accelerator_type(self.slice), self.software
        size = f"{self.slice.n_chips} chips on {counted(self.slice.n_hosts, 'host')}"
        if self.queued_resource:
            words = ("queued-resources", "create", self.queue_name, f"--node-id={self.tpu_name}")
            words = (*words, f"--accelerator-type={kind}", f"--runtime-version={version}", *self._where)
            return self._gcloud(f"queue for {size}", words)
        words = ("tpu-vm", "create", self.tpu_name, f"--accelerator-type={kind}", f"--version={version}", *self._where)
        return self._gcloud(f"create {size}", words, timeout_seconds=1800)

    @property
    def queue_state(self) -> Command:
        """The state of the queued resource: ACTIVE where the slice is there."""
        words = ("queued-resources", "describe", self.queue_name, "--format=value(state.state)")
        return self._gcloud("state of the queued resource: ACTIVE when it is there", words, quiet=True)

    @property
    def machine_state(self) -> Command:
        """The state of the TPU VM: READY, PREEMPTED, ..."""
        words = ("tpu-vm", "describe", self.tpu_name, "--format=value(state)")
        return self._gcloud("state of the slice: READY, PREEMPTED, ...", words, timeout_seconds=120, quiet=True)

    @property
    def sent_environment(self) -> Path:
        """What `env_file` is written to on its way to the hosts; readable by nobody else."""
        return self.folder / ENV_FILE

    @property
    def pack(self) -> list[Command]:
        """Put the commit that is checked out, and the configuration, into the launch's folder."""
        folder = str(self.folder)
        archive = ("git", "archive", "--format=tar.gz", f"--output={folder}/checkout.tgz", "HEAD")
        commands = [
            Command("a folder for what is sent and for logs", ("mkdir", "-p", folder), 60),
            Command("pack the commit that is checked out", archive, 300),
            Command("and the configuration as it is now", ("cp", self.config_path, f"{folder}/config.yaml"), 60),
        ]
        if self.env_file is not None:
            module = (sys.executable, "-m", "tomat.launch.environment", str(self.env_file), str(self.sent_environment))
            commands.append(Command("and the environment, quoted for the shell of the hosts", module, 60))
        return commands

    @property
    def install(self) -> list[Command]:
        """Send both to every host and install."""
        files = (f"{self.folder}/checkout.tgz", f"{self.folder}/config.yaml")
        copy = ("tpu-vm", "scp", *files, f"{self.tpu_name}:{FOLDER}/", "--worker=all", *self._reach)
        commands = [
            self._on_all_hosts("a folder on every host", MAKE_FOLDER_SCRIPT, timeout_seconds=600),
            self._gcloud("send both to every host", copy, timeout_seconds=1200),
        ]
        if self.env_file is not None:
            target = f"{self.tpu_name}:{FOLDER}/{ENV_FILE}"
            # -p: readable by nobody else there either, as `environment.py` demands it here.
            words = ("tpu-vm", "scp", str(self.sent_environment), target, "--worker=all", "--scp-flag=-p", *self._reach)
            commands.append(self._gcloud("send the environment to every host", words, timeout_seconds=1200))
            commands.append(Command("and keep no copy of it here", ("rm", "-f", str(self.sent_environment)), 60))
        if self.data_disk is not None:
            commands.append(self._on_all_hosts("mount the disk on every host", MOUNT_SCRIPT, timeout_seconds=300))
        return [*commands, self._on_all_hosts("install on every host", INSTALL_SCRIPT, timeout_seconds=1800)]

    @property
    def start(self) -> Command:
        """Start the training on every host."""
        script = start_script(training_command(self.overrides), with_environment=self.env_file is not None)
        return self._on_all_hosts("start the training on every host", script, timeout_seconds=600)

    @property
    def status(self) -> Command:
        """Ask every host after its training."""
        return self._on_all_hosts("ask every host", STATUS_SCRIPT, timeout_seconds=180, quiet=True)

    @property
    def stop(self) -> Command:
        """Stop the training on every host that still has one."""
        script = stop_script(STOP_GRACE_SECONDS)
        return self._on_all_hosts("stop what is left of the training", script, timeout_seconds=600)

    def logs(self, attempt: int) -> list[Command]:
        """Copy every host's log here, under the number of the attempt; gcloud copies from one host at a time."""
        commands = []
        for host in range(self.slice.n_hosts):
            target = f"{self.folder}/attempt-{attempt}-host-{host}.log"
            words = ("tpu-vm", "scp", f"{self.tpu_name}:{FOLDER}/{LOG_FILE}", target, f"--worker={host}", *self._reach)
            commands.append(self._gcloud(f"collect the log of host {host}", words, timeout_seconds=300, quiet=True))
        return commands

    @property
    def delete(self) -> Command:
        """Give the slice back."""
        if self.queued_resource:
            words = ("queued-resources", "delete", self.queue_name, "--force", "--quiet")
        else:
            words = ("tpu-vm", "delete", self.tpu_name, "--quiet")
        return self._gcloud("give the slice back", words, timeout_seconds=1200)

    def commands(self) -> list[Command]:
        """Every command of a launch that is never interrupted, in order."""
        queue = [self.queue_state] if self.queued_resource else []
        return [
            self.create,
            *queue,
            self.machine_state,
            *self.pack,
            *self.install,
            self.start,
            self.status,
            *self.logs(1),
            self.delete,
        ]
