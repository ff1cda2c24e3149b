"""Ranks of a cluster, each a process: ``python cluster_runs.py TRIALS`` prints what they found.

It is a process of its own, which imports once and forks the ranks of each trial. They meet over the
loopback, by a file. The parent's clock decides when a rank stops, stays away or is killed.
"""

import contextlib
import json
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import pyro
import pyro.distributions as dist
import torch
import torch.distributed
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import pyro_dp.infer.base
import pyro_dp.vips.inference
from pyro_dp import (
    DPSEP,
    DPSVI,
    VIPS,
    Clip,
    Cluster,
    ClusterError,
    Execution,
    FullBatch,
    Noise,
    PaperDPSEP,
    PaperDPSVI,
    PrivacyAccountant,
    PrivacyError,
    SubsampledGaussian,
)
from pyro_dp.infer.svi.stochastic_gradient_vi import StochasticGradientVI
from pyro_dp.mechanism.clipping import ClippedSum
from pyro_dp.mechanism.cluster import Ranks
from pyro_dp.mechanism.fixed_point import FixedPointSum
from pyro_dp.mechanism.messages import Flag
from pyro_dp.mechanism.releases import Releases
from pyro_dp.vips import LogisticRegression

SIZE, DIM = 60, 2


def data() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, DIM, generator=rng, dtype=torch.float64)
    logits = x @ torch.tensor([1.0, -1.0], dtype=torch.float64)
    y = torch.rand(SIZE, generator=rng, dtype=torch.float64) < torch.sigmoid(logits)
    return x, y.double()


