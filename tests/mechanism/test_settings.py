"""Settings that are objects: plain values for them, what they refuse, and older names."""

import dataclasses
import math
import re
from pathlib import Path

import pyro
import pytest
import torch
from problems import logistic
from pyro.infer.autoguide import AutoNormal

from pyro_dp import (
    DPSEP,
    DPSVI,
    VIPS,
    AdaptiveClip,
    Clip,
    ConfigurationError,
    DPStandardScaler,
    Execution,
    Factors,
    FixedSizeSampling,
    FullBatch,
    Noise,
    PaperDPSEP,
    PaperDPSVI,
    PoissonSampling,
    PrivacyAccountant,
)
from pyro_dp.mechanism.settings import Sampling
from pyro_dp.tabular import Number, PrivateGLM, Schema, Synthesizer
from pyro_dp.vips import LogisticRegression

KINDS = [Noise, PoissonSampling, FixedSizeSampling, FullBatch, Clip, Factors, Execution]


def settings(**more):
    return {"accountant": PrivacyAccountant(1.0)} | more


MAKE = {
    "DPSVI": lambda **own: DPSVI(logistic, AutoNormal(logistic), **settings(**own)),
    "PaperDPSVI": lambda **own: PaperDPSVI(
        logistic, AutoNormal(logistic), pyro.optim.Adam({}), **settings(num_steps=2, **own)
    ),
    "DPSEP": lambda **own: DPSEP(logistic, AutoNormal(logistic), **settings(**own)),
    "PaperDPSEP": lambda **own: PaperDPSEP(
        logistic, AutoNormal(logistic), **settings(clip=1.0, num_steps=2, **own)
    ),
    "VIPS": lambda **own: VIPS(LogisticRegression(3), **settings(num_steps=2, **own)),
    "Synthesizer": lambda **own: Synthesizer(Schema({"a": Number(0, 1)}), **settings(**own)),
    "DPStandardScaler": lambda **own: DPStandardScaler((0.0, 1.0), **settings(noise=1.0, **own)),
    "PrivateGLM": lambda **own: PrivateGLM(
        Schema({"a": Number(0, 1), "y": Number(0, 1)}), "y ~ a", family="linear", **settings(**own)
    ),
}
# The class, an argument of version 0.2, a value, and the present line.
OLD = [
    ("DPSVI", "noise_multiplier", 2.0, "noise=2.0"),
    ("DPStandardScaler", "noise_multiplier", 5.0, "noise=5.0"),
    ("DPSEP", "generator", 0, "noise=Noise(source=0)"),
    ("PrivateGLM", "generator", 0, "noise=Noise(source=0)"),
    ("Synthesizer", "secure", True, 'noise=Noise(source="system")'),
    ("VIPS", "sample_rate", 0.1, "sampling=0.1"),
    ("VIPS", "sampling", "poisson", "sampling=PoissonSampling(rate)"),
    ("PaperDPSVI", "sampling", "fixed", "sampling=FixedSizeSampling(rate)"),
    ("PaperDPSEP", "sampling", "full", "sampling=FullBatch()"),
    ("DPSVI", "plate", "data", "sampling=PoissonSampling(plate='data')"),
    ("DPSEP", "plate", "data", "sampling=FullBatch(plate='data')"),
    ("DPSVI", "max_grad_norm", 1.0, "clip=1.0"),
    ("PaperDPSEP", "max_factor_norm", 1.0, "clip=1.0"),
    ("DPSVI", "privatize", "parameters", "clip=Clip(of='parameters')"),
    ("DPSVI", "loss_clip", 5.0, "clip=Clip(loss=5.0)"),
    ("DPSVI", "loss_share", 0.1, "clip=Clip(loss=..., loss_share=0.1)"),
    ("PaperDPSEP", "report_clipping", False, "clip=Clip(..., report=False)"),
    ("DPSVI", "local_optim", None, "optim=None, or optim=(optim, None)"),
    ("PaperDPSEP", "precision", "full", "factors='full'"),
    ("PaperDPSEP", "precision_weight", 0.5, "factors=Factors(weight=0.5)"),
    ("PaperDPSEP", "centred", False, "factors=Factors(centred=False)"),
    ("DPSEP", "noise_aware", False, "posterior(noise_aware=False)"),
    ("VIPS", "microbatch_size", 10, "execution=Execution(microbatch_size=10)"),
    ("DPSEP", "jit", "trace", "execution=Execution(jit='trace')"),
    ("DPSVI", "slice_data", True, "execution=Execution(slice_data=True)"),
    ("DPSEP", "cluster", None, "execution=Execution(peers=None)"),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("who", "name", "value", "now"), OLD)
def test_an_old_name_says_what_is_written_now(who, name, value, now):
    with pytest.raises(ConfigurationError) as caught:
        MAKE[who](**{name: value})
    assert str(caught.value).startswith(f"{who}: {name}={value!r} is now {now}.")


def test_the_page_has_every_old_name():
    page = Path(__file__).parents[2] / "docs" / "upgrade.md"
    assert all(f"`{name}" in page.read_text() for _, name, _, _ in OLD)


