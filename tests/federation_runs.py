"""Holders of a federation, each a process: ``python federation_runs.py TRIALS`` prints the results.

The aggregator is in the parent; messages go through pipes. As :mod:`cluster_runs`, whose models
these are.
"""

import contextlib
import io
import json
import math
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cluster_runs
import numpy as np
import pyro
import torch
from cluster_runs import SECURE, data, fresh, make, shard
from trials import free_ports

from pyro_dp import (
    DPSEP,
    VIPS,
    ClusterError,
    ClusterWarning,
    FullBatch,
    Noise,
    PrivacyAccountant,
    PrivacyError,
)
from pyro_dp.federated import AtTrustedAggregator, Federation, ShamirSums
from pyro_dp.mechanism import fixed_point
from pyro_dp.mechanism.fixed_point import FixedPointSum
from pyro_dp.teaching import PipeLine, together
from pyro_dp.utils.torch_state import torch_states

CUTS = [0, 13, 13, 60]  # one holder has nothing


def holders(
    size: int, body: Callable[[int, PipeLine], Any], **server: Any
) -> tuple[list[Any], list[dict[int, bytes]]]:
    """As :func:`together`, from the same public start in all processes."""

    def be(index: int, line: PipeLine) -> Any:
        signal.alarm(900)  # ends a process that hangs
        warnings.simplefilter("ignore")
        fresh()
        torch.manual_seed(index)
        return body(index, line)

    return together(be, holders=size, **server)


def started(size: int, body: Callable[[int], Any]) -> Callable[[], list[cluster_runs.Ended]]:
    """Start processes that run a function of the index, and return a function that waits."""

    def be(index: int) -> Any:
        torch.manual_seed(index)
        return body(index)

    return cluster_runs.forked(size, be)


def noise_of_first_only(index: int) -> None:
    """The draws are the same in each trial, and the others' shares are zero."""
    rng = torch.Generator().manual_seed(5)

    def known(scale: int, size: int, stream: Any) -> Any:
        draw = torch.randn(size, generator=rng, dtype=torch.float64)
        return (draw * 2.0**27 if index == 0 else 0 * draw).long().numpy()

    fixed_point.discrete_gaussian = known
    Federation.agreed_states = lambda self: torch_states()  # so public draws agree


METHODS = {
    "vips": {"num_steps": 4},
    "sep": {"jit": "none"},
    "svi with an optim": {"jit": "trace", "sampling": FullBatch()},
    "svi": {"jit": "none", "num_steps": 4, "sampling": FullBatch()},
}


def equality() -> dict[str, Any]:
    """Three holders, and one process with all records, at equal noise."""

    def all_of(index: int, cluster: Federation | None, own: Any) -> dict[str, Any]:
        results = {}
        for method, options in METHODS.items():
            fresh()
            noise_of_first_only(index)
            # The accountants count sigma; posteriors count what is in the sums.
            accountant, sigma = PrivacyAccountant(), 2.0 * (math.sqrt(3) if cluster is None else 1)
            given = dict(options, noise=Noise(sigma, source="system"))
            torch.manual_seed(3)
            inference = make(method, accountant, cluster, **given)
            values = list(inference.run(*own, progress=False))
            results[method] = [*cluster_runs.found(inference), *values]
        return results

    def body(index: int, line: PipeLine) -> Any:
        federation = Federation(AtTrustedAggregator(line), holders=3, colluders=2)
        found = all_of(index, federation, shard(index, CUTS))
        federation.leave()
        return found

    one = started(1, lambda index: all_of(0, None, data()))()[0].value
    return {"one process": one, "ranks": holders(3, body)[0]}


