"""Lines and relays between processes, and a real Flower on the loopback."""

import os
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import flower_runs
import pytest

from pyro_dp import ClusterError, ConfigurationError
from pyro_dp.mechanism.flower import FlowerLine, Nodes, lead
from pyro_dp.mechanism.flower_relay import ANSWER, BEGIN, LAST, carry, send

with_flower = pytest.mark.skipif(find_spec("flwr") is None, reason="needs the extra flower")


@pytest.fixture
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("l")
    folder.chmod(0o700)
    return str(folder / "line")


@pytest.fixture
def line(address):
    with FlowerLine(address, index=2, timeout=20) as opened:
        yield opened


@pytest.fixture
def aside():
    """Runs something in another thread."""
    with ThreadPoolExecutor(2) as threads:
        yield threads.submit


@pytest.mark.long
def test_rounds(line, address, aside):
    asked = aside(line.ask, b"one")
    assert carry(address, BEGIN, b"", 20) == (2, b"one")
    relay = aside(carry, address, ANSWER, b"first", 20)
    assert asked.result() == b"first"
    large = os.urandom(30_000_000)
    asked = aside(line.ask, large)
    assert relay.result() == (2, large)
    assert carry(address, LAST, large[::-1], 20) == (0, b"")
    assert asked.result() == large[::-1]
    assert not Path(address).exists()
    with pytest.raises(ClusterError, match="line is over"):
        line.ask(b"three")


def test_a_relay_waits_for_the_holder(address, aside):
    relay = aside(carry, address, BEGIN, b"", 20)
    time.sleep(0.3)
    with FlowerLine(address, index=0, timeout=20) as line:
        asked = aside(line.ask, b"")
        assert relay.result() == (0, b"")
        carry(address, LAST, b"", 20)
        assert asked.result() == b""


def test_a_run_that_ended_before_it_began_is_forgotten(line, address, aside):
    with socket.socket(socket.AF_UNIX) as gone:  # it gave up before the holder asked
        gone.connect(address)
        send(gone, BEGIN, time.monotonic() + 20)
    with socket.socket(socket.AF_UNIX) as gone:  # it died at once
        gone.connect(address)
    asked = aside(line.ask, b"one")
    for _ in range(2):  # two runs
        assert carry(address, BEGIN, b"", 20) == (2, b"one")
    carry(address, LAST, b"answer", 20)
    assert asked.result() == b"answer"


def begun(line, address, aside):
    """A line in the middle of a run, and its relay."""
    asked = aside(line.ask, b"one")
    carry(address, BEGIN, b"", 20)
    relay = aside(carry, address, ANSWER, b"", 20)
    asked.result()
    return relay


def test_another_run_in_the_middle(line, address, aside):
    begun(line, address, aside)
    asked = aside(line.ask, b"two")
    with pytest.raises(OSError, match="closed"):
        carry(address, BEGIN, b"", 20)
    with pytest.raises(ClusterError, match="another run began"):
        asked.result()


def test_a_holder_that_leaves_is_known_at_once(line, address, aside):
    relay = begun(line, address, aside)
    line.close()
    line.close()
    with pytest.raises(OSError, match="closed"):
        relay.result()
    with pytest.raises(OSError):
        carry(address, ANSWER, b"", 20)


def test_a_relay_that_is_gone(line, address, aside):
    asked = aside(line.ask, b"one")
    carry(address, BEGIN, b"", 20)
    with socket.socket(socket.AF_UNIX) as relay:
        relay.connect(address)
        send(relay, ANSWER, time.monotonic() + 20)
        asked.result()
    with pytest.raises(ClusterError, match="its relay is gone"):
        line.ask(bytes(10_000_000))
    with pytest.raises(ClusterError, match="over"):
        line.ask(b"")


@pytest.mark.parametrize("sent", [b"", BEGIN, b"\0" * 8, b"\xff" * 8, b"\0" * 7 + b"\5abc"])
def test_nothing_in_time(address, sent):
    """Neither end waits without limit, and none is fooled about lengths."""
    with FlowerLine(address, index=0, timeout=0.4) as line, socket.socket(socket.AF_UNIX) as relay:
        relay.connect(address)
        relay.sendall(sent)
        with pytest.raises(ClusterError, match="nothing came within timeout=0.4"):
            line.ask(b"one")
        assert not Path(address).exists()


@pytest.mark.parametrize("kind", [BEGIN, ANSWER])
def test_a_relay_waits_so_long(address, kind):
    with FlowerLine(address, index=0), pytest.raises(TimeoutError):
        carry(address, kind, b"", 0.3)
    with pytest.raises(TimeoutError if kind == BEGIN else FileNotFoundError):
        carry(address, kind, b"", 0.3)


def test_none_but_the_owner(tmp_path, address):
    made = tmp_path / "made" / "line"
    with FlowerLine(made, index=0):
        assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
        assert not stat.S_IMODE(made.stat().st_mode) & stat.S_IRWXO
    for mode in (0o755, 0o701, 0o702):
        Path(address).parent.chmod(mode)
        with pytest.raises(ConfigurationError, match="address must lie in a folder"):
            FlowerLine(address, index=0)
    Path(address).parent.chmod(0o750)
    FlowerLine(address, index=0).close()


def test_one_holder_at_an_address(line, address):
    with pytest.raises(ConfigurationError, match="another process listens"):
        FlowerLine(address, index=0)


