"""Launches from begin to end in simulated time: what the guide says of each scenario, and what holds in any order."""

import dataclasses
import re
import shutil
from pathlib import Path

import pod_twin
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pod_twin import Gone, Twin

from tomat.base.errors import TomatError
from tomat.launch.command import Command, Result
from tomat.launch.gcloud import TpuLaunch, launch_folder
from tomat.launch.machine import Clock
from tomat.launch.pack import Pack
from tomat.launch.policy import RestartPolicy
from tomat.launch.record import Login
from tomat.launch.supervisor import Supervisor

ME, OTHER = Login("me@example.org", "me", "laptop"), Login("bob@example.org", "bob", "desk")
ZONES = ("us-east5-b", "us-east5-a")
HOUR = 3600.0


@pytest.fixture(autouse=True)
def folder(tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("twin"))


def launcher(twin: Twin, login: Login = ME, pack: str = "a", **options) -> Supervisor:
    path = Path("pack.tar.gz")
    path.write_text(pack)
    packed = Pack(path, pack * 64, pack * 8, False, "tomat-launch/c.yaml", ())
    values = {"run_name": "r", "slice_name": "v6e-16", "zone": ZONES[0], "tpu_name": "t", "output_dir": "gs://b/runs"}
    own = {key: options.pop(key) for key in ("unwatched_hours", "queued_resource") if key in options}
    launch = TpuLaunch(**values, pack=packed, **own)
    launch = dataclasses.replace(launch, label=login.label(launch.run_url))
    return Supervisor(launch, RestartPolicy(), twin.run, twin.calls.append, login, clock=twin, **options)


def launched(twin: Twin, **options) -> tuple[str, Supervisor]:
    """How a launch ends: `finished`, `closed` (the laptop), or what it says."""
    supervisor = launcher(twin, **options)
    try:
        supervisor.supervise()
    except Gone:
        twin.flags.discard("closed")
        return "closed", supervisor
    except TomatError as error:
        return str(error), supervisor
    return "finished", supervisor


def fill(event: str) -> None:
    """A laptop's disk takes nothing of the launch any more, or does so again."""
    folder = launch_folder("r")
    if event == "full disk" and not folder.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.touch()
    elif event == "no more full disk" and folder.is_file():
        folder.unlink()


def sound(twin: Twin, cap_hours: float | None = None) -> None:
    """What must hold at the end, once the hosts have had their hour."""
    twin.advance(1.3 * HOUR)
    assert not twin.faults and not [one for one in twin.slices.values() if one.state == "READY"]
    assert not [one for one in twin.queues.values() if one.state in ("PROVISIONING", "ACTIVE")]
    if cap_hours is not None:
        assert twin.paid_seconds <= cap_hours * HOUR