def uploads() -> dict[str, Any]:
    """A holder's uploads: noise of its own in each release, and no record."""

    def body(index: int, line: PipeLine) -> Any:
        exact, kept = FixedPointSum._noisy, []

        def noisy(self: FixedPointSum, sigmas: Any, noise: Any) -> Any:
            kept.append(torch.cat(self._totals).tolist())
            return exact(self, sigmas, noise)

        FixedPointSum._noisy = noisy
        federation = Federation(AtTrustedAggregator(line), holders=3, dropouts=1)
        accountant = PrivacyAccountant(epsilon=1.0)
        path = Path(tempfile.mkdtemp()) / "journal"
        accountant.journal(path)
        vips = make("vips", accountant, federation, noise=SECURE)
        vips.run(*shard(index, CUTS), progress=False)
        federation.leave()
        return {
            "exact": kept,
            "counted": cluster_runs.counted(path),
            "epsilon": accountant.get_epsilon(),
            "sigma": vips.noise_multiplier,
            "noise": vips.last_run.noise,
            "notes": list(accountant.notes),
        }

    found, seen = holders(3, body, dropouts=1)
    added = [
        {index: each.partition(b"\n")[2].hex() for index, each in messages.items()}
        for messages in seen
        if messages and all(b'"kind": "add"' in each for each in messages.values())
    ]
    times = [times for messages in seen for times in map(_time_told, messages.values())]
    return {
        "holders": found,
        "uploads": added,
        "told": sorted({each for each in times if each is not None}),
    }


def _time_told(message: bytes) -> int | None:
    """The time in an agreement, its last number."""
    line, _, content = message.partition(b"\n")
    if b"talk" not in line:
        return None
    said = torch.load(io.BytesIO(content), weights_only=True)
    return said[4] if isinstance(said, list) and len(said) == 5 else None


def _until(how: str, index: int, line: PipeLine) -> Any:
    """One of three holders is lost in its second upload, or before its third step."""
    federation = Federation(AtTrustedAggregator(line), holders=3, dropouts=1)
    path = Path(tempfile.mkdtemp()) / "journal"
    accountant = PrivacyAccountant(epsilon=1.0)
    accountant.journal(path)
    vips = make("vips", accountant, federation, noise=SECURE, num_steps=6)
    add, calls = federation.add, []

    def upload(numbers: torch.Tensor) -> torch.Tensor:
        calls.append(cluster_runs.counted(path))
        if len(calls) == 3 and index in {"one": [2], "two": [1, 2]}[how]:
            os._exit(9)
        return add(numbers)

    federation.add = upload
    said = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            vips.run(*shard(index, CUTS), progress=False)
        except ClusterError as error:
            said = str(error)
    federation.leave()
    told = [str(each.message) for each in caught if each.category is ClusterWarning]
    return {
        "calls": calls,
        "counted": cluster_runs.counted(path),
        "steps": vips._steps,
        "said": said,
        "told": told,
    }


def dropouts() -> dict[str, Any]:
    """One drop-out, which is allowed, and two, which are not."""
    return {
        how: holders(3, lambda i, line, how=how: _until(how, i, line), dropouts=1)[0]
        for how in ("one", "two")
    }


def _lose_release(inference: VIPS | DPSEP) -> None:
    """Do what a step does that fails between ledger and noise."""
    reserved = inference._reservation.reserved(1.0)
    event = next(iter(reserved)) if isinstance(inference, DPSEP) else inference._releases.last
    with inference.accountant.next_position(inference._reservation.begin(), 1.0, reserved):
        inference.accountant.record(event)


def resumed(method: str = "vips") -> list[list[Any]]:
    """Three steps, a crash in which one holder loses a release, and the rest in new processes."""
    folder = Path(tempfile.mkdtemp())

    def start(index: int, line: PipeLine) -> tuple[Federation, PrivacyAccountant, VIPS | DPSEP]:
        federation = Federation(AtTrustedAggregator(line), holders=3)
        accountant = PrivacyAccountant(epsilon=1.0)
        accountant.journal(folder / f"{index}")
        return federation, accountant, make(method, accountant, federation, noise=SECURE)

    def before(index: int, line: PipeLine) -> Any:
        _, accountant, inference = start(index, line)
        own = shard(index, CUTS)
        for _ in range(2):
            inference.step(*own)
        torch.save(inference.state_dict(), folder / f"{index}.pt")
        if index == 1:
            _lose_release(inference)
        return inference.noise_multiplier

    def after(index: int, line: PipeLine) -> Any:
        federation, accountant, inference = start(index, line)
        inference.load_state_dict(torch.load(folder / f"{index}.pt", weights_only=True))
        inference.run(*shard(index, CUTS), progress=False)
        federation.leave()
        counted = cluster_runs.counted(folder / f"{index}")
        return [
            cluster_runs.found(inference),
            accountant.get_epsilon(),
            inference.noise_multiplier,
            counted,
        ]

    def reloaded(index: int, line: PipeLine) -> Any:
        """In the same processes."""
        federation, accountant, inference = start(index + 3, line)
        own = shard(index, CUTS)
        for _ in range(2):
            inference.step(*own)
        if index == 1:
            state = inference.state_dict()
            _lose_release(inference)
            inference.load_state_dict(state)
        inference.run(*own, progress=False)
        federation.leave()
        return [cluster_runs.found(inference), accountant.get_epsilon(), inference.noise_multiplier]

    return [holders(3, trial)[0] for trial in (before, after, reloaded)]


