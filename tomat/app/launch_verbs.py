"""`tomat launch`: a run on a TPU slice that may be taken away. Without --execute it only prints the commands."""

import argparse
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tomat.base.arguments import config_file, count, positive_float, positive_int, report_file

if TYPE_CHECKING:
    from tomat.launch.supervisor import RestartPolicy
    from tomat.training.config import TrainConfig

LAUNCHER = "train_tomat_tpu.py"


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb `launch`."""
    parser = subparsers.add_parser(
        "launch",
        help="train on a TPU slice through gcloud or Iris, restarting it when it is preempted",
        description="Print the commands that create a TPU slice, install the checked-out commit on every host, start "
        "the training, restart it, collect logs and give the slice back; with --execute run them. Any setting of the "
        "configuration can follow as --a.b VALUE. Started again while the training runs, it goes on watching it.",
        epilog="The guide is docs/guides/preemption.md.",
    )
    parser.add_argument(
        "--config_path",
        type=config_file("configs/train/"),
        required=True,
        metavar="FILE",
        help="configuration; its `slice` is what is used",
    )
    parser.add_argument("--zone", help="zone, such as us-east5-b")
    parser.add_argument("--project", help="project (default: gcloud's own)")
    parser.add_argument("--tpu_name", metavar="NAME", help="name of the TPU VM (default: tomat-RUN)")
    parser.add_argument("--queued_resource", action="store_true", help="queue for the slice")
    parser.add_argument("--spot", action="store_true", help="capacity that can be taken away")
    parser.add_argument("--iris", metavar="CLUSTER", help="submit to this Marin cluster (a name or a YAML) instead")
    parser.add_argument("--execute", action="store_true", help="run the commands, and watch")
    parser.add_argument("--keep", action="store_true", help="do not give the slice back at the end")
    parser.add_argument("--allow_dirty", action="store_true", help="send the last commit although files differ from it")
    policy = parser.add_argument_group("restarts")
    policy.add_argument("--max_restarts", type=count, default=200, help="of whatever kind (default: %(default)s)")
    policy.add_argument("--max_failures", type=positive_int, default=5, help="failures in a row (default: %(default)s)")
    policy.add_argument(
        "--backoff_seconds", type=positive_float, default=30.0, help="first wait (default: %(default)s)"
    )
    policy.add_argument(
        "--poll_seconds", type=positive_float, default=30.0, help="between questions (default: %(default)s)"
    )
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write what happened (with --execute)")
    parser.set_defaults(run=run_launch, takes_overrides=True)


def run_launch(args: argparse.Namespace) -> int:
    """Read the configuration, and print or run the launch."""
    from tomat.app.config_keys import check_words
    from tomat.base.errors import TomatError

    if not Path(LAUNCHER).exists():
        raise TomatError(
            f"{LAUNCHER} is not here; run `tomat launch` in the root of a checkout, which is what it sends."
        )
    check_words(args.config_path, args.overrides)
    if args.zone is None and not args.iris:
        raise TomatError("--zone is missing; give the zone of your capacity, as in --zone us-east5-b.")

    from tomat.training.config import load_config

    config = load_config(args.config_path, args.overrides)
    if config.slice is None:
        raise TomatError(f"{args.config_path} names no slice; add one, as in `slice: v6e-16`, or give --slice v6e-16.")
    problems = [*_unfit_for_preemption(config), *([] if args.allow_dirty else _local_changes())]
    if args.execute and problems:
        raise TomatError(problems[0])
    for problem in problems:
        print(f"# warning: {problem}")
    return _launch_iris(args, config) if args.iris else _launch_gcloud(args, config)


def _launch_gcloud(args: argparse.Namespace, config: "TrainConfig") -> int:
    from tomat.base.reporting import console, write_report
    from tomat.launch.command import require_program, run_command
    from tomat.launch.gcloud import TpuLaunch, tpu_name_for
    from tomat.launch.supervisor import RestartPolicy, Supervisor

    assert config.slice is not None
    launch = TpuLaunch(
        run_name=config.run_name,
        slice_name=config.slice,
        zone=args.zone,
        tpu_name=args.tpu_name or tpu_name_for(config.run_name),
        config_path=str(args.config_path),
        overrides=tuple(args.overrides),
        project=args.project,
        queued_resource=args.queued_resource,
        spot=args.spot,
    )
    policy = RestartPolicy(
        max_restarts=args.max_restarts,
        max_failures=args.max_failures,
        backoff_seconds=args.backoff_seconds,
        poll_seconds=args.poll_seconds,
    )
    if not args.execute:
        for command in launch.commands():
            print(f"# {command.purpose}\n{command.line}")
        print(policy_text(policy))
        return 0
    require_program("gcloud", "the Google Cloud SDK (https://cloud.google.com/sdk/docs/install)")
    supervisor = Supervisor(launch, policy, run_command, lambda text: console.print(text, highlight=False), args.keep)
    began = time.monotonic()
    try:
        supervisor.supervise()
    except KeyboardInterrupt:
        console.print(
            "stopped watching; the slice and its training go on, at their price. The same command watches again; "
            f"give the slice back with: {launch.delete.line}",
            highlight=False,
        )
        raise
    finally:
        report = supervisor.report
        figures = {"run": config.run_name, "slice": config.slice, "attempts": len(report.endings)}
        write_report(args.json, figures | vars(report) | {"total_seconds": time.monotonic() - began})
    return 0


def _launch_iris(args: argparse.Namespace, config: "TrainConfig") -> int:
    from tomat.base.errors import TomatError
    from tomat.launch.command import require_program, run_command
    from tomat.launch.iris import iris_command

    assert config.slice is not None
    command = iris_command(
        cluster=args.iris,
        run_name=config.run_name,
        slice_name=config.slice,
        config_path=str(args.config_path),
        overrides=args.overrides,
        zone=args.zone,
        spot=args.spot,
        max_failures=args.max_failures,
    )
    print(f"# {command.purpose}\n{command.line}")
    if not args.execute:
        return 0
    require_program("iris", "marin-iris, which comes with tomat's own dependencies")
    result = run_command(command)
    if not result.ok:
        raise TomatError(f"iris ended with status {result.status}: {result.last_line}.")
    return 0


def policy_text(policy: "RestartPolicy") -> str:
    """How --execute restarts, as comments of the dry run."""
    return (
        f"# With --execute, the state every {policy.poll_seconds:.0f} s. PREEMPTED or gone: delete, create, "
        "install, start. Exit status 143\n# (stopped in good order): start at once. 2 (input refused): never again. "
        f"Others: start after {policy.backoff_seconds:.0f} s, doubling up to\n# {policy.max_backoff_seconds:.0f} s, at "
        f"most {policy.max_failures} failures in a row and {policy.max_restarts} restarts. Every host's log is "
        f"collected every {policy.log_seconds / 60:.0f} min."
    )


def _unfit_for_preemption(config: "TrainConfig") -> list[str]:
    """What would lose work on machines that are deleted: placeholders, and folders on them."""
    problems = []
    places = {"data.train": config.data.train, "data.validation": config.data.validation}
    for key, place in {**places, "output_dir": config.output_dir}.items():
        if place is not None and place.startswith("gs://BUCKET"):
            problems.append(
                f"{key} is {place}; put your bucket in the place of BUCKET, as in --{key} gs://my-bucket/..."
            )
        elif place is not None and "://" not in place:
            problems.append(
                f"{key} is the folder '{place}', which other hosts do not see and which is lost with the machine; "
                f"expected a bucket, as in --{key} gs://my-bucket/..."
            )
    return problems


def _local_changes() -> list[str]:
    """Why the commit that is sent is not what is seen here."""
    found = subprocess.run(["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    if found.returncode != 0:
        return ["this folder is no git checkout; `tomat launch` sends the commit that is checked out."]
    changed = len(found.stdout.splitlines())
    if not changed:
        return []
    return [f"{changed} file(s) differ from the last commit, which is what is sent; commit them or give --allow_dirty."]
