"""The settings that inferences share: noise, sampling, clipping, factors, execution.

Each is a small frozen object that checks its fields. A plain number is short for an object with
only that number: ``noise=5.0`` for ``Noise(5.0)``, ``sampling=0.05`` for ``PoissonSampling(0.05)``,
and ``clip=1.0`` for ``Clip(1.0)``.
"""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.mechanism.clipped_fraction import AdaptiveClip
from pyro_dp.mechanism.cluster import Cluster
from pyro_dp.mechanism.federation import Federation
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import (
    require_choice,
    require_count,
    require_flag,
    require_number,
    require_scale,
    same,
)

S = TypeVar("S", bound="Setting")
Init = TypeVar("Init", bound=Callable[..., None])


@dataclass(frozen=True)
class Setting:
    """Base of the settings.

    :cvar _plain: types of values that are short for a setting.
    :cvar _forms: the values that an argument may have, in words.
    """

    _plain: ClassVar[tuple[type, ...]] = (int, float, np.integer, np.floating)
    _forms: ClassVar[str]

    @classmethod
    def read(cls: type[S], value: Any) -> S:
        """The setting for an argument, which may be short for one. None: the default.

        :raises ConfigurationError: the argument has the wrong type.
        """
        if isinstance(value, cls):
            return value
        if value is not None and (isinstance(value, bool) or not isinstance(value, cls._plain)):
            kind = type(value).__name__
            raise ConfigurationError(f"{cls.__name__.lower()} must be {cls._forms}, not {kind}.")
        return cls._made(value)

    @classmethod
    def _made(cls: type[S], value: Any) -> S:
        return cls() if value is None else cls(value)  # type: ignore[call-arg]

    def only(self: S, who: str, *names: str) -> S:
        """Check that no other field than these is set.

        :param who: the class that uses only these fields.
        :raises ConfigurationError: another field is set.
        """
        for each in fields(self):
            if each.name not in names and getattr(self, each.name) != each.default:
                raise ConfigurationError(
                    f"{who} has no use for {type(self).__name__}.{each.name}: leave it out."
                )
        return self

    def _check(self, name: str, require: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Replace a field by the result of its check. None is allowed if it is the default."""
        value = getattr(self, name)
        if value is not None or type(self).__dataclass_fields__[name].default is not None:
            checked = require(f"{type(self).__name__}.{name}", value, *args, **kwargs)
            object.__setattr__(self, name, checked)


@dataclass(frozen=True)
class Noise(Setting):
    """The noise of the releases, and the source of its random numbers.

    :param multiplier: sigma, the noise's standard deviation in units of the bound of one record's
        contribution. ``None``: the smallest sigma that fits the remaining budget at the first step.
        0: a non-private reference.
    :param source: ``None``: noise and sampling come from generators that the operating system
        seeds. ``"system"``: they come from its cryptographic generator itself, and sums and noise
        are integers (:mod:`pyro_dp.mechanism.fixed_point`). A seed or a ``torch.Generator``: the
        run can be repeated, and there is no guarantee against anyone who can guess the seed. Runs
        with equal seeds and separate accountants share their noise; the ledger says so. The guide's
        initial values and draws are public: use ``pyro.set_rng_seed`` for these.
    :raises ConfigurationError: a field is out of range.

    >>> Noise(5.0, source=0)
    Noise(multiplier=5.0)
    """

    _forms = "a number or Noise(...)"

    multiplier: float | None = None
    # A seed is not printed, because it determines the noise.
    source: int | str | torch.Generator | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._check("multiplier", require_number, above=0.0, below=math.inf, or_equal=True)
        source = self.source
        is_seed = isinstance(source, int) and not isinstance(source, bool) and source >= 0
        if not (is_seed or isinstance(source, torch.Generator | None) or same(source, "system")):
            raise ConfigurationError(
                "Noise.source must be a torch.Generator, a non-negative int, 'system' or None."
            )
        if self.is_secure and self.multiplier == 0:
            raise ConfigurationError("Noise(0, source='system') adds none: leave the source out.")

    @property
    def is_secure(self) -> bool:
        return isinstance(self.source, str)


@dataclass(frozen=True)
class Sampling(Setting):
    """Base of the sampling schemes, which choose the records that take part in a step."""

    _forms = "a rate, PoissonSampling(...), FixedSizeSampling(...) or FullBatch()"

    rate: float | None = None
    plate: str | None = field(default=None, kw_only=True)
    kind: ClassVar[str]  # the scheme's name in the ledger

    def __post_init__(self) -> None:
        if type(self) not in (PoissonSampling, FixedSizeSampling, FullBatch):
            raise ConfigurationError(
                "sampling must be a PoissonSampling, a FixedSizeSampling or a FullBatch. No other "
                "scheme is accounted for."
            )
        if self.rate is not None:
            name = f"{type(self).__name__}.rate, the expected fraction of the records in a step,"
            rate = require_number(name, self.rate, above=0.0, below=1.0, closed=True)
            object.__setattr__(self, "rate", rate)
        if not isinstance(self.plate, str | None):
            raise ConfigurationError("Sampling.plate must be the name of a pyro.plate.")

    @classmethod
    def _made(cls, value: Any) -> "Sampling":
        return PoissonSampling(value)


@dataclass(frozen=True)
class PoissonSampling(Sampling):
    """Each record takes part independently, with probability ``rate``.

    :param rate: in (0, 1]. ``None``: subsample_size / size of the plate. If that is 1,
        :class:`DPSVI` takes 0.05, or 1000 records if that is more.
    :param plate: name of the private plate. It is found if only one plate holds observations.

    >>> PoissonSampling(0.05, plate="people").rate
    0.05
    """

    kind = "poisson"


@dataclass(frozen=True)
class FixedSizeSampling(Sampling):
    """A uniform subset of floor(rate N) records. The accountant must use ``"replace_one"``.

    :param rate: as for :class:`PoissonSampling`; likewise plate.

    >>> FixedSizeSampling(0.05).rate
    0.05
    """

    kind = "fixed"


@dataclass(frozen=True)
class FullBatch(Sampling):
    """All records take part in every step.

    :param plate: as for :class:`PoissonSampling`.

    >>> FullBatch(plate="people").rate
    1.0
    """

    rate: float = field(default=1.0, init=False)
    kind = "full"


@dataclass(frozen=True)
class Clip(Setting):
    """The clipping bound of one record's contribution, and further blocks of a release.

    :param bound: C, the norm to which one record's contribution is clipped. ``math.inf`` needs
        ``noise=0``. :class:`PaperDPSVI` also takes an :class:`AdaptiveClip`. ``None``:
        :class:`DPSVI` chooses C, and adapts it during the run
        (:mod:`pyro_dp.infer.svi.histogram_bound`). In :class:`DPSVI` a histogram of the norms takes
        5% of the cost of each release. If C is chosen, it takes the whole first release.
    :param of: the gradient that is clipped. For "latents" it is that with respect to the global
        latents in unconstrained coordinates, and the parameters used inside the plate. It is pulled
        back through the guide, as the aligned gradients of DPVIm (Jälkö et al. 2022, arXiv
        2210.15961). For "parameters" it is that with respect to all parameters, as in Algorithm 1
        of DPVI.
    :param loss: L > 0 also releases the loss. Each record's loss is clipped to [-L, L] nats, and
        their sum is a further block of the release.
    :param loss_share: the loss's part of the privacy cost (of sigma^-2), in (0, 1). The loss's
        noise has standard deviation sigma L / sqrt(loss_share). The gradient's noise grows by a
        factor of 1 / sqrt(1 - loss_share).
    :param report: release ``clipped_fraction``, with a bit that takes 1% of the privacy cost; for
        :class:`PaperDPSVI` and :class:`PaperDPSEP`. An :class:`AdaptiveClip` always has such a bit.
    :raises ConfigurationError: a field is out of range.

    >>> Clip(1.0, loss=10.0).loss
    10.0
    """

    bound: float | AdaptiveClip | None = None
    of: str = "latents"
    loss: float | None = None
    loss_share: float = 0.05
    report: bool = True

    _plain = (*Setting._plain, AdaptiveClip)
    _forms = "a number, an AdaptiveClip or Clip(...)"

    def __post_init__(self) -> None:
        if not isinstance(self.bound, AdaptiveClip):
            self._check("bound", require_scale, infinite=True)
        self._check("of", require_choice, ("latents", "parameters"))
        self._check("loss", require_scale)
        self._check("loss_share", require_number, above=0.0, below=1.0)
        self._check("report", require_flag)

    @property
    def adaptive(self) -> AdaptiveClip | None:
        return self.bound if isinstance(self.bound, AdaptiveClip) else None

    @property
    def first_bound(self) -> float | None:
        """The bound of the first step; None: it is chosen."""
        return self.bound.initial if isinstance(self.bound, AdaptiveClip) else self.bound


@dataclass(frozen=True)
class Factors(Setting):
    """The form of the sites that :class:`PaperDPSEP` releases, with precision Lambda and shift eta.

    :param precision: structure of Lambda: "full", "diagonal", or "shared" (one number for each
        latent site). ``None``: full up to 1200 latents, else shared.
    :param weight: kappa, the public weight of Lambda. The noise of Lambda is sigma C / kappa.
        ``None``: 2 / C, which makes the result independent of the latents' scale.
    :param centred: release eta - Lambda m instead of eta. Then the noise of Lambda does not move
        the mean.
    :param moments: as for :class:`DPSEP`.
    :raises ConfigurationError: a field is out of range.

    >>> Factors("diagonal").centred
    True
    """

    precision: str | None = None
    weight: float | None = None
    centred: bool = True
    moments: str = "auto"

    _plain = (str,)
    _forms = "'full', 'diagonal', 'shared' or Factors(...)"

    def __post_init__(self) -> None:
        self._check("precision", require_choice, ("full", "diagonal", "shared"))
        self._check("weight", require_scale)
        self._check("centred", require_flag)

    def weight_at(self, bound: float) -> float:
        """kappa, for sites that are clipped to this norm."""
        return self.weight or (1.0 if bound == math.inf else 2.0 / bound)


@dataclass(frozen=True)
class Execution(Setting):
    """How steps are computed. Except for rounding, the result does not depend on it.

    :param microbatch_size: the largest number of records in memory at a time.
    :param jit: with "trace", model and guide are traced once, and steps run no Pyro code. With
        "compile", the graph also becomes machine code, which needs a C++ compiler and up to a
        minute. With "none", every step runs Pyro code. With "auto", gradient steps are traced, but
        looks are not, because a dozen looks gain little. Graphs are checked against the model in
        the first steps. If a model cannot be traced, a warning says so, and "none" is used.
    :param slice_data: True: model and guide are written for whole tensors (``with
        pyro.plate("data", len(x))``), and get rows of them. False: they read their arguments at the
        plate's indices. "auto" finds out with placeholders.
    :param peers: a :class:`Cluster` of processes that share the work, each with its own records.
        Owners who do not show records to each other use a :class:`pyro_dp.federated.Federation`.
    :raises ConfigurationError: a field is out of range.

    >>> Execution(jit="compile").microbatch_size is None
    True
    """

    microbatch_size: int | None = None
    jit: str = "auto"
    slice_data: bool | str = "auto"
    peers: Cluster | Federation | None = None

    _plain = ()
    _forms = "Execution(...)"

    def __post_init__(self) -> None:
        # The check returns a Python int, because torch takes no other integers for sizes.
        self._check("microbatch_size", require_count)
        self._check("jit", require_choice, ("auto", "trace", "compile", "none"))
        if not isinstance(self.slice_data, bool) and not same(self.slice_data, "auto"):
            raise ConfigurationError(
                f"Execution.slice_data must be True, False or 'auto'; it is {self.slice_data!r}."
            )
        if not isinstance(self.peers, Cluster | Federation | None):
            raise ConfigurationError(
                "Execution.peers must be a pyro_dp.Cluster, a pyro_dp.federated.Federation, or "
                "None."
            )


def require_fit(
    accountant: PrivacyAccountant,
    num_steps: int | None,
    noise: Noise,
    sampling: Sampling,
    execution: Execution,
    *,
    bound: float,
    plans: bool,
) -> None:
    """Check the arguments of an :class:`IterativeMechanism`.

    :param plans: whether the inference chooses ``num_steps`` itself.
    :raises ConfigurationError: a setting does not fit the others.
    """
    if not isinstance(accountant, PrivacyAccountant):
        raise ConfigurationError("accountant must be a PrivacyAccountant.")
    peers, sigma, is_fixed = execution.peers, noise.multiplier, sampling.kind == "fixed"
    if is_fixed and accountant.neighboring != "replace_one":
        raise ConfigurationError(
            "FixedSizeSampling hides no change of the number of records: use "
            "PrivacyAccountant(neighboring='replace_one'), or PoissonSampling(rate)."
        )
    if isinstance(peers, Federation) and not noise.is_secure:
        raise ConfigurationError(
            "A Federation adds up integers: pass noise=Noise(source='system'). (Shares of "
            "floating-point noise could reveal what they should hide.)"
        )
    if peers is not None and is_fixed:
        raise ConfigurationError(
            "FixedSizeSampling needs all records in one process: with peers each draws from its "
            "own. Use PoissonSampling, or FullBatch."
        )
    if sigma is None and accountant.epsilon is None:
        raise ConfigurationError(
            "Noise.multiplier is calibrated from a budget: give the accountant an epsilon, or pass "
            "noise=5.0, say."
        )
    if sigma is None and num_steps is None and not plans:
        raise ConfigurationError(
            "Noise.multiplier is calibrated for a number of steps: pass num_steps."
        )
    if bound == math.inf and sigma != 0:
        raise ConfigurationError(
            "An infinite bound needs noise=0: no noise hides an unbounded record. Choose a finite "
            "one."
        )


# The present argument for each argument of version 0.2; {} is its value.
_NOW = {
    "noise_multiplier": "noise={}",
    "generator": "noise=Noise(source={})",
    "secure": 'noise=Noise(source="system")',
    "sample_rate": "sampling={}",
    "sampling='poisson'": "sampling=PoissonSampling(rate)",
    "sampling='fixed'": "sampling=FixedSizeSampling(rate)",
    "sampling='full'": "sampling=FullBatch()",
    "plate": "sampling=PoissonSampling(plate={})",
    "max_grad_norm": "clip={}",
    "max_factor_norm": "clip={}",
    "privatize": "clip=Clip(of={})",
    "loss_clip": "clip=Clip(loss={})",
    "loss_share": "clip=Clip(loss=..., loss_share={})",
    "report_clipping": "clip=Clip(..., report={})",
    "local_optim": "optim={0}, or optim=(optim, {0})",
    "precision": "factors={}",
    "precision_weight": "factors=Factors(weight={})",
    "centred": "factors=Factors(centred={})",
    "noise_aware": "posterior(noise_aware={})",
    "microbatch_size": "execution=Execution(microbatch_size={})",
    "jit": "execution=Execution(jit={})",
    "slice_data": "execution=Execution(slice_data={})",
    "cluster": "execution=Execution(peers={})",
}


def old_names_explained(other: type | None = None, **instead: str) -> Callable[[Init], Init]:
    """Decorate an ``__init__``, so errors translate the arguments of version 0.2.

    :param other: a related class. If only that class takes an argument, errors name it.
    :param instead: texts that replace the general ones, by argument.
    """

    def decorated(init: Init) -> Init:
        own = inspect.signature(init).parameters
        theirs = inspect.signature(other).parameters if other else {}
        present = _NOW | instead

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            who, moved = type(self).__name__, []
            for name, value in kwargs.items():
                shown = repr(value) if isinstance(value, int | float | str | None) else "..."
                now = present.get(name) or present.get(f"{name}={shown}")
                new = now.partition("=")[0] if now else name
                if other and new in theirs and new not in own:
                    text = now.format("...") if now else f"{name}=..."
                    raise ConfigurationError(
                        f"{who} takes no {name}. Leave it out, or use {other.__name__}(..., "
                        f"{text})."
                    )
                if now:
                    moved.append(f"{name}={shown} is now {now.format(shown)}.")
            if moved:
                raise ConfigurationError(f"{who}: {' '.join(moved)} See docs/upgrade.md.")
            init(self, *args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorated
