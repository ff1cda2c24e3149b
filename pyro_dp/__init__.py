"""Private Bayesian inference for Pyro models."""

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.accounting.events import ApproximateDP, NonPrivateLook, SubsampledGaussian
from pyro_dp.auditing.audit import audit, audit_one_run
from pyro_dp.auditing.result import AuditResult
from pyro_dp.infer.dpsvi import DPSVI
from pyro_dp.infer.ep.dpsep import DPSEP
from pyro_dp.infer.ep.paper_dpsep import PaperDPSEP
from pyro_dp.infer.posterior.evidence import Evidence
from pyro_dp.infer.posterior.explanation import Explanation
from pyro_dp.infer.posterior.forecast import Forecast
from pyro_dp.infer.posterior.posterior import Posterior
from pyro_dp.infer.svi.optimizers import RowAdam
from pyro_dp.infer.svi.stochastic_gradient_vi import PaperDPSVI
from pyro_dp.mechanism.clipped_fraction import AdaptiveClip, ClippedFraction
from pyro_dp.mechanism.cluster import Cluster
from pyro_dp.mechanism.nonprivate import nonprivate
from pyro_dp.mechanism.run_result import ReleasedStep, RunResult
from pyro_dp.mechanism.settings import (
    Clip,
    Execution,
    Factors,
    FixedSizeSampling,
    FullBatch,
    Noise,
    PoissonSampling,
)
from pyro_dp.pipeline.private_selection import Selection, private_selection, selection_epsilon
from pyro_dp.pipeline.standard_scaler import DPStandardScaler
from pyro_dp.pipeline.trials import PoissonTrials, TruncatedNegativeBinomial
from pyro_dp.records.columns import columns
from pyro_dp.utils.errors import (
    ClippingWarning,
    ClusterError,
    ClusterWarning,
    ConfigurationError,
    ConvergenceWarning,
    ModelError,
    NotPrivateWarning,
    PrivacyBudgetExceeded,
    PrivacyError,
    PrivacyWarning,
    SchemaError,
)
from pyro_dp.vips import VIPS

__all__ = [
    "AdaptiveClip",
    "ApproximateDP",
    "AuditResult",
    "Clip",
    "ClippedFraction",
    "ClippingWarning",
    "Cluster",
    "ClusterError",
    "ClusterWarning",
    "ConfigurationError",
    "ConvergenceWarning",
    "DPSEP",
    "DPSVI",
    "DPStandardScaler",
    "Evidence",
    "Execution",
    "Explanation",
    "Factors",
    "FixedSizeSampling",
    "Forecast",
    "FullBatch",
    "ModelError",
    "Noise",
    "NonPrivateLook",
    "NotPrivateWarning",
    "PaperDPSEP",
    "PaperDPSVI",
    "PoissonSampling",
    "PoissonTrials",
    "Posterior",
    "PrivacyAccountant",
    "PrivacyBudgetExceeded",
    "PrivacyError",
    "PrivacyWarning",
    "ReleasedStep",
    "RowAdam",
    "RunResult",
    "SchemaError",
    "Selection",
    "SubsampledGaussian",
    "TruncatedNegativeBinomial",
    "VIPS",
    "audit",
    "audit_one_run",
    "columns",
    "nonprivate",
    "private_selection",
    "selection_epsilon",
]