@pytest.mark.slow
def test_what_a_killed_holder_left(address):
    code = (
        "import os, sys; from pyro_dp.mechanism.flower import FlowerLine; "
        "FlowerLine(sys.argv[1], 0); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code, address])
    assert Path(address).exists()
    FlowerLine(address, index=0).close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"index": -1}, "index"),
        ({"index": True}, "index"),
        ({"timeout": 0.0}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"address": "/tmp/" + 103 * "a"}, "107 bytes"),
    ],
)
def test_settings(address, wrong, said):
    with pytest.raises(ConfigurationError, match=said):
        FlowerLine(**({"address": address, "index": 0} | wrong))


def test_the_relay_needs_nothing_of_the_package():
    """The relay is loaded for each message, without the package."""
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1]); "
        "assert not {'torch', 'numpy', 'pyro_dp', 'flwr'} & sys.modules.keys()"
    )
    relay = Path(sys.modules[carry.__module__].__file__)
    subprocess.run([sys.executable, "-c", code, str(relay)], check=True)


class RelayedNodes:
    """As the SuperNodes 10, 11, ... of a run, with relays in threads to these addresses."""

    def __init__(self, addresses, timeout):
        self.addresses = dict(enumerate(addresses, start=10))
        self.timeout = timeout

    def meet(self, count):
        assert count <= len(self.addresses)
        return list(self.addresses)

    def ask(self, kind, answers):
        with ThreadPoolExecutor(3) as threads:
            relays = {
                node: threads.submit(carry, self.addresses[node], kind, answer, self.timeout)
                for node, answer in answers.items()
            }
        return {node: each.result() for node, each in relays.items() if not each.exception()}


class Sums:
    def __init__(self, holders, rounds, timeout=20.0):
        self.holders, self.rounds, self.timeout = holders, rounds, timeout
        self.seen = []

    @property
    def done(self):
        return len(self.seen) == self.rounds

    def answer(self, messages):
        self.seen.append(sorted(messages))
        if len(messages) == 1:
            raise RuntimeError("one alone")
        return dict.fromkeys(messages, sum(map(int, messages.values())).to_bytes(2, "big"))


def led(aggregator, addresses):
    lead(RelayedNodes(addresses, aggregator.timeout), aggregator)


def hold(address, index, rounds):
    """:returns: the sums, or what went wrong."""
    found = []
    try:
        with FlowerLine(address, index, timeout=20) as line:
            for step in range(rounds):
                answer = line.ask(str(10**index + step).encode())
                found.append(int.from_bytes(answer, "big"))
    except ClusterError as error:
        return str(error)
    return found


def test_an_aggregator_and_its_holders(address, aside):
    addresses = [f"{address}{index}" for index in range(3)]
    with ThreadPoolExecutor(3) as holders:
        found = [
            holders.submit(hold, addresses[each], each, 4 - 2 * (each == 1)) for each in (0, 1, 2)
        ]
        aggregator = Sums(3, 4)
        led(aggregator, addresses[::-1])
    assert aggregator.seen == [[0, 1, 2]] * 2 + [[0, 2]] * 2
    sums = [111, 114, 105, 107]
    assert [each.result() for each in found] == [sums, sums[:2], sums]


def test_an_aggregator_that_fails_tells_all(address, aside):
    addresses = [f"{address}{index}" for index in range(2)]
    found = [aside(hold, addresses[each], each, 2 - each) for each in (0, 1)]
    with pytest.raises(RuntimeError, match="one alone"):
        led(Sums(2, 3), addresses)
    assert "aggregator failed (one alone)" in found[0].result()
    assert found[1].result() == [11]


@pytest.mark.parametrize("indices", [(1, 1), (0, 2)])
def test_each_holder_has_an_index_of_its_own(address, aside, indices):
    addresses = [f"{address}{each}" for each in (0, 1)]
    found = [aside(hold, *each, 2) for each in zip(addresses, indices, strict=True)]
    with pytest.raises(ClusterError, match="index of its own, from 0 to 1"):
        led(Sums(2, 2), addresses)
    assert all("index of its own" in each.result() for each in found)


def test_too_few_nodes():
    class Grid:
        def get_node_ids(self):
            return [7]

    assert Nodes(Grid(), 0.3).meet(1) == [7]
    with pytest.raises(ClusterError, match="There are 1 SuperNodes, for 2 holders"):
        Nodes(Grid(), 0.3).meet(2)


def test_no_holder_is_left(address):
    with pytest.raises(ClusterError, match="No holder is left"):
        led(Sums(2, 2, timeout=0.3), [address, address + "1"])


@pytest.mark.slow
@with_flower
def test_flower_with_a_holder_that_is_killed():
    """Ten rounds over a real SuperLink and three SuperNodes."""
    found = flower_runs.sums(10, 1000, killed=[1])
    for index, rounds in enumerate(found):
        assert len(rounds) == (5 if index == 1 else 10)
        for step, (first, last) in enumerate(rounds):
            there = [0, 1, 2] if step < 5 else [0, 2]
            sums = sum(flower_runs.message(each, step, 1000) for each in there)
            assert [first, last] == [int(sums[0]), int(sums[-1])]


@pytest.mark.slow
@with_flower
def test_the_example():
    """All three holders print one posterior, of the records of all, and a ledger of their own."""
    found = [text.splitlines() for text in flower_runs.example()]
    for index, lines in enumerate(found):
        assert lines[-5:-1] == found[0][-5:-1]
        assert lines[-1].startswith("epsilon = ") and lines[-1].endswith(f"holder {index}")
    medians = [float(line.split()[1]) for line in found[0][-4:-1]]
    assert medians == pytest.approx([1.0, -1.0, 0.5], abs=0.1)
