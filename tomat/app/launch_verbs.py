"""`tomat launch`: starts a run on a TPU slice that may be taken away. Without --execute it only prints the commands."""

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from tomat.base.layout import CHECKPOINT_FOLDER, CONFIG_FILE
from tomat.base.reporting import console, counted, tell, write_report

if TYPE_CHECKING:
    from tomat.launch.command import Command
    from tomat.launch.gcloud import TpuLaunch
    from tomat.launch.pack import Pack
    from tomat.launch.prices import Caps
    from tomat.train.settings.config import TrainConfig

AS_GIVEN = ("project", "queued_resource", "spot", "reserved", "service_account", "network", "subnetwork",
            "internal_ips", "env_file", "data_disk")  # fmt: skip
"""Flags that are passed to `TpuLaunch` unchanged."""
LAUNCHER = "train_tomat_tpu.py"
SKY_FROM = "SkyPilot in an environment of its own (`uv tool install 'skypilot[gcp]==0.14.1'`)"
GCLOUD_FROM = "the Google Cloud SDK (https://cloud.google.com/sdk/docs/install)"
OF_THE_HOSTS = ("service_account", "network", "subnetwork", "labels", "runtime_version", "env_file", "reserved",
                "internal_ips", "data_disk", "check")  # fmt: skip
