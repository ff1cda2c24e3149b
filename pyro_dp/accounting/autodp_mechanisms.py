"""Mechanisms of ``autodp`` as entries of a ledger, and a ledger as a mechanism of ``autodp``.

Entries compose without autodp. For the kinds in :func:`_known`, the parameters are read, and the
entry has a dominating pair. For any other mechanism, the entry stores the Rényi divergences.
Autodp's privacy profiles are not used, because some are wrong: docs/autodp.md lists them.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pyro_dp.accounting import composition
from pyro_dp.accounting.events import (
    LONGEST_TEXT,
    ApproximateDP,
    Event,
    Laplace,
    RenyiDP,
    SubsampledGaussian,
)
from pyro_dp.accounting.pld import ORDERS, Floats
from pyro_dp.accounting.trade_off import Accountant, trade_off
from pyro_dp.utils.errors import ConfigurationError
from pyro_dp.utils.validation import require_choice, require_count, require_number, require_scale

if TYPE_CHECKING:
    from autodp.autodp_core import Mechanism

_WORDS = {"add_or_remove_one": "add_remove", "replace_one": "replace_one"}  # relations in autodp
# The relation under which a mechanism is private, by a parameter that autodp stores in it.
_NEEDS = dict.fromkeys(("PoissonSample", "PoissonSampling", "prob"), "add_or_remove_one")
_NEEDS["Subsample"] = "replace_one"
_ROUNDING = 1e-6  # relative error of autodp's divergences
_REFUSED = {
    "NoisyScreenMechanism": (
        "its cost depends on the data. Record an ApproximateDP with a bound for all data."
    ),
    "LaplaceSVT_Mechanism": (
        "its divergences are too small where queries move in opposite directions. Record "
        "ApproximateDP(3 * c / b, 0.0, name)."
    ),
    "GaussianSVT_Mechanism": (
        "its bound needs assumptions about the queries that it does not state. Record an "
        "ApproximateDP with a bound that is proven for yours."
    ),
}


def _known(kind: str, of: Mapping[str, Any], name: str, unit: float) -> tuple[Event, Any] | None:
    """The event of a mechanism, and its count; None: this function lacks its kind.

    :param of: the mechanism's parameters.
    :param unit: a sum's sensitivity, in units of the clipping bound.
    """
    match kind:
        case "GaussianMechanism" | "ExactGaussianMechanism":
            return _gaussian(of["sigma"], unit), 1
        case "NoisyGD_Mechanism":
            return _gaussian(np.sum(1.0 / np.square(of["sigma_list"])) ** -0.5, unit), 1
        case "ComposedGaussianMechanism":
            return _gaussian(of["sigma"], unit), of["coeff"]
        case "SubsampleGaussianMechanism":
            return _gaussian(of["sigma"], unit, of["prob"]), of["coeff"]
        case "NoisySGD_Mechanism":
            return _gaussian(of["sigma"], unit, of["prob"]), of["niter"]
        case "LaplaceMechanism":
            return Laplace(of["b"], name), 1
        case "PureDP_Mechanism":
            return ApproximateDP(of["eps"], 0.0, name), 1
        case "RandresponseMechanism":
            p = require_number("p", of["p"], above=0.0, below=1.0)
            return ApproximateDP(abs(math.log(p) - math.log1p(-p)), 0.0, name), 1
    return None


def _gaussian(sigma: Any, unit: float, rate: Any = 1.0) -> SubsampledGaussian:
    return SubsampledGaussian(unit * require_scale("sigma", sigma), rate)


def read(mechanism: Any, stated: str | None, neighboring: str) -> tuple[Event, int]:
    """The event for one use of a ``Mechanism`` of autodp, and its count.

    :param stated: the relation under which it is private, stated by the user, as autodp does not
        store it.
    :raises ConfigurationError: it is not a mechanism, is private under another relation, or its
        cost is not certain.
    """
    from autodp.autodp_core import Mechanism

    if not isinstance(mechanism, Mechanism):
        composition.interpret(mechanism, neighboring)
    _require_relation(mechanism, stated, neighboring)
    kinds = [kind.__name__ for kind in type(mechanism).__mro__]
    if refused := next(filter(_REFUSED.__contains__, kinds), None):
        raise ConfigurationError(f"{refused}: {_REFUSED[refused]}")
    if not mechanism.log_phi_p2q.__qualname__.startswith("Mechanism."):
        raise ConfigurationError(
            f"{kinds[0]}: its analytical Fourier accountant is wrong. Leave out phi_off=False, and "
            "compose with Composition."
        )
    name, curve = str(getattr(mechanism, "name", kinds[0]))[:LONGEST_TEXT], _curve(mechanism)
    kind = kinds[0] if type(mechanism).__module__ == "autodp.mechanism_zoo" else ""
    unit = 1.0 if neighboring == "add_or_remove_one" else 2.0
    try:
        known = _known(kind, getattr(mechanism, "params", {}), name, unit)
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"{kind}: its parameters are damaged.") from error
    if known is not None:
        event, count = known[0], require_count("its number of steps", known[1])
        least = np.array(composition.renyi({event: count}, neighboring).at_orders) / (ORDERS - 1.0)
        if not np.all(curve >= least * (1.0 - _ROUNDING) - 1e-12):
            raise ConfigurationError(
                f"{kind}: its divergences are below those that its parameters have. One of the "
                "two was changed: make the mechanism anew."
            )
        return event, count
    if not np.all(np.isfinite(curve)):
        raise ConfigurationError(
            f"{kinds[0]}: its Rényi divergences are not finite. Record its parts, or an "
            "ApproximateDP."
        )
    most = float(mechanism.eps_pureDP)
    return RenyiDP(tuple(curve), None if most == math.inf else most, name), 1


def _require_relation(mechanism: "Mechanism", stated: str | None, neighboring: str) -> None:
    """
    :raises ConfigurationError: the stated relation is missing, is not the accountant's, or
        contradicts the mechanism or its parts.
    """
    require_choice("neighboring, the relation that the mechanism keeps,", stated, tuple(_WORDS))
    keys = [key.rsplit(":", 1)[-1].rstrip("0123456789") for key in getattr(mechanism, "params", {})]
    found = {_NEEDS[key] for key in keys if key in _NEEDS} | {stated}
    one_sided = mechanism.neighboring not in ("add_remove", _WORDS[neighboring])
    if found != {neighboring} or one_sided:
        raise ConfigurationError(
            f"neighboring={stated!r}: this mechanism, or a part of it, is private under another "
            f"relation than this accountant's {neighboring!r}. Costs under two relations do not "
            "add up. Bound it under the accountant's."
        )


def _curve(mechanism: "Mechanism") -> Floats:
    """A mechanism's Rényi divergences at ``ORDERS``. They may be NaN, which the caller refuses."""
    try:
        with np.errstate(all="ignore"):
            return np.array([float(mechanism.get_RDP(order)) for order in ORDERS])
    except Exception as error:  # a user's mechanism may raise any error
        text = f"its Rényi divergences raised {type(error).__name__}: {error}"
        raise ConfigurationError(text) from error


def of_ledger(accountant: Accountant) -> "Mechanism":
    """See :meth:`PrivacyAccountant.to_autodp`."""
    from autodp.autodp_core import Mechanism

    pair = composition.renyi(dict(accountant.counted), accountant.neighboring)

    def divergence(order: float) -> float:
        rate = max(float(order) - 1.0, 1.0)  # divergences grow with the order
        return pair.most if rate == math.inf else float(pair.log_moments(np.array(rate))) / rate

    def epsilon(delta: float) -> float:
        if delta >= 1.0:
            return 0.0
        return accountant.get_epsilon(float(delta)) if delta > 0.0 else pair.most

    found = Mechanism()
    found.name, found.params = "ledger of pyro_dp", {}
    found.neighboring = _WORDS[accountant.neighboring]
    found.replace_one = accountant.neighboring == "replace_one"
    found.RenyiDP, found.approxDP, found.eps_pureDP = divergence, epsilon, pair.most
    found.approx_delta = accountant.get_delta
    found.fDP = lambda false_positives: float(trade_off(accountant, false_positives))
    return found
