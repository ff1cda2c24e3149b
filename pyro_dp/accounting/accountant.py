"""The accountant: releases, their cost, the rest of the budget, and the noise that fits it.

Every release is recorded here *before* it happens. The accountant hands over to its books
(:mod:`pyro_dp.accounting.books`), its budget, and the cost of a ledger.
"""

import contextlib
import math
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, NoReturn

from pyro_dp.accounting import autodp_mechanisms, composition, figures, report
from pyro_dp.accounting.books import Books
from pyro_dp.accounting.budget import Settings
from pyro_dp.accounting.events import KINDS, Event, NonPrivateLook, SubsampledGaussian
from pyro_dp.accounting.journal import Journal
from pyro_dp.accounting.ledger import MOST, Description, LedgerEntry, table
from pyro_dp.accounting.origins import Origin, Part, Source
from pyro_dp.utils.display import Facts, Table, in_notebook, of_budget, spent_and_left, up
from pyro_dp.utils.errors import ConfigurationError, PrivacyError
from pyro_dp.utils.files import read_file, write_file
from pyro_dp.utils.validation import require_choice, require_count, require_number


def _reads(name: str, doc: str) -> Any:
    """A property for an attribute of one of the accountant's parts."""
    return property(operator.attrgetter(name), doc=doc)