def test_several_old_names_are_one_error():
    with pytest.raises(ConfigurationError, match=r"noise=5.0\. .*source=\.\.\.\)\. .*upgrade.md"):
        MAKE["DPSEP"](noise_multiplier=5.0, generator=torch.Generator())


@pytest.mark.parametrize("name", ["clip", "max_factor_norm", "damping", "num_steps"])
def test_what_another_class_takes(name):
    with pytest.raises(ConfigurationError, match=rf"DPSEP takes no {name}.*PaperDPSEP\("):
        MAKE["DPSEP"](**{name: 1.0})


def test_an_unknown_name_is_a_type_error():
    with pytest.raises(TypeError, match="nonsense"):
        MAKE["DPSVI"](nonsense=1)


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_frozen_and_equal_by_value(kind):
    assert kind() == kind() and hash(kind()) == hash(kind()) and kind.read(kind()) == kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind().plate = "data"


def test_plain_values_stand_for_objects():
    assert Noise.read(2) == Noise(2.0) and Noise.read(None) == Noise()
    assert Sampling.read(0.5) == PoissonSampling(0.5) and Sampling.read(None) == PoissonSampling()
    assert Clip.read(math.inf) == Clip(math.inf)
    assert Clip.read(AdaptiveClip(3.0)).first_bound == 3.0
    assert Factors.read("diagonal") == Factors("diagonal")
    assert Execution.read(None) == Execution()


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (Noise, "5", "noise must be a number or Noise(...), not str."),
        (Noise, True, "noise must be a number"),
        (Sampling, "full", "sampling must be a rate, PoissonSampling"),
        (Clip, [1.0], "clip must be a number, an AdaptiveClip or Clip(...), not list"),
        (Factors, 1, "factors must be 'full', 'diagonal'"),
        (Execution, 100, "execution must be Execution(...), not "),
        (Execution, Noise(), "execution must be Execution(...), not "),
    ],
)
def test_what_stands_for_none(kind, value, text):
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        kind.read(value)


FIELDS = [
    (Noise, "multiplier", (-1.0, math.nan, math.inf, "1", True, False)),
    (Noise, "source", ("random", -1, True)),
    (PoissonSampling, "rate", (0.0, 1.2, math.nan, "all")),
    (FixedSizeSampling, "rate", (2,)),
    (FullBatch, "plate", (1,)),
    (Clip, "bound", (0.0, -1.0, math.nan, "1")),
    (Clip, "of", (None, "all")),
    (Clip, "loss", (0.0, math.inf)),
    (Clip, "loss_share", (0.0, 1.0, None)),
    (Clip, "report", (None, 0.01)),
    (AdaptiveClip, "initial", (0.0, math.inf)),
    (AdaptiveClip, "quantile", (1.0,)),
    (AdaptiveClip, "learning_rate", (-1,)),
    (AdaptiveClip, "share", (1.0,)),
    (Factors, "precision", ("low rank",)),
    (Factors, "centred", (None, torch.zeros(2))),
    (Factors, "weight", (0.0,)),
    (Execution, "microbatch_size", (0, 1.5)),
    (Execution, "jit", (None, True, "script")),
    (Execution, "slice_data", (None, 2, "True", "whole", torch.zeros(2))),
    (Execution, "peers", ("all",)),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("kind", "name", "values"), FIELDS)
def test_fields_out_of_range(kind, name, values):
    for value in values:
        with pytest.raises(ConfigurationError, match=rf"^({kind.__name__}|Sampling)\.{name}\b"):
            kind(**{name: value})


def test_fields_that_do_not_fit_each_other():
    with pytest.raises(ConfigurationError, match="adds none"):
        Noise(0, source="system")
    with pytest.raises(ConfigurationError, match="sampling must be a PoissonSampling"):
        Sampling(0.1)


@pytest.mark.parametrize(
    ("who", "own", "text"),
    [
        ("DPSVI", {"clip": Clip(report=False)}, "DPSVI has no use for Clip.report"),
        ("DPSVI", {"clip": AdaptiveClip()}, "AdaptiveClip is for PaperDPSVI"),
        ("DPSEP", {"sampling": 0.5}, "DPSEP looks at all records"),
        ("VIPS", {"execution": Execution(jit="trace")}, "VIPS has no use for Execution.jit"),
        ("VIPS", {"sampling": FullBatch(plate="data")}, "no use for FullBatch.plate"),
        ("VIPS", {"sampling": PoissonSampling()}, "VIPS needs a rate"),
        ("PaperDPSVI", {"sampling": FixedSizeSampling(0.5)}, "FixedSizeSampling hides no change"),
        ("PaperDPSVI", {"clip": math.inf}, "infinite bound needs noise=0"),
    ],
)
def test_what_does_not_fit(who, own, text):
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        MAKE[who](**own)


def test_the_seed_is_not_shown():
    """Anyone who knows the seed can compute the noise."""
    assert "7" not in repr(Noise(1.0, source=7))
    assert "7" not in repr(MAKE["DPSVI"](noise=Noise(source=7)))
