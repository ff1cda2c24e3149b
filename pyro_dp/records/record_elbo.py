"""One record's term of the negative ELBO, in plain tensor operations that ``torch.func`` can
transform.

Pyro's own losses read numbers out of tensors and cannot be vectorised over records. These are the
same estimators for the sites inside the private plate of one record; what they do not cover raises
:class:`NotVectorizable`.
"""

from collections.abc import Callable
from unittest import mock

import torch
from pyro.distributions.util import is_identically_zero, scale_and_mask
from pyro.infer import ELBO, TraceEnum_ELBO, TraceMeanField_ELBO
from pyro.infer.enum import get_importance_trace
from pyro.infer.traceenum_elbo import _compute_model_factors
from pyro.ops import packed
from pyro.ops.contract import contract_tensor_tree
from pyro.ops.einsum import torch_log
from pyro.ops.rings import LogRing
from pyro.poutine import Trace
from pyro.poutine.enum_messenger import EnumMessenger
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_dp.utils.errors import PrivacyError


class NotVectorizable(PrivacyError):
    """The record's term needs the one-record loop."""


def record_loss(
    loss: ELBO, model: Callable, guide: Callable, args: tuple, kwargs: dict
) -> tuple[Tensor, Tensor]:
    """The differentiable surrogate and the value of the negative ELBO, as scalars.

    :param model: shows its sites inside the plate only; the same for the guide.
    """
    enumerates = isinstance(loss, TraceEnum_ELBO)
    if enumerates:
        guide = EnumMessenger(first_available_dim=-1 - loss.max_plate_nesting)(guide)
        model = EnumMessenger()(model)
    model_trace, guide_trace = get_importance_trace(
        "flat", loss.max_plate_nesting, model, guide, args, kwargs
    )
    if enumerates:
        value = -_enumerated_elbo(model_trace, guide_trace)
        return value, value
    if isinstance(loss, TraceMeanField_ELBO):
        value = -_mean_field_elbo(model_trace, guide_trace)
        return value, value
    value = surrogate = -_log_prob(model_trace)
    for site in _samples(guide_trace):
        log_prob, score, entropy = site["score_parts"]
        value = value + site["log_prob_sum"]
        if not is_identically_zero(entropy):
            surrogate = surrogate + entropy.sum()
    # Latents without a reparameterisation: the score, weighted with all of the record's term.
    for site in _samples(guide_trace):
        score = site["score_parts"].score_function
        if not is_identically_zero(score):
            surrogate = surrogate + value.detach() * score.sum()
    return surrogate, value


def _samples(trace: Trace) -> list[dict]:
    return [site for site in trace.nodes.values() if site["type"] == "sample"]


def _log_prob(trace: Trace) -> Tensor:
    return sum((site["log_prob_sum"] for site in _samples(trace)), torch.tensor(0.0))


def _mean_field_elbo(model_trace: Trace, guide_trace: Trace) -> Tensor:
    """With analytic KL divergences where torch has them, as ``TraceMeanField_ELBO``."""
    elbo = _log_prob(model_trace)
    for site in _samples(guide_trace):
        prior = model_trace.nodes.get(site["name"])
        try:
            divergence = kl_divergence(site["fn"], prior["fn"])
        except (NotImplementedError, TypeError):
            elbo = elbo - site["score_parts"].entropy_term.sum()
        else:
            divergence = scale_and_mask(divergence, site["scale"], site["mask"])
            elbo = elbo - prior["log_prob_sum"] - divergence.sum()
    return elbo


def _enumerated_elbo(model_trace: Trace, guide_trace: Trace) -> Tensor:
    """With the model's enumerated latents summed out, as ``TraceEnum_ELBO``."""
    for site in _samples(guide_trace):
        if site["infer"].get("enumerate") or not is_identically_zero(
            site["score_parts"].score_function
        ):
            raise NotVectorizable(
                f"site {site['name']!r} of the guide is enumerated or not reparameterised"
            )
    guide_trace.pack_tensors()
    model_trace.pack_tensors(guide_trace.plate_to_symbol)
    costs, log_factors, _, sum_dims, scale = _compute_model_factors(model_trace, guide_trace)
    terms = [term for group in costs.values() for term in group]
    if log_factors:
        sizes: dict[str, int] = {}
        for factor in (f for group in log_factors.values() for f in group):
            sizes.update(zip(factor._pyro_dims, factor.shape, strict=True))
        # torch.func cannot see through Pyro's safe_log.
        with mock.patch.object(torch_log, "safe_log", _SafeLog.apply):
            log_factors = contract_tensor_tree(
                log_factors, sum_dims, ring=LogRing(dim_to_size=sizes)
            )
        terms += [
            packed.scale_and_mask(t, scale=scale) for group in log_factors.values() for t in group
        ]
    elbo = sum((term.sum() for term in terms), torch.tensor(0.0))
    return elbo - sum(site["log_prob_sum"] for site in _samples(guide_trace))


class _SafeLog(torch.autograd.Function):
    """``log`` whose gradient stays finite at 0, in a form that ``torch.func`` can transform."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.log()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / x.clamp(min=torch.finfo(x.dtype).eps)
