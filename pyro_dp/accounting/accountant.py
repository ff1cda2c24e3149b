"""The accountant: it records releases, computes their cost, and calibrates noise to the budget.

Every release is recorded *before* it happens. :mod:`pyro_dp.accounting.books` keeps the ledger and
its journal, :mod:`pyro_dp.accounting.budget` the budget, and :mod:`pyro_dp.accounting.composition`
computes costs.
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
    """A read-only property for an attribute of one of the accountant's parts."""
    return property(operator.attrgetter(name), doc=doc)


class PrivacyAccountant:
    """Keeps the ledger of all releases about one data set, and the budget.

    One accountant belongs to one data set. Pass the same accountant to every inference on the same
    records. Threads may share it.

    :param epsilon: the budget in nats, > 0; ``None`` for no limit.
    :param delta: in (0, 1). An event's probability under one data set is at most exp(epsilon) times
        that under a neighbour, plus delta.
    :param neighboring: under ``"add_or_remove_one"``, neighbours differ by a record that is empty
        in one of them. Under ``"replace_one"``, this record may be any other.
    :param engine: ``"pld"`` (tight), or ``"rdp"``.
    :raises ConfigurationError: if a setting is out of range.

    **Guarantee.** All releases in the ledger together are (epsilon, delta)-differentially private
    with respect to one record. Here epsilon is :meth:`get_epsilon`. Post-processing does not change
    this. Every engine returns an upper bound. With a budget, a release that would exceed it
    is refused before it happens. Sources: see :mod:`pyro_dp.accounting.composition`.

    **Not protected.** The number of records, the plate's size and the sample rate are public in
    both relations. To hide the number of records, declare a bound instead. Data must be finite.
    Choose the settings of the events without looking at the data or at earlier releases. The same
    holds for the decision to stop a loop of ``step`` with a fixed noise multiplier. There are two
    exceptions:

    * Gaussian sums over all records may have noise that depends on earlier releases. The budget
      still holds (docs/proofs/evidence.md; Smith & Thakurta 2022, arXiv 2210.17520). ``DPSEP`` uses
      that, and reserves its whole cost with its first look.
    * A run that is calibrated, or made by ``run``, may stop because of its releases, because it
      counts all planned steps.

    The accountant cannot check an :class:`ApproximateDP` event, nor whether a mechanism of autodp
    was run. It does not cover several people behind one record, one person in several records, or
    other data sets.

    >>> accountant.record(SubsampledGaussian(5.0, sample_rate=0.05), count=200)
    >>> print(f"{accountant.get_epsilon():.3f} spent, {accountant.remaining:.3f} left")
    0.515 spent, 0.485 left
    >>> accountant.record(SubsampledGaussian(0.5))  # little noise: it costs more than is left
    Traceback (most recent call last):
        ...
    PrivacyBudgetExceeded: ...
    """

    silent = False  # whether runs must not show their progress

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
        "Digest of the journal's last line, which covers all lines; None: there is no journal.",
    )

    @property
    def ledger(self) -> tuple[LedgerEntry, ...]:
        """The releases: equal events are merged, in the order of their first release."""
        with self._books.lock:
            return tuple(LedgerEntry(*item) for item in self._books.ledger.counts.items())

    @property
    def counted(self) -> tuple[LedgerEntry, ...]:
        """The releases that epsilon counts: those in the ledger, and those that are reserved."""
        with self._books.lock:
            return tuple(LedgerEntry(*item) for item in self._books.ledger.counted().items())

    @property
    def reserved(self) -> list[tuple[Origin, Mapping[Event, int]]]:
        """Planned releases that runs have not made. They count, even if a run stopped early.

        A run reserves its steps with its first release, and nothing is returned. So it may stop
        because of its releases: epsilon is the cost of the whole plan.
        """
        with self._books.lock:
            return [(origin, dict(left)) for origin, left in self._books.ledger.origins.reserved()]

    @property
    def num_releases(self) -> int:
        """The number of releases in the ledger."""
        with self._books.lock:
            return sum(self._books.ledger.counts.values())

    @property
    def position(self) -> int:
        """The number of the next release, from which its random streams are derived.

        It starts at 0, or at a random number of 128 bits if a ledger was loaded or resumed. Such a
        ledger may lack later releases, and their noise must not be repeated.
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
        """The number of the release inside the block. Other threads wait for its end.

        :param origin: the run to which the release belongs, for the report.
        :param bound: C, to which records were clipped, if there is such a bound.
        :param reserves: all releases of the run from here on, including this one. They replace the
            run's reservation. None: the release uses up a part of the reservation.
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
        """Note facts about a run's result, for the report. Omitted facts stay as they are.

        :param origin: the run. If it is not in the ledger, nothing is noted.
        :param clipped: the released fraction of its clipped records, and the standard error.
        :param status: one line that says whether its result can be published, from released numbers
            alone.
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
        """Describe the data and the study, for the report. The ledger saves the description.

        All texts are public, and nobody checks them. Omitted arguments stay as they are.

        :param title: title of the study or the release.
        :param dataset: which data these are.
        :param purpose: purpose of the processing.
        :param controller: the person or office that is responsible for the data.
        :param unit: the protected unit, which is one record: "a person with all their visits".
        :param units: number of units, > 0.
        :raises ConfigurationError: a text is not one line of at most 1000 characters, or ``units``
            is not a whole number > 0. Nothing has changed then.
        :raises PrivacyError: the journal cannot be used.
        :raises OSError: the journal could not be written.
        """
        texts: dict[str, Any] = dict(title=title, dataset=dataset, purpose=purpose)
        texts |= dict(controller=controller, unit=unit, units=units)
        with self._books.lock:
            changed = {name: value for name, value in texts.items() if value is not None}
            self._books.describe(replace(self.description, **changed))

    def runs(self) -> list[tuple[Origin | None, Part]]:
        """The releases of each run, in the order of the runs' first releases.

        Releases without a run come first, with None instead of a run. They were recorded by hand,
        or loaded from an older version's ledger.
        """
        with self._books.lock:
            origins, counts = self._books.ledger.origins, self._books.ledger.counts
            rest = Counter({event: n for event, n in origins.unknown(counts).items() if n})
            return [*([(None, Part(rest))] if rest else []), *origins.copy().items()]

    def note_earlier_values(self, text: str) -> None:
        """Note that parameters or an optimizer had values before the first step."""
        self.note(text)

    def get_epsilon(self, delta: float | None = None) -> float:
        """
        :param delta: None: the accountant's.
        :returns: the epsilon that is spent at this delta, in nats. It is 0.0 for an empty ledger,
            and inf after a noiseless event. Reservations count as if they had been released.
        :raises ConfigurationError: if delta is out of range.
        """
        delta = self.delta if delta is None else delta
        delta = require_number("delta", delta, above=0.0, below=1.0)
        with self._books.lock:
            counts = self._books.ledger.counted()
            planned = self._books.budget.bound(counts) if delta == self.delta else math.inf
        # If the plan contains the ledger, its cost is also a bound, and never above the budget.
        return min(planned, composition.epsilon(counts, delta, self.neighboring, self.engine))

    def get_delta(self, epsilon: float) -> float:
        """
        :param epsilon: in nats, >= 0.
        :returns: the smallest delta that the engine can prove for this epsilon.
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
        """Spend only a part of the budget inside the block, and leave the rest to later analyses.

        Inside, calibrated noise (of any inference, or :meth:`noise_multiplier`) brings the total to
        this share of the budget. The total is the composition of all releases in the ledger, not a
        sum of epsilons. So a second analysis may spend more than the difference. A release beyond
        the share is refused, and nothing has changed then. The share applies to releases of the
        same thread. In nested blocks, the smallest share applies.

        :param share: share of the budget, in (0, 1], not an epsilon: for a budget of 2, 0.8 is
            epsilon = 1.6. Choose it without the data.
        :raises ConfigurationError: there is no budget, or the share is out of range.
        :raises PrivacyBudgetExceeded: that share is spent already.

        >>> with accountant.up_to(0.8):
        ...     sigma = accountant.noise_multiplier(num_steps=10)
        ...     accountant.record(SubsampledGaussian(sigma), count=10)
        >>> print(f"{accountant.get_epsilon():.3f} of {accountant.epsilon}")
        0.800 of 1.0
        """
        with self._books.budget.up_to(share, self.get_epsilon):
            yield

    def record(self, event: Any, count: int = 1, *, neighboring: str | None = None) -> None:
        """Enter a release before it happens. With a :meth:`journal`, it is also written to disk.

        Inside :meth:`next_position` of a run, the release uses up this run's reservation.

        :param event: the coming release: an event, or a ``Mechanism`` of autodp (docs/autodp.md
            lists their costs). A :class:`NonPrivateLook` is never refused. With a budget, all later
            releases are refused.
        :param count: the number of such releases, >= 0.
        :param neighboring: for a mechanism of autodp, the relation under which it is private. It
            must be the accountant's; autodp does not store it. Release only the mechanism's output.
        :raises PrivacyBudgetExceeded: the budget does not cover it. Nothing has changed then.
        :raises ConfigurationError: the event is unknown or does not fit the relation, or the cost
            of a mechanism is not certain.
        :raises PrivacyError: the ledger would have both a run with adaptive noise and an open loop
            on samples, the journal is unusable, or the process was forked. Nothing has changed.
        :raises OSError: the journal could not be written. Do not release anything. The ledger
            counts the release, because its line may be on the disk.
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
        """Check that the budget covers a release, without recording it.

        :raises PrivacyBudgetExceeded: it does not.
        """
        self._books.require_room(event)

    def follow(self, state: Mapping[str, Any] | None = None) -> None:
        """Follow the accountant of another process, which counts all releases of a cluster.

        From then on this accountant refuses ``record``, ``journal``, ``save`` and ``report``. So
        nothing counts twice, and no copy is mistaken for the ledger.

        :param state: the state of the accountant that counts; None: it is not available yet.
        :raises PrivacyError: this accountant has a journal, or releases that the other lacks.
        :raises ConfigurationError: the state is damaged, or its settings differ from these.
        """
        self._books.follow(state)

    def mirror(self, event: Event) -> None:
        """Count a release that the followed accountant has recorded.

        :raises PrivacyError: this accountant does not follow another.
        """
        self._books.mirror(event)

    def record_nonprivate(self, what: str) -> None:
        """Enter a look at the data without noise, and its time, before it happens.

        Epsilon is inf from then on. With a budget, every further release is refused.

        :param what: the numbers that will be read, in a line of public text.
        :raises ConfigurationError: if it is not a short line of text.
        """
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.record(NonPrivateLook(what, now))

    def noise_multiplier(
        self, *, num_steps: int, sample_rate: float = 1.0, sampling: str = "poisson"
    ) -> float:
        """The smallest noise with which ``num_steps`` more releases fit into the budget.

        They are composed with the releases in the ledger. The total is at most the budget, or the
        share of it that :meth:`up_to` allows. It is within 0.1% of that, unless the smallest noise
        that is considered (1e-4) fits.

        :param num_steps: number of releases, > 0.
        :param sample_rate: see :class:`SubsampledGaussian`; likewise ``sampling``.
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
        :param reservation: name of the reservation that these releases replace, if any.
        :returns: sigma, with the accuracy of :meth:`noise_multiplier`.
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
        """Load a ledger that contains this one. After an error, nothing has changed.

        With a :meth:`journal`, this ledger stays, because the journal counts every release. Then it
        must contain the state's.

        :param state: from :meth:`state_dict`.
        :raises PrivacyError: it lacks releases of this ledger, which cannot be undone. With a
            journal: it has releases that the journal lacks.
        :raises ConfigurationError: it is damaged, or its settings differ from these.
        """
        self._books.load(state)

    def journal(self, path: str | os.PathLike[str]) -> Journal:
        """From now on, write every release to a file before it happens, and every note.

        If the file is missing, it is created: call this before the first release. If it exists,
        this accountant continues its ledger, which counts all releases, even of a process that was
        killed. An inference can then load an earlier state. Results of later releases are lost, but
        the releases count. See :mod:`pyro_dp.accounting.journal`.

        :param path: the file's path, on a local file system.
        :returns: the open journal. Keep the file, and never replace it by a copy.
        :raises ConfigurationError: the file is damaged or in use, or has other settings. Or this
            accountant has a journal already, or the system has no file locks. Nothing was changed.
        :raises PrivacyError: the file counts less than this ledger, or this accountant follows
            another (:meth:`follow`). Nothing was changed.
        """
        return self._books.open(path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as JSON. The file is replaced as a whole, or not at all.

        :param path: the file to write.
        :raises PrivacyError: this accountant follows another (:meth:`follow`).
        """
        self._books.require_counting("save()")
        write_file(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load a file that :meth:`save` wrote; see :meth:`load_state_dict`.

        :param path: the file to read.
        """
        self.load_state_dict(read_file(path))

    def report(self, format: str = "markdown") -> str:
        """A report on the guarantee, its limits, and every release.

        :param format: "markdown", or "html" for a complete page.
        :returns: a text that contains only released or public numbers. Nothing is spent.
        :raises ConfigurationError: the format is unknown.
        :raises PrivacyError: this accountant follows another (:meth:`follow`).
        """
        self._books.require_counting("report()")
        return report.report(self, format)

    def to_autodp(self) -> Any:
        """A copy of the ledger for autodp's transformers and accountants.

        :returns: an ``autodp.autodp_core.Mechanism`` with bounds: Rényi divergences,
            epsilon(delta), delta(epsilon) and the trade-off curve. It does not contain later
            releases. Its relation is the accountant's; autodp does not check it.
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
        """Forecast the width of a posterior's intervals at several budgets, without the data.

        In ``accountant.forecast(model, guide, x, y, inference=DPSEP)``, ``x`` and ``y`` are *made
        up*. They have the shapes and types of the data. Draw the features from public knowledge;
        the outcomes may have any values. The forecast runs ``inference`` on outcomes of the prior
        predictive, at each budget and without noise. It averages the intervals' widths over draws.

        **Guarantee.** Nothing is recorded in this ledger: each run has its own accountant, with the
        same delta, relation and engine. The result does not depend on the data, *provided that no
        argument is made from them*.

        :param model: Pyro model; likewise ``guide``. Both, and Pyro's parameters, stay unchanged.
        :param args: made-up arguments of the model; likewise ``kwargs``. The values of observed
            sites must be an argument, or a column of one.
        :param inference: the class to run, :class:`DPSVI` or :class:`DPSEP`.
        :param epsilons: budgets, in nats, > 0.
        :param num_draws: number of draws from the prior predictive.
        :param seed: the seed of draws and runs: equal seeds make equal forecasts.
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
