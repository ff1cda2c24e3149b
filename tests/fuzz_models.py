"""Models, guides, optimizers, losses and data to fuzz with: sound ones and weird ones."""

import contextlib
import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from fuzz_contract import HALF_SENTINEL, SENTINEL
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer import (
    EnergyDistance,
    JitTrace_ELBO,
    RenyiELBO,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    TraceTailAdaptive_ELBO,
)
from pyro.infer import autoguide as ag
from torch import Tensor

from pyro_dp import RowAdam

DIM = 2


def _weights(x):
    return pyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))


def _regression(
    family: Callable = lambda mean: dist.Normal(mean, 1.0),
    mean: Callable = torch.matmul,
    prior: Callable | None = None,
    around: Callable = lambda rows: contextlib.nullcontext(),
    name: str = "data",
    offset: int = 0,
    **plate,
) -> Callable:
    """A regression with one odd thing: its observation, mean, prior, handler or plate."""

    def model(x, y):
        w = pyro.sample("w", prior(x.new_zeros(x.shape[1]))) if prior else _weights(x)
        with pyro.plate(name, len(x) + offset, **plate) as idx, around(x[idx]):
            pyro.sample("y", family(mean(x[idx], w)), obs=y[idx])

    return model


def whole(x, y):
    w = _weights(x)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def no_plate(x, y):
    pyro.sample("y", dist.Normal(x @ _weights(x), 1.0).to_event(1), obs=y)


def two_plates(x, y):
    w = _weights(x)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx] @ w, 1.0), obs=y[idx])
    with pyro.plate("again", len(x)) as idx:
        pyro.sample("x", dist.Normal(w, 1.0).to_event(1), obs=x[idx])


def nested(x, y, dims=(-2, -1)):
    w = _weights(x)
    with pyro.plate("data", len(x), dim=dims[0]) as idx:
        with pyro.plate("columns", x.shape[1], dim=dims[1]):
            pyro.sample("x", dist.Normal(w, 1.0), obs=x[idx])


def same_name_twice(x, y):
    w = _weights(x)
    for k in range(2):
        with pyro.plate("data", len(x)) as idx:
            pyro.sample(f"y{k}", dist.Normal(x[idx] @ w, 1.0), obs=y[idx])


def sequential(x, y):
    w = _weights(x)
    for i in pyro.plate("data", len(x)):
        pyro.sample(f"y{i}", dist.Normal(x[i] @ w, 1.0), obs=y[i])


def outside_too(x, y):
    w = _weights(x)
    pyro.sample("first", dist.Normal(w.sum(), 1.0), obs=y[0])
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx] @ w, 1.0), obs=y[idx])


def unobserved(x, y):
    w = _weights(x)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx] @ w, 1.0))


def _masked(mask: Callable) -> Callable:
    return _regression(around=lambda rows: poutine.mask(mask=mask(rows)))


def _scaled(scale: float) -> Callable:
    return _regression(around=lambda rows: poutine.scale(scale=scale))


def mixture(x, y):
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(2)))
    locs = pyro.sample("locs", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    with pyro.plate("data", len(x)) as idx:
        z = pyro.sample("z", dist.Categorical(weights), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(locs[z], 0.5), obs=y[idx])


def _with_local(site: str, prior: Callable) -> Callable:
    return _regression(mean=lambda x, w: x @ w + pyro.sample(site, prior()))


def discrete_global(x, y):
    z = pyro.sample("z", dist.Bernoulli(0.5))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(z, 1.0), obs=y[idx])


def of_parameters(x, y):
    loc = pyro.param("model_loc", torch.zeros(x.shape[1]))
    scale = pyro.param("model_scale", torch.ones(()), constraint=constraints.positive)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx] @ loc, scale), obs=y[idx])


def data_in_parameter(x, y):
    shift = pyro.param("shift", x.mean().detach().clone())
    w = _weights(x)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx] @ w + shift, 1.0), obs=y[idx])


def quotes_data(x, y):
    w = _weights(x)
    if x.abs().max() > 9000:
        raise RuntimeError(f"what about {x.tolist()}?")
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx] @ w, 1.0), obs=y[idx])