# What happens when (seconds), with which options; how it ends; attempts; and hours that are paid for, at most.
SCENARIOS = {
    "an undisturbed run": ([], {}, "finished", 1, 1.4),
    "three preemptions": ([(n, "preempted") for n in (2000, 4000, 6000)], {}, "finished", 4, 2.3),
    "a crash after an hour": ([(3600, "1")], {}, "finished", 2, 1.7),
    "storage that does not answer": ([(2000, "75"), (4000, "75")], {}, "finished", 3, 1.9),
    "an orderly stop": ([(2000, "143")], {}, "finished", 2, 1.6),
    "a hang that the guard ends": ([(2500, "124")], {}, "finished", 2, 1.8),
    # The third attempt is on another slice.
    "a start that never works": ([(0, "broken start")], {}, "2 attempts in a row without a step", 3, 0.6),
    "a bad host": ([(0, "broken start"), (900, "no more broken start")], {}, "finished", 3, 1.8),
    "a refused input": ([(0, "refused")], {}, "refused its input", 1, 0.4),
    "a quota of zero": ([(0, "quota")], {}, "quota: TPUV6E.* is 0.*iam-admin/quotas", 0, 0.0),
    "no capacity for two hours": ([(0, "no capacity"), (7200, "no more no capacity")], {}, "finished", None, 1.4),
    "capacity in the second zone": ([(0, f"no capacity {ZONES[0]}")], {"zones": ZONES}, "finished", 1, 1.4),
    "preempted, then only elsewhere": (
        [(2000, "preempted"), (2000, f"no capacity {ZONES[0]}")], {"zones": ZONES}, "finished", 2, 1.8
    ),
    "a create that fails and leaves a slice": ([(0, "failed create")], {}, "5 attempts in a row", 5, 0.4),
    "a create that fails for a while": (
        [(0, "failed create"), (400, "no more failed create")], {}, "finished", None, 1.7
    ),
    "a quota of zero in the first zone": ([(0, f"quota {ZONES[0]}")], {"zones": ZONES}, "finished", 1, 1.4),
    "a quota of zero in both zones": ([(0, "quota")], {"zones": ZONES}, "quota: .* is 0.*nothing was started", 0, 0.0),
    "a login that has expired before": ([(0, "login")], {}, "gcloud auth login", 0, 0.0),
    "a login that expires meanwhile": ([(2000, "login")], {}, "Reauthentication.*auth login|failed 10 times", 0, 2.0),
    "a bucket that refuses": ([(0, "denied")], {}, "403", 0, 0.0),
    "hosts that do not answer for long": ([(1500, "mute"), (5100, "no more mute")], {}, "without a step", 4, 0.7),
    "a cap that is enough": ([], {"max_hours": 2.0}, "finished", 1, 1.4),
    "a cap of an hour": ([], {"max_hours": 1.0}, "cap of 1.00 h", 1, 1.0),
    "a cap over preemptions": (
        [(n, "preempted") for n in range(1500, 30_000, 1500)], {"max_hours": 1.5}, "cap of 1.50 h", None, 1.5
    ),
    "a hang without end": ([(2000, "hangs")], {}, "in a row without a step", 3, 2.6),
    "a hang without end, capped": ([(2000, "hangs")], {"max_hours": 1.0}, "cap of 1.00 h", 1, 1.0),
    "preempted at once": ([(n, "preempted") for n in range(200, 60_000, 200)], {}, "5 attempts in a row", 5, 1.2),
    "crashes of few steps": ([(n, "1") for n in range(900, 90_000, 420)], {}, "in a row", None, 2.5),
    "a dead host": ([(2000, "dead host")], {}, "finished", 2, 1.7),
    "two dead hosts": ([(2000, "dead host"), (4500, "dead host")], {}, "finished", 3, 2.0),
    "a bucket that is gone": ([(0, "bucket gone")], {}, "gs://b not found: 404.*nothing was started", 0, 0.0),
    "a bucket that is gone for an hour": (
        [(2000, "bucket gone"), (5600, "no more bucket gone")], {}, "may have gone on.*If none has.*: gcloud", None, 1.2
    ),
    "a disk that is full before": ([(0, "full disk")], {}, "cannot be written|Not a directory|is not a folder", 0, 0.0),
    "a disk that is full meanwhile": ([(2000, "full disk")], {}, "finished", 1, 1.4),
    "a laptop that sleeps": ([(1500, "sleeps"), (3050, "sleeps")], {}, "finished", 1, 1.8),
    "a laptop that sleeps through a preemption": ([(2000, "sleeps"), (2500, "preempted")], {}, "finished", 2, 1.9),
    # A lost host is no reason to wait.
    "a lost host": ([(2000, "76")], {}, "finished", 2, 1.6),
    "a queued resource": ([], {"queued_resource": True}, "finished", 1, 1.4),
    "a queue of a day": (
        [(0, "no capacity"), (86_400, "no more no capacity")], {"queued_resource": True}, "finished", 1, 1.4
    ),
    "a queue of a day, capped": (
        [(0, "no capacity"), (86_400, "no more no capacity")], {"queued_resource": True, "max_hours": 2.0}, "finished",
        1, 1.4,
    ),
    "a queued resource that is taken away": (
        [(2000, "preempted"), (2000, "no capacity"), (20_000, "no more no capacity")], {"queued_resource": True},
        "finished", 2, 1.8,
    ),
    "a queued resource that is taken away as it comes": (
        [(n, "preempted") for n in (300, 900)], {"queued_resource": True}, "finished", None, 1.7
    ),
    "a queued resource without quota": (
        [(0, "quota")], {"queued_resource": True}, "quota: TPUV6E.* is 0.*iam-admin/quotas", 0, 0.0
    ),
    "a queued resource that cannot be": (
        [(0, "bad request")], {"queued_resource": True}, "queued resource.*Network 'x' is not found", 0, 0.0
    ),
    "a queued resource at its cap": ([], {"queued_resource": True, "max_hours": 1.0}, "cap of 1.00 h", 1, 1.0),
}  # fmt: skip


