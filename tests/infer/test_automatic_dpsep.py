"""DPSEP without a bound: sensitivity, noise, states; exact without noise, the prior under it."""

from contract import InferenceContract
from problems import logistic, regression_data
from pyro.infer.autoguide import AutoMultivariateNormal

from pyro_dp import DPSEP

_KINDS = {
    "logistic": (logistic, AutoMultivariateNormal, regression_data),
}


class TestContract(InferenceContract):
    variants = kinds = ("logistic",)
    opening = 1  # of norms alone
    bad_settings = (
        ({"damping": 0.5}, "max_factor_norm"),
        ({"precision": "diagonal"}, "max_factor_norm"),
        ({"precision_weight": 2.0}, "max_factor_norm"),
        ({"centred": False}, "max_factor_norm"),
    )

    def make(self, variant, **options):
        model, guide, _ = _KINDS[variant]
        return DPSEP(model, guide(model), **options)

    def data(self, variant):
        return _KINDS[variant][2]()

    def result(self, sep):
        posterior = sep.posterior()
        held = {name: value.detach().clone() for name, value in sep.guide.median().items()}
        return held | {"mean": posterior.mean, "covariance": posterior.covariance_matrix}
