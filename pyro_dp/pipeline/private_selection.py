"""Choose among settings privately. :mod:`pyro_dp.pipeline.trials` has the cost."""

import contextlib
import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyro
import torch
from pyro.optim import PyroOptim
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from pyro_dp.accounting import composition
from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import ApproximateDP, SubsampledGaussian
from pyro_dp.accounting.ledger import SEEDED
from pyro_dp.accounting.origins import Origin
from pyro_dp.accounting.pld import RATES, renyi_epsilon
from pyro_dp.graphs.references import References
from pyro_dp.mechanism.streams import Randomness
from pyro_dp.pipeline.trials import NOTE, TrialAccountant, Trials, TruncatedNegativeBinomial
from pyro_dp.utils.errors import ConfigurationError, PrivacyError, no_warnings
from pyro_dp.utils.torch_state import private_rng, version
from pyro_dp.utils.validation import require_count, require_number

Releases = Mapping[SubsampledGaussian, int]
_GOES_ON = (  # reveals only that there was an earlier trial
    "A trial of private_selection found parameters, tensors or an optimizer that an earlier trial, "
    "or somebody else, had moved. Trials that go on from each other cost more than was charged. "
    "Make guide, optimizer and modules inside run. The cost was spent."
)


@dataclass(frozen=True)
class Selection:
    """The winner of a private selection. The other trials are discarded.

    :param result: as ``run`` returned it, as was the score.

    >>> best = Selection(setting=0.03, result="a guide", score=-1.2)  # of private_selection
    >>> best.setting
    0.03
    """

    setting: Any
    result: Any
    score: float


