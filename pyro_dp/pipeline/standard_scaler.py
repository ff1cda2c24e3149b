"""Centre and scale features by private means and variances."""

import inspect
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.graphs.references import require_torchs
from pyro_dp.mechanism.contributions import Block
from pyro_dp.mechanism.iterative import IterativeMechanism
from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.mechanism.settings import FullBatch, Noise, old_names_explained
from pyro_dp.utils.errors import CURATOR, ConfigurationError, ModelError

_LEAST_VARIANCE = 1e-8  # in units where the bounds are -1 and 1


class DPStandardScaler:
    r"""Subtract means and divide by standard deviations that were released with noise.

    The interface is that of scikit-learn's ``StandardScaler``, for NumPy arrays, data frames and
    torch tensors, also as a step of a ``Pipeline``. :meth:`fit` clips every feature to its public
    bounds and maps it to u in [-1, 1]. It releases the sums of u and of u^2 - 1/2 over all records
    as *one* Gaussian event of two blocks with equal shares. One record's parts have norms of at
    most sqrt(d) and sqrt(d) / 2.

    **Guarantee.** ``mean_``, ``var_`` and ``scale_`` are covered by the accountant's (epsilon,
    delta) for one row of the data, under both neighbouring relations, for finite data. Every call
    of :meth:`fit` makes a new release and pays for it. Cross-validation pays for each of its
    clones, because clones keep the accountant. A pickled or copied scaler transforms, but has no
    accountant and no seed, and cannot be fitted.

    **Not protected.** The number of rows and features, their names and the bounds. Do not read
    bounds off the data. The output of :meth:`transform` is as secret as its input. Errors about
    the data are for the curator.

    :param bounds: (lower, upper), public: numbers, or arrays with one number per feature. Values
        beyond them are clipped when means and variances are computed, and only then. Noise grows
        with the distance between the bounds.
    :param accountant: keeps the ledger and the budget, also for later fits.
    :param noise: sigma of the event, or a :class:`Noise` with sigma. The noise of a mean has
        standard deviation sigma sqrt(2 d) h / N, h half of the distance between the bounds. See
        :meth:`PrivacyAccountant.noise_multiplier` for ``num_steps=1``. 0: not private.

    :ivar mean\_: (d,) in float64, within the bounds, as are
    :ivar var\_: (d,), at least the noise's own standard deviation and 1e-8 h^2, at most h^2, and
    :ivar scale\_: (d,), its square root.
    :ivar n_features_in\_: d, the number of features.

    >>> ages = np.linspace(20.0, 60.0, 10_000)[:, None]
    >>> scaler = DPStandardScaler((0.0, 100.0), accountant=accountant, noise=Noise(5.0, source=0))
    >>> scaled = scaler.fit_transform(ages)
    >>> print(f"mean {scaler.mean_[0]:.0f}, epsilon {accountant.get_epsilon():.1f}")
    mean 40, epsilon 0.7
    """

    @old_names_explained()
    def __init__(
        self,
        bounds: "tuple[ArrayLike, ArrayLike]",
        *,
        accountant: PrivacyAccountant,
        noise: Noise | float,
    ):
        # scikit-learn asks for unchanged settings. fit() checks them.
        self.bounds = bounds
        self.accountant = accountant
        self.noise = noise

    def fit(self, X: Any, y: Any = None) -> "DPStandardScaler":
        """Release means and variances of the rows X, (N, d). y is not used.

        Nothing was spent after one of these exceptions.

        :raises ModelError: the data do not fit.
        :raises ConfigurationError: a setting is out of range.
        :raises PrivacyBudgetExceeded: the release does not fit the budget.
        """
        rows = _rows(X)
        middle, half = self._bounds(rows.shape[1])
        scaled = ((rows - middle.to(rows.device)) / half.to(rows.device)).clamp(-1.0, 1.0)
        noise = Noise.read(self.noise)
        if noise.multiplier is None:
            raise ConfigurationError(
                "Noise.multiplier must be a number: scaling should not take all that remains."
            )
        inference = _MomentRelease(
            accountant=self.accountant,
            num_steps=1,
            bound=math.sqrt(rows.shape[1]),
            noise=noise,
            sampling=FullBatch(),
        )
        inference.step(scaled)
        mean, variance = inference.moments
        self.mean_ = (middle + half * mean).numpy()
        self.var_ = (half.square() * variance).numpy()
        self.scale_ = (half * variance.sqrt()).numpy()
        self.n_features_in_ = rows.shape[1]
        vars(self).pop("feature_names_in_", None)
        names = np.asarray(getattr(X, "columns", ()), dtype=object)
        if len(names) and all(isinstance(name, str) for name in names):
            self.feature_names_in_ = names
        return self

    def transform(self, X: Any) -> Any:
        """``(X - mean_) / scale_``, in the type of X. It costs no budget, and adds no privacy.

        :raises ConfigurationError: there is no fit yet.
        """
        return self._moved(X, lambda rows, mean, scale: (rows - mean) / scale)

    def inverse_transform(self, X: Any) -> Any:
        """``X * scale_ + mean_``; otherwise as :meth:`transform`."""
        return self._moved(X, lambda rows, mean, scale: rows * scale + mean)

    def fit_transform(self, X: Any, y: Any = None) -> Any:
        """:meth:`fit`, then :meth:`transform` of the same rows."""
        return self.fit(X, y).transform(X)

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """The names of the data frame, or else x0, x1, ...

        :raises ConfigurationError: there is no fit yet, or ``input_features`` are other names.
        """
        self._require_fit()
        own = getattr(self, "feature_names_in_", None)
        if input_features is None:
            numbered = np.array([f"x{i}" for i in range(self.n_features_in_)], dtype=object)
            return numbered if own is None else own
        names = np.asarray(input_features, dtype=object)
        if names.shape != (self.n_features_in_,):
            raise ConfigurationError("input_features must have one name per feature.")
        if own is not None and list(own) != list(names):
            raise ConfigurationError("input_features differ from the names of the fitted data.")
        return names

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The settings by name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> "DPStandardScaler":
        """:raises ConfigurationError: a name is no setting."""
        unknown = sorted(params.keys() - self.get_params().keys())
        if unknown:
            raise ConfigurationError(f"DPStandardScaler has no settings {', '.join(unknown)}.")
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __sklearn_clone__(self) -> "DPStandardScaler":
        # With the same accountant: a copy of it would forget what the clones spend.
        return type(self)(**self.get_params())

    def __getstate__(self) -> dict[str, Any]:
        # A copied ledger could be spent twice, and a seed reveals the noise.
        return vars(self) | {"accountant": None, "noise": Noise.read(self.noise).multiplier}

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "scale_")

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            transformer_tags=TransformerTags(),
            input_tags=InputTags(),
        )

    def __repr__(self) -> str:
        return f"DPStandardScaler(bounds={self.bounds!r}, noise={self.noise!r})"

    def _bounds(self, features: int) -> tuple[Tensor, Tensor]:
        """Middle and half of the distance of the bounds, (d,) each."""
        try:
            lower, upper = (
                torch.from_numpy(np.broadcast_to(np.asarray(x, float), features).copy())
                for x in self.bounds
            )
        except (TypeError, ValueError):
            raise ConfigurationError(
                "bounds must be (lower, upper): numbers, or one number per feature of X."
            ) from None
        middle, half = lower / 2 + upper / 2, upper / 2 - lower / 2
        if not bool((half.isfinite() & (half > 0) & half.square().isfinite()).all()):
            raise ConfigurationError("bounds must be finite, each lower one below the upper one.")
        return middle, half

    def _require_fit(self) -> None:
        if not self.__sklearn_is_fitted__():
            raise ConfigurationError("This DPStandardScaler is not fitted yet: call fit() first.")

    def _moved(self, X: Any, move: Any) -> Any:
        self._require_fit()
        shape = X.shape if isinstance(X, Tensor) else np.shape(X)
        if len(shape) != 2 or shape[1] != self.n_features_in_:
            raise ModelError(f"X must be of shape (n, {self.n_features_in_}), as in fit().")
        if isinstance(X, Tensor):
            X = X if X.is_floating_point() else X.to(torch.get_default_dtype())
            return move(X, torch.from_numpy(self.mean_).to(X), torch.from_numpy(self.scale_).to(X))
        values = np.asarray(X)
        try:
            values = values if values.dtype.kind == "f" else values.astype(float)
        except (TypeError, ValueError):  # its text would show a value
            raise ModelError("X must hold real numbers.") from None
        mean, scale = (x.astype(values.dtype) for x in (self.mean_, self.scale_))
        return move(values, mean, scale)