@pytest.mark.parametrize("max_hours", [1.0, 1.04, 1.1, 1.22])
def test_the_logs_of_many_hosts_do_not_outlast_the_cap(monkeypatch, max_hours):
    """A v6e-256 at 8 s a copy, whose hosts may not give it back themselves: up to 753 s beyond it were paid."""
    monkeypatch.setattr(pod_twin, "N_HOSTS", 64)
    monkeypatch.setitem(pod_twin.SECONDS, "scp", 8.0)
    twin = Twin([(0.0, "powerless")], steps=40_000)
    supervisor = launcher(twin, max_hours=max_hours)
    supervisor.launch = supervisor.machine.launch = dataclasses.replace(supervisor.launch, slice_name="v6e-256")
    with pytest.raises(TomatError, match="cap of"):
        supervisor.supervise()
    assert twin.paid_seconds <= max_hours * HOUR


def test_a_wait_before_the_next_attempt_does_not_outlast_the_cap():
    """Of hosts that may not give the slice back themselves."""
    twin = Twin([(0.0, "powerless"), (3200.0, "75")])
    watched = launcher(twin, max_hours=1.0)
    watched.policy = RestartPolicy(backoff_seconds=900.0)
    with pytest.raises(TomatError, match="cap of 1.00 h"):
        watched.supervise()
    assert not twin.slices and twin.paid_seconds <= HOUR


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_launch_ends_as_the_guide_says(name):
    events, options, ends, attempts, hours = SCENARIOS[name]
    twin = Twin(sorted(events))
    twin.changed = fill
    said, supervisor = launched(twin, **options)
    assert re.search(ends, said), said
    sound(twin)
    assert attempts is None or len(supervisor.endings) == attempts, supervisor.endings
    assert twin.paid_seconds / HOUR <= hours
    assert twin.saved == twin.steps or said != "finished"


def test_a_closed_laptop_stops_nothing_for_an_hour_and_then_all_in_good_order():
    twin = Twin([(2000, "closed")], steps=9000)
    said, _ = launched(twin)
    assert said == "closed" and twin.slices
    twin.advance(0.9 * HOUR)
    assert twin.slices and not twin.lost
    sound(twin)
    assert twin.lost == [] and 0 < twin.saved < twin.steps and twin.paid_seconds < 1.7 * HOUR
    # The same command goes on where it was.
    before = twin.saved
    said, supervisor = launched(twin)
    assert said == "finished" and any("going on with the launch" in line for line in twin.calls)
    assert twin.saved == twin.steps and before > 0 and supervisor.endings == ["finished"]
    sound(twin)