class PrivacyAccountant:
    """Keeps the ledger of everything that was released about one data set, and its budget.

    One accountant belongs to one data set. Pass the same accountant to every inference on the same
    records. Threads may share it.

    :param epsilon: the budget in nats, > 0; ``None`` for no limit.
    :param delta: in (0, 1): the most by which any event's probability may exceed epsilon's limit.
    :param neighboring: ``"add_or_remove_one"`` replaces a record by an empty one. ``"replace_one"``
        replaces it by any other.
    :param engine: ``"pld"`` (tight), or ``"rdp"``.
    :raises ConfigurationError: if a setting is out of range.

    **Guarantee.** All releases in the ledger together are (epsilon, delta)-differentially private
    with respect to one record. Here epsilon is :meth:`get_epsilon`. Post-processing does not change
    this. Every engine returns an upper bound. With a budget, a release that would exceed it
    is refused before it happens. Sources: see :mod:`pyro_dp.accounting.composition`.

    **Not protected.** The number of records, the plate's size and the sample rate are public in
    both relations. To hide the number of records, declare a bound instead. Data must be finite.
    Choose the settings of the events without looking at the data or at earlier releases. Also
    decide without them when to stop a loop with a noise multiplier of its own. Gaussian sums over
    all records may have noise that follows from earlier releases. The budget still holds
    (docs/proofs/evidence.md; Smith & Thakurta 2022, arXiv 2210.17520). ``DPSEP`` uses that, and
    reserves its whole cost with its first look. A run that is calibrated, or made by ``run``, may
    stop because of its releases, because it counts all planned steps. The accountant cannot check
    an :class:`ApproximateDP` event, nor that a mechanism of autodp was run. It does not cover
    several people behind one record, one person in several records, or other data sets.

    >>> accountant.record(SubsampledGaussian(5.0, sample_rate=0.05), count=200)
    >>> print(f"{accountant.get_epsilon():.3f} spent, {accountant.remaining:.3f} left")
    0.515 spent, 0.485 left
    >>> accountant.record(SubsampledGaussian(0.5))  # with little noise: beyond what is left
    Traceback (most recent call last):
        ...
    PrivacyBudgetExceeded: ...
    """

    silent = False  # whether the progress of releases recorded here stays hidden

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float = 1e-5,
        *,
        neighboring: str = "add_or_remove_one",
        engine: str = "pld",
    ) -> None:
        self._settings = Settings(epsilon, delta, neighboring, engine)
        self._books = Books(self._settings)

    epsilon: float | None = _reads("_settings.epsilon", "The budget in nats, or None.")
    delta: float = _reads("_settings.delta", "The delta at which epsilon is stated.")
    neighboring: str = _reads("_settings.neighboring", "The neighbouring relation.")
    engine: str = _reads("_settings.engine", "The engine that turns the ledger into epsilon.")
    description: Description = _reads(
        "_books.ledger.description", "The subject of this ledger, from :meth:`describe`."
    )
    journal_digest: str | None = _reads(
        "_books.digest",
        "Digest of the journal's last line, and so of all lines; None: there is no journal.",
    )

    @property
    def ledger(self) -> tuple[LedgerEntry, ...]:
        """Releases and their counts, equal events merged, in the order of their first release."""
        with self._books.lock:
            return tuple(LedgerEntry(*item) for item in self._books.ledger.counts.items())

    @property
    def counted(self) -> tuple[LedgerEntry, ...]:
        """The releases that epsilon counts: the ledger, and the rest of all reservations."""
        with self._books.lock:
            return tuple(LedgerEntry(*item) for item in self._books.ledger.counted().items())

    @property
    def reserved(self) -> list[tuple[Origin, Mapping[Event, int]]]:
        """Planned releases that runs have not made. They count, even if a run stopped early.

        A run reserves its steps with its first release, and nothing is returned. So it may stop
        because of its releases: epsilon is that of the whole plan.
        """
        with self._books.lock:
            return [(origin, dict(left)) for origin, left in self._books.ledger.origins.reserved()]

    @property
    def num_releases(self) -> int:
        """How many events were recorded."""
        with self._books.lock:
            return sum(self._books.ledger.counts.values())

    @property
    def position(self) -> int:
        """The number of the next release, from which its random streams are derived.

        It starts at 0, or at a random number of 128 bits if a ledger was loaded or resumed. The
        loaded ledger may lack later releases, whose noise must not be repeated.
        """
        with self._books.lock:
            return self._books.position

    @contextlib.contextmanager
    def next_position(
        self,
        origin: Origin | None = None,
        bound: float | None = None,
        reserves: Mapping[Event, int] | None = None,
    ) -> Iterator[int]:
        """The number of the release inside the block; no other thread records meanwhile.

        :param origin: the run to which it belongs, for the report.
        :param bound: C, to which records were clipped, if there is such a bound.
        :param reserves: all that the run will release from here on, with this release. It replaces
            the run's reservation. None: the run uses up its reservation.
        """
        finite = bound is not None and math.isfinite(bound)
        source = Source(origin, bound if finite else None, reserves) if origin else None
        with self._books.next_position(source) as position:
            yield position

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks about the guarantee, such as a seed that somebody might guess."""
        with self._books.lock:
            return tuple(self._books.ledger.notes)

    def note(self, text: str) -> None:
        """
        :param text: a remark about the guarantee. The ledger prints and saves it once.
        :raises ConfigurationError: if it is not a string.
        """
        if not isinstance(text, str):
            raise ConfigurationError("text must be a string: a remark about the guarantee.")
        self._books.note(text)

    def note_result(
        self, origin: Origin, clipped: tuple[float, float] | None = None, status: str | None = None
    ) -> None:
        """Note facts about a run's result, for the report. Omitted parts stay as they are.

        :param origin: the run; one that is not in the ledger is left out.
        :param clipped: the released fraction of its clipped records, and the standard error.
        :param status: whether its result can be published: one line, from released numbers alone.
        """
        self._books.note_result(origin, clipped, status)

    def describe(
        self,
        *,
        title: str | None = None,
        dataset: str | None = None,
        purpose: str | None = None,
        controller: str | None = None,
        unit: str | None = None,
        units: int | None = None,
    ) -> None:
        """Describe the subject of this ledger. The report shows it, and the ledger saves it.

        All of it is public, and only you can check it. Omitted arguments leave their texts as they
        are.

        :param title: title of the study or the release.
        :param dataset: which data these are.
        :param purpose: purpose of the processing.
        :param controller: the person or office that is responsible for the data.
        :param unit: the protected unit, which is one record: "a person with all their visits".
        :param units: number of units, > 0.
        :raises ConfigurationError: a text is not one line of at most 1000 characters, or ``units``
            is not a whole number > 0; nothing has changed then.
        :raises PrivacyError: the journal cannot be used; OSError: it could not be written.
        """
        said: dict[str, Any] = dict(title=title, dataset=dataset, purpose=purpose)
        said |= dict(controller=controller, unit=unit, units=units)
        with self._books.lock:
            changed = {name: value for name, value in said.items() if value is not None}
            self._books.describe(replace(self.description, **changed))

    def runs(self) -> list[tuple[Origin | None, Part]]:
        """The releases of each run, in the order of their first ones, after those without a run.

        Releases of an older version's ledger, or recorded by hand, belong to no run: None.
        """
        with self._books.lock:
            origins, counts = self._books.ledger.origins, self._books.ledger.counts
            rest = Counter({event: n for event, n in origins.unknown(counts).items() if n})
            return [*([(None, Part(rest))] if rest else []), *origins.copy().items()]

    def note_earlier_values(self, text: str) -> None:
        """A remark that parameters or an optimizer had values before the first step."""
        self.note(text)

    def get_epsilon(self, delta: float | None = None) -> float:
        """
        :param delta: at which epsilon is stated; the accountant's own if None.
        :returns: epsilon spent, in nats: 0.0 on an empty ledger, inf after a noiseless event.
            Reservations count as if they had been released.
        :raises ConfigurationError: if delta is out of range.
        """
        delta = self.delta if delta is None else delta
        delta = require_number("delta", delta, above=0.0, below=1.0)
        with self._books.lock:
            counts = self._books.ledger.counted()
            planned = self._books.budget.bound(counts) if delta == self.delta else math.inf
        # The plan contains the ledger: its cost is a bound as well, and never above the budget.
        return min(planned, composition.epsilon(counts, delta, self.neighboring, self.engine))

    def get_delta(self, epsilon: float) -> float:
        """
        :param epsilon: in nats, >= 0.
        :returns: the smallest delta the engine can show for this epsilon.
        :raises ConfigurationError: if epsilon is negative or not a number.
        """
        epsilon = require_number("epsilon", epsilon, above=0.0, closed=True, or_equal=True)
        with self._books.lock:
            counts = self._books.ledger.counted()
        return composition.delta(counts, epsilon, self.neighboring, self.engine)

    @property
    def remaining(self) -> float:
        """Budget minus the epsilon spent, in nats, never negative; inf without a budget."""
        return math.inf if self.epsilon is None else max(0.0, self.epsilon - self.get_epsilon())

    @contextlib.contextmanager
    def up_to(self, share: float) -> Iterator[None]:
        """Leave a part of the budget to later releases: two analyses on one budget.

        Within the block, calibrated noise (any inference, :meth:`noise_multiplier`) brings the
        total to this share of the budget. The total is the composition of all releases in the
        ledger. Epsilons are not subtracted, so a second analysis may have more than seems to be
        left. A release beyond the share is refused, and nothing has changed then. The share holds
        for releases of the same thread. In nested blocks the smallest share holds.

        :param share: share of the budget, in (0, 1], not an epsilon: for a budget of 2, 0.8 is
            epsilon = 1.6. Choose it without the data.
        :raises ConfigurationError: there is no budget, or the share is out of range.
        :raises PrivacyBudgetExceeded: as much is spent already.

        >>> with accountant.up_to(0.8):
        ...     sigma = accountant.noise_multiplier(num_steps=10)
        ...     accountant.record(SubsampledGaussian(sigma), count=10)
        >>> print(f"{accountant.get_epsilon():.3f} of {accountant.epsilon}")
        0.800 of 1.0
        """
        with self._books.budget.up_to(share, self.get_epsilon):
            yield

    def record(self, event: Any, count: int = 1, *, neighboring: str | None = None) -> None:
        """Enter a release, before it happens; with a :meth:`journal` also on the disk.

        Within :meth:`next_position` of a run it uses up this run's reservation.

        :param event: the release to come: an event, or a ``Mechanism`` of autodp (docs/autodp.md
            says what each costs). A :class:`NonPrivateLook` is never refused. With a budget,
            everything else is refused afterwards.
        :param count: how many times, >= 0.
        :param neighboring: the relation under which the mechanism is private, which must be the
            accountant's. Autodp does not store it. The released value must be its output.
        :raises PrivacyBudgetExceeded: if the budget does not cover it; nothing has changed then.
        :raises ConfigurationError: if the event is unknown or does not fit the relation, or a
            mechanism has no cost that is certain.
        :raises PrivacyError: a run with adaptive noise would meet an open loop on samples, the
            journal is unusable, or the process was forked; nothing has changed then.
        :raises OSError: if the journal could not be written. Nothing may be released, but the
            ledger counts it: the line may be on the disk.
        """
        count = require_count("count", count, least=0)
        self._books.require_process()
        if type(event) not in KINDS.values():
            event, times = autodp_mechanisms.read(event, neighboring, self.neighboring)
            count *= times
        elif neighboring is not None:
            require_choice("neighboring of an event", neighboring, (self.neighboring,))
        with self._books.lock:
            if event not in self._books.ledger.counts:
                composition.interpret(event, self.neighboring)
            if count:
                self._books.enter(event, count)

    def require_room(self, event: Event) -> None:
        """Raise what :meth:`record` would raise, and record nothing.

        :raises PrivacyBudgetExceeded: the budget does not cover this release.
        """
        self._books.require_room(event)

    def follow(self, state: Mapping[str, Any] | None = None) -> None:
        """Follow the accountant of another process, whose ledger counts the releases of all.

        So a cluster counts nothing twice, and no copy is mistaken for the ledger. This one then
        refuses ``record``, ``journal``, ``save`` and ``report``.

        :param state: state of the accountant that counts; None: there is none yet.
        :raises PrivacyError: this one has a journal, or counts a release that the other does not.
        :raises ConfigurationError: the state is damaged, or its settings differ from these.
        """
        self._books.follow(state)

    def mirror(self, event: Event) -> None:
        """Copy the records of the accountant that this one follows.

        :raises PrivacyError: it follows none.
        """
        self._books.mirror(event)

    def record_nonprivate(self, what: str) -> None:
        """Enter a look at the data without noise, and its time, before it happens.

        Epsilon is inf from then on. With a budget, every further release is refused.

        :param what: the numbers that will be looked at, as a line of public text.
        :raises ConfigurationError: if it is none.
        """
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.record(NonPrivateLook(what, now))

    def noise_multiplier(
        self, *, num_steps: int, sample_rate: float = 1.0, sampling: str = "poisson"
    ) -> float:
        """The smallest noise with which so many more releases fit into the rest of the budget.

        Releases in the ledger count by composition. The total is at most the budget, or the share
        of it that :meth:`up_to` allows. It is within 0.1% of that, unless the least noise that is
        considered (1e-4) fits.

        :param num_steps: number of releases, > 0.
        :param sample_rate: see :class:`SubsampledGaussian`, as for ``sampling``.
        :returns: noise standard deviation in units of the per-record bound.
        :raises PrivacyBudgetExceeded: if less than 0.5% remains.
        :raises ConfigurationError: without a budget, or if a setting is out of range.
        """
        if require_count("num_steps", num_steps) > MOST:
            raise ConfigurationError(f"num_steps must be at most {MOST:g}.")
        return self.least_noise(
            lambda sigma: {SubsampledGaussian(sigma, sample_rate, sampling): num_steps}
        )

    def least_noise(
        self, releases: Callable[[float], Mapping[Event, int]], reservation: str | None = None
    ) -> float:
        """The smallest sigma with which releases of several kinds fit into the rest of the budget.

        :param releases: events and their counts as a function of sigma; all noise grows with it.
        :param reservation: name of their reservation, which does not count beside them, or None.
        :returns: sigma, as exact as :meth:`noise_multiplier`, which is the case of one kind.
        :raises PrivacyBudgetExceeded: if less than 0.5% remains.
        :raises ConfigurationError: without a budget, or if an event does not fit the relation.
        """
        return self._books.least_noise(releases, reservation)

    def __reduce__(self) -> NoReturn:
        raise PrivacyError(
            "A PrivacyAccountant cannot be copied or pickled, because a copy would not count the "
            "other one's releases. Share it, or save() it."
        )

    def state_dict(self) -> dict[str, Any]:
        """:returns: settings, ledger, reservations and notes as plain numbers, strings, lists."""
        return self._books.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a ledger that contains this one. Nothing changes if anything is wrong.

        With a :meth:`journal` the reverse holds: the journal counts every release. Its ledger
        stays, and must contain the state's.

        :param state: from :meth:`state_dict`.
        :raises PrivacyError: if it lacks something that this ledger has: releases that happened
            cannot be forgotten. With a journal: if it has something that the journal lacks.
        :raises ConfigurationError: if it is damaged or its settings differ from these.
        """
        self._books.load(state)

    def journal(self, path: str | os.PathLike[str]) -> Journal:
        """Write every release and note to a file, from now on and before it happens.

        If there is no such file, it is made: call this before the first release. If there is one,
        this accountant goes on with its ledger, which counts all releases of a process killed at
        any moment. An inference can then load a state that was saved before the last release. Later
        releases are lost, but counted. See :mod:`pyro_dp.accounting.journal`.

        :param path: the file's, on a local file system.
        :returns: the open journal. Keep the file, and do not copy it back and forth.
        :raises ConfigurationError: the file is damaged or in use, or has other settings. Or there
            is a journal already, or the system has no file locks. Nothing was changed.
        :raises PrivacyError: the file counts less than this ledger, or this accountant follows
            another (:meth:`follow`). Nothing was changed.
        """
        return self._books.open(path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as JSON; the file is the old one or the new one, never half of it.

        :param path: the file to write.
        :raises PrivacyError: it is not this one that counts (:meth:`follow`).
        """
        self._books.require_counting("save()")
        write_file(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read what :meth:`save` wrote; see :meth:`load_state_dict`.

        :param path: the file to read.
        """
        self.load_state_dict(read_file(path))

    def report(self, format: str = "markdown") -> str:
        """The guarantee in words, every release, and the limits of the guarantee.

        :param format: "markdown" or "html", a page of its own.
        :returns: text to save and show, of released numbers alone. Nothing is spent.
        :raises ConfigurationError: the format is another one.
        :raises PrivacyError: it is not this one that counts (:meth:`follow`).
        """
        self._books.require_counting("report()")
        return report.report(self, format)

    def to_autodp(self) -> Any:
        """The ledger as it is now, for autodp's transformers and accountants.

        :returns: an ``autodp.autodp_core.Mechanism`` with Rényi divergences, epsilon(delta),
            delta(epsilon) and the trade-off curve. All are bounds. Later releases are not in it.
            Its relation is the accountant's, which autodp does not check.
        """
        now = PrivacyAccountant(None, self.delta, neighboring=self.neighboring)
        for event, count in self.counted:
            now.record(event, count)
        return autodp_mechanisms.of_ledger(now)

    plot = figures.plot

    def forecast(
        self,
        model: Callable[..., Any],
        guide: Callable[..., Any],
        *args: Any,
        inference: Any,
        epsilons: Sequence[float] = (0.1, 0.3, 1.0, 3.0, 10.0),
        num_draws: int = 3,
        seed: int = 0,
        settings: Mapping[str, Any] | None = None,
        progress: bool = True,
        **kwargs: Any,
    ) -> Any:
        """How wide a posterior's intervals would be at several budgets, without touching the data.

        In ``accountant.forecast(model, guide, x, y, inference=DPSEP)``, ``x`` and ``y`` are *made
        up*. They have the shapes and types of the data. Draw the features from public knowledge;
        the outcomes may have any values. The forecast runs ``inference`` on outcomes of the prior
        predictive, at each budget and without noise. It averages the intervals' widths over draws.

        **Guarantee.** Nothing is recorded here: each run has an accountant of its own, of the same
        delta, relation and engine. The result says nothing about the data, *provided that no
        argument is made from them*.

        :param model: Pyro model, as is ``guide``; both, and Pyro's parameters, stay unchanged.
        :param args: made-up arguments of the model, as are ``kwargs``. The values of observed sites
            must be an argument, or a column of one.
        :param inference: the class that will be run, :class:`DPSVI` or :class:`DPSEP`.
        :param epsilons: budgets, in nats, > 0.
        :param num_draws: number of draws from the prior predictive.
        :param seed: for these and for the runs: equal seeds make equal forecasts.
        :param settings: further arguments of ``inference``, such as ``{"num_steps": 500}``.
        :param progress: show a progress bar.
        :returns: a :class:`Forecast`; it prints as a table.
        :raises ConfigurationError: a setting is out of range, or the guide's posterior is not
            available, with or without noise.
        :raises ModelError: model or guide do not fit, or the outcomes cannot be drawn.
        """
        if not (isinstance(inference, type) and hasattr(inference, "_forecast")):
            raise ConfigurationError("inference must be a class, pyro_dp.DPSEP or pyro_dp.DPSVI.")
        if not isinstance(settings, Mapping | None):
            raise ConfigurationError("settings must be a dictionary of arguments of the inference.")
        how = dict(epsilons=epsilons, num_draws=num_draws, seed=seed, progress=progress)
        return inference._forecast(
            self, model, guide, (args, kwargs), settings=settings or {}, **how
        )

    def __repr__(self) -> str:
        facts, released = _displayed(self)
        lines = [f"  {line}" for line in released.lines()]
        return "\n".join([facts.caption, *lines, *facts.lines()[1:]])

    def _repr_html_(self) -> str:
        return in_notebook(_displayed(self))


def _displayed(accountant: PrivacyAccountant) -> tuple[Facts, Table]:
    with accountant._books.lock:
        return Facts(_facts(accountant), "PrivacyAccountant"), table(dict(accountant.ledger))


def _facts(accountant: PrivacyAccountant) -> list[tuple[str, str]]:
    spent, budget = up(accountant.get_epsilon()), accountant.epsilon
    left = "no budget"
    if budget is not None:
        spent, rest = spent_and_left(accountant.get_epsilon(), budget)
        left = f"{rest} of {of_budget(budget)}"
    engine = accountant.engine
    return [
        ("epsilon so far", spent),
        ("remaining", left),
        ("delta", f"{accountant.delta:.6g}"),
        ("neighboring", accountant.neighboring),
        ("composed by", f"{composition.ENGINES[engine]} ({engine})"),
        *(
            ("planned, not taken", f"{n:,} of {origin.method}, {event.brief}; they count")
            for origin, left in accountant.reserved
            for event, n in left.items()
        ),
        *(("note", note) for note in accountant.notes),
    ]