def quotes_data_inside(x, y):
    w = _weights(x)
    with pyro.plate("data", len(x)) as idx:
        try:
            if x[idx].abs().max() > 9000:
                raise KeyError(x[idx].tolist())
        except KeyError as error:
            raise ValueError(f"it was {error}") from error
        pyro.sample("y", dist.Normal(x[idx] @ w, 1.0), obs=y[idx])


def mean_of_data(x, y):
    w = _weights(x)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal((x - x.mean(0))[idx] @ w, 1.0), obs=y[idx])


def in_place(x, y):
    w = _weights(x)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(x[idx].mul_(2.0) @ w, 1.0), obs=y.add_(0.0)[idx])


def covariances(x, y):
    """The data are scale factors, which must be positive."""
    w = _weights(x)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.MultivariateNormal(w, torch.diag_embed(x[idx])), obs=x[idx])


def bad_scales(x, y):
    w = _weights(x)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(w.sum(), x[idx].sum(-1), validate_args=True), obs=y[idx])


def factor(x, y):
    w = _weights(x)
    with pyro.plate("data", len(x)) as idx:
        pyro.factor("fit", -((x[idx] @ w - y[idx]) ** 2))


def no_latents(x, y):
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=y[idx])


def captured(x, y):
    w = _weights(_CAPTURED)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Normal(_CAPTURED[idx] @ w, 1.0), obs=y[idx])


_CAPTURED = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(8, 2)


def positive(x, y):
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("y", dist.Poisson(rate), obs=y[idx].abs().round())


MODELS: dict[str, Callable] = {
    "normal": _regression(),
    "logistic": _regression(lambda mean: dist.Bernoulli(logits=mean)),
    "validated": _regression(lambda mean: dist.Bernoulli(logits=mean, validate_args=True)),
    "cauchy": _regression(lambda mean: dist.StudentT(1.0, mean, 1.0)),
    "uniform": _regression(lambda mean: dist.Uniform(mean - 2, mean + 2)),
    "poisson of exp": _regression(lambda mean: dist.Poisson(mean.exp())),
    "square root": _regression(lambda mean: dist.Normal(mean.sqrt(), 1.0)),
    "log": _regression(lambda mean: dist.Normal(mean.log(), mean)),
    "whole": whole,
    "subsampled": _regression(subsample_size=2),
    "subsampled to 0": _regression(subsample_size=0),
    "subsampled to -1": _regression(subsample_size=-1),
    "subsampled to 1000": _regression(subsample_size=1000),
    "dim -2": _regression(dim=-2),
    "dim -3": _regression(dim=-3),
    "dim 1": _regression(dim=1),
    "longer plate": _regression(offset=1),
    "shorter plate": _regression(offset=-1),
    "odd name": _regression(name=""),
    "another name": _regression(name="a plate, 'quoted'.x"),
    "name of a latent": _regression(name="w"),
    "no plate": no_plate,
    "two plates": two_plates,
    "nested": nested,
    "nested far": lambda x, y: nested(x, y, dims=(-3, -1)),
    "nested inverted": lambda x, y: nested(x, y, dims=(-1, -2)),
    "nested in the same dim": lambda x, y: nested(x, y, dims=(-1, -1)),
    "same plate twice": same_name_twice,
    "sequential": sequential,
    "observed outside too": outside_too,
    "unobserved": unobserved,
    "not indexed": whole,
    "all masked": _masked(lambda x: torch.zeros(len(x), dtype=torch.bool)),
    "masked by data": _masked(lambda x: x[:, 0] > 0),
    "masked by numbers": _masked(lambda x: x[:, 0]),
    "masked by False": _masked(lambda x: False),
    "scaled by 0": _scaled(0.0),
    "scaled by -1": _scaled(-1.0),
    "scaled by inf": _scaled(math.inf),
    "scaled by nan": _scaled(math.nan),
    "scaled by 1e300": _scaled(1e300),
    "prior of scale 0": _regression(prior=lambda x: dist.Normal(x, 0.0).to_event(1)),
    "prior of scale -1": _regression(prior=lambda x: dist.Normal(x, -1.0).to_event(1)),
    "prior of scale 1e300": _regression(prior=lambda x: dist.Normal(x, 1e300).to_event(1)),
    "prior at nan": _regression(prior=lambda x: dist.Normal(x + math.nan, 1.0).to_event(1)),
    "prior half": _regression(prior=lambda x: dist.HalfCauchy(torch.ones_like(x)).to_event(1)),
    "prior on a simplex": _regression(prior=lambda x: dist.Dirichlet(torch.ones_like(x))),
    "prior uniform": _regression(prior=lambda x: dist.Uniform(x, x + 1).to_event(1)),
    "mixture": mixture,
    "local latents": _with_local("effect", lambda: dist.Normal(0.0, 1.0)),
    "discrete local": _with_local("z", lambda: dist.Bernoulli(0.5)),
    "discrete global": discrete_global,
    "of parameters": of_parameters,
    "data in a parameter": data_in_parameter,
    "quotes data": quotes_data,
    "quotes data inside": quotes_data_inside,
    "control flow": _regression(mean=lambda x, w: x @ w if x.sum() > 0 else x.sum(-1) * w[0]),
    "mean of data": mean_of_data,
    "in place": in_place,
    "covariances": covariances,
    "bad scales": bad_scales,
    "factor": factor,
    "nothing used": _regression(lambda mean: dist.Normal(0.0, 1.0)),
    "no latents": no_latents,
    "captured": captured,
    "positive": positive,
}
# The first ones run through; they are drawn more often.
SOUND_MODELS = ["normal", "logistic", "cauchy", "subsampled", "mixture", "local latents", "whole"]