"""Flags that Iris does not take."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "train on a TPU slice through gcloud, SkyPilot or Iris, restarting it when it is preempted"
    guides = "The guides are docs/guides/first-pod-run.md and preemption.md."
    parser = add_verb(subparsers, "launch", text, _run_launch, epilog=guides)
    text = "configuration, a file or the name of one that ships; its `slice` is the slice to use"
    parser.add_argument("--config_path", type=config_file("train"), required=True, metavar="FILE", help=text)
    text = "zone, such as us-east5-b, or several, in the order in which to ask for capacity"
    parser.add_argument("--zone", metavar="ZONE[,...]", help=text)
    parser.add_argument("--project", help="project (default: gcloud's own)")
    parser.add_argument("--tpu_name", metavar="NAME", help="name of the TPU VM (default: tomat-RUN)")
    parser.add_argument("--queued_resource", action="store_true", help="queue for the slice")
    parser.add_argument("--spot", action="store_true", help="use capacity that can be taken away")
    parser.add_argument("--check", action="store_true", help="ask Google whether the launch can work; changes nothing")
    text = "what supervises the run: this process, a managed job of SkyPilot, or Iris (default: gcloud)"
    parser.add_argument("--engine", choices=("gcloud", "skypilot", "iris"), help=text)
    parser.add_argument("--iris", metavar="CLUSTER", help="Marin cluster of --engine iris (a name or a YAML)")
    text = "check on this slice what the guide promises: 20 steps, a SIGTERM, a resume, a profile; 25 min at most"
    parser.add_argument("--smoke", action="store_true", help=text)
    parser.add_argument("--execute", action="store_true", help="run the commands, and watch")
    parser.add_argument("--keep", action="store_true", help="do not give the slice back at the end")
    parser.add_argument("--allow_dirty", action="store_true", help="send what differs from the last commit; recorded")
    text = "go on with an open launch of the run, but with this checkout in place of the pack that it began with"
    parser.add_argument("--new_pack", action="store_true", help=text)
    money = parser.add_argument_group("what it may cost")
    for flag, text in (
        ("--max_hours", "most hours with a slice, over all restarts; then save, stop and give it back"),
        ("--max_cost", "most US dollars for chips; then as with --max_hours"),
        ("--chip_hour_price", "US dollars for an hour of one chip (default: as published)"),
    ):
        money.add_argument(flag, type=positive_float, metavar="X", help=text)
    add_flag(money, "--unwatched_hours", 1.0, "hosts without a launcher then give the slice back", type=positive_float)
    hosts = parser.add_argument_group("the hosts")
    hosts.add_argument("--reserved", action="store_true", help="use capacity that the project has reserved")
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
    policy.add_argument("--max_restarts", type=count, default=200, help="of any kind (default: %(default)s)")
    text = "attempts in a row of fewer than 50 steps that end it (default: %(default)s); two without a step do, too"
    policy.add_argument("--max_failures", type=positive_int, default=5, help=text)
    add_flag(policy, "--backoff_seconds", 30.0, "first wait before a restart", type=positive_float)
    add_flag(policy, "--poll_seconds", 30.0, "time between questions to Google", type=positive_float)
    add_report(parser, "write what happened (with --execute), or was found (--check)", takes_overrides=True)


def _run_launch(args: argparse.Namespace) -> int:
    """Pack this checkout, and print the commands that create a TPU slice, install the pack on every host, start the
    training, restart it, collect logs and give the slice back; with --execute run them. Any setting of the
    configuration can follow as --a.b VALUE. Started again while the training runs, the command watches it again."""
    from tomat.train.settings.keys import check_words

    if not Path(LAUNCHER).exists():
        raise TomatError(f"{LAUNCHER} is not here; run `tomat launch` in the root of a checkout, which it sends.")
    check_words(args.config_path, args.overrides)
    engine = args.engine or ("iris" if args.iris else "gcloud")
    if (engine == "iris") is not bool(args.iris):
        raise TomatError("--engine iris and --iris CLUSTER go together; give both, or --iris alone.")
    if engine != "gcloud" and (args.keep or args.new_pack):
        raise TomatError(f"--{'keep' if args.keep else 'new_pack'} is for --engine gcloud; leave it out.")
    if args.zone is None and engine != "iris":
        raise TomatError("--zone is missing; give the zone of your capacity, as in --zone us-east5-b.")
    zones = args.zone.split(",") if args.zone else []
    if len(zones) > 1 and args.data_disk is not None:
        raise TomatError("--data_disk is in one zone, but --zone names several; name only that zone.")

    from tomat.launch.check import unfit_places
    from tomat.launch.pack import build_pack, read_tree
    from tomat.train.settings.config import load_config

    config = load_config(args.config_path, args.overrides)
    if args.smoke:
        args.overrides = _for_smoke(args, config.run_name, engine)
        config = load_config(args.config_path, args.overrides)
    if config.slice is None:
        raise TomatError(f"{args.config_path} names no slice; add one, as in `slice: v6e-16`, or give --slice v6e-16.")
    if args.iris and (given := [flag for flag in OF_THE_HOSTS if getattr(args, flag)]):
        raise TomatError(f"--{given[0]} is for TPU VMs of your own, and --iris is given; leave one of them out.")
    data = config.data
    places = {"data.train": data.train, "data.validation": data.validation, "output_dir": config.output_dir}
    if (temporary := config.trainer.checkpointer.temporary_base_path) is not None:
        places["trainer.checkpointer.temporary_base_path"] = temporary
    tree = read_tree(Path.cwd(), args.config_path, [path for path in (args.env_file, args.json) if path is not None])
    problems = unfit_places(places, args.data_disk is not None)
    problems += [] if args.allow_dirty or tree.problem is None else [tree.problem]
    if not args.check:
        if args.execute and problems:
            raise TomatError(problems[0])
        for problem in problems:
            print(f"# warning: {problem}")

    from tomat.launch.environment import read_env_file
    from tomat.launch.gcloud import STOP_SHELL_SECONDS, TpuLaunch, launch_folder, tpu_name_for
    from tomat.launch.prices import MARGIN_SECONDS, caps_of
    from tomat.launch.remote import PACK

    secrets = [] if args.env_file is None else list(read_env_file(args.env_file))
    if args.env_file is not None:
        print(f"# from {args.env_file}, by name: {', '.join(secrets) or 'nothing'}")
    folder = launch_folder(config.run_name)
    pack = build_pack(tree, args.config_path, args.overrides, folder / PACK)
    print(f"# {pack.words}")
    if engine == "iris":
        return _launch_iris(args, config, pack, zones)
    launch = TpuLaunch(
        run_name=config.run_name,
        slice_name=config.slice,
        zone=zones[0],
        tpu_name=args.tpu_name or tpu_name_for(config.run_name),
        output_dir=config.output_dir,
        pack=pack,
        labels=tuple(args.labels.split(",")) if args.labels else (),
        label="by-hand",
        unwatched_hours=None if args.keep else args.unwatched_hours,
        grace_seconds=config.preemption.grace_seconds,
        with_signal=args.smoke,
        boot_software=args.runtime_version,
        **{name: getattr(args, name) for name in AS_GIVEN},
    )
    for zone in zones[1:]:
        replace(launch, zone=zone)  # raises an error if it is not a zone
    money = {name: getattr(args, name) for name in ("max_hours", "max_cost")}
    if (args.check or args.execute) and (said := _taken(config, launch)) is not None:
        problems.append(said)
        if args.execute and not args.check:
            raise TomatError(said)
    every = [caps_of(launch.slice, zone, spot=args.spot, price=args.chip_hour_price, **money) for zone in zones]
    # The caps of the dearest zone, so that they hold wherever the slice is.
    caps = max(every, key=lambda each: math.inf if each.price is None else each.price)
    if caps.hours(launch.slice) is not None and launch.stop_grace_seconds > MARGIN_SECONDS / 2:
        said = f"preemption.grace_seconds is {launch.grace_seconds:g}, but a training is stopped {MARGIN_SECONDS:g} s "
        said += "before a cap, and the slice is given back in that time too"
        raise TomatError(f"{said}. Set at most {MARGIN_SECONDS / 2 - STOP_SHELL_SECONDS:g}, or leave the cap out.")
    print(f"# {caps.words(launch.slice)}")
    if engine == "skypilot" and not args.check:
        from tomat.launch.skypilot import skypilot_commands

        return _submit(args, skypilot_commands(launch, zones, caps, secrets, args.execute), "sky", SKY_FROM)
    return _check(args, launch, zones, places, problems) if args.check else _launch_gcloud(args, launch, zones, caps)


def _for_smoke(args: argparse.Namespace, run_name: str, engine: str) -> list[str]:
    """The overrides of a smoke run. Also sets the time cap and the poll interval in `args`."""
    from tomat.launch.smoke import MAX_HOURS, POLL_SECONDS, smoke_words

    if engine != "gcloud" or args.keep:
        flag = "--keep" if args.keep else f"--engine {engine}"
        raise TomatError(f"--smoke makes a slice of its own, so it does not go with {flag}; leave one of them out.")
    args.max_hours = min(args.max_hours or MAX_HOURS, MAX_HOURS)
    args.poll_seconds = min(args.poll_seconds, POLL_SECONDS)
    return smoke_words(run_name, args.overrides)


def _taken(config: "TrainConfig", launch: "TpuLaunch") -> str | None:
    """Why the run's name is taken by another configuration, or None: paid hosts would only refuse to train it."""
    from tomat.launch.command import Command, require_program, run_command
    from tomat.train.runs.record import read_config
    from tomat.train.settings.meanings import changed_keys

    require_program("gcloud", GCLOUD_FROM)

    def answer(purpose: str, *words: str) -> str:
        result = run_command(Command(purpose, ("gcloud", "storage", *words), 120, quiet=True))
        return result.output if result.ok else ""

    recorded = answer("is the run's name taken", "cat", f"{launch.run_url}/{CONFIG_FILE}")
    if not recorded or not answer("has it been saved", "ls", f"{launch.run_url}/{CHECKPOINT_FOLDER}/"):
        return None
    path = launch.folder / f"recorded-{CONFIG_FILE}"
    path.write_text(recorded, encoding="utf-8")
    changed = sorted(changed_keys(read_config(str(path)), config.to_dict()))
    if not changed:
        return None
    named = ", ".join(changed[:4]) + (", ..." if len(changed) > 4 else "")
    said = f"run '{config.run_name}' exists in {config.output_dir} with another configuration"
    return f"{said}: {counted(len(changed), 'key')} ({named}); give another --run_name, or its own settings."