def test_a_launch_whose_slice_was_not_given_back_is_not_over():
    """Google answers for the bucket, and not for the slice: the same command goes on, and its hours count on."""
    twin = Twin()
    first = launcher(twin)

    def run(command: Command) -> Result:
        if twin.time < 3000 or command.argv[1] != "compute":
            return twin.run(command)
        twin.advance(30.0)
        return Result(1, "", "ERROR: (gcloud.compute.tpus.tpu-vm.describe) HttpError 503: unavailable")

    first.run = first.machine.run = run
    with pytest.raises(TomatError, match="failed 10 times in a row.*the same command goes on"):
        first.supervise()
    said, second = launched(twin, pack="b")
    assert said == "finished" and second.launch.pack.sha256 == "a" * 64
    assert second.held_hours * HOUR == pytest.approx(twin.paid_seconds, abs=600)
    sound(twin)


def test_a_launcher_that_google_does_not_answer_leaves_a_training_at_work():
    """It could delete the slice as soon as Google answers again; the same command is to go on with it."""
    twin = Twin()
    first = launcher(twin)

    def run(command: Command) -> Result:
        if 3000 < twin.time < 4000 and command.argv[1] == "compute" and command != first.machine.launch.delete:
            twin.advance(30.0)
            return Result(1, "", "ERROR: gcloud crashed (TransportError)")
        return twin.run(command)

    first.run = first.machine.run = run
    with pytest.raises(TomatError, match="failed 10 times in a row.*the same command goes on"):
        first.supervise()
    assert twin.slices
    said, second = launched(twin)
    assert said == "finished" and second.endings == ["finished"] and not twin.lost
    sound(twin)


def test_a_smoke_run_that_has_finished_pays_for_no_second_slice():
    twin = Twin()
    assert launched(twin, only_once=True)[0] == "finished"
    paid = twin.paid_seconds
    said, _ = launched(twin, only_once=True)
    assert "run 'r' has finished" in said and "Remove gs://b/runs/r" in said
    assert twin.paid_seconds == paid and not twin.slices


def test_a_laptop_that_is_opened_again_finds_the_training_at_work():
    twin = Twin([(2000, "closed")])
    launched(twin)
    twin.advance(600)
    said, supervisor = launched(twin)
    assert said == "finished" and supervisor.endings == ["finished"]
    assert (
        "the training is running already; watching it" in twin.calls
        and twin.calls.count("create 16 chips on 4 hosts") == 1
    )
    sound(twin)


def slow_to_answer(watched: Supervisor, twin: Twin, hosts: int, since: float = 0.0, times: int = 1) -> None:
    """From a moment on, and so many times, only the last `hosts` hosts answer the question for the training's state."""
    asked = []

    def run(command: Command) -> Result:
        result = twin.run(command)
        if command != watched.launch.status or twin.time < since or len(asked) >= times:
            return result
        asked.append(command)
        return Result(255, "".join(result.output.splitlines(keepends=True)[pod_twin.N_HOSTS - hosts :]))

    watched.run = run


def test_a_host_that_is_slow_to_answer_is_no_reason_to_install_over_a_training_at_work():
    twin = Twin([(2000, "closed")])
    launched(twin)
    second = launcher(twin)
    slow_to_answer(second, twin, hosts=3)
    assert second.supervise().endings == ["finished"]
    assert twin.calls.count("install on every host") == 1 and twin.saved == twin.steps
    sound(twin)


def test_a_closed_laptop_may_stay_closed_as_long_as_it_is_allowed_and_no_longer_than_the_run():
    twin = Twin([(500, "closed")], steps=2 * 3600)
    launched(twin, unwatched_hours=12.0)
    twin.advance(1.9 * HOUR)
    assert twin.slices
    twin.advance(0.6 * HOUR)
    assert not twin.slices and twin.saved == twin.steps and not twin.faults


def test_a_slice_keeps_to_the_hours_that_its_hosts_were_told():
    """Whatever a later command says: all its hours count, and the next slice has the new ones."""
    twin = Twin([(2000, "closed"), (18_000, "preempted")], steps=20_000)
    launched(twin, unwatched_hours=12.0)
    twin.advance(4 * HOUR)
    said, second = launched(twin)
    assert said == "finished" and any("12 h after a launcher last looked" in line for line in twin.calls)
    assert second.held_hours * HOUR == pytest.approx(twin.paid_seconds, abs=600)
    assert second.machine.launch.unwatched_hours == 1.0
    sound(twin)


