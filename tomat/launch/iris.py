"""The Iris form of a launch, for those who share a Marin cluster.

Iris restarts a job by itself: machines that are taken away do not count (up to 1,000 times), failures up to
`--max-retries`. Options as of marin-iris 0.2.227.dev40316220070, `iris job run --help`.
"""

from collections.abc import Sequence

from tomat.base.errors import TomatError
from tomat.hardware.chips import slice_named
from tomat.launch.command import Command
from tomat.launch.gcloud import accelerator_type, runtime_version

PINNED_VERSION = "0.2.227.dev40316220070"
"""Of marin-iris, which the options below belong to."""


def iris_command(
    *,
    cluster: str,
    run_name: str,
    slice_name: str,
    config_path: str,
    overrides: Sequence[str],
    zone: str | None = None,
    spot: bool = False,
    max_failures: int = 5,
) -> Command:
    """The job that trains on one slice of a cluster; `config_path` as seen from the root of the checkout, which Iris
    sends. Of `max_failures` that are retried a refused input (status 2) is one, since Iris does not tell statuses
    apart; each such retry ends within a minute."""
    from fray.types import ResourceConfig

    tpu_slice = slice_named(slice_name)
    runtime_version(tpu_slice)
    kind = accelerator_type(tpu_slice)
    try:
        # Half of a host's cores and memory, which is Marin's own default for training (fray 0.2.227).
        resources = ResourceConfig.with_tpu(kind)
    except ValueError as error:
        raise TomatError(f"Iris does not know the slice '{slice_name}': {error}") from error
    cluster_flag = "--config" if cluster.endswith((".yaml", ".yml")) else "--cluster"
    words = ["iris", f"{cluster_flag}={cluster}", "job", "run", "--enable-extra-resources", f"--tpu={kind}"]
    words += [f"--cpu={resources.cpu}", f"--memory={resources.ram}", f"--disk={resources.disk}", "--extra=tpu"]
    words += [f"--job-name={run_name}", f"--max-retries={max_failures}"]
    words += [f"--zone={zone}"] if zone is not None else []
    words += ["--preemptible"] if spot else []
    words += ["--", "python", "train_tomat_tpu.py", "--config_path", config_path, *overrides]
    purpose = f"train on {tpu_slice.n_chips} chips of the cluster {cluster} (marin-iris {PINNED_VERSION})"
    return Command(purpose, tuple(words), timeout_seconds=365 * 86_400)