class _MomentRelease(IterativeMechanism):
    """Releases the moments of one fit."""

    _method = "DPStandardScaler"

    def step(self, scaled: Tensor) -> float:
        """Private means and variances (d,) of rows (N, d) in [-1, 1]."""
        size, dim = scaled.shape
        # Subtracting 1/2 from the squares halves their bound and noise. N is public.
        blocks = [Block(dim, math.sqrt(dim), 0.5), Block(dim, math.sqrt(dim) / 2, 0.5)]
        clipped = self._releases.sum_type(blocks, scaled.device)
        for rows in scaled.split(clipped.most_records(2 * dim, None) or size):
            clipped.add(rows, rows.square() - 0.5)
        sums, squares = self._release(clipped, RecordSampler(self.sampling.kind, size, 1.0))
        mean = (sums / size).clamp(-1.0, 1.0)
        variance = squares / size + 0.5 - mean.square()
        noise = self.noise_multiplier * math.sqrt(2 * dim) / 2 / size
        variance = variance.clamp(min=min(1.0, max(noise, _LEAST_VARIANCE)), max=1.0)
        self.moments = mean.cpu(), variance.cpu()
        return math.nan


def _rows(X: Any) -> Tensor:
    """(N, d) in float64. :raises ModelError: X is not a table of finite numbers."""
    if isinstance(X, Tensor):
        require_torchs("X", X)
    try:
        rows = X.detach() if isinstance(X, Tensor) else torch.from_numpy(np.array(X))
        real = not rows.is_complex()
    except (TypeError, ValueError):
        real = False
    if not real:
        raise ModelError("X must hold real numbers: an array, a data frame or a tensor.")
    if rows.dim() != 2 or 0 in rows.shape:
        raise ModelError("X must be of shape (N, d), one row per record, and not empty.")
    rows = rows.to(torch.float64)
    if not rows.isfinite().all():
        raise ModelError(
            f"X holds NaN or infinite values: impute them, or drop the rows. {CURATOR}"
        )
    return rows
