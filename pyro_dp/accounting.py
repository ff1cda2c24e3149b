"""The ledger: what was released, what it cost, what remains, and how much noise the rest needs.

Every release is recorded here *before* it happens. What an event costs is the business of
:mod:`pyro_dp.engines`; this module merges events, holds the budget and keeps the state.
"""

import html
import json
import math
import operator
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scipy import optimize

from pyro_dp import engines
from pyro_dp.engines import SubsampledGaussian, real
from pyro_dp.errors import ConfigurationError, PrivacyBudgetExceeded, PrivacyError

__all__ = ["LedgerEntry", "PrivacyAccountant", "SubsampledGaussian"]

_VERSION = 1
_SETTINGS = ("epsilon", "delta", "neighboring", "engine")


class LedgerEntry(NamedTuple):
    """An event and how often it was recorded."""

    event: SubsampledGaussian
    count: int


def _integer(name: str, value: Any, least: int) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ConfigurationError(f"{name}={value!r} is out of range: pass an integer >= {least}.")
    return number


def _delta(value: Any) -> float:
    advice = "pass a probability in (0, 1), well below 1 / number of records"
    value = real("delta", value, advice)
    if not 0.0 < value < 1.0:
        raise ConfigurationError(f"delta={value!r} is out of range: {advice}.")
    return value


