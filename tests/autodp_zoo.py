"""The table in docs/autodp.md: how the ledger takes each mechanism of autodp's ``mechanism_zoo``.

python tests/autodp_zoo.py  # write the table anew
"""

import inspect
from pathlib import Path

import numpy as np
from autodp import mechanism_zoo as zoo
from autodp.autodp_core import Mechanism

from pyro_dp import ConfigurationError, PrivacyAccountant
from pyro_dp.utils.display import up

PAGE = Path(__file__).parents[1] / "docs" / "autodp.md"
ADD, REPLACE = "add_or_remove_one", "replace_one"
HEAD = (
    "| mechanism | parameters | in the ledger, or why it is refused | epsilon |\n|---|---|---|---|"
)
SAMPLED = {"prob": 0.01, "sigma": 1.0, "coeff": 100}
ZOO = {
    "ComposedGaussianMechanism": ({"sigma": 10.0, "coeff": 10},),
    "DiscreteGaussianMechanism": (4.0,),
    "ExactGaussianMechanism": (4.0,),
    "ExponentialMechanism": (0.5,),
    "GaussianMechanism": (4.0,),
    "GaussianSVT_Mechanism": ({"sigma": 4.0, "k": 10},),
    "LaplaceMechanism": (10.0,),
    "LaplaceSVT_Mechanism": ({"b": 10.0, "k": 10, "c": 1},),
    "NoisyGD_Mechanism": (np.array([4.0, 8.0]),),
    "NoisySGD_Mechanism": (0.01, 1.0, 100),
    "NoisyScreenMechanism": ({"logp": -1.0, "logq": -1.1},),
    "PureDP_Mechanism": (0.5,),
    "RandresponseMechanism": (0.6,),
    "StageWiseMechanism": ({"sigma": 4.0, "k": 10, "c": 2},),
    "SubsampleGaussianMechanism": (SAMPLED,),
    "zCDP_Mechanism": (0.02,),
}


def names() -> list[str]:
    """All mechanisms of the zoo."""
    kinds = inspect.getmembers(zoo, lambda each: inspect.isclass(each))
    return sorted(n for n, each in kinds if issubclass(each, Mechanism) and each is not Mechanism)


def made(name: str) -> Mechanism:
    with np.errstate(all="ignore"):
        return getattr(zoo, name)(*ZOO[name])


def row(name: str) -> str:
    accountant = PrivacyAccountant(delta=1e-5)
    try:
        accountant.record(made(name), neighboring=ADD)
    except ConfigurationError as error:
        listed, cost = "refused: " + str(error).removeprefix(f"{name}: "), ""
    else:
        ((event, count),) = accountant.ledger
        listed = f"{count} times {type(event).__name__}: {event.brief}"
        cost = up(accountant.get_epsilon())
    given = ", ".join(str(each.tolist() if hasattr(each, "tolist") else each) for each in ZOO[name])
    return f"| `{name}` | `{given}` | {listed} | {cost} |"


def table() -> str:
    return "\n".join([HEAD, *map(row, names())]) + "\n"


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(HEAD)
    after = rest[rest.index("\n\n") + 1 :]
    PAGE.write_text(before + table() + after, encoding="utf-8")
