"""The Iris form of a launch, for users of a shared Marin cluster.

Iris restarts a job by itself: after a preemption up to 1,000 times, after a failure up to `--max-retries` times. The
options are those of `iris job run --help` in marin-iris 0.2.227.dev40316220070.
"""

import shutil
import tarfile
import tempfile
from pathlib import Path

from tomat.base.errors import TomatError
from tomat.base.reporting import writing
from tomat.base.shipped import PACK_HASH_FILE
from tomat.hardware.chips import slice_named
from tomat.launch.command import Command
from tomat.launch.gcloud import accelerator_type, runtime_version
from tomat.launch.pack import Pack

PINNED_VERSION = "0.2.227.dev40316220070"
"""Version of marin-iris that has the options below."""


def workspace(pack: Pack) -> Path:
    """The folder where the pack is unpacked for Iris, which sends the folder it is called in. It is outside of every
    checkout, because inside one Iris would send the files that git tracks."""
    return Path(tempfile.gettempdir()) / f"tomat-pack-{pack.sha256[:16]}"


def unpack(pack: Pack) -> None:
    folder = workspace(pack)
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tarfile.open(pack.path) as archive:
            archive.extractall(folder, filter="data")
        (folder / PACK_HASH_FILE).write_text(f"{pack.sha256}\n")


def iris_command(
    *,
    cluster: str,
    run_name: str,
    slice_name: str,
    pack: Pack,
    zone: str | None = None,
    spot: bool = False,
    max_failures: int = 5,
    max_hours: float | None = None,
) -> Command:
    """The command for a job that trains the pack on one slice of a cluster, run in the unpacked folder. Iris does not
    tell exit statuses apart, so it also retries a refused input (status 2) `max_failures` times; each of these retries
    ends within a minute."""
    from fray.types import ResourceConfig

    tpu_slice = slice_named(slice_name)
    runtime_version(tpu_slice)
    kind = accelerator_type(tpu_slice)
    try:
        # Half of a host's cores and memory: Marin's own default for training (fray 0.2.227).
        resources = ResourceConfig.with_tpu(kind)
    except ValueError as error:
        raise TomatError(f"Iris does not know the slice '{slice_name}': {error}") from error
    cluster_flag = "--config" if cluster.endswith((".yaml", ".yml")) else "--cluster"
    if cluster_flag == "--config":
        cluster = str(Path(cluster).resolve())
    words = ["iris", f"{cluster_flag}={cluster}", "job", "run", "--enable-extra-resources", f"--tpu={kind}"]
    words += [f"--cpu={resources.cpu}", f"--memory={resources.ram}", f"--disk={resources.disk}", "--extra=tpu"]
    words += [f"--job-name={run_name}", f"--max-retries={max_failures}"]
    words += [f"--timeout={max_hours * 3600:.0f}"] if max_hours is not None else []
    words += [f"--zone={zone}"] if zone is not None else []
    words += ["--preemptible"] if spot else []
    words += ["--", "python", "train_tomat_tpu.py", "--config_path", pack.config_path, *pack.overrides]
    purpose = f"train on {tpu_slice.n_chips} chips of the cluster {cluster} (marin-iris {PINNED_VERSION})"
    return Command(purpose, tuple(words), timeout_seconds=365 * 86_400, folder=str(workspace(pack)))