def _by_hand(loc: float = 0.0, scale: float = 1.0) -> Callable:
    """A Gaussian that starts there."""

    def guide(x, y):
        own = pyro.param("loc", torch.full((x.shape[1],), loc))
        width = torch.full((x.shape[1],), scale)
        width = pyro.param("scale", width, constraint=constraints.positive)
        pyro.sample("w", dist.Normal(own, width).to_event(1))

    return guide


by_hand = _by_hand()


def by_hand_delta(x, y):
    pyro.sample("w", dist.Delta(pyro.param("loc", torch.zeros(x.shape[1]))).to_event(1))


def without_sites(x, y):
    pyro.param("loc", torch.zeros(()))


def with_other_sites(x, y):
    by_hand(x, y)
    pyro.sample("v", dist.Normal(0.0, 1.0))


def of_other_shape(x, y):
    pyro.sample("w", dist.Normal(pyro.param("loc", torch.zeros(5)), 1.0).to_event(1))


def of_data(x, y):
    by_hand(x, y)
    loc = pyro.param("loc")
    pyro.param("center", x.mean().detach().clone())
    pyro.sample("z", dist.Normal(loc.sum(), 1.0))


def with_a_plate(x, y):
    by_hand(x, y)
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("effect", dist.Normal(y[idx] * pyro.param("a", torch.ones(())), 1.0))


def with_another_plate(x, y):
    by_hand(x, y)
    with pyro.plate("guide only", len(x)):
        pyro.sample("effect", dist.Normal(pyro.param("a", torch.zeros(())), 1.0))


def with_rows(x, y):
    by_hand(x, y)
    own = pyro.param("own", torch.zeros(len(x)))
    with pyro.plate("data", len(x)) as idx:
        pyro.sample("effect", dist.Normal(own[idx], 1.0))


def with_integers(x, y):
    pyro.sample("w", dist.Normal(pyro.param("loc", torch.zeros(DIM, dtype=torch.long)), 1.0))


def that_fails(x, y):
    raise ValueError(f"{x} {y}")


def without_arguments():
    pyro.sample("w", dist.Normal(torch.zeros(DIM), 1.0).to_event(1))


def in_single_precision(x, y):
    loc = pyro.param("loc", torch.zeros(x.shape[1], dtype=torch.float32))
    pyro.sample("w", dist.Normal(loc, 1.0).to_event(1))


def _auto(kind: Callable, **settings) -> Callable:
    return lambda model: kind(poutine.block(model, hide=["z"]), **settings)


def _list_of_guides(model: Callable) -> ag.AutoGuideList:
    guides = ag.AutoGuideList(model)
    guides.append(ag.AutoNormal(poutine.block(model, expose=["w", "weights", "locs"])))
    guides.append(ag.AutoDelta(poutine.block(model, hide=["w", "weights", "locs", "z"])))
    return guides


