"""The zoo: without noise DPSVI is SVI, one record moves no sum by more than its bound, graphs."""

import math
import warnings

import pyro
import pytest
import torch
from contract import RECORD, WITH, WITHOUT, require_close_by
from problems import values
from pyro.infer import SVI
from releases import Releases, take
from torch.utils import _pytree as pytree

from pyro_dp import DPSVI, Clip, Execution, FullBatch, Noise, PaperDPSVI, PrivacyAccountant
from pyro_dp.infer.svi.traced_step import TracedStep

from . import ZOO
from .common_draws import all_at_once, one_by_one

SIZE = 23  # no other dimension of a model is as long
STEPS = 20

# Entries with another estimate of the gradient than SVI, of the same mean.
OTHER_ESTIMATE = {
    # A record's own choice has a gradient by its score. Pyro weights that with the record's term
    # and the terms outside of the plate, which do not depend on it. DPSVI leaves out the latter.
    "Dirichlet process mixture",
}


def test_there_are_forty():
    assert len(ZOO) == 40
    assert OTHER_ESTIMATE <= ZOO.keys()


def start(name):
    """Model, guide and data, and the parameters where they start."""
    entry = ZOO[name]
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model, guide = entry.make()
    for part in (model, guide):
        module = getattr(part, "__self__", part)
        if isinstance(module, torch.nn.Module):
            module.eval()  # what is dropped out is no draw that two inferences can share
    data = entry.data(SIZE)
    with all_at_once(SIZE):
        guide(*data)
    pyro.set_rng_seed(1)
    return entry, model, guide, data


def dpsvi(entry, model, guide, **options):
    optim = pyro.optim.Adam({"lr": options.pop("lr", 0.02)})
    options["accountant"] = PrivacyAccountant()
    return PaperDPSVI(model, guide, optim, entry.loss(), **options)


def plain(entry, model, guide, **options):
    """Without noise and clipping, on all records."""
    whole = dict(noise=0, clip=math.inf, sampling=FullBatch())
    return dpsvi(entry, model, guide, **whole, **options)


def fit(name, private):
    entry, model, guide, data = start(name)
    if private:
        inference, draws = plain(entry, model, guide, execution=Execution(jit="trace")), one_by_one
    else:
        optim = pyro.optim.Adam({"lr": 0.02})
        inference, draws = SVI(model, guide, optim, entry.loss()), all_at_once
    for _ in range(STEPS):
        with draws(SIZE):
            inference.step(*data)
    if private:
        assert isinstance(inference._kept.prepared.step, TracedStep)
    return values()


@pytest.mark.one_in(20)
@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_equals_svi(name):
    """Steps run from a graph, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = fit(name, True)
    if name in OTHER_ESTIMATE:
        return
    theirs = fit(name, False)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-5, atol=1e-7)


@pytest.mark.long
@pytest.mark.every_commit
@pytest.mark.one_in(10)
@pytest.mark.parametrize("name", ZOO)
def test_sensitivity(monkeypatch, name):
    """A record moves each block by its bound at most, by twice it if another replaces it.

    The same draws each time, at the same parameters: nothing else moves the sums.
    """
    entry, model, guide, data = start(name)
    seen, options = Releases(monkeypatch), dict(noise=Noise(1.0, source=0), sampling=0.5)
    inference = dpsvi(entry, model, guide, clip=Clip(0.5, loss=2.0), lr=1e-30, **options)

    def sums(batch):
        take(monkeypatch, batch)
        pyro.set_rng_seed(1)
        with one_by_one(SIZE):
            inference.step(*data)
        return seen.sums[-1]

    with_it, without = sums(WITH), sums(WITHOUT)
    blocks = seen.blocks[-1]
    for one, none in zip(with_it, without, strict=True):
        assert not len(one) or (one - none).norm() > 0  # rows alone make no gradient to release
    require_close_by(blocks, with_it, without, 1)
    tables = [x for x in pytree.tree_leaves(data) if is_data(x)]
    for change in (ordinary, outlier):
        for table in tables:
            change(table.numpy())  # torch does not notice
        replaced = sums(WITH)
        require_close_by(blocks, replaced, without, 1)
        require_close_by(blocks, replaced, with_it, 2)


def is_data(leaf):
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == SIZE


def ordinary(table):
    table[RECORD] = table[RECORD + 1]


def outlier(table):
    """Make record values extreme if they are real numbers; labels stay."""
    if table.dtype.kind == "f":
        table[RECORD] = 1e6


@pytest.mark.one_in(20)
@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_first_step_with_nothing_set(name):
    entry = ZOO[name]
    pyro.set_rng_seed(0)
    data = entry.data(60)
    model, guide = entry.make()
    svi = DPSVI(model, guide, loss=entry.loss(), accountant=PrivacyAccountant(epsilon=4.0))
    assert math.isnan(svi.step(*data))