def looks_resumed() -> list[list[Any]]:
    """The same for DPSEP, which divides its budget between looks."""
    return resumed("sep")


def refusals() -> dict[str, Any]:
    """Errors of both holders when the second one fails."""

    def holder(index: int, line: PipeLine, steps: int, epsilons=(3.0, 3.0), **options) -> list:
        federation = Federation(AtTrustedAggregator(line), holders=2)
        own = options.pop("own", shard(index, [0, 30, 60]))
        accountant = PrivacyAccountant(epsilon=epsilons[index])
        vips, said = make("vips", accountant, federation, **{"noise": SECURE} | options), None
        try:
            for _ in range(steps):
                vips.step(*own)
        except PrivacyError as error:
            said = f"{type(error).__name__}: {error}"
        federation.leave()
        return [said, accountant.num_releases, vips._steps, vips]

    def budget(index: int, line: PipeLine) -> Any:
        noise = Noise(20.0, source="system")
        return holder(index, line, 100, (3.0, 1.0), noise=noise, num_steps=9)[:-1]

    def calibrated(index: int, line: PipeLine) -> Any:
        *found, vips = holder(index, line, 4, (3.0, 1.0))
        return [*found, vips.noise_multiplier]

    def broken(index: int, line: PipeLine) -> Any:
        own = shard(index, [0, 30, 60])
        if index:
            own[0][3] = float("nan")
        return holder(index, line, 1, own=own)[:-1]

    def other_numbers(index: int, line: PipeLine) -> Any:
        Federation(AtTrustedAggregator(line), holders=3, colluders=1 + index % 2)

    def other_settings(index: int, line: PipeLine) -> Any:
        return holder(index, line, 1, num_steps=4 + index)[:-1]

    trials = [budget, calibrated, broken, other_settings]
    results = {each.__name__: holders(2, each)[0] for each in trials}
    return results | {"other_numbers": holders(3, other_numbers)[0]}


def _addresses(size: int) -> list[str]:
    """Free addresses of this machine."""
    return [f"127.0.0.1:{port}" for port in free_ports(size)]