def private_selection(
    run: Callable[[Any, PrivacyAccountant], tuple[Any, Any]],
    candidates: Sequence[Any],
    *,
    releases: Releases | Callable[[Any], Releases],
    accountant: PrivacyAccountant,
    trials: Trials | None = None,
    delta: float | None = None,
    generator: torch.Generator | int | None = None,
) -> Selection:
    """The best of a random number of private runs with random settings.

    The number K of trials is drawn from ``trials``. Each trial draws a setting uniformly from the
    candidates. It calls ``run`` with the setting and a fresh accountant, which admits only the
    declared releases. The trial with the highest score wins (the first of equals), and only it is
    returned. The ledger gets *one* event before the first trial runs: (epsilon, delta)-DP with the
    epsilon of :func:`selection_epsilon`. The event does not depend on the drawn K.

    **Guarantee.** The accountant's (epsilon, delta) covers settings, result and score of the winner
    under two conditions. All that ``run`` returns comes from the releases of its accountant and
    from public data. It keeps nothing of a trial anywhere else.

    **Hidden.** Losing trials and K itself. Each run has a parameter store of its own, and a copy of
    its candidate. Runs use the global generators of torch, NumPy and Python, seeded privately, and
    leave them as they were. Prints, warnings and progress bars, which would count the trials, are
    not displayed. A trial that raises an exception, or whose score is NaN, gets the lowest score,
    and the exception's text stays hidden. Try ``run`` by itself on data that need no protection.

    **Not protected.** The running time, which reveals K. A score on the private data themselves
    that is not a release of the trial's accountant. Whether a trial fails, if that depends on the
    data other than through releases. Files, logs, displays and variables that ``run`` writes to.
    Guides, optimizers and modules that are made outside ``run``: a trial that finds them moved ends
    the selection with an error.

    :param run: takes a setting and an accountant; returns a result and a score. The score is a
        number: the larger, the better. It must be private, for example from ``DPSVI`` with
        ``Clip.loss``, or computed on public data. The result must hold its parameters, as an
        autoguide does. Call ``pyro.clear_param_store()`` before you use it, or parameters of equal
        names in Pyro's store replace its own. (The winner's store is gone afterwards.)
    :param candidates: the settings, which are public.
    :param releases: the most that one trial releases, with counts, or a function of the setting
        that returns it. The most expensive one is charged. So ``run`` must state its
        ``noise``: a trial has no budget to calibrate from.
    :param accountant: keeps the ledger and the budget.
    :param trials: distribution of K. ``None``: ``TruncatedNegativeBinomial(mean=10)``.
    :param delta: the event's, in (0, 1); it is part of the delta of the accountant's guarantee.
        ``None``: half of the accountant's.
    :param generator: a ``torch.Generator`` or a seed, for K and settings that can be repeated. No
        guarantee against anyone who can guess the seed, and the ledger says so.
    :raises ConfigurationError: a setting is out of range; nothing was spent.
    :raises PrivacyBudgetExceeded: the selection does not fit the budget; nothing was spent.
    :raises PrivacyError: all trials failed. Or there was none, which happens with probability
        e^-mean under ``PoissonTrials``. The cost was spent.

    >>> def run(scale, accountant):  # a result, and its score on public data
    ...     accountant.record(SubsampledGaussian(5.0))
    ...     return f"a fit with prior scale {scale}", -abs(scale - 1.0)
    >>> best = private_selection(run, [1.0, 100.0], accountant=PrivacyAccountant(epsilon=4.0),
    ...                          releases={SubsampledGaussian(5.0): 1})
    >>> best.setting in (1.0, 100.0)
    True
    """
    trials = TruncatedNegativeBinomial(mean=10.0) if trials is None else trials
    declared = _declared(run, candidates, releases, accountant)
    settings, have_moved = _copies(candidates), _watch(run, candidates)
    delta = accountant.delta / 2 if delta is None else delta
    epsilon = selection_epsilon(
        declared, trials=trials, delta=delta, neighboring=accountant.neighboring
    )
    if epsilon == math.inf:
        raise ConfigurationError("releases must have noise, or a selection costs infinitely much.")
    randomness = Randomness("system" if generator is None else generator)
    if randomness.seeded:
        accountant.note(SEEDED)
    origin = Origin.now("private_selection", seeded=randomness.seeded, secure=False)
    with accountant.next_position(origin) as position:
        name = f"private_selection among {len(candidates)} settings, {trials!r}"
        accountant.record(ApproximateDP(epsilon, delta, name))
    draws = randomness.stream("sampling", position)
    private = randomness.stream("local", position)
    best = _Trial(None, error="no trial was drawn")
    uniform = int(draws.integers(2**53)) * 2.0**-53
    for number in range(trials.draw(uniform)):
        index = int(draws.integers(len(candidates)))
        start = int(draws.integers(2**63)) << 64 | int(draws.integers(2**63))
        own = TrialAccountant(declared[index], accountant, start)
        if have_moved():
            raise PrivacyError(_GOES_ON)
        trial = _tried(run, copy.deepcopy(settings[index]), own, private)
        if own.continued:
            raise PrivacyError(_GOES_ON)
        if number == 0 or trial.score > best.score:
            best = trial._replace(setting=candidates[index])
    if best.error is not None:
        raise PrivacyError(
            f"private_selection has no result: {best.error}. Its cost was spent. To see an error, "
            "call run(setting, accountant) yourself, on data that need no protection."
        )
    for note in best.notes:
        if note != NOTE:
            accountant.note(note)
    return Selection(best.setting, best.result, best.score)


def selection_epsilon(
    releases: Releases | Sequence[Releases],
    *,
    trials: Trials | None = None,
    delta: float = 5e-6,
    neighboring: str = "add_or_remove_one",
) -> float:
    """The cost of a private selection, for planning.

    The Rényi divergences of one trial bound those of the best of K
    (:mod:`pyro_dp.pipeline.trials`). Proposition 12 of Canonne, Kamath & Steinke 2020 converts them
    to epsilon. Arguments as for :func:`private_selection`.

    :param releases: one trial's releases, with counts; or several of these, to charge the worst.
    :param neighboring: the relation, as for :class:`PrivacyAccountant`.
    :returns: epsilon in nats; inf if a release has no noise.
    :raises ConfigurationError: a setting is out of range.

    >>> trial = {SubsampledGaussian(20.0, sample_rate=0.05): 200}
    >>> print(f"{selection_epsilon(trial, trials=TruncatedNegativeBinomial(mean=10)):.2f}")
    0.24
    """
    trials = TruncatedNegativeBinomial(mean=10.0) if trials is None else trials
    if not isinstance(trials, Trials):
        raise ConfigurationError("trials must be a TruncatedNegativeBinomial or PoissonTrials.")
    delta = require_number("delta", delta, above=0.0, below=1.0)
    each = [releases] if isinstance(releases, Mapping) else list(releases)
    parts = [composition.moments(_checked(one), neighboring) for one in each]
    # A random public setting costs at most as much as the worst one.
    base = np.max([moments for moments, _ in parts], axis=0)
    if not np.isfinite(base).any():
        return math.inf
    # The moments leave out outcomes of mass ``lost``. The rest has 1 - lost of the mass. Selections
    # with and without those outcomes differ by at most E[K] lost in total variation.
    lost = 2.0 * max(lost for _, lost in parts)
    base = base - (1.0 + RATES) * math.log1p(-lost)
    epsilon = renyi_epsilon(RATES, trials.moments(base), delta * (1.0 - 1e-6))
    slack = math.log1p(math.exp(-epsilon)) + math.log(max(lost * trials.mean, 1e-300)) + epsilon
    return epsilon if slack <= math.log(1e-6 * delta) else math.inf


