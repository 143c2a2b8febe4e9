"""`tomat launch`: a run on a TPU slice that may be taken away. Without --execute it only prints the commands."""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tomat.base.arguments import (
    add_flag,
    add_report,
    add_verb,
    config_file,
    count,
    existing_file,
    positive_float,
    positive_int,
)
from tomat.base.errors import TomatError
from tomat.base.reporting import console, write_report

if TYPE_CHECKING:
    from tomat.launch.gcloud import TpuLaunch
    from tomat.train.settings.config import TrainConfig

AS_GIVEN = ("zone", "project", "queued_resource", "spot", "reserved", "service_account", "network", "subnetwork",
            "internal_ips", "env_file", "data_disk")  # fmt: skip
"""Flags that `TpuLaunch` takes as they are."""
LAUNCHER = "train_tomat_tpu.py"
GCLOUD_FROM = "the Google Cloud SDK (https://cloud.google.com/sdk/docs/install)"
OF_THE_HOSTS = ("service_account", "network", "subnetwork", "labels", "runtime_version", "env_file", "reserved",
                "internal_ips", "data_disk", "check")  # fmt: skip
"""Flags that are for gcloud alone."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb `launch`."""
    text = "train on a TPU slice through gcloud or Iris, restarting it when it is preempted"
    guides = "The guides are docs/guides/first-pod-run.md and preemption.md."
    parser = add_verb(subparsers, "launch", text, _run_launch, epilog=guides)
    text = "configuration, a file or the name of one that ships; its `slice` is what is used"
    parser.add_argument("--config_path", type=config_file("train"), required=True, metavar="FILE", help=text)
    parser.add_argument("--zone", help="zone, such as us-east5-b")
    parser.add_argument("--project", help="project (default: gcloud's own)")
    parser.add_argument("--tpu_name", metavar="NAME", help="name of the TPU VM (default: tomat-RUN)")
    parser.add_argument("--queued_resource", action="store_true", help="queue for the slice")
    parser.add_argument("--spot", action="store_true", help="capacity that can be taken away")
    parser.add_argument("--check", action="store_true", help="ask Google whether it can go well, and change nothing")
    parser.add_argument("--iris", metavar="CLUSTER", help="submit to this Marin cluster (a name or a YAML) instead")
    parser.add_argument("--execute", action="store_true", help="run the commands, and watch")
    parser.add_argument("--keep", action="store_true", help="do not give the slice back at the end")
    parser.add_argument("--allow_dirty", action="store_true", help="send the last commit although files differ from it")
    hosts = parser.add_argument_group("the hosts")
    hosts.add_argument("--reserved", action="store_true", help="capacity of a reservation of the project")
    for flag, metavar, words in (
        ("--service_account", "EMAIL", "account that the hosts act as (default: Compute's)"),
        ("--network", "NAME", "network of the hosts (default: default)"),
        ("--subnetwork", "NAME", "subnetwork of the hosts, in the zone's region"),
        ("--labels", "KEY=VALUE,...", "labels of the slice, for the bill"),
        ("--runtime_version", "NAME", "software that the hosts boot with (default: the chip's)"),
        ("--data_disk", "DISK", "projects/P/zones/ZONE/disks/NAME, read-only at /mnt/tomat-data of every host"),
    ):
        hosts.add_argument(flag, metavar=metavar, help=words)
    text = "no external addresses; start this from inside the network"
    hosts.add_argument("--internal_ips", action="store_true", help=text)
    text = "variables of the training (NAME=VALUE lines, mode 600), sent as a file: no value is printed or logged"
    hosts.add_argument("--env_file", type=existing_file, metavar="FILE", help=text)
    policy = parser.add_argument_group("restarts")
    policy.add_argument("--max_restarts", type=count, default=200, help="of whatever kind (default: %(default)s)")
    policy.add_argument("--max_failures", type=positive_int, default=5, help="failures in a row (default: %(default)s)")
    add_flag(policy, "--backoff_seconds", 30.0, "first wait", type=positive_float)
    add_flag(policy, "--poll_seconds", 30.0, "between questions", type=positive_float)
    add_report(parser, "write what happened (with --execute), or was found (--check)", takes_overrides=True)