@pytest.mark.parametrize("closed", [10.0, 100.0, 250.0, 400.0, 600.0])
def test_a_laptop_that_is_closed_while_it_starts_leaves_nothing(closed):
    twin = Twin([(closed, "closed")])
    assert launched(twin)[0] == "closed"
    sound(twin)
    assert twin.paid_seconds < 1.4 * HOUR


def test_every_start_is_of_the_pack_that_the_launch_began_with():
    """Also by a launcher of later, from a checkout that has moved on; `--new_pack` says so."""
    twin = Twin([(2000, "preempted"), (3000, "closed")])
    launched(twin)
    said, supervisor = launched(twin, pack="b")
    assert said == "finished" and {*twin.packs_run} == {"a" * 64} and len(twin.packs_run) == 2
    assert supervisor.launch.pack.sha256 == "a" * 64
    assert any("--new_pack" in line for line in twin.calls)
    sound(twin)


def test_a_new_pack_replaces_the_old_one_in_good_order():
    twin = Twin([(3000, "closed")])
    launched(twin)
    before = twin.saved
    said, _ = launched(twin, pack="b", new_pack=True)
    assert said == "finished" and twin.packs_run == ["a" * 64, "b" * 64]
    assert twin.saved == twin.steps > before and not twin.lost
    sound(twin)


def test_an_ended_launch_begins_anew_with_the_checkout_of_then():
    twin = Twin([(0, "refused")])
    assert "refused its input" in launched(twin)[0]
    twin.flags.clear()
    assert launched(twin, pack="b")[0] == "finished" and twin.packs_run == ["a" * 64, "b" * 64]


@pytest.mark.parametrize(
    ("wait", "said"),
    [
        (60.0, "launched by me@example.org as me on laptop, whose launcher looked"),
        # Its launcher is silent, and its slice trains.
        (0.4 * HOUR, "was not made by this launch and login.*left as it is.*--tpu_name"),
    ],
)
def test_another_login_never_touches_a_slice_that_trains(wait, said):
    twin = Twin([(3000, "closed")])
    launched(twin)
    twin.advance(wait)
    before = dataclasses.replace(next(iter(twin.slices.values())))
    told, other = launched(twin, login=OTHER)
    assert re.search(said, told), told
    assert twin.slices and not other.machine.held
    assert next(iter(twin.slices.values())).training is before.training
    # Whose it is goes on.
    assert launched(twin)[0] == "finished"
    sound(twin)


@pytest.mark.parametrize("skew", [-3 * HOUR, 3 * HOUR])
def test_a_wrong_clock_neither_takes_over_what_is_watched_nor_leaves_what_is_not(skew):
    """Of the machine that comes second: it is the same login's, which the slice's label would let in."""
    twin = Twin([(3000, "closed")], steps=9000)
    launched(twin, max_hours=4.0)
    twin.advance(60.0)
    twin.skew, desktop = skew, dataclasses.replace(ME, machine="desktop")
    said, second = launched(twin, login=desktop, max_hours=4.0)
    assert re.search("launched by me@example.org as me on laptop, whose launcher looked [1-9][0-9]{1,2} s ago", said)
    assert len(twin.slices) == 1 and not twin.lost
    twin.advance(900.0)
    said, second = launched(twin, login=desktop, max_hours=4.0)
    assert said == "finished" and second.held_hours * HOUR == pytest.approx(twin.paid_seconds, abs=600)
    sound(twin, 4.0)


