"""Audits: attacks on real runs give a lower bound on their epsilon.

An audit is the counterpart of a proof. The accountant bounds epsilon from above, from the design of
the code. An audit bounds it from below, from the code's results. A bound above the claim shows a
fault. A bound below it shows only that this attack found no violation in these runs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.trade_off import TradeOff
from pyro_dp.auditing.bounds import (
    canaries_bound,
    canaries_contradict,
    chosen_thresholds,
    count_guesses,
    error_rates,
    least_advantage,
    middle_threshold,
    runs_bound,
)
from pyro_dp.auditing.result import AuditResult, CurveTest, drawn_curve
from pyro_dp.utils.errors import ConfigurationError, warn_not_private
from pyro_dp.utils.validation import require_count, require_number

Column = torch.Tensor | np.ndarray
_LENGTHS = "score=None needs equally many numbers from every run: pass a score."
_PART = 0.2  # share of the runs that choose thresholds, and of those that choose a direction


def audit(
    make_run: Callable[..., Any],
    data: Sequence[Column],
    canary: Sequence[Any],
    *,
    num_trials: int,
    score: Callable[[Any], float] | None = None,
    delta: float = 1e-5,
    confidence: float = 0.999,
    claim: PrivacyAccountant | None = None,
    seed: int | None = None,
    progress: bool = True,
) -> AuditResult:
    """A lower confidence bound on epsilon from repeated runs, with and without a canary.

    In each trial the canary replaces the first record, or does not. A fifth of the runs chooses two
    thresholds. The attacker guesses "with" above the upper one, "without" up to the lower one, and
    abstains between them. In the other runs a fair coin decides on the canary. The bound counts how
    often the attacker is right (:func:`pyro_dp.auditing.bounds.runs_bound`).

    With a claim, the same runs also test its whole trade-off curve
    (:func:`pyro_dp.auditing.bounds.least_advantage`). Each test gets half of the error probability.
    The curve shows much smaller faults. With 10,000 runs at epsilon = 4, nearly all audits find
    noise that is 20% too small.

    **Guarantee.** Assume independent, alike runs, each (epsilon, delta)-differentially private for
    the first record. Then the bound is at most epsilon with the stated confidence, for any canary
    and score. With a claim this holds for mechanisms that have the ledger's trade-off curve at some
    share of its noise. If the claim is true, the result contradicts it with probability 1 -
    confidence at most.

    **Not protected.** The result is not private, and ``make_run`` gets the raw data. Use made-up
    data, or keep the result to yourself; a :class:`NotPrivateWarning` says so. An audit never
    proves privacy: a low bound may come from a weak canary, a weak score or too few runs.

    :param make_run: called as ``make_run(*records)``. It runs the inference from its start, with
        fresh noise, and returns the release. State kept from one run for the next would make the
        runs dependent.
    :param data: tensors or arrays with one row per record. Under ``add_or_remove_one`` the first
        record must be empty and add nothing, such as zero features in a regression. Under
        ``replace_one`` any record will do.
    :param canary: one row for each entry of ``data``. The most revealing canary has the largest
        gradient in a direction that no other record has.
    :param num_trials: total number of runs, at least 100. No attack on n runs can show an epsilon
        above about log(n / 9).
    :param score: a function of the release that returns a number, larger with the canary. None: the
        release is a number, tensor or array. Another fifth of the runs finds the direction in which
        its means differ most, relative to the variances.
    :param delta: the delta at which epsilon is bounded, in [0, 1).
    :param confidence: in (0, 1).
    :param claim: the accountant of one run, whose epsilon and trade-off curve the audit tests.
    :param seed: seed of the coins, to repeat an audit.
    :raises ConfigurationError: an argument is not as stated, or a score is not a finite number.

    >>> noise = np.random.default_rng(1)  # another seed than that of the coins
    >>> def forgot_the_noise(x):  # so its result reveals who is in the data
    ...     return x.sum() + 1e-3 * noise.standard_normal()
    >>> result = audit(forgot_the_noise, [np.zeros(10)], [1.0], num_trials=1000, score=float,
    ...                seed=0, progress=False)
    >>> result.bound > 3.0
    True
    """
    scores = {} if score is None else {"score": score}
    _check(delta, confidence, claim, make_run=make_run, **scores)
    num_trials = require_count("num_trials", num_trials, least=100)
    canaries = _canary_rows(data, canary, single=True)
    warn_not_private("audit", "data", "made-up data")
    worlds = tuple(data), _with_canaries(data, canaries, np.array([True]))

    part = int(_PART * num_trials)
    chosen = np.arange(part) % 2 == 1
    learning = part if score is None else 0
    coins = _generator(seed).integers(2, size=num_trials - part - learning) == 1
    with tqdm(total=num_trials, desc="audit", disable=not progress) as bar:

        def run(included: np.ndarray, read: Callable[[Any], Any]) -> np.ndarray:
            values = []
            for each in included:
                values.append(read(make_run(*worlds[int(each)])))
                bar.update()
            if len({value.shape for value in values}) > 1:
                raise ConfigurationError(_LENGTHS)
            return np.stack(values)

        rule = _projection(run(chosen, _vector), chosen) if score is None else score
        held_out, tested = (run(each, lambda v: _number(rule(v))) for each in (chosen, coins))

    error = (1.0 - confidence) / (1.0 if claim is None else 2.0)  # each test gets an equal share
    low, high = chosen_thresholds(held_out, chosen, delta, 1.0 - error)
    guesses, correct = count_guesses(tested, coins, low, high)
    bound = float(runs_bound(len(coins), guesses, correct, delta, 1.0 - error))
    right = int(((tested > middle_threshold(held_out, chosen)) == coins).sum())
    limit = least_advantage(len(coins), right, error)

    def rejected(curve: TradeOff) -> bool:
        return curve.advantage < limit

    stated = bound, delta, confidence, "repeated runs", len(coins), int(guesses), int(correct)
    rates = error_rates(held_out, tested, coins, 1.0 - confidence)
    return AuditResult(*stated, rates, *_claims(claim, delta, len(coins), right, rejected))


def audit_one_run(
    make_run: Callable[..., Any],
    data: Sequence[Column],
    canaries: Sequence[Any],
    score: Callable[[Any], Any],
    *,
    positive: int | None = None,
    negative: int | None = None,
    delta: float = 1e-5,
    confidence: float = 0.999,
    claim: PrivacyAccountant | None = None,
    seed: int | None = None,
) -> AuditResult:
    """A lower confidence bound on epsilon from one run, with many canaries.

    Each of m canaries replaces one of the first m records with probability 1/2. The attacker
    guesses "with" for the highest scores and "without" for the lowest (Steinke, Nasr & Jagielski
    2023, arXiv 2305.08846; :func:`pyro_dp.auditing.bounds.canaries_error`). With a claim, the same
    guesses also test its whole trade-off curve
    (:func:`pyro_dp.auditing.bounds.canaries_contradict`). The test that rejects at fewer correct
    guesses decides, so each may have all of the error probability.

    **Guarantee.** As for :func:`audit`, if the run is private for each of the first m records, and
    also if canaries disturb each other.

    **Not protected.** As for :func:`audit`. One run gives a smaller bound than many runs.

    :param make_run: as for :func:`audit`; called once.
    :param data: as for :func:`audit`. Canaries replace some of the first m records.
    :param canaries: m rows for each entry of ``data``. Orthogonal canaries are best. With 1,000
        canaries in as many directions the curve shows epsilon >= 2.2 of 4, at a confidence of 0.95.
    :param score: a function of the release that returns m numbers, larger for canaries that seem
        included.
    :param positive: number of canaries guessed to be included; m / 10 if None.
    :param negative: number guessed to be left out, likewise.
    :param delta: in [0, 1); far below 1 / m, or the bound is 0.
    :param claim: the accountant of the run. It may be the one that the run itself records in.
    :raises ConfigurationError: an argument is not as stated, or a score is not a finite number.

    >>> noise = np.random.default_rng(1)  # another seed than that of the coins
    >>> def run(x):  # a sum of a hundred coordinates, with noise of standard deviation 1/2
    ...     return x.sum(0) + 0.5 * noise.standard_normal(100)
    >>> data, canaries = [np.zeros((200, 100))], [np.eye(100)]
    >>> result = audit_one_run(run, data, canaries, lambda sums: sums, seed=0)
    >>> result.coins, result.bound > 0.5
    (100, True)
    """
    _check(delta, confidence, claim, make_run=make_run, score=score)
    canaries = _canary_rows(data, canaries, single=False)
    m = len(canaries[0])
    tenth = max(1, m // 10)
    positive = require_count("positive", tenth if positive is None else positive, least=0)
    negative = require_count("negative", tenth if negative is None else negative, least=0)
    guesses = positive + negative
    if not 1 <= guesses <= m:
        raise ConfigurationError(
            f"positive + negative must lie in [1, {m}], the number of canaries; it is {guesses}."
        )
    coins = _generator(seed).integers(2, size=m) == 1
    warn_not_private("audit_one_run", "data", "made-up data")
    scores = _vector(score(make_run(*_with_canaries(data, canaries, coins))))
    if scores.shape != (m,):
        raise ConfigurationError(f"score must return one number for each of the {m} canaries.")
    order = np.argsort(scores, kind="stable")
    correct = int((~coins[order[:negative]]).sum() + coins[order[m - positive :]].sum())
    error = 1.0 - confidence
    bound = canaries_bound(m, guesses, correct, delta, confidence)

    def rejected(curve: TradeOff) -> bool:
        return canaries_contradict(curve, m, guesses, correct, error)

    stated = bound, delta, confidence, "one run", m, guesses, correct
    rates = error_rates(scores, scores, coins, None)
    return AuditResult(*stated, rates, *_claims(claim, delta, guesses, correct, rejected))


def _check(delta: Any, confidence: Any, claim: Any, **functions: Any) -> None:
    for name, value in functions.items():
        if not callable(value):
            raise ConfigurationError(f"{name} must be callable.")
    require_number("delta", delta, above=0.0, below=1.0, or_equal=True)
    require_number("confidence", confidence, above=0.0, below=1.0)
    if not isinstance(claim, PrivacyAccountant | None):
        raise ConfigurationError("claim must be a PrivacyAccountant, or None.")


def _generator(seed: int | None) -> np.random.Generator:
    if seed is not None:
        require_count("seed", seed, least=0)
    return np.random.default_rng(seed)


def _vector(value: Any) -> np.ndarray:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    try:
        vector = np.asarray(value, dtype=np.float64).ravel()
    except (TypeError, ValueError):
        raise ConfigurationError(
            "score=None needs runs that return a number, a tensor or an array: pass a score."
        ) from None
    if not np.isfinite(vector).all():
        raise ConfigurationError("The result of make_run, or its score, must be finite.")
    return vector


def _projection(vectors: np.ndarray, included: np.ndarray) -> Callable[[Any], np.ndarray]:
    """A linear score. Each coordinate's weight is its difference of means over its variance."""
    difference = vectors[included].mean(axis=0) - vectors[~included].mean(axis=0)
    variance = (vectors[included].var(axis=0) + vectors[~included].var(axis=0)) / 2.0
    least = 1e-12 * np.max(difference**2, initial=0.0)  # without noise any weight will do
    weights = difference / np.where(variance > least, variance, least or 1.0)

    def score(value: Any) -> np.ndarray:
        vector = _vector(value)
        if vector.shape != weights.shape:
            raise ConfigurationError(_LENGTHS)
        return vector @ weights

    return score