def model(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(DIM), 2.0).to_event(1))
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def by_index(x, y, spread):
    """Reads rows, says N and a batch, and has a constant that is longer than some shards."""
    w = pyro.sample("w", dist.Normal(torch.zeros(DIM), spread.mean()).to_event(1))
    with pyro.plate("people", SIZE, subsample_size=SIZE // 2) as index:
        pyro.sample("y", dist.Bernoulli(logits=x[index] @ w), obs=y[index])


_NOT_OF_DPSEP = ("num_steps", "sampling")
SECURE = Noise(source="system")


def make(
    method: str, accountant: PrivacyAccountant, peers: Any, jit: str = "auto", **options: Any
) -> Any:
    """An inference of :func:`model`, or of its conjugate kin."""
    given = dict(accountant=accountant, execution=Execution(jit=jit, peers=peers)) | options
    if method == "vips":
        return VIPS(LogisticRegression(DIM), **{"num_steps": 4} | given)
    if method == "sep":  # on all records, and as many steps as it takes
        given = {name: value for name, value in given.items() if name not in _NOT_OF_DPSEP}
        return DPSEP(model, AutoMultivariateNormal(model), **given)
    if method == "sep with a bound":
        return PaperDPSEP(model, AutoNormal(model), **{"clip": 3.0, "num_steps": 4} | given)
    if method == "svi by index":
        return DPSVI(by_index, AutoNormal(by_index), **{"num_steps": 4} | given)
    if method == "svi":
        return DPSVI(model, AutoNormal(model), **{"num_steps": 6} | given)
    assert method == "svi with an optim"
    optim = pyro.optim.Adam({"lr": 0.1})
    given = {"num_steps": 6, "clip": Clip(loss=1.0)} | given
    return PaperDPSVI(model, AutoNormal(model), optim, **given)


def _eager(method: str) -> dict[str, str]:
    return {} if method == "vips" else {"jit": "none"}


def found(inference: Any) -> list[float]:
    """All that is public after a run: parameters, and statistics."""
    values = [v.detach().flatten() for v in pyro.get_param_store().values()]
    if isinstance(inference, VIPS):
        values += [marginal.mean.flatten() for marginal in inference.posterior().values()]
    return torch.cat(values).tolist()


def fresh() -> None:
    pyro.clear_param_store()
    torch.manual_seed(1)


@dataclass
class Ended:
    """The end of a rank.

    :param status: its process's: 0, 1 for an error, -9 if it was killed.
    :param value: its result, or its error's class and text.
    :param seconds: until it ended.
    """

    status: int
    value: Any
    seconds: float

    @property
    def error(self) -> str | None:
        """Its class, if there was one."""
        return self.value[0] if self.status == 1 and self.value else None


def forked(
    size: int, body: Callable[[int], Any], *, seconds: float = 900.0, stopped: int | None = None
) -> Callable[[], list[Ended]]:
    """Start processes that run a function of the index, and return a function that waits.

    :param seconds: all processes left after that time are killed, with status -9.
    :param stopped: a process that is let go on when all others have ended.
    """
    folder = Path(tempfile.mkdtemp(prefix="forked"))
    start, pids = time.monotonic(), []
    for index in range(size):
        pid = os.fork()
        if pid == 0:
            _be_one(index, folder, body)
        pids.append(pid)

    def wait() -> list[Ended]:
        ended: dict[int, Ended] = {}
        while running := set(range(size)) - ended.keys():
            now = time.monotonic() - start
            if running == {stopped}:
                os.kill(pids[stopped], signal.SIGCONT)
            for index in running:
                if now > seconds:
                    os.kill(pids[index], signal.SIGKILL)
                pid, status = os.waitpid(pids[index], os.WNOHANG)
                if pid:
                    path = folder / f"{index}.pickle"
                    value = pickle.loads(path.read_bytes()) if path.exists() else None
                    code = os.waitstatus_to_exitcode(status)
                    ended[index] = Ended(code, value, time.monotonic() - start)
            time.sleep(0.005)
        return [ended[index] for index in range(size)]

    return wait


def _be_one(index: int, folder: Path, body: Callable[[int], Any]) -> None:
    status, value = 1, None
    signal.alarm(900)  # ends a process that hangs; on a busy machine all takes minutes
    try:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        fresh()
        status, value = 0, body(index)
    except BaseException as error:
        value = (type(error).__name__, str(error))
        if not isinstance(error, ClusterError) and os.environ.get("CLUSTER_RUNS_SHOW"):
            traceback.print_exc()
    finally:
        path = folder / f"{index}.pickle"
        path.with_suffix(".new").write_bytes(pickle.dumps(value))
        path.with_suffix(".new").rename(path)
        os._exit(status)


def ranks(size: int, body: Callable[[int], Any], **limits: Any) -> list[Ended]:
    """Run a function of the rank in so many processes, which can make a Cluster."""
    meeting = f"file://{tempfile.mkdtemp(prefix='cluster')}/meeting"

    def be(rank: int) -> Any:
        torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=size)
        return body(rank)

    return forked(size, be, **{"seconds": 60.0} | limits)()


def shard(rank: int, cuts: list[int]) -> tuple[torch.Tensor, ...]:
    return tuple(column[cuts[rank] : cuts[rank + 1]].clone() for column in data())


def without_noise_in_units():
    """Secure sums without noise: the noise cannot be repeated, so sums are compared."""
    exact = FixedPointSum._noisy

    def units(self, sigmas, noise):
        exact(self, sigmas, noise)
        return [each.double() for each in self._totals]

    return mock.patch.object(FixedPointSum, "_noisy", units)


# Trials: what they return is judged by test_cluster.py.

FEW = {
    "svi": [{"jit": "none"}],
    "svi by index": [{"jit": "none"}],
    "sep": [{"jit": "none"}],
    "vips": [{}],
}
METHODS = {  # without the few, which make looks
    "svi with an optim": [{"jit": "none"}, {"jit": "trace"}],
    "sep with a bound": [{"jit": "none"}, {"jit": "trace"}],
}
CUTS = [0, 40, 40, 60]  # one rank has nothing; other trials have two ranks