class _Trial(NamedTuple):
    setting: Any
    result: Any = None
    score: float = -math.inf
    notes: tuple[str, ...] = ()
    error: str | None = None


def _tried(
    run: Callable, setting: Any, accountant: TrialAccountant, private: np.random.Generator
) -> _Trial:
    """Run one trial, and hide everything but its result."""
    try:
        with _unseen(private):
            result, score = run(setting, accountant)
            score = float(score)
    except (Exception, SystemExit) as error:
        reason = type(error).__name__
        if accountant.declared.refused:
            reason += ", at a release that was not declared"
        return _Trial(setting, error=f"every trial failed, one with {reason}")
    finally:
        accountant.declared.over = True
    if math.isnan(score):
        return _Trial(setting, error="every score was NaN")
    return _Trial(setting, result, score, accountant.notes)


@contextlib.contextmanager
def _unseen(private: np.random.Generator) -> Iterator[None]:
    """Hide prints and warnings, seed privately, and restore global state, also after errors."""
    with (
        private_rng(private),
        pyro.get_param_store().scope(),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        no_warnings(),
    ):
        yield


def _watch(run: Callable, candidates: Sequence[Any]) -> Callable[[], bool]:
    """Watch the tensors that ``run`` and the settings refer to: has any of them changed since?

    A copied setting still shares the tensors that its functions capture.
    """
    found = References(("run", run), ("candidates", list(candidates)))
    tensors = [x for _, x in found.tensors if not is_lazy(x)]
    versions = [version(x) for x in tensors]
    # Some optimizers write into parameters without a new version.
    numbers = [(x, x.detach().clone()) for x in tensors if x.requires_grad]

    def have_moved() -> bool:
        same = versions == [version(x) for x in tensors]
        return not (same and all(torch.equal(x, before) for x, before in numbers))

    return have_moved


def _copies(candidates: Sequence[Any]) -> list[Any]:
    """Copies of the settings, from which each trial gets another copy."""
    if any(isinstance(each, (nn.Module, PyroOptim)) for each in pytree.tree_leaves(candidates)):
        raise ConfigurationError(
            "candidates must be settings, not guides, modules or optimizers, which trials would go "
            "on from: make those inside run."
        )
    try:
        return [copy.deepcopy(one) for one in candidates]
    except Exception:
        raise ConfigurationError(
            "candidates must be settings that can be copied: each trial gets one of its own."
        ) from None


def _declared(run: Any, candidates: Any, releases: Any, accountant: Any) -> list[Releases]:
    """The releases that a trial with each of the candidates may make."""
    if not isinstance(accountant, PrivacyAccountant):
        raise ConfigurationError("accountant must be a PrivacyAccountant.")
    if not callable(run):
        raise ConfigurationError("run must be a function of a setting and an accountant.")
    if not isinstance(candidates, Sequence) or isinstance(candidates, str) or not candidates:
        raise ConfigurationError("candidates must be a list of settings, and not empty.")
    return [_checked(releases(one) if callable(releases) else releases) for one in candidates]


def _checked(releases: Any) -> dict[SubsampledGaussian, int]:
    if not isinstance(releases, Mapping) or not releases:
        raise ConfigurationError(
            "releases must list a trial's releases, for example "
            "{SubsampledGaussian(20.0, sample_rate=0.05): 200}."
        )
    for event, count in releases.items():
        if type(event) is not SubsampledGaussian:
            raise ConfigurationError("releases of a trial must be SubsampledGaussian events.")
        require_count("releases: a count", count)
    return dict(releases)