def _as_it_is(guide: Callable) -> Callable:
    return lambda model: guide


GUIDES: dict[str, Callable] = {
    "AutoNormal": _auto(ag.AutoNormal),
    "AutoDiagonalNormal": _auto(ag.AutoDiagonalNormal),
    "AutoMultivariateNormal": _auto(ag.AutoMultivariateNormal),
    "AutoLowRankMultivariateNormal": _auto(ag.AutoLowRankMultivariateNormal),
    "AutoDelta": _auto(ag.AutoDelta),
    "AutoLaplaceApproximation": _auto(ag.AutoLaplaceApproximation),
    "AutoIAFNormal": _auto(ag.AutoIAFNormal, hidden_dim=[3]),
    "AutoStructured": _auto(ag.AutoStructured),
    "AutoGaussian": _auto(ag.AutoGaussian),
    "AutoDiscreteParallel": lambda model: ag.AutoDiscreteParallel(model),
    "AutoNormal of init_scale 1e300": _auto(ag.AutoNormal, init_scale=1e300),
    "AutoNormal of init_scale 1e-300": _auto(ag.AutoNormal, init_scale=1e-300),
    "AutoNormal with everything": lambda model: ag.AutoNormal(model),
    "AutoNormal at nan": _auto(
        ag.AutoNormal, init_loc_fn=lambda site: torch.full_like(site["value"], math.nan)
    ),
    "AutoGuideList": _list_of_guides,
    "model": lambda model: model,
    "by_hand": _as_it_is(by_hand),
    "by_hand_delta": _as_it_is(by_hand_delta),
    "by_hand_at_nan": _as_it_is(_by_hand(loc=math.nan)),
    "by_hand_beyond": _as_it_is(_by_hand(loc=1e300)),
    "by_hand_narrow": _as_it_is(_by_hand(scale=1e-300)),
    **{
        guide.__name__: _as_it_is(guide)
        for guide in (
            *(without_sites, with_other_sites, of_other_shape, of_data, with_a_plate),
            *(with_another_plate, with_rows, with_integers, that_fails, without_arguments),
            in_single_precision,
        )
    },
    "None": _as_it_is(None),
    "string": _as_it_is("AutoNormal"),
}
SOUND_GUIDES = ["AutoNormal", "AutoDiagonalNormal", "AutoMultivariateNormal", "by_hand"]


def _unnamed(name: str) -> dict:
    raise KeyError(name)


OPTIMIZERS: dict[str, Callable] = {
    "none": lambda: None,
    "Adam": lambda: pyro.optim.Adam({"lr": 0.01}),
    "SGD": lambda: pyro.optim.SGD({"lr": 0.01, "momentum": 0.9}),
    "ClippedAdam": lambda: pyro.optim.ClippedAdam({"lr": 0.01}),
    "clip_norm": lambda: pyro.optim.Adam({"lr": 0.01}, {"clip_norm": 1.0}),
    "AdagradRMSProp": lambda: pyro.optim.AdagradRMSProp({}),
    "ExponentialLR": lambda: pyro.optim.ExponentialLR(
        {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.01}, "gamma": 0.9}
    ),
    "RowAdam": lambda: (pyro.optim.Adam({"lr": 0.01}), RowAdam()),
    "RowAdam at 1e40": lambda: (pyro.optim.Adam({"lr": 0.01}), RowAdam(1e40)),
    "Rprop": lambda: pyro.optim.Rprop({}),
    "per parameter": lambda: pyro.optim.Adam(lambda name: {"lr": 0.01}),
    "per parameter, failing": lambda: pyro.optim.Adam(_unnamed),
    "per parameter, None": lambda: pyro.optim.Adam(lambda name: None),
    "Adam at 1e300": lambda: pyro.optim.Adam({"lr": 1e300}),
    "SGD at 1e300": lambda: pyro.optim.SGD({"lr": 1e300}),
    "SGD at 1e308": lambda: pyro.optim.SGD({"lr": 1e308}),
    "SGD at inf": lambda: pyro.optim.SGD({"lr": math.inf}),
    "Adam at nan": lambda: pyro.optim.Adam({"lr": math.nan}),
    "Adam at -1": lambda: pyro.optim.Adam({"lr": -1.0}),
    "Adam at 'a'": lambda: pyro.optim.Adam({"lr": "a"}),
    "Adam with eps 0": lambda: pyro.optim.Adam({"lr": 0.01, "eps": 0.0}),
    "Adam with betas 2": lambda: pyro.optim.Adam({"lr": 0.01, "betas": (2.0, 2.0)}),
    "unknown setting": lambda: pyro.optim.Adam({"nonsense": 1}),
    "unknown clip": lambda: pyro.optim.Adam({"lr": 0.01}, {"nonsense": 1}),
    "clip_norm nan": lambda: pyro.optim.Adam({"lr": 0.01}, {"clip_norm": math.nan}),
    "SparseAdam": lambda: pyro.optim.SparseAdam({"lr": 0.01}),
    "torch's": lambda: torch.optim.Adam([torch.zeros(1, requires_grad=True)]),
    "None": lambda: None,
}
SOUND_OPTIMIZERS = list(OPTIMIZERS)[:6]