def equality(methods: dict = FEW) -> dict[str, Any]:
    """Methods on three ranks, and in one process, with the same noise and samples."""

    def fit(method, options, cluster, data):
        fresh()
        options |= {} if method == "vips" else {"sampling": FullBatch()}
        noise = Noise(source=5)
        inference = make(method, PrivacyAccountant(3.0), cluster, noise=noise, **options)
        more = [torch.full((31,), 2.0)] if "index" in method else []
        values = list(inference.run(*data, *more, progress=False))
        return [*found(inference), *values, inference.accountant.get_epsilon()]

    def all_of(cluster, data):
        return {
            f"{method} {options}": fit(method, options, cluster, data)
            for method, several in methods.items()
            for options in several
        }

    one = ranks(1, lambda rank: all_of(None, data()))[0].value
    several = ranks(3, lambda rank: all_of(Cluster(timeout=30), shard(rank, CUTS)))
    return {"one process": one, "ranks": [each.value for each in several]}


def equality_of_all() -> dict[str, Any]:
    """The other methods."""
    return equality(METHODS)


def secure() -> dict[str, Any]:
    """Integer sums of all methods, as they are released."""

    def sums(method, cluster, data):
        fresh()
        torch.manual_seed(3)
        options = dict(noise=Noise(1.0, source="system"), num_steps=1, **_eager(method))
        inference = make(method, PrivacyAccountant(), cluster, **options)
        kept, released = [], inference._release

        def release(*given):
            kept.append([each.tolist() for each in released(*given)])
            return [torch.zeros(len(each)) for each in kept[-1]]

        inference._release = release
        with without_noise_in_units(), contextlib.suppress(Exception):
            inference.step(*data)
        return kept

    methods = {"svi with an optim": {}, "sep with a bound": {}, "vips": {}}

    def all_of(cluster, own):
        return {method: sums(method, cluster, own) for method in methods}

    one = ranks(1, lambda rank: all_of(None, data()))[0].value
    several = ranks(3, lambda rank: all_of(Cluster(timeout=30), shard(rank, CUTS)))
    return {"one process": one, "ranks": several[0].value}


def samples() -> list[dict[str, Any]]:
    """Two ranks with equal seeds: their samples, their draws of noise, and their last sums."""

    def body(rank):
        drawn, noises = [], []
        own, noisy = Releases.sample, ClippedSum._noisy

        def sample(self, sampler, *place):
            drawn.append(own(self, sampler, *place))
            return drawn[-1]

        def noise(self, sigmas, stream):
            noises.append(tuple(sigmas))
            return noisy(self, sigmas, stream)

        Releases.sample, ClippedSum._noisy = sample, noise
        accountant, cluster = PrivacyAccountant(), Cluster(timeout=30)
        options = dict(noise=Noise(1.0, source=7), sampling=0.5, num_steps=20)
        svi = make("svi with an optim", accountant, cluster, **options, jit="none")
        svi.run(*shard(rank, [0, 30, 60]), progress=False)
        own_state = torch.get_rng_state()
        left, path = last_sums(svi), Path(tempfile.mkdtemp()) / "ledger"
        return {
            "drawn": [each.tolist() for each in drawn],
            "noises": len(noises),
            "left": [each.abs().sum().item() for each in left],
            "global draws": torch.equal(own_state, torch.get_rng_state()),
            "refused": [_refused(getattr(accountant, name), path) for name in ("save", "journal")]
            + [_refused(each) for each in (accountant.report, svi.state_dict)],
            "releases": accountant.num_releases,
        }

    return [each.value for each in ranks(2, body)]


def _refused(function: Callable, *given: Any) -> str | None:
    try:
        function(*given)
    except PrivacyError as error:
        return f"{type(error).__name__}: {error}"
    return None