def _check(
    args: argparse.Namespace,
    launch: "TpuLaunch",
    zones: Sequence[str],
    places: Mapping[str, str | None],
    problems: Sequence[str],
) -> int:
    """Print a line for each check; of the zones after the first, what differs there. Returns 1 if a check failed."""
    from tomat.launch.check import print_line, run_checks
    from tomat.launch.command import require_program, run_command

    require_program("gcloud", GCLOUD_FROM)
    lines, seen = [], set()
    for zone in zones:
        for line in run_checks(replace(launch, zone=zone), places, problems, run_command):
            if line in seen:
                continue
            seen.add(line)
            lines.append(line if zone == zones[0] else replace(line, name=f"{zone}: {line.name}"))
            print_line(lines[-1])
    failed = sum(line.state == "failed" for line in lines)
    figures = {"run": launch.run_name, "slice": launch.slice_name, "failed": failed, "checks": list(map(vars, lines))}
    write_report(args.json, figures)
    return 1 if failed else 0


def _launch_gcloud(args: argparse.Namespace, launch: "TpuLaunch", zones: Sequence[str], caps: "Caps") -> int:
    from tomat.launch.command import require_program, run_command
    from tomat.launch.policy import RestartPolicy
    from tomat.launch.record import Login, alone
    from tomat.launch.smoke import Promise, Smoke, print_promise
    from tomat.launch.smoke import figures as smoke_figures
    from tomat.launch.supervisor import Supervisor

    names = ("max_restarts", "max_failures", "backoff_seconds", "poll_seconds")
    policy = RestartPolicy(**{name: getattr(args, name) for name in names})
    if not args.execute:
        hours = caps.hours(launch.slice)
        launch.write_watchdog(None if hours is None else hours * 3600)
        for command in launch.commands():
            print(f"# {command.purpose}\n{command.line}")
        print(policy.words)
        return 0
    require_program("gcloud", GCLOUD_FROM)
    login = Login.here(_of_gcloud("account", "nobody is logged in", "run `gcloud auth login`"))
    how = "give --project, or run `gcloud config set project P`"
    project = launch.project or _of_gcloud("project", "no project is set", how)
    launch = replace(launch, label=login.label(launch.run_url), project=project)
    supervisor = Supervisor(
        launch,
        policy,
        run_command,
        lambda text: tell(text, highlight=False),
        login,
        keep=args.keep,
        zones=zones,
        max_hours=caps.hours(launch.slice),
        new_pack=args.new_pack,
        only_once=args.smoke,
    )
    began = time.monotonic()
    smoke = Smoke(launch, run_command, supervisor.clock) if args.smoke else None
    if smoke is not None:
        supervisor.at_end = smoke.at_end
    promises: list[Promise] = []
    try:
        with alone(launch.folder):
            supervisor.supervise()
    except KeyboardInterrupt:
        if supervisor.machine.held:
            slice_now = supervisor.machine.launch
            console.print(
                "stopped watching; the slice and its training go on, at their price. The same command watches again; "
                f"unwatched, {slice_now.unwatched_words}. To do it at once: {slice_now.delete.line}",
                highlight=False,
            )
        raise
    finally:
        figures = {"run": launch.run_name, "slice": launch.slice_name, "attempts": len(supervisor.endings)}
        figures |= {"endings": supervisor.endings, "waited_seconds": supervisor.waited_seconds}
        hours, pack = supervisor.held_hours, supervisor.launch.pack
        figures |= {"slice_hours": hours, "chip_hour_usd": caps.price, "cost_usd": caps.cost(launch.slice, hours)}
        figures |= {"pack": pack.sha256, "commit": pack.commit, "dirty": pack.dirty}
        if smoke is not None and supervisor.endings:
            most = caps.cost(launch.slice, caps.hours(launch.slice) or 0.0)
            promises = smoke.promises(supervisor, figures["cost_usd"], most)
            for promise in promises:
                print_promise(promise)
            figures |= smoke_figures(promises)
        write_report(args.json, figures | {"total_seconds": time.monotonic() - began})
    return 1 if any(promise.held is False for promise in promises) else 0