class PrivacyAccountant:
    """Keeps the ledger of everything that was released about one data set, and its budget.

    One accountant belongs to one data set: every inference that touches the same records gets the
    same accountant. It may be shared by threads.

    :param epsilon: the budget in nats, > 0; ``None`` for no limit.
    :param delta: in (0, 1); the failure probability at which epsilon is stated.
    :param neighboring: ``"add_or_remove_one"``, where a record is replaced by an empty one, or
        ``"replace_one"``, where it is replaced by any other.
    :param engine: ``"pld"`` (tight), ``"rdp"``, or for teaching ``"advanced"`` and ``"basic"``.
    :raises ConfigurationError: if a setting is out of range.

    **Guarantee.** All releases in the ledger together are (epsilon, delta)-differentially private
    with respect to one record, epsilon being :meth:`get_epsilon`, whatever is done with them
    afterwards. Every engine returns an upper bound. With a budget, a release that would exceed it
    is refused before it happens. Sources: see :mod:`pyro_dp.engines`.

    **Not protected.** The number of records, the plate's size and the sample rate are public in
    both relations; to hide the number of records, declare a bound instead. Data must be finite.
    The settings of the events must be chosen without looking at the data or at earlier releases,
    and so must the moment to stop: that events chosen adaptively, or a stop that depends on the
    budget, cost no more is not proven for privacy loss distributions. Several people behind one
    record, one person in several records, and other data sets are not covered.
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float = 1e-5,
        *,
        neighboring: str = "add_or_remove_one",
        engine: str = "pld",
    ) -> None:
        if epsilon is not None:
            advice = "pass a finite number > 0, or None for no budget"
            epsilon = real("epsilon", epsilon, advice)
            if not 0.0 < epsilon < math.inf:
                raise ConfigurationError(f"epsilon={epsilon!r} is out of range: {advice}.")
        for name, value, known in (
            ("neighboring", neighboring, engines.NEIGHBORING),
            ("engine", engine, engines.ENGINES),
        ):
            if value not in known:
                raise ConfigurationError(f"{name}={value!r} is unknown: use one of {known}.")
        self._epsilon, self._delta = epsilon, _delta(delta)
        self._neighboring, self._engine = neighboring, engine
        self._counts: dict[SubsampledGaussian, int] = {}
        self._notes: dict[str, None] = {}
        self._lock = threading.RLock()
        self._forget_plan()

    @property
    def epsilon(self) -> float | None:
        """The budget in nats, or None."""
        return self._epsilon

    @property
    def delta(self) -> float:
        """The failure probability at which epsilon is stated."""
        return self._delta

    @property
    def neighboring(self) -> str:
        """The neighbouring relation."""
        return self._neighboring

    @property
    def engine(self) -> str:
        """The engine that turns the ledger into epsilon."""
        return self._engine

    @property
    def ledger(self) -> tuple[LedgerEntry, ...]:
        """What ran and how often, equal events merged, in the order of their first release."""
        with self._lock:
            return tuple(LedgerEntry(*item) for item in self._counts.items())

    @property
    def num_releases(self) -> int:
        """How many events were recorded; the position from which random streams are derived."""
        with self._lock:
            return sum(self._counts.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks about the guarantee, such as a seed that somebody might guess."""
        with self._lock:
            return tuple(self._notes)

    def note(self, text: str) -> None:
        """
        :param text: a remark about the guarantee; it is shown and saved with the ledger, once.
        :raises ConfigurationError: if it is not a string.
        """
        if not isinstance(text, str):
            raise ConfigurationError("text must be a string: a remark about the guarantee.")
        with self._lock:
            self._notes.setdefault(text)

    def get_epsilon(self, delta: float | None = None) -> float:
        """
        :param delta: the failure probability; the accountant's own if None.
        :returns: epsilon spent, in nats: 0.0 on an empty ledger, inf after a noiseless event.
        :raises ConfigurationError: if delta is out of range.
        """
        delta = self._delta if delta is None else _delta(delta)
        with self._lock:
            counts, planned = dict(self._counts), self._plan_cost
            planned = planned if delta == self._delta and self._is_planned(counts) else math.inf
        # The plan contains the ledger: its cost is a bound as well, and never above the budget.
        return min(planned, engines.epsilon(counts, delta, self._neighboring, self._engine))

    def get_delta(self, epsilon: float) -> float:
        """
        :param epsilon: in nats, >= 0.
        :returns: the smallest delta the engine can show for this epsilon.
        :raises ConfigurationError: if epsilon is negative or not a number.
        """
        epsilon = real("epsilon", epsilon, "pass a number >= 0")
        if epsilon < 0.0:
            raise ConfigurationError(f"epsilon={epsilon!r} is negative: pass a number >= 0.")
        with self._lock:
            counts = dict(self._counts)
        return engines.delta(counts, epsilon, self._neighboring, self._engine)

    @property
    def remaining(self) -> float:
        """Budget minus what was spent, in nats, never negative; inf without a budget."""
        return math.inf if self._epsilon is None else max(0.0, self._epsilon - self.get_epsilon())

    def record(self, event: SubsampledGaussian, count: int = 1) -> None:
        """Enter a release, before it happens.

        :param event: what will be released.
        :param count: how many times, >= 0.
        :raises PrivacyBudgetExceeded: if the budget does not cover it; nothing has changed then.
        :raises ConfigurationError: if the event is unknown or does not fit the relation.
        """
        count = count if type(count) is int and count >= 0 else _integer("count", count, 0)
        with self._lock:
            known = self._counts.get(event, 0) if type(event) is SubsampledGaussian else 0
            if not known:
                engines.interpret(event, self._neighboring)
            if count:
                if self._epsilon is not None and known + count > self._plan.get(event, 0):
                    self._extend_plan(event, count)
                self._counts[event] = known + count

    # The budget is checked against a plan: counts that are known to fit. Epsilon grows with every
    # count, so a ledger within the plan fits, and an engine runs only when the plan has run out.

    def _forget_plan(self) -> None:
        self._plan: dict[SubsampledGaussian, int] = {}
        self._plan_cost = math.inf
        self._mark = dict(self._counts)

    def _is_planned(self, counts: Mapping[SubsampledGaussian, int]) -> bool:
        return bool(counts) and all(self._plan.get(e, 0) >= n for e, n in counts.items())

    def _adopt(self, plan: dict[SubsampledGaussian, int], cost: float) -> bool:
        if cost > self._epsilon:
            return False
        self._plan, self._plan_cost = plan, cost
        return True

    def _cost(self, counts: Mapping[SubsampledGaussian, int]) -> float:
        return engines.epsilon(counts, self._delta, self._neighboring, self._engine)

    def _extend_plan(self, event: SubsampledGaussian, count: int) -> None:
        """Plan for the ledger, this event, and as much more of the recent mix as fits."""
        needed = dict(self._counts)
        needed[event] = needed.get(event, 0) + count
        recent = {
            e: n - self._mark.get(e, 0) for e, n in needed.items() if n > self._mark.get(e, 0)
        }
        share = sum(needed.values()) / sum(recent.values())

        def ahead(factor: float, base: Mapping[SubsampledGaussian, int] = needed) -> dict:
            more = {e: int(factor * share * n) for e, n in recent.items()}
            return {e: n + more.get(e, 0) for e, n in base.items()}

        union = self._plan | needed
        everything = {e: max(self._plan.get(e, 0), needed.get(e, 0)) for e in union}
        mark = dict(self._counts)
        for plan in (ahead(1.0, everything), everything, ahead(1.0)):
            cost = engines.epsilon_bound(plan, self._delta, self._neighboring, self._engine)
            if self._adopt(plan, cost):
                self._mark = mark
                return
        cost = self._cost(needed)
        if cost > self._epsilon:
            raise PrivacyBudgetExceeded(
                f"recording {count} x {event} would bring epsilon to {cost:.6g}, above the budget "
                f"of {self._epsilon:.6g} at delta={self._delta:.6g}; nothing was released. "
                "Stop here, or plan fewer steps or more noise from the start."
            )
        self._mark = mark
        # Epsilon grows about like the root of the counts: guess, then correct by interpolation.
        budget, paid = self._epsilon**2, cost**2
        factor = min(1.0, max(0.0, budget / paid - 1.0)) if paid else 1.0
        for _ in range(2):
            if factor * sum(needed.values()) < 1.0:
                break
            plan = ahead(factor)
            planned = self._cost(plan)
            if self._adopt(plan, planned):
                return
            factor *= 0.995 * (budget - paid) / (planned**2 - paid)
        self._adopt(needed, cost)

    def noise_multiplier(
        self, *, num_steps: int, sample_rate: float = 1.0, sampling: str = "poisson"
    ) -> float:
        """The smallest noise with which ``num_steps`` more releases fit into what remains.

        What is in the ledger counts by composition, not by subtracting epsilons: the total comes
        out at most at the budget and within 0.1% of it, unless there the least noise that is
        considered (1e-4) fits.

        :param num_steps: number of releases, > 0.
        :param sample_rate: see :class:`SubsampledGaussian`.
        :param sampling: see :class:`SubsampledGaussian`.
        :returns: noise standard deviation in units of the per-record bound.
        :raises PrivacyBudgetExceeded: if nothing remains.
        :raises ConfigurationError: without a budget, or if a setting is out of range.
        """
        num_steps = _integer("num_steps", num_steps, 1)
        engines.interpret(SubsampledGaussian(1.0, sample_rate, sampling), self._neighboring)
        if self._epsilon is None:
            raise ConfigurationError(
                "epsilon=None is no budget to calibrate from: give the accountant an epsilon, or "
                "choose noise_multiplier yourself."
            )
        with self._lock:
            counts = dict(self._counts)

        def plan(log_sigma: float) -> dict[SubsampledGaussian, int]:
            event = SubsampledGaussian(math.exp(log_sigma), sample_rate, sampling)
            return counts | {event: counts.get(event, 0) + num_steps}

        def excess(log_sigma: float) -> float:  # aims 0.02% below the budget
            cost = max(self._cost(plan(log_sigma)), 1e-300)
            return min(700.0, math.log(cost / self._epsilon) + 2e-4)

        low, high, factor = 0.0, 0.0, math.log(2.0)
        while excess(high) > 0.0:
            low, high, factor = high, high + factor, 1.5 * factor
            if high > math.log(1e9):
                raise PrivacyBudgetExceeded(
                    f"nothing remains of the budget of epsilon={self._epsilon:.6g}: no noise is "
                    "large enough for more releases. Start with a larger budget."
                )
        while low == high or excess(low) <= 0.0:
            if low == math.log(1e-4):
                return 1e-4
            low, high, factor = max(math.log(1e-4), low - factor), low, 1.5 * factor
        root = optimize.brentq(excess, low, high, xtol=1e-5, rtol=1e-7)
        while (cost := self._cost(plan(root))) > self._epsilon:
            root += 2e-5
        with self._lock:
            if all(plan(root).get(e, 0) >= n for e, n in self._counts.items()):
                self._adopt(plan(root), cost)
        return math.exp(root)

    def state_dict(self) -> dict[str, Any]:
        """
        :returns: settings, ledger and notes as plain numbers, strings and lists.
        """
        with self._lock:
            return {
                "version": _VERSION,
                **{name: getattr(self, name) for name in _SETTINGS},
                "ledger": [
                    {
                        "mechanism": "subsampled_gaussian",
                        "noise_multiplier": event.noise_multiplier,
                        "sample_rate": event.sample_rate,
                        "sampling": event.sampling,
                        "count": count,
                    }
                    for event, count in self._counts.items()
                ],
                "notes": list(self._notes),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a ledger that contains this one. Nothing changes if anything is wrong.

        :param state: from :meth:`state_dict`.
        :raises PrivacyError: if it lacks something that this ledger has: releases that happened
            cannot be forgotten.
        :raises ConfigurationError: if it is damaged or its settings differ from these.
        """
        damaged = "the accountant's state is damaged or not one: "
        if not isinstance(state, Mapping):
            raise ConfigurationError(damaged + "it is not a dictionary.")
        missing = {"version", *_SETTINGS, "ledger", "notes"} - set(state)
        if missing:
            raise ConfigurationError(damaged + f"{sorted(missing)} are missing.")
        if state["version"] != _VERSION:
            raise ConfigurationError(
                f"version={state['version']!r} of the accountant's state is unknown: this release "
                f"reads version {_VERSION}."
            )
        for name in _SETTINGS:
            if state[name] != getattr(self, name):
                raise ConfigurationError(
                    f"{name}={state[name]!r} in the state differs from this accountant's "
                    f"{getattr(self, name)!r}: make an accountant with the same settings."
                )
        notes, lines = state["notes"], state["ledger"]
        if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
            raise ConfigurationError(damaged + "notes must be a list of strings.")
        if not isinstance(lines, list) or not all(isinstance(line, Mapping) for line in lines):
            raise ConfigurationError(damaged + "ledger must be a list of dictionaries.")
        counts: dict[SubsampledGaussian, int] = {}
        for line in lines:
            try:
                if line["mechanism"] != "subsampled_gaussian":
                    raise ConfigurationError(f"mechanism={line['mechanism']!r} is unknown.")
                event = SubsampledGaussian(
                    line["noise_multiplier"], line["sample_rate"], line["sampling"]
                )
                engines.interpret(event, self._neighboring)
                counts[event] = counts.get(event, 0) + _integer("count", line["count"], 1)
            except KeyError as error:
                raise ConfigurationError(damaged + f"a line has no {error}.") from None
            except ConfigurationError as error:
                raise ConfigurationError(damaged + str(error)) from None
        with self._lock:
            for event, count in self._counts.items():
                if counts.get(event, 0) < count:
                    raise PrivacyError(
                        f"the state has {counts.get(event, 0)} of the {count} releases of {event} "
                        "in this ledger: what was released stays released. Load it into a new "
                        "accountant, or a later state into this one."
                    )
            self._counts = counts
            self._notes |= dict.fromkeys(notes)
            self._forget_plan()

    def save(self, path: str | os.PathLike) -> None:
        """Write the state as JSON; the file is the old one or the new one, never half of it.

        :param path: of the file.
        """
        path = Path(path)
        text = json.dumps(self.state_dict(), indent=1)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def load(self, path: str | os.PathLike) -> None:
        """Read what :meth:`save` wrote; see :meth:`load_state_dict`.

        :param path: of the file.
        """
        try:
            state = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigurationError(
                f"{os.fspath(path)} is damaged or not an accountant's state: not JSON ({error})."
            ) from None
        self.load_state_dict(state)

    def _rows(self) -> tuple[list[tuple[str, ...]], list[tuple[str, str]]]:
        with self._lock:
            lines, notes, spent = self.ledger, self.notes, self.get_epsilon()
        table = [("sampling", "sample rate", "noise multiplier", "count")]
        for event, count in lines:
            settings = (f"{event.sample_rate:.6g}", f"{event.noise_multiplier:.6g}", str(count))
            table.append((f"Gaussian, {event.sampling}", *settings))
        budget = self._epsilon
        left = "no budget" if budget is None else f"{max(0.0, budget - spent):.6g} of {budget:.6g}"
        facts = [
            ("epsilon so far", f"{spent:.6g}"),
            ("remaining", left),
            ("delta", f"{self._delta:.6g}"),
            ("neighboring", self._neighboring),
            ("engine", self._engine),
            *(("note", note) for note in notes),
        ]
        return table, facts

    def __repr__(self) -> str:
        table, facts = self._rows()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["PrivacyAccountant"]
        for name, *numbers in table:
            cells = [n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True)]
            lines.append("  " + "  ".join([name.ljust(widths[0]), *cells]))
        if len(table) == 1:
            lines.append("  nothing was released")
        return "\n".join(lines + [f"  {name}: {value}" for name, value in facts])

    def _repr_html_(self) -> str:
        (head, *body), facts = self._rows()

        def row(cells: tuple[str, ...], tag: str = "td") -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        ledger = row(head, "th") + "".join(map(row, body))
        return f"<table>{ledger}</table><table>{''.join(map(row, facts))}</table>"