def differences() -> dict[str, Any]:
    """The errors or results of two ranks, if the second one does something else."""

    def other_settings(rank, svi, x, y):
        svi._reservation.noise_multiplier += rank
        svi.run(x, y, progress=False)

    def other_parameters(rank, svi, x, y):
        svi.step(x, y)
        pyro.param("AutoNormal.locs.w").data.add_(rank)
        svi.step(x, y)

    def other_constants(rank, svi, x, y):
        def scaled(x, y, scale):
            model(x * scale.mean(), y)

        accountant, execution = (
            PrivacyAccountant(),
            Execution(jit="none", peers=Cluster(timeout=20)),
        )
        given = dict(accountant=accountant, noise=1.0, execution=execution)
        svi = DPSEP(scaled, AutoNormal(scaled), **given)
        svi.step(x, y, torch.ones(1, 3) + rank)

    def other_rows(rank, svi, x, y):
        svi.step(x[:, : DIM - rank], y)

    def other_calls(rank, svi, x, y):
        svi.step(x, y)
        if rank == 0:
            svi.step(x, y)
        else:
            svi._releases.peers.exchange(Flag(True))

    def earlier_releases(rank, svi, x, y):
        svi.step(x, y)

    def no_draws_between_steps(rank, svi, x, y, draws=0, copies=False):
        torch.rand(draws * rank)  # rank 0 draws none
        for _ in range(3):
            svi.step(x.clone() if copies and rank else x, y)
            torch.rand(draws * (1 + rank))
        return found(svi)

    def draws_between_steps(*given):
        return no_draws_between_steps(*given, draws=1)

    def new_arguments(*given):
        return no_draws_between_steps(*given, copies=True)

    def stopped_by_one(rank, svi, x, y):
        stop = [lambda step: step.step == 2] if rank else []
        result = svi.run(x, y, progress=False, callbacks=stop)
        return [*found(svi), result.steps, result.stopped, len(svi.accountant.notes)]

    def graphs_on_one(rank, svi, x, y):
        svi._kept.traces_left = 4 * (1 - rank)
        svi.step(x, y)
        return type(svi._kept.prepared.step).__name__

    def refused_by_first(rank, svi, x, y):
        def refuse(event):
            raise PrivacyError("no")

        if rank == 0:
            svi.accountant.record = refuse
        try:
            svi.step(x, y)
        except PrivacyError as error:
            said = [type(error).__name__, svi._steps, svi.accountant.num_releases]
        vars(svi.accountant).pop("record", None)
        svi.step(x, y)
        return [*said, svi._steps, svi.accountant.num_releases]

    def body(rank):
        own, results = shard(rank, [0, 20, 60]), {}
        for case in cases:
            fresh()
            cluster, accountant = Cluster(timeout=20), PrivacyAccountant()
            if case is earlier_releases and rank:
                accountant.record(SubsampledGaussian(1.0))
            options = dict(noise=Noise(1.0, source=7), jit="none")
            try:
                svi = make("svi with an optim", accountant, cluster, **options)
                results[case.__name__] = case(rank, svi, *own)
            except Exception as error:
                results[case.__name__] = f"{type(error).__name__}: {error}"
        return results

    cases = [
        *(other_settings, other_parameters, other_constants, other_rows, other_calls),
        *(earlier_releases, draws_between_steps, no_draws_between_steps, new_arguments),
        *(stopped_by_one, graphs_on_one, refused_by_first),
    ]
    return [each.value for each in ranks(2, body)]


def last_sums(inference: Any) -> tuple[torch.Tensor, ...]:
    """A rank's own sums after they were added up elsewhere."""
    kept: list[ClippedSum] = []
    add = inference._releases.peers.add_up

    def add_up(clipped, *given):
        kept.append(clipped)
        add(clipped, *given)

    inference._releases.peers.add_up = add_up
    inference.num_steps += 1
    inference.step(*shard(inference._releases.peers.rank, [0, 30, 60]))
    return kept[0]._exact_sums


# Failures: a run with a journal and checkpoints, in which one rank does not do its part.

