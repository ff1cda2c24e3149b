"""A formula with its two sides, as far as it may be read: by the library formulaic."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyro_dp.tabular.column import Column
from pyro_dp.tabular.design import Term
from pyro_dp.tabular.expressions import require_column
from pyro_dp.utils.errors import ConfigurationError


@dataclass(frozen=True)
class Formula:
    """
    :param text: as the user wrote it.
    :param outcome: column on the left side.
    :param terms: those of the right side.
    """

    text: str
    outcome: str
    terms: tuple[Term, ...]

    @classmethod
    def read(cls, text: str, columns: Mapping[str, Column]) -> "Formula":
        """
        :param text: "visits ~ age + chronic * income".
        :raises ConfigurationError: it is no formula with one outcome, and names which part is not;
            or formulaic is not installed.
        """
        try:
            import formulaic
        except ImportError:
            raise ConfigurationError(
                "PrivateGLM needs formulaic, which is not installed: pip install "
                "'pyro-dp[tabular]'."
            ) from None
        if not isinstance(text, str):
            raise ConfigurationError("formula must be text, such as 'visits ~ age + chronic'.")
        if re.search(r"(?<![\w.])\.(?![\w.])", text):
            raise ConfigurationError("The formula has '.', which stands for no columns: name them.")
        if "|" in text:
            raise ConfigurationError(
                "The formula has '|', a grouped term of other packages: an intercept for each "
                "level of a column is group='column'. Slopes for each level: write the "
                "interaction, age * region."
            )
        try:
            read = formulaic.Formula(text)
        except Exception as error:  # formulaic's own, of many types
            first = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines()[0]
            raise ConfigurationError(f"The formula cannot be read: {first}") from None
        sides: tuple[Any, Any] = getattr(read, "lhs", ()), getattr(read, "rhs", read)
        if len(sides[0]) != 1 or len(sides[0][0].factors) != 1 or isinstance(sides[1], tuple):
            raise ConfigurationError(
                "The formula must have one outcome and one right side: 'visits ~ age + chronic'."
            )
        outcome = sides[0][0].factors[0].expr
        if outcome not in columns and re.search(r"\W", outcome):
            raise ConfigurationError(
                f"The outcome {outcome!r} must be a column itself: make the column before, and "
                "declare it."
            )
        require_column(outcome, columns)
        terms = []
        for term in sides[1]:
            texts = tuple(each.expr for each in term.factors)
            if any(each.startswith("offset(") for each in texts):
                raise ConfigurationError(
                    f"The formula has the term {str(term)!r}: say exposure='column' instead."
                )
            if texts == ("1",):
                texts = ()
            elif any(re.fullmatch(r"[\d.]+|'.*'|\".*\"", each) for each in texts):
                raise ConfigurationError(
                    f"The formula has the term {str(term)!r}: numbers stand within I(...) only."
                )
            elif outcome in texts:
                raise ConfigurationError(f"The outcome {outcome!r} is on both sides.")
            terms.append(texts)
        return cls(text, outcome, tuple(terms))