def shamir() -> dict[str, Any]:
    """Three holders who add up by themselves: a fit, what they send, and one that dies."""

    def fit(index: int) -> Any:
        channel = ShamirSums(addresses, index, encrypted=False, timeout=30)
        federation = Federation(channel, holders=3, colluders=2)
        noise_of_first_only(index)
        fresh()
        vips = make("vips", PrivacyAccountant(), federation, noise=Noise(2.0, source="system"))
        vips.run(*shard(index, CUTS), progress=False)
        federation.leave()
        return cluster_runs.found(vips), list(vips.accountant.notes)

    def sends(index: int) -> Any:
        channel = ShamirSums(addresses, index, encrypted=False, timeout=30)
        from mpyc.asyncoro import MessageExchanger  # after its logger was silenced

        kept, send = {}, MessageExchanger.send

        def lie(self: Any, label: int, content: bytes) -> None:
            """The last one tells the second what it tells nobody else."""
            lies = index == 2 and self.peer_pid == 1
            send(self, label, content[:-1] + b"?" if lies else content)

        def keep(self: Any, label: int, content: bytes) -> None:
            kept.setdefault(self.peer_pid, []).append(content)
            send(self, label, content)

        MessageExchanger.send = lie
        heard = channel.talk(b"of %d" % index)
        MessageExchanger.send = keep
        upload = np.full(400, [2**62, 7, -(2**63)][index])
        total, present = channel.add(upload)
        refused = []
        for size in (1 + index, 1, 0):
            try:
                if index == 2 and not size:
                    channel.talk(b"")
                else:
                    channel.add(np.zeros(size, np.int64))
            except ClusterError as error:
                refused.append(str(error))
        channel.leave()
        # Lengths come first. Then come the shares and the opened sums.
        width = channel._field.field.byte_length
        shares = {
            peer: [
                int.from_bytes(each[i : i + width], "little") / 2.0**89
                for i in range(0, len(each), width)
            ]
            for peer, several in kept.items()
            for each in several[1:2]
        }
        heard = [each.decode() for each in heard.values()]
        found = {"total": total.tolist(), "present": present, "shares": shares}
        return found | {"refused": refused, "heard": heard}

    def dies(index: int) -> Any:
        channel = ShamirSums(addresses, index, encrypted=False, timeout=2)
        channel.add(np.ones(1, np.int64))
        if index == 2:
            os._exit(9)
        said = []
        for _ in range(2):
            try:
                channel.add(np.ones(1, np.int64))
            except ClusterError as error:
                said.append(str(error))
        return said

    results = {}
    for trial in (fit, sends, dies):
        addresses = _addresses(3)
        results[trial.__name__] = [each.value for each in started(3, trial)()]

    def alone(index: int) -> Any:
        fresh()
        noise_of_first_only(0)
        sigma = 2.0 * math.sqrt(3)
        vips = make("vips", PrivacyAccountant(), None, noise=Noise(sigma, source="system"))
        vips.run(*data(), progress=False)
        return cluster_runs.found(vips)

    return results | {"alone": started(1, alone)()[0].value}


def certificates() -> dict[str, Any]:
    """Three holders by TLS, and one that takes the parts of two with its own certificate."""
    folder = Path(tempfile.mkdtemp())
    (folder / ".config").mkdir()

    def openssl(*given: str) -> None:
        command = ["openssl", *given]
        subprocess.run(command, cwd=folder / ".config", check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "mpyc_ca.crt", "-subj", "/CN=all")
    authority = ["-CA", "mpyc_ca.crt", "-CAkey", "ca.key", "-CAcreateserial"]
    for name in ("party_0", "party_1", "party_2"):
        subject = f"/CN=MPyC {name}".replace("_", " ")
        openssl("req", *key, "-keyout", f"{name}.key", "-out", "request", "-subj", subject)
        openssl("x509", "-req", "-in", "request", *authority, "-out", f"{name}.crt")

    def add(index: int) -> Any:
        os.chdir(folder)
        channel = ShamirSums(addresses, index, timeout=30 if honest else 4)
        total, _ = channel.add(np.array([2**index]))
        channel.leave()
        return total.tolist()

    def both_parts(index: int) -> Any:
        """Bytes that the last holder sends to one that says this index."""
        if index == 2:
            return add(2)
        own = folder / ".config" / "party_0"
        context = ssl.create_default_context(cafile=own.parent / "mpyc_ca.crt")
        context.load_cert_chain(own.with_suffix(".crt"), own.with_suffix(".key"))
        host, port = addresses[2].split(":")
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(ConnectionRefusedError):
                plain = socket.create_connection((host, int(port)), timeout=8)
                break
            time.sleep(0.05)
        with context.wrap_socket(plain, server_hostname="MPyC party 2") as line:
            line.sendall(index.to_bytes(2, "little"))
            with contextlib.suppress(OSError):
                return len(line.recv(99))
        return 0

    honest, addresses = True, _addresses(3)
    results = {"sums": [each.value for each in started(3, add)()]}
    honest, addresses = False, _addresses(3)
    return results | {"sent": [each.value for each in started(3, both_parts)()]}


TRIALS = (equality, uploads, dropouts, resumed, looks_resumed, refusals, shamir)
WITH_OPENSSL = (certificates,)

if __name__ == "__main__":
    if sys.argv[1:] != ["certificates"]:  # in which nobody fits
        cluster_runs.warm_up()
    pyro.set_rng_seed(0)
    chosen = {each.__name__: each for each in (*TRIALS, *WITH_OPENSSL)}
    print(json.dumps({name: chosen[name]() for name in sys.argv[1:]}))
