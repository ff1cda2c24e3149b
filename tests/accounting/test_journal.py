"""The journal: ahead of every release, whole or refused, and never shared."""

import errno
import functools
import gc
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ledgers import a_run, in_threads, ledger, loaded, record, reopened, told

from pyro_dp.accounting import journal as journals
from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import ApproximateDP, NonPrivateLook, SubsampledGaussian
from pyro_dp.accounting.ledger import Description
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.release import release
from pyro_dp.utils.errors import ConfigurationError, PrivacyBudgetExceeded, PrivacyError
from pyro_dp.utils.files import line_of, value_of

EVENT = SubsampledGaussian(4.0, 0.01)
OTHER = ApproximateDP(0.5, 1e-6, "selection of a prior")


def resumed(path, **settings):
    """Ledger and notes of the file."""
    accountant = reopened(path, **settings)
    return dict(accountant.ledger), accountant.notes


@pytest.fixture
def quick(monkeypatch):
    """For hundreds of files whose durability is not at stake."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def written(tmp_path):
    """A journal of five lines after its header."""
    path = tmp_path / "journal"
    accountant = PrivacyAccountant()
    accountant.note("seeded, «ß»\n")
    with accountant.journal(path):
        accountant.record(EVENT)
        accountant.record(OTHER, 3)
        accountant.record(EVENT, 2)
        accountant.record(OTHER)
    return path


def test_a_journal_goes_on(written):
    assert resumed(written) == ({EVENT: 3, OTHER: 4}, ("seeded, «ß»\n",))
    accountant = PrivacyAccountant()
    accountant.record(EVENT)
    accountant.note("mine")
    with accountant.journal(written) as journal:
        assert accountant.ledger == ((EVENT, 3), (OTHER, 4))
        assert accountant.notes == ("mine", "seeded, «ß»\n")
        accountant.record_nonprivate("loss")
        accountant.note("mine"), accountant.note("late")
        assert journal.path == written
    counts, notes = resumed(written)
    assert list(counts.values()) == [3, 4, 1] and notes == ("seeded, «ß»\n", "mine", "late")
    assert type(list(counts)[-1]) is NonPrivateLook


def test_batches_and_repeats_take_little_room(tmp_path):
    accountant = PrivacyAccountant()
    with accountant.journal(tmp_path / "journal"):
        accountant.record(EVENT, 10**6)
        size = (tmp_path / "journal").stat().st_size
        for _ in range(100):
            accountant.record(EVENT)
    assert size < 500 and (tmp_path / "journal").stat().st_size < size + 100 * 30
    assert resumed(tmp_path / "journal")[0] == {EVENT: 10**6 + 100}


def test_the_line_is_on_the_disk_before_the_noise_is_drawn(tmp_path, monkeypatch):
    path, log = tmp_path / "journal", []
    accountant = PrivacyAccountant()
    accountant.journal(path)
    write, fsync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda *a: log.append("write") or write(*a))
    monkeypatch.setattr(os, "fsync", lambda *a: log.append("fsync") or fsync(*a))

    class Noise:
        def standard_normal(self, size):
            log.append(path.read_bytes().count(b"\n"))
            return np.zeros(size)

    clipped = ClippedSum([Block(2, 1.0)])
    clipped.add(torch.ones(3, 2))
    release(clipped, accountant=accountant, event=EVENT, noise=Noise())
    assert log == ["write", "fsync", 2]


@pytest.mark.long
@pytest.mark.every_commit
def test_a_torn_last_line_is_dropped(quick, written, tmp_path):
    """Wherever the file is cut, all whole lines count and the journal goes on."""
    content, path = written.read_bytes(), tmp_path / "cut"
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    ledgers = {}
    for end in ends:
        path.write_bytes(content[:end])
        ledgers[end] = resumed(path)
    assert [sum(ledgers[end][0].values()) for end in ends] == [0, 0, 1, 4, 6, 7]
    for cut in range(ends[0], len(content)):
        path.write_bytes(content[:cut])
        whole = max(end for end in ends if end <= cut + 1)  # nothing but a newline is missing
        accountant = PrivacyAccountant()
        with accountant.journal(path):
            assert (dict(accountant.ledger), accountant.notes) == ledgers[whole]
            accountant.record(EVENT)
        assert sum(resumed(path)[0].values()) == sum(ledgers[whole][0].values()) + 1
    for zeros in (1, 1000):  # blocks of the last line that never reached the disk
        path.write_bytes(content + b"\0" * zeros)
        assert resumed(path) == ledgers[ends[-1]]


def refused(path, error=ConfigurationError, match="damaged"):
    """The error names the file and changes nothing."""
    before = path.read_bytes()
    accountant = PrivacyAccountant()
    with pytest.raises(error, match=match) as caught:
        accountant.journal(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == before and accountant.ledger == ()
    accountant.record(EVENT)  # without the journal: nothing was opened by halves


@pytest.mark.long
@pytest.mark.every_commit
def test_damage_is_refused(written, tmp_path):
    content, path = written.read_bytes(), tmp_path / "damaged"
    lines = content.splitlines(keepends=True)
    damaged = [lines[:2] + lines[3:], lines[1:], [*lines[:2], lines[3], lines[2], *lines[4:]]]
    damaged += [[*lines, lines[-1]], [*lines, b"\n"], [*lines[:3], b"{}\n", *lines[3:]]]
    damaged += [[lines[0][:cut]] for cut in range(len(lines[0]))]
    for parts in [*damaged, [b'{"version": 1}'], [b"\0" * 100]]:
        path.write_bytes(b"".join(parts))
        refused(path)


@pytest.mark.slow
@pytest.mark.every_commit
def test_a_flipped_bit_is_never_a_release_less(quick, written, tmp_path):
    content, path = written.read_bytes(), tmp_path / "flipped"
    ledger = resumed(written)
    kept = 0
    for place in range(len(content)):
        for bit in (0, 5):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                assert resumed(path) == ledger
                kept += 1
            except ConfigurationError as error:
                assert str(path) in str(error) and path.read_bytes() == flipped
    assert kept == 2  # the newline at the end


RUN = {"method": "x", "generator": "secure", "time": "z"}
STATED = {"mechanism": "approximate_dp", "epsilon": 1, "delta": 2, "name": "", "count": 1}
UNKNOWN = [
    *([9, 1], [-1, 1], ["0", 1], [0], 3, None, {"mechanism": "laplace", "count": 1}, {}, STATED),
    [0, 1, 0],  # a run that the journal does not have
    {"reserved": []},
    {"reserved": [3], "run": RUN},
    {"reserved": [], "run": 0},
    [0, 1, {"method": "x"}],
    [0, 1, RUN | {"generator": "y"}],
    [0, 1, RUN, -1.0],
    [0, 1, RUN, "1"],
    [0, 1, RUN, 1.0, 2],
    {"clipped": [0, 0.5, 0.1]},
    {"clipped": [0, 1.5, 0.1]},
    {"status": [0, "ok"]},
    {"status": [0]},
    {"description": {"title": "two\nlines"}},
    {"description": []},
]


def test_lines_that_no_journal_has(written, tmp_path):
    """Lines that are well-formed but unknown, of a later version or made up, are refused."""
    path, digest = tmp_path / "unknown", ""
    first = written.read_bytes().splitlines(keepends=True)[:3]  # up to the first event
    for line in first:
        _, digest = value_of(line[:-1], digest)
    for value in UNKNOWN:
        path.write_bytes(b"".join(first) + line_of(value, digest)[0])
        refused(path)
    for header in ({"journal": 2}, {"journal": 1}, [], "text", {}):
        path.write_bytes(line_of(header, "")[0])
        refused(path)


def test_settings_must_match(written):
    before = written.read_bytes()
    settings = {"epsilon": 1.0, "delta": 1e-6, "neighboring": "replace_one", "engine": "rdp"}
    for name, value in settings.items():
        with pytest.raises(ConfigurationError, match=f"{name}=.*differs"):
            reopened(written, **{name: value})
    assert written.read_bytes() == before


def test_a_journal_that_counts_less_is_refused(written, tmp_path):
    accountant, before = ledger((OTHER, 5)), written.read_bytes()
    with pytest.raises(PrivacyError, match="older copy"):
        accountant.journal(written)
    with pytest.raises(PrivacyError, match="before the first release"):
        accountant.journal(tmp_path / "new")
    assert written.read_bytes() == before and not (tmp_path / "new").exists()


def test_one_journal_one_accountant(written):
    accountant = PrivacyAccountant()
    journal = accountant.journal(written)
    refused(written, match="in use")
    with pytest.raises(ConfigurationError, match="already"):
        accountant.journal(written)
    journal.close()
    ledger = accountant.ledger
    with pytest.raises(PrivacyError, match="closed"):
        accountant.record(EVENT)
    with pytest.raises(PrivacyError, match="closed"):
        accountant.note("late")
    assert accountant.ledger == ledger
    second = PrivacyAccountant()
    second.journal(written)
    del second
    gc.collect()
    resumed(written)


@pytest.mark.parametrize("change", ["cut", "append", "replace", "move", "remove"])
def test_a_change_by_something_else_is_noticed(written, tmp_path, change):
    accountant = PrivacyAccountant()
    accountant.journal(written)
    content = written.read_bytes()
    (tmp_path / "copy").write_bytes(content)
    {
        "cut": lambda: os.truncate(written, len(content) - 30),
        "append": lambda: written.write_bytes(content + b"x"),
        "replace": lambda: os.replace(tmp_path / "copy", written),
        "move": lambda: written.rename(tmp_path / "moved"),
        "remove": written.unlink,
    }[change]()
    for _ in range(2):
        with pytest.raises(PrivacyError, match="changed, moved or replaced"):
            accountant.record(EVENT)
    assert accountant.num_releases == 7


def test_what_the_budget_refuses_is_not_written(tmp_path):
    path = tmp_path / "journal"
    accountant = PrivacyAccountant(1.0)
    accountant.journal(path)
    accountant.record(SubsampledGaussian(10.0), 3)
    before = path.read_bytes()
    for bad in (SubsampledGaussian(0.1), SubsampledGaussian(1.0, 0.5, "fixed"), "event"):
        with pytest.raises((PrivacyBudgetExceeded, ConfigurationError)):
            accountant.record(bad)
    accountant.record(EVENT, 0)
    assert path.read_bytes() == before


@pytest.mark.parametrize("fails", ["write", "part of a write", "fsync"])
def test_a_disk_that_fails(tmp_path, monkeypatch, fails):
    path = tmp_path / "journal"
    accountant = PrivacyAccountant()
    accountant.journal(path)
    accountant.record(EVENT)
    write = os.write
    room = {"write": 0, "part of a write": 7}.get(fails, 10**6)

    def full(file, data):
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "no space left")
        room, data = room - len(data[:room]), data[:room]
        return write(file, data)

    def broken(file):
        raise OSError(errno.EIO, "input/output error")

    clipped = ClippedSum([Block(2, 1.0)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        if fails == "fsync":
            patch.setattr(os, "fsync", broken)
        with pytest.raises(OSError, match="space|input"):
            release(clipped, accountant=accountant, event=EVENT, noise=None)  # would draw from it
    assert dict(accountant.ledger) == {EVENT: 2}
    with pytest.raises(PrivacyError, match="could not be written"):
        accountant.record(EVENT)
    del accountant
    gc.collect()
    accountant = PrivacyAccountant()
    accountant.journal(path)
    assert 1 <= accountant.num_releases <= 2
    accountant.record(EVENT)


@pytest.mark.long
def test_runs_and_descriptions_come_back(tmp_path):
    path, accountant = tmp_path / "journal", PrivacyAccountant()
    one, two = (a_run(seeded=True) for _ in "ab")  # alike, but two
    accountant.describe(dataset="before it was opened")
    with accountant.journal(path):
        accountant.describe(title="«T»", units=7)
        accountant.describe()  # nothing new
        accountant.record(EVENT)
        for origin, bound in [(one, 0.25), (two, None), (one, 4.0), (two, float("inf"))]:
            with accountant.next_position(origin, bound):
                accountant.record(EVENT, 2)
                accountant.record(OTHER)
        accountant.note_result(one, (0.5, 0.125))
        accountant.note_result(a_run("x", secure=True), (0.5, 0.125))
        accountant.note_result(two, status="check: the noise hides one coefficient")
        digest = accountant.journal_digest
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + 2 + 1 + 8 + 2 and lines[-1].startswith(digest)
    again = PrivacyAccountant()
    again.describe(title="mine stays")
    with again.journal(path):
        assert again.ledger == accountant.ledger and told(again) == told(accountant)
        assert again.description == Description("mine stays", "before it was opened", units=7)
        record(again, one, EVENT)
        assert told(again)[-1][1].counts == {EVENT: 1}
    (by_hand, first, second, third) = told(reopened(path))
    assert by_hand[0] is None and by_hand[1].counts == {EVENT: 1}
    assert first[0] == third[0] == one.saved() and second[0] == two.saved()
    assert first[1].bounds == {EVENT: (0.25, 4.0), OTHER: (0.25, 4.0)}
    assert (first[1].clipped, second[1].clipped) == ((0.5, 0.125), None)
    assert (first[1].status, second[1].status) == (None, "check: the noise hides one coefficient")
    assert second[1].bounds == {} and third[1].counts == {EVENT: 1}


def test_reservations_come_back(tmp_path):
    """A run that is continued takes over what its first part had reserved."""
    path, accountant = tmp_path / "journal", PrivacyAccountant()
    origin = a_run()
    with accountant.journal(path):
        for _ in range(3):
            record(accountant, origin, EVENT, bound=1.0, reserves={EVENT: 10 - accountant.position})
        accountant.record(EVENT)  # by hand
    assert len(path.read_text().splitlines()) == 1 + 1 + 3 + 1
    again = PrivacyAccountant()
    with again.journal(path):
        assert again.ledger == ((EVENT, 4),) and again.counted == ((EVENT, 11),)
        ((found, left),) = again.reserved
        assert (found.saved(), left) == (origin.saved(), {EVENT: 7})
        later = a_run(seeded=True, reservation=origin.reservation)
        record(again, later, OTHER, reserves={OTHER: 4})
    third = reopened(path)
    assert third.counted == again.counted == ((EVENT, 4), (OTHER, 4))
    ((found, left),) = third.reserved
    assert (found.saved(), left) == (later.saved(), {OTHER: 3})


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.parametrize("plan", ["planned", "adaptive"])
def test_a_plan_counts_where_its_first_release_was_not_written(tmp_path, plan):
    path, accountant = tmp_path / "journal", PrivacyAccountant()
    with accountant.journal(path):
        record(accountant, a_run(plan=plan), EVENT, reserves={EVENT: 10})
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    again = reopened(path)
    assert again.ledger == () and again.counted == ((EVENT, 10),)
    assert "planned and not released" in again.report()


def test_a_system_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "fcntl", None)
    with pytest.raises(ConfigurationError, match="save"):
        PrivacyAccountant().journal(tmp_path / "journal")
    assert not list(tmp_path.iterdir())


def test_a_new_journal_never_replaces_one_that_appears_meanwhile(written, monkeypatch):
    before = written.read_bytes()
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert resumed(written)[0] == {EVENT: 3, OTHER: 4}
    assert written.read_bytes() == before
    assert [p.name for p in written.parent.iterdir()] == ["journal"]


def test_names_in_folders_are_synchronised(tmp_path, monkeypatch):
    folders, fsync = [], os.fsync

    def spy(file):
        folders.append(stat.S_ISDIR(os.fstat(file).st_mode))
        fsync(file)

    monkeypatch.setattr(os, "fsync", spy)
    PrivacyAccountant().journal(tmp_path / "journal")
    assert folders == [False, True]
    folders.clear()
    PrivacyAccountant().save(tmp_path / "state.json")
    assert folders == [False, True]


def test_threads_share_a_journal(tmp_path):
    accountant = PrivacyAccountant()
    events = [SubsampledGaussian(1.0 + i) for i in range(4)]
    with accountant.journal(tmp_path / "journal"):

        def work(event):
            for _ in range(50):
                accountant.record(event)

        in_threads(*(functools.partial(work, event) for event in events))
    assert resumed(tmp_path / "journal")[0] == dict.fromkeys(events, 50)


def test_states_and_journals(written, tmp_path):
    """An older state loads and lowers nothing. A state that counts more is refused."""
    older, newer = ledger((EVENT, 1)), ledger((OTHER, 5))
    older.note("older")
    accountant = PrivacyAccountant()
    with accountant.journal(written):
        accountant.load_state_dict(older.state_dict())
        with pytest.raises(PrivacyError, match="older copy"):
            accountant.load_state_dict(newer.state_dict())
        newer.save(tmp_path / "newer.json")
        with pytest.raises(PrivacyError, match="older copy"):
            accountant.load(tmp_path / "newer.json")
        assert dict(accountant.ledger) == {EVENT: 3, OTHER: 4}
        accountant.load_state_dict(accountant.state_dict())
    counts, notes = resumed(written)
    assert counts == {EVENT: 3, OTHER: 4} and notes == ("seeded, «ß»\n", "older")


def test_a_resumed_ledger_never_leads_to_the_same_streams(written, tmp_path):
    new = PrivacyAccountant()
    with new.journal(tmp_path / "new"):
        assert new.position == 0
        new.record(EVENT)
        assert new.position == 1
    positions = set()
    for copy in range(3):
        shutil.copy(written, tmp_path / f"copy{copy}")
        accountant = PrivacyAccountant()
        accountant.journal(tmp_path / f"copy{copy}")
        positions.add(accountant.position)
    for _ in range(3):
        accountant = loaded(new.state_dict())
        first = accountant.position
        accountant.record(EVENT)
        assert accountant.position == first + 1
        positions.add(first)
    assert len(positions) == 6 and min(positions) > 2**64  # except once in 2^60


# Each case has a seed of its own, so the slow one does not repeat the quick one.
@pytest.mark.slow
@pytest.mark.parametrize("kills", [10, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_runs_and_other_processes(tmp_path, kills):
    """Runs killed at random moments count every release and go on; see killed_runs.py."""
    script = Path(__file__).parents[1] / "killed_runs.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(kills)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    trials = found["trials"]
    assert len(trials) == kills and found["finished"] == kills / 10
    assert all(released <= counted <= released + lost for counted, released, lost in trials)
    assert sum(released for _, released, number in trials if number == 10) > kills
    assert found["child"] and found["second"] and found["after"] and found["orphan"]


def test_an_interrupted_record_ends_the_journal(tmp_path, monkeypatch):
    """Its line is on the disk and has a number, which no later line may have again."""
    accountant = PrivacyAccountant()
    path = tmp_path / "x.journal"
    journal = accountant.journal(path)

    def interrupted(lines, value, origin=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(journal._lines), "take", interrupted)
        accountant.record(SubsampledGaussian(90.0))
    with pytest.raises(PrivacyError, match="could not be written"):
        accountant.record(SubsampledGaussian(70.0))
    journal.close()
    assert reopened(path).ledger == ((SubsampledGaussian(90.0), 1),)


@pytest.mark.parametrize("bound", [0.0, -1.0, True])
def test_a_bound_that_no_journal_has_is_not_written(tmp_path, bound):
    accountant, origin = PrivacyAccountant(), a_run("DPSEP")
    path = tmp_path / "x.journal"
    with accountant.journal(path):
        with pytest.raises(ConfigurationError), accountant.next_position(origin, bound):
            accountant.record(SubsampledGaussian(5.0))
        accountant.record(SubsampledGaussian(6.0))
    assert reopened(path).ledger == ((SubsampledGaussian(6.0), 1),)


def test_a_resumed_journal_has_earlier_reservations(tmp_path):
    """A plan that was reserved without the journal counts when it is opened again."""
    path, accountant = tmp_path / "journal", PrivacyAccountant()
    reopened(path)
    origin = a_run("DPSEP")
    accountant._books.ledger.origins.reserve(origin, {EVENT: 3})
    with accountant.journal(path):
        epsilon = accountant.get_epsilon()
    assert reopened(path).get_epsilon() == epsilon > 0