LOSSES: dict[str, Callable] = {
    "none": lambda: None,
    "Trace_ELBO": Trace_ELBO,
    "TraceMeanField_ELBO": TraceMeanField_ELBO,
    "TraceEnum_ELBO": lambda: TraceEnum_ELBO(max_plate_nesting=1),
    "2 particles": lambda: Trace_ELBO(num_particles=2),
    "vectorized": lambda: Trace_ELBO(num_particles=2, vectorize_particles=True),
    "0 particles": lambda: Trace_ELBO(num_particles=0),
    "-1 particles": lambda: Trace_ELBO(num_particles=-1),
    "1.5 particles": lambda: Trace_ELBO(num_particles=1.5),
    "TraceEnum_ELBO, nesting inf": TraceEnum_ELBO,
    "TraceEnum_ELBO, nesting 0": lambda: TraceEnum_ELBO(max_plate_nesting=0),
    "TraceEnum_ELBO, nesting -1": lambda: TraceEnum_ELBO(max_plate_nesting=-1),
    "TraceEnum_ELBO, nesting 4": lambda: TraceEnum_ELBO(max_plate_nesting=4),
    "retain_graph": lambda: Trace_ELBO(retain_graph=True),
    "JitTrace_ELBO": JitTrace_ELBO,
    "TraceGraph_ELBO": TraceGraph_ELBO,
    "RenyiELBO": RenyiELBO,
    "TraceTailAdaptive_ELBO": TraceTailAdaptive_ELBO,
    "EnergyDistance": EnergyDistance,
    "None": lambda: None,
    "class": lambda: Trace_ELBO,
    "ELBOModule": lambda: Trace_ELBO()(whole, by_hand),
}
SOUND_LOSSES = list(LOSSES)[:4]

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "complex": torch.complex128,
}
_FILLS = {
    "zeros": 0.0,
    "huge": 1e300,
    "-huge": -1e300,
    "large": 1e30,
    "tiny": 1e-300,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
}
FILLS = ["plain", "sentinel", "sentinel", *_FILLS]
LAYOUTS = ["plain", "expanded", "strided", "requires_grad", "parameter", "transposed", "column"]


def tensor(shape: tuple[int, ...], dtype: str, fill: str, layout: str, seed: int) -> Tensor:
    """Data with one odd thing, or several. Rows but the first are zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(2, shape, generator=generator).double()
    special = _FILLS.get(fill)
    if fill == "sentinel":
        special = HALF_SENTINEL if dtype == "float16" else SENTINEL
    if special is not None and values.numel():
        values.view(-1)[0] = special
    values = values.to(DTYPES[dtype])
    if layout == "expanded" and shape[0]:
        return values[:1].expand(shape)
    if layout == "strided":
        return torch.stack([values, values], dim=-1)[..., 0]
    if layout == "transposed" and len(shape) > 1:
        return values.T.contiguous().T
    if layout == "column":
        return values.unsqueeze(-1)
    if values.is_floating_point() and layout == "requires_grad":
        return values.requires_grad_()
    if values.is_floating_point() and layout == "parameter":
        return torch.nn.Parameter(values)
    return values
