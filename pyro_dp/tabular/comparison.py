"""How far synthetic rows are from others: total variation of margins, and prediction."""

import itertools
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import optimize, sparse
from scipy.special import log_softmax
from scipy.stats import rankdata

from pyro_dp.tabular.schema import Schema

_TURNS = 200


@dataclass(frozen=True, eq=False)
class Comparison:
    """Distances of synthetic rows from those of a frame. Not private, where the frame is not.

    :param one_way: total variation of each column's codes, in [0, 1], by column.
    :param two_way: of each pair's, by pair: (columns, columns), NaN where there is no pair.
    :param accuracy: in the frame, of a logistic regression of the kept column on the codes of all
        others that learnt from the synthetic rows; None: no column is kept.
    :param auc: the area under its ROC curve; None where the kept column has not two levels that
        are in the frame.

    >>> import pandas as pd
    >>> from pyro_dp.tabular import Comparison
    >>> pairs = pd.DataFrame([[float("nan"), 0.03], [0.03, float("nan")]])
    >>> Comparison(pd.Series([0.01, 0.02]), pairs, None, None)  # as Synthesizer.compare returns it
    Comparison(total variation, one-way 0.0150, two-way 0.0300)
    """

    one_way: pd.Series
    two_way: pd.DataFrame
    accuracy: float | None
    auc: float | None

    @property
    def tv1(self) -> float:
        """Mean of the columns'."""
        return float(self.one_way.mean())

    @property
    def tv2(self) -> float:
        """Mean of the pairs'."""
        return float(np.nanmean(self.two_way.to_numpy()))

    def __repr__(self) -> str:
        said = [f"total variation, one-way {self.tv1:.4f}, two-way {self.tv2:.4f}"]
        if self.accuracy is not None:
            said.append(f"train on synthetic, test on this: accuracy {self.accuracy:.4f}")
        if self.auc is not None:
            said.append(f"area under the curve {self.auc:.4f}")
        return f"Comparison({'; '.join(said)})"


def compared(
    synthetic: np.ndarray, other: np.ndarray, schema: Schema, target: int | None
) -> Comparison:
    """
    :param synthetic: codes, (rows, columns), as is other.
    :param target: column that is predicted from all others.
    """
    names, sizes = schema.names, schema.sizes
    one_way = pd.Series(
        [_distance(synthetic, other, [j], sizes) for j in range(len(names))], index=names
    )
    two_way = pd.DataFrame(np.nan, index=names, columns=names)
    for i, j in itertools.combinations(range(len(names)), 2):
        two_way.iloc[i, j] = two_way.iloc[j, i] = _distance(synthetic, other, [i, j], sizes)
    if target is None:
        return Comparison(one_way, two_way, None, None)
    scores = _scores(synthetic, other, sizes, target)
    truth = other[:, target]
    accuracy = float((scores.argmax(axis=1) == truth).mean())
    levels = np.unique(truth)
    auc = None
    if len(levels) == 2:
        auc = _area(scores[:, levels[1]] - scores[:, levels[0]], truth == levels[1])
    return Comparison(one_way, two_way, accuracy, auc)


def _distance(one: np.ndarray, other: np.ndarray, columns: list[int], sizes: list[int]) -> float:
    """Total variation of a margin: half of the sum of absolute differences."""
    shape = [sizes[j] for j in columns]
    shares = [
        np.bincount(np.ravel_multi_index(x[:, columns].T, shape), minlength=np.prod(shape)) / len(x)
        for x in (one, other)
    ]
    return float(abs(shares[0] - shares[1]).sum() / 2)


def _scores(learnt: np.ndarray, shown: np.ndarray, sizes: list[int], target: int) -> np.ndarray:
    """Log odds of the target's codes for the rows that are shown, (rows, size): by a multinomial
    logistic regression with a standard normal prior."""
    others = [j for j in range(len(sizes)) if j != target]
    starts = np.cumsum([0, *(sizes[j] for j in others)])
    x, y = (_indicators(rows[:, others] + starts[:-1], starts[-1]) for rows in (learnt, shown))
    truth = np.eye(sizes[target])[learnt[:, target]]

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = flat.reshape(-1, sizes[target])
        logs = log_softmax(x @ weights, axis=1)
        value = -(truth * logs).sum() + 0.5 * (weights**2).sum()
        slope = x.T @ (np.exp(logs) - truth) + weights
        return value / len(learnt), slope.ravel() / len(learnt)

    start = np.zeros(int(starts[-1]) * sizes[target])
    options = {"maxiter": _TURNS}
    found = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    scores: np.ndarray = y @ found.x.reshape(-1, sizes[target])
    return scores


def _indicators(places: np.ndarray, width: int) -> sparse.csr_matrix:
    """(rows, width), with a one in each of a row's places."""
    rows, ones = places.shape
    ends = np.arange(0, rows * ones + 1, ones)
    return sparse.csr_matrix((np.ones(rows * ones), places.ravel(), ends), (rows, int(width)))


def _area(scores: np.ndarray, positive: np.ndarray) -> float:
    """Probability that a positive row has the higher score."""
    ranks = rankdata(scores)
    number = positive.sum()
    above = ranks[positive].sum() - number * (number + 1) / 2
    return float(above / (number * (len(scores) - number)))