@pytest.mark.parametrize("finishes", [True, False])
def test_a_laptop_that_wakes_leaves_the_launch_to_the_machine_that_went_on_with_it(finishes):
    class Sleeper(Clock):
        slept = False

        def now(self) -> float:
            return twin.now()

        def sleep(self, seconds: float) -> None:
            twin.sleep(seconds)
            if twin.time > 3000 and not self.slept:
                self.slept = True
                twin.advance(1200.0)
                twin.events = [] if finishes else [(twin.time + 1000, "closed")]
                said, _ = launched(twin, login=dataclasses.replace(ME, machine="desktop"))
                assert said == ("finished" if finishes else "closed")

    twin = Twin(steps=9000)
    sleeper = launcher(twin)
    sleeper.clock = sleeper.machine.clock = Sleeper()
    with pytest.raises(TomatError, match="now launched by me@example.org as me on desktop.*left to that one"):
        sleeper.supervise()
    assert len(twin.slices) == (not finishes) and not twin.lost and twin.calls.count("create 16 chips on 4 hosts") == 1
    if not finishes:
        assert launched(twin, login=dataclasses.replace(ME, machine="desktop"))[0] == "finished"
    assert twin.saved == twin.steps
    sound(twin)


def test_another_login_takes_over_what_is_left_behind():
    twin = Twin([(3000, "closed")])
    launched(twin)
    twin.advance(2 * HOUR)
    said, other = launched(twin, login=OTHER, pack="b")
    assert said == "finished" and {*twin.packs_run} == {"a" * 64}
    sound(twin)


def test_two_launchers_that_begin_in_the_same_moment():
    twin = Twin()
    second = launcher(twin, login=OTHER)
    assert not second.run(second.launch.read_record).ok
    launcher(twin)._claim()
    second._recorded = lambda: None
    with pytest.raises(TomatError, match="412.*Another launcher may have begun just now; nothing was started"):
        second.supervise()
    assert not twin.slices


def test_a_kept_slice_is_used_again_by_whose_it_is():
    twin = Twin()
    assert launched(twin, keep=True, unwatched_hours=None)[0] == "finished" and len(twin.slices) == 1
    twin.advance(3 * HOUR)
    assert launched(twin, login=OTHER)[0].endswith("--zone=us-east5-b") and len(twin.slices) == 1
    said, supervisor = launched(twin)
    assert said == "finished" and supervisor.endings == ["finished"]
    assert twin.calls.count("create 16 chips on 4 hosts") == 1
    sound(twin)


def test_what_is_kept_is_not_kept_beyond_the_cap():
    twin = Twin()
    assert launched(twin, keep=True, unwatched_hours=None, max_hours=2.0)[0] == "finished" and twin.slices
    twin.advance(HOUR)
    assert not twin.slices and twin.paid_seconds <= 2 * HOUR


@pytest.mark.parametrize(("at", "trains"), [(100.0, False), (2500.0, True)])
def test_an_interrupt_leaves_what_trains_and_gives_back_what_does_not(at, trains):
    twin = Twin([*([] if trains else [(0.0, "no capacity")]), (at, "Ctrl-C")], steps=9000)
    with pytest.raises(KeyboardInterrupt):
        launcher(twin).supervise()
    assert bool(twin.slices) is trains and not twin.lost
    # It has said that it watches no more: the same login may go on from another machine at once.
    twin.flags.discard("no capacity")
    said, _ = launched(twin, login=dataclasses.replace(ME, machine="desktop"))
    assert said == "finished" and twin.saved == twin.steps
    sound(twin)


@pytest.mark.parametrize("hosts", [0, 3])
def test_an_interrupt_leaves_what_trains_where_hosts_do_not_answer(hosts):
    twin = Twin([(2500.0, "Ctrl-C")], steps=9000)
    watched = launcher(twin)
    slow_to_answer(watched, twin, hosts, since=2500.0)
    with pytest.raises(KeyboardInterrupt):
        watched.supervise()
    assert twin.slices and not twin.lost
    sound(twin)


def test_a_record_that_cannot_be_written_ends_nothing_and_is_said():
    twin = Twin([(2000, "denied")])
    assert launched(twin)[0] == "finished" and twin.paid_seconds / HOUR <= 1.4
    assert any("record of the launch could not be renewed" in line and "403" in line for line in twin.calls)
    sound(twin)