def _number(value: Any) -> np.ndarray:
    vector = _vector(value)
    if vector.size != 1:
        raise ConfigurationError("score must return one number.")
    return vector[0]


def _claims(
    claim: PrivacyAccountant | None,
    delta: float,
    guesses: int,
    correct: int,
    rejected: Callable[[TradeOff], bool],
) -> tuple[float, np.ndarray, CurveTest] | tuple:
    if claim is None:
        return ()
    epsilon = claim.get_epsilon(delta) if delta else math.inf
    return epsilon, drawn_curve(claim), CurveTest.of(claim, delta, guesses, correct, rejected)


def _canary_rows(data: Any, canaries: Any, *, single: bool) -> list[Column]:
    """Check the canaries. Each column becomes (m, ...) in the data's type, with m = 1 if single."""
    name = "canary" if single else "canaries"
    for argument, value in (("data", data), (name, canaries)):
        if not isinstance(value, tuple | list) or not value:
            raise ConfigurationError(
                f"{argument} must be a tuple with an entry for each argument of make_run: (x, y)."
            )
    if len(data) != len(canaries):
        raise ConfigurationError(f"{name} must have an entry for each of the {len(data)} of data.")
    columns = []
    for i, (column, rows) in enumerate(zip(data, canaries, strict=True)):
        if not isinstance(column, torch.Tensor | np.ndarray) or column.ndim < 1 or not len(column):
            raise ConfigurationError(
                f"data[{i}] must be a tensor or an array with one row per record."
            )
        try:
            if isinstance(column, torch.Tensor):
                rows = torch.as_tensor(rows, dtype=column.dtype, device=column.device)
            else:
                rows = np.asarray(rows, dtype=column.dtype)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigurationError(f"{name}[{i}] does not fit the type of data[{i}].") from None
        rows = rows[None] if single else rows
        if rows.ndim < 1 or rows.shape[1:] != column.shape[1:] or not 1 <= len(rows) <= len(column):
            shape = f"shape {tuple(column.shape[1:])}, as a row of data[{i}]"
            if not single:
                shape = f"1 to {len(column)} rows, each of {shape}"
            raise ConfigurationError(f"{name}[{i}] must have {shape}.")
        columns.append(rows)
    if len({len(rows) for rows in columns}) > 1:
        raise ConfigurationError(f"{name} must have equally many rows in each entry.")
    if _alike(data, columns).any():
        raise ConfigurationError(
            f"{name}: a canary equals the record that it replaces. Data with and without it are "
            "the same, and no audit finds a fault: choose another."
        )
    return columns


def _alike(data: Sequence[Column], canaries: Sequence[Column]) -> np.ndarray:
    """Which canaries equal the records that they replace, (m,)."""
    found = np.ones(len(canaries[0]), dtype=bool)
    for column, rows in zip(data, canaries, strict=True):
        same = np.asarray(column[: len(rows)] == rows)
        found &= same.reshape(len(rows), -1).all(axis=1)
    return found


def _with_canaries(
    data: Sequence[Column], canaries: Sequence[Column], included: np.ndarray
) -> tuple[Column, ...]:
    """A copy of the data in which included canary i replaces record i."""
    chosen = np.flatnonzero(included)
    records = []
    for column, rows in zip(data, canaries, strict=True):
        kept: Any = column.clone() if isinstance(column, torch.Tensor) else column.copy()
        kept[chosen] = rows[chosen]
        records.append(kept)
    return tuple(records)