POINTS = (
    "meeting",  # before the Cluster is made
    "looking",  # at new data, before the others do
    "building",  # what a step needs
    "sampling",
    "agreeing",  # the sums are computed, and not yet sent
    "adding up",
    "added up",  # before the ledger
    "counted",  # before the noise, on rank 0
    "sharing",  # after the noise
    "shared",  # before the update
)
LATER = 4  # steps, so that a checkpoint is there
TIMEOUT = 3.0
MARGIN = 3.0  # seconds for whatever is no waiting, on a busy machine


@dataclass(frozen=True)
class Failure:
    """A failure of a rank.

    :param how: "killed", "stopped", "raises", "interrupted"; "changed", "shorter" or "NaN" data;
        "spent", the budget.
    :param rank: the rank that fails.
    :param point: where; one of :data:`POINTS`.
    :param late: in a later step, not the first.
    """

    how: str
    rank: int
    point: str = "sampling"
    late: bool = True


class Planned(RuntimeError):
    """A planned failure."""


def _fail(how: str) -> None:
    if how in ("killed", "stopped"):
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    elif how == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
    else:
        raise Planned(how)


def _set_up(failure: Failure, inference_type: type, steps: Callable[[], int], folder: Path) -> None:
    """Make this process fail there."""
    pending = [True]

    def trip(point: str) -> None:
        if pending and point == failure.point and steps() >= (LATER if failure.late else 0):
            pending.clear()
            (folder / "failed").write_text(repr(time.monotonic()))
            _fail(failure.how)

    def around(owner: Any, name: str, before: str | None, after: str | None = None) -> None:
        exact = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if before:
                trip(before)
            result = exact(*args, **kwargs)
            if after:
                trip(after)
            return result

        setattr(owner, name, call)

    vips = inference_type is VIPS
    around(Cluster, "__init__", "meeting")
    owner, name = (
        (pyro_dp.vips.inference, "_checked") if vips else (pyro_dp.infer.base, "first_look")
    )
    around(owner, name, "looking")
    owner, name = (pyro_dp.vips.inference, "_m_step") if vips else (inference_type, "_build")
    around(owner, name, "building")
    around(Releases, "sample", "sampling")
    around(Ranks, "add_up", "agreeing")
    around(Cluster, "reduce", "adding up", "added up")
    around(ClippedSum, "_noisy", "counted")
    around(Cluster, "broadcast", "sharing", "shared")


def counted(path: Path) -> int:
    """Releases in a journal, by its complete lines."""
    lines = path.read_bytes().split(b"\n")[1:-1]
    values = [json.loads(line.partition(b" ")[2]) for line in lines]
    return sum(
        v[1] if isinstance(v, list) else v.get("count", 0) for v in values if not isinstance(v, str)
    )