def _run_launch(args: argparse.Namespace) -> int:
    """Print the commands that create a TPU slice, install the checked-out commit on every host, start the training,
    restart it, collect logs and give the slice back; with --execute run them. Any setting of the configuration can
    follow as --a.b VALUE. Started again while the training runs, it goes on watching it."""
    from tomat.train.settings.keys import check_words

    if not Path(LAUNCHER).exists():
        raise TomatError(f"{LAUNCHER} is not here; run `tomat launch` in the root of a checkout, which it sends.")
    check_words(args.config_path, args.overrides)
    if args.zone is None and not args.iris:
        raise TomatError("--zone is missing; give the zone of your capacity, as in --zone us-east5-b.")

    from tomat.launch.check import local_changes, unfit_places
    from tomat.train.settings.config import load_config

    config = load_config(args.config_path, args.overrides)
    if config.slice is None:
        raise TomatError(f"{args.config_path} names no slice; add one, as in `slice: v6e-16`, or give --slice v6e-16.")
    if args.iris and (given := [flag for flag in OF_THE_HOSTS if getattr(args, flag)]):
        raise TomatError(f"--{given[0]} is for TPU VMs of your own, and --iris is given; leave one of them out.")
    data = config.data
    places = {"data.train": data.train, "data.validation": data.validation, "output_dir": config.output_dir}
    problems = [*unfit_places(places, args.data_disk is not None), *([] if args.allow_dirty else local_changes())]
    if not args.check:
        if args.execute and problems:
            raise TomatError(problems[0])
        for problem in problems:
            print(f"# warning: {problem}")
        if args.iris:
            return _launch_iris(args, config)

    from tomat.launch.environment import read_env_file
    from tomat.launch.gcloud import TpuLaunch, tpu_name_for

    if args.env_file is not None:
        print(f"# from {args.env_file}, by name: {', '.join(read_env_file(args.env_file)) or 'nothing'}")
    launch = TpuLaunch(
        run_name=config.run_name,
        slice_name=config.slice,
        tpu_name=args.tpu_name or tpu_name_for(config.run_name),
        config_path=str(args.config_path),
        overrides=tuple(args.overrides),
        labels=tuple(args.labels.split(",")) if args.labels else (),
        boot_software=args.runtime_version,
        **{name: getattr(args, name) for name in AS_GIVEN},
    )
    return _check(args, launch, places, problems) if args.check else _launch_gcloud(args, launch)


def _check(
    args: argparse.Namespace, launch: "TpuLaunch", places: Mapping[str, str | None], problems: Sequence[str]
) -> int:
    """Print a line a question; status 1 where one failed."""
    from tomat.launch.check import print_line, run_checks
    from tomat.launch.command import require_program, run_command

    require_program("gcloud", GCLOUD_FROM)
    lines = []
    for line in run_checks(launch, places, problems, run_command):
        print_line(line)
        lines.append(line)
    failed = sum(line.state == "failed" for line in lines)
    figures = {"run": launch.run_name, "slice": launch.slice_name, "failed": failed, "checks": list(map(vars, lines))}
    write_report(args.json, figures)
    return 1 if failed else 0


def _launch_gcloud(args: argparse.Namespace, launch: "TpuLaunch") -> int:
    from tomat.launch.command import require_program, run_command
    from tomat.launch.supervisor import RestartPolicy, Supervisor

    names = ("max_restarts", "max_failures", "backoff_seconds", "poll_seconds")
    policy = RestartPolicy(**{name: getattr(args, name) for name in names})
    if not args.execute:
        for command in launch.commands():
            print(f"# {command.purpose}\n{command.line}")
        print(policy.words)
        return 0
    require_program("gcloud", GCLOUD_FROM)
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
        figures = {"run": launch.run_name, "slice": launch.slice_name, "attempts": len(supervisor.endings)}
        figures |= {"endings": supervisor.endings, "waited_seconds": supervisor.waited_seconds}
        write_report(args.json, figures | {"total_seconds": time.monotonic() - began})
    return 0


def _launch_iris(args: argparse.Namespace, config: "TrainConfig") -> int:
    from tomat.launch.command import require_program, run_command
    from tomat.launch.iris import iris_command

    assert config.slice is not None
    flags = {name: getattr(args, name) for name in ("overrides", "zone", "spot", "max_failures")}
    run = {"run_name": config.run_name, "slice_name": config.slice, "config_path": str(args.config_path)}
    command = iris_command(cluster=args.iris, **run, **flags)
    print(f"# {command.purpose}\n{command.line}")
    if not args.execute:
        return 0
    require_program("iris", "marin-iris, which comes with tomat's own dependencies")
    result = run_command(command)
    if not result.ok:
        raise TomatError(f"iris ended with status {result.status}: {result.last_line}.")
    return 0