def _of_gcloud(name: str, missing: str, remedy: str) -> str:
    """A setting of gcloud, read once for all commands of the launch: gcloud on the hosts may not have it, and here it
    may change meanwhile."""
    from tomat.launch.command import Command, run_command

    found = run_command(Command(f"which {name}", ("gcloud", "config", "get-value", name), 60, quiet=True))
    if not found.ok or found.output.strip() in ("", "(unset)"):
        raise TomatError(f"{missing} ({found.last_line}); {remedy}. Nothing was started.")
    return found.output.strip()


def _launch_iris(args: argparse.Namespace, config: "TrainConfig", pack: "Pack", zones: Sequence[str]) -> int:
    from tomat.launch.iris import iris_command, unpack

    assert config.slice is not None
    if args.max_cost is not None or len(zones) > 1 or args.check:
        flag = "max_cost" if args.max_cost is not None else "check" if args.check else "zone"
        raise TomatError(f"--{flag} as given does not go with Iris; give --max_hours, one zone, and no --check.")
    flags = {name: getattr(args, name) for name in ("spot", "max_failures", "max_hours")}
    run = {"run_name": config.run_name, "slice_name": config.slice, "pack": pack}
    command = iris_command(cluster=args.iris, zone=zones[0] if zones else None, **run, **flags)
    unpack(pack)
    return _submit(args, [command], "iris", "marin-iris, which comes with tomat's own dependencies")


def _submit(args: argparse.Namespace, commands: Sequence["Command"], program: str, where_from: str) -> int:
    """Print the commands that hand the run over to another engine. With --execute, run them."""
    from tomat.launch.command import require_program, run_command

    if args.execute:
        require_program(program, where_from)
    for command in commands:
        print(f"# {command.purpose}\n{command.line}")
        if args.execute and not (result := run_command(command)).ok:
            raise TomatError(f"{command.argv[0]} ended with status {result.status}: {result.last_line}.")
    return 0