def train(
    rank: int, method: str, folder: Path, cuts: list[int], failure: Failure | None, **options: Any
) -> bool:
    """Goes on from journal and checkpoint. Noise is written down before it is drawn.

    :return: whether the run came to its end. How many looks DPSEP takes follows from releases.
    """
    written = os.open(folder / "released", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    journal, checkpoint = folder / "journal", folder / "checkpoint"
    noisy, made = ClippedSum._noisy, []

    def noise(self, sigmas, stream):
        os.write(written, f"{rank} {counted(journal)}\n".encode())
        return noisy(self, sigmas, stream)

    ClippedSum._noisy = noise
    mine = failure is not None and failure.rank == rank
    if mine:
        kind = {"svi": StochasticGradientVI, "sep": DPSEP, "vip": VIPS}[method[:3]]
        _set_up(failure, kind, lambda: made[0]._steps if made else 0, folder)
    accountant = PrivacyAccountant(3.0)
    if rank == 0:
        accountant.journal(journal)
    if mine and failure.how == "spent":
        accountant.record(SubsampledGaussian(accountant.noise_multiplier(num_steps=1)))
    cluster = Cluster(timeout=TIMEOUT if failure else 30.0)
    if method == "svi":
        options = options | {"clip": 2.0}  # gradient steps: looks are as of "sep"
    inference = make(method, accountant, cluster, num_steps=8, **options)
    made.append(inference)
    if checkpoint.exists():
        inference.load_state_dict(torch.load(checkpoint, weights_only=True))
    own = shard(rank, cuts)
    if mine and failure.how == "NaN":
        own[0][0] = torch.nan
    own_method = getattr(inference, "_inference", inference)
    while not own_method._reservation.plan.finished:
        if mine and failure.how == "changed" and inference._steps == LATER:
            own = (own[0] + 1.0, own[1])
        elif mine and failure.how == "shorter" and inference._steps == LATER:
            own = tuple(column[:-1] for column in own)
        inference.step(*own)
        if rank == 0 and inference._steps % 2 == 0:
            torch.save(inference.state_dict(), checkpoint.with_suffix(".new"))
            os.replace(checkpoint.with_suffix(".new"), checkpoint)
    return own_method._reservation.plan.finished


@dataclass
class Verdict:
    """A verdict on a run that failed, and on the one that went on from its journal.

    :param ended: the ends of the ranks.
    :param slowest: seconds that a rank took, from the failure on, that did not fail.
    :param counted: releases in the journal after the failure, and at the end.
    :param released: how often noise was drawn, then and at the end.
    :param early: how often noise was drawn that the journal did not count.
    :param resumed: the ends of the ranks that went on.
    """

    ended: list[Ended]
    slowest: float
    counted: tuple[int, int]
    released: tuple[int, int]
    early: int
    resumed: list[Ended]

    def wrong(self, failure: Failure) -> list[str]:
        """The faults of the verdict."""
        others = [each for i, each in enumerate(self.ended) if i != failure.rank]
        own, said = self.ended[failure.rank], []
        if self.slowest > TIMEOUT + MARGIN:
            said.append(f"the others took {self.slowest:.1f} seconds")
        # All ranks have the budget and the number of all records.
        by_all = {"shorter": "ModelError", "spent": "PrivacyBudgetExceeded"}.get(failure.how)
        if any(each.error not in ("ClusterError", by_all) for each in others):
            said.append(f"the others ended otherwise: {others}")
        its_own = {
            "killed": (-signal.SIGKILL, None),
            "stopped": (1, "ClusterError"),
            "raises": (1, "Planned"),
            "interrupted": (1, "KeyboardInterrupt"),
            "changed": (1, "ModelError"),
            "shorter": (1, "ModelError"),  # N is another one for all
            "NaN": (1, "ModelError"),
            "spent": (1, "PrivacyBudgetExceeded" if failure.rank == 0 else "PrivacyError"),
        }[failure.how]
        if (own.status, own.error) != its_own:
            said.append(f"it ended otherwise: {own}")
        if self.counted[0] < self.released[0] or self.counted[1] < self.released[1]:
            said.append(f"{self.counted} were counted of {self.released} releases")
        if self.early:
            said.append(f"{self.early} releases came before the ledger")
        if failure.how != "spent" and not all(each.value is True for each in self.resumed):
            said.append(f"it did not go on: {self.resumed}")
        return said


def fails(method: str, failure: Failure, *, size: int, again: int, **options: Any) -> Verdict:
    """Run until one rank fails; then go on with another number of ranks.

    :param size: number of ranks; shards are unequal.
    :param again: number of ranks that go on.
    """
    folder = Path(tempfile.mkdtemp(prefix="cluster"))

    def run(size: int, failure: Failure | None, **given: Any) -> list[Ended]:
        cuts = [0, *(10 + 15 * i for i in range(size - 1)), SIZE]
        return ranks(
            size, lambda rank: train(rank, method, folder, cuts, failure, **options), **given
        )

    def drawn() -> list[list[int]]:
        path = folder / "released"
        return [list(map(int, x.split())) for x in path.read_text().splitlines()] * path.exists()

    def releases() -> int:
        path = folder / "journal"
        return counted(path) if path.exists() else 0

    begun = time.monotonic()
    ended = run(size, failure, seconds=40.0, stopped=failure.rank)
    failed = folder / "failed"
    before = float(failed.read_text()) - begun if failed.exists() else 0.0
    others = [each for rank, each in enumerate(ended) if rank != failure.rank]
    first, counts = len(drawn()), releases()
    resumed = run(again, None) if failure.how != "spent" else []
    everything = drawn()
    return Verdict(
        ended,
        max(each.seconds for each in others) - before,
        (counts, releases()),
        (first, len(everything)),
        sum(n > before or rank != 0 for n, (rank, before) in enumerate(everything, start=1)),
        resumed,
    )


SOME = {
    "killed between ledger and noise": ("vips", Failure("killed", 0, "counted")),
    "stopped while the others add up": ("vips", Failure("stopped", 1, "adding up")),
    "raises on its records": ("svi", Failure("raises", 1, "sampling")),
    "changed data": ("svi", Failure("changed", 1)),
}
MORE = {
    "killed before its sums are added": ("svi", Failure("killed", 1, "adding up")),
    "killed while it shares": ("sep", Failure("killed", 0, "sharing")),
    "stopped before the ledger": ("svi", Failure("stopped", 0, "added up")),
    "killed in the first look": ("sep", Failure("killed", 1, "building", False)),
    "interrupted": ("svi", Failure("interrupted", 1)),
    "NaN": ("sep", Failure("NaN", 1)),
    "another number of records": ("vips", Failure("shorter", 1)),
    "an exhausted budget": ("vips", Failure("spent", 0)),
    "a rank that was used before": ("vips", Failure("spent", 1)),
}


def failures(cases: dict = SOME) -> dict[str, list[str]]:
    """The faults of a few failures; benchmarks/cluster_failures.py has all."""
    return {
        name: fails(method, failure, size=2, again=1 + i % 3, **_eager(method)).wrong(failure)
        for i, (name, (method, failure)) in enumerate(cases.items())
    }


def more_failures() -> dict[str, list[str]]:
    return failures(MORE)


def product(x, y):
    """Records see a product of latents, which has no looks."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(DIM), 2.0).to_event(1))
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=scale * (x @ w)), obs=y)


def methods() -> dict[str, list[Any]]:
    """DPSVI with nothing set on two ranks: its method, steps and releases, and what it found."""

    def body(rank):
        results, own = [], shard(rank, [0, 30, 60])  # other tensors would be checked anew
        for each, rounds in ((model, 16), (product, 5)):
            fresh()
            accountant, cluster = PrivacyAccountant(3.0), Cluster(timeout=30)
            execution = Execution(jit="none", peers=cluster)
            given = dict(noise=Noise(source=2), num_steps=5, execution=execution)
            svi = DPSVI(each, AutoNormal(each), accountant=accountant, **given)
            for _ in range(rounds):
                svi.step(*own)
            counts = type(svi._inference).__name__, svi._steps, accountant.num_releases
            results.append([*counts, found(svi)])
        return results

    return {str(rank): each.value for rank, each in enumerate(ranks(2, body))}


ALWAYS = (equality, secure, samples, differences, failures, methods)
SLOW = (equality_of_all, more_failures)
TRIALS = {each.__name__: each for each in (*ALWAYS, *SLOW)}


def warm_up() -> None:
    """Import and prepare once what each forked rank would otherwise."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for method in ("svi", "sep"):
            fresh()
            make(method, PrivacyAccountant(3.0), None, jit="trace").step(*data())


if __name__ == "__main__":
    warm_up()
    print(json.dumps({name: TRIALS[name]() for name in sys.argv[1:]}, default=vars))