def test_a_report_that_nobody_can_read_ends_nothing(capsys):
    def full(text: str) -> None:
        raise OSError(28, "No space left on device")

    told = launcher(Twin([(2000, "preempted")]))
    told.say = full
    assert told.supervise().endings == ["lost its machines", "finished"]
    assert "attempt 2 finished" in capsys.readouterr().err


def test_restarts_are_capped():
    twin = Twin([(n, "143") for n in (2000, 4000)])
    limited = launcher(twin)
    limited.policy = RestartPolicy(max_restarts=1)
    with pytest.raises(TomatError, match="1 restarts are used up"):
        limited.supervise()
    sound(twin)


EVENTS = ["preempted", "1", "75", "76", "124", "143", "closed", "sleeps", "taken over", "dead host"]
STATES = ["mute", "login", "denied", "no capacity", f"no capacity {ZONES[0]}", "hangs", "broken start", "quota",
          "full disk", "bucket gone"]  # fmt: skip
"""Of which each may end again."""
DRAWN = st.sampled_from([*EVENTS, *STATES, *(f"no more {state}" for state in STATES)])
RETURNS = st.fixed_dictionaries({
    "wait": st.sampled_from([0.0, 300.0, 2400.0, 9000.0]),
    "login": st.sampled_from([ME, ME, dataclasses.replace(ME, machine="desktop"), OTHER]),
    "new_pack": st.booleans(),
    "skew": st.sampled_from([0.0, -7200.0, 7200.0]),
})  # fmt: skip
LAUNCHES = st.fixed_dictionaries({
    "events": st.lists(st.tuples(st.integers(0, 15_000), DRAWN), max_size=12),
    "max_hours": st.sampled_from([0.4, 1.0, 2.0, None]),
    "returns": st.lists(RETURNS, max_size=3),
    "zones": st.sampled_from([ZONES, ZONES[:1]]),
    "queued_resource": st.booleans(),
})  # fmt: skip


@given(LAUNCHES)
@settings(max_examples=60, deadline=None)
def test_whatever_the_order_no_two_trainers_no_slice_left_and_no_cost_beyond_the_cap(drawn):
    events, returns = sorted(drawn.pop("events")), drawn.pop("returns")
    # Every state ends at last: a quota is granted, a bucket is made again.
    twin = Twin([*events, *((30_000, f"no more {state}") for state in STATES)], steps=9000)
    shutil.rmtree("runs", ignore_errors=True)  # what earlier launches left on the laptop

    def happens(event: str) -> None:
        if event == "taken over":
            launched(twin, login=dataclasses.replace(ME, machine="desktop"), **drawn)
        fill(event)

    twin.changed = happens
    for one in [{"wait": 0.0, "login": ME, "new_pack": False, "skew": 0.0}, *returns]:
        twin.advance(one["wait"])
        twin.flags.discard("login")
        before, twin.skew = twin.paid_seconds, one["skew"]
        pack = "b" if one["new_pack"] else "a"
        said, _ = launched(twin, login=one["login"], pack=pack, new_pack=one["new_pack"], **drawn)
        if said == "finished":
            assert twin.saved == twin.steps
        if (hours := drawn["max_hours"]) is not None:
            # A cap is of one launch; one that has ended by it begins anew.
            assert twin.paid_seconds - before <= hours * HOUR
    # A queue that was left may still give a slice, which its hosts then give back.
    twin.advance(max(0.0, 31_000 - twin.time))
    sound(twin)
    # Nothing that was saved is ever lost: each range begins at the newest save, and saves only grow; and none is longer
    # than what lies between two saves.
    begins = [first for first, _ in twin.lost]
    assert begins == sorted(begins)
    assert all(reached - first <= twin.save_seconds + 30 for first, reached in twin.lost)
