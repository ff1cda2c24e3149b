"""Which records take part: sizes, inclusions and pairs, against the law and against wrong ones.

Samples of several steps at once: each is used once, even if its step fails.
"""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from scipy import stats

from pyro_dp import ConfigurationError
from pyro_dp.mechanism import sampling
from pyro_dp.mechanism.sampling import DrawnAhead, RecordSampler
from pyro_dp.mechanism.streams import Randomness

_ALARM = 1e-8
_SIZE, _RATE, _DRAWS = 12, 0.3, 4000


def inclusions(draw):
    """Which records were in, (draws, size)."""
    member = np.zeros((_DRAWS, _SIZE))
    for t in range(_DRAWS):
        member[t, np.asarray(draw(t))] = 1
    return member


def poisson_pvalue(member):
    """Smallest p-value (Bonferroni) of: batch sizes, each record, each pair, pairs in time."""
    sizes = np.bincount(member.sum(1).astype(int), minlength=_SIZE + 1)
    law = stats.binom.pmf(np.arange(_SIZE + 1), _SIZE, _RATE) * _DRAWS
    inner = law > 5
    observed = np.append(sizes[inner], sizes[~inner].sum())
    expected = np.append(law[inner], law[~inner].sum())
    pvalues = [stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue]
    pvalues += _counts(member.sum(0), _RATE)
    pairs = (member.T @ member)[np.triu_indices(_SIZE, 1)]
    pvalues += _counts(pairs, _RATE**2)
    in_time = (member[1:] * member[:-1]).sum(0)
    pvalues += _counts(in_time, _RATE**2, draws=_DRAWS - 1)
    return min(pvalues) * len(pvalues)


def fixed_pvalue(member):
    batch = math.floor(_RATE * _SIZE)
    if (member.sum(1) != batch).any():
        return 0.0
    pvalues = _counts(member.sum(0), batch / _SIZE)
    pairs = (member.T @ member)[np.triu_indices(_SIZE, 1)]
    pvalues += _counts(pairs, batch * (batch - 1) / (_SIZE * (_SIZE - 1)))
    in_time = (member[1:] * member[:-1]).sum(0)
    pvalues += _counts(in_time, (batch / _SIZE) ** 2, draws=_DRAWS - 1)
    return min(pvalues) * len(pvalues)


def _counts(counts, rate, draws=_DRAWS):
    """Two-sided binomial p-values (normal approximation, which is good at these counts)."""
    z = (counts - rate * draws) / math.sqrt(rate * (1 - rate) * draws)
    return list(2 * stats.norm.sf(np.abs(z)))


def drawn(kind, size=_SIZE, rate=_RATE, source=None):
    sampler, source = RecordSampler(kind, size, rate), source or Randomness(0)
    return inclusions(lambda t: sampler.draw(source.stream("sampling", t)))


def shuffled_epochs(batch):
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(_SIZE) for _ in range(_DRAWS)])
    return inclusions(lambda t: order[t * batch : (t + 1) * batch])


@pytest.fixture(params=[0, "system"])
def source(request, stream):
    """The operating system's generator has other algorithms."""
    return Randomness(request.param)


@pytest.mark.slow
@pytest.mark.every_commit
def test_poisson(source):
    assert poisson_pvalue(drawn("poisson", source=source)) > _ALARM
    assert poisson_pvalue(drawn("poisson", rate=0.35, source=source)) < _ALARM


@pytest.mark.long
@pytest.mark.every_commit
def test_fixed(source):
    assert fixed_pvalue(drawn("fixed", source=source)) > _ALARM


@pytest.mark.slow
@pytest.mark.every_commit
def test_poisson_test_has_power():
    """It rejects fixed batches, shuffled epochs, a wrong rate, and one draw used for all steps."""
    assert poisson_pvalue(drawn("fixed", rate=4 / 12)) < _ALARM
    assert poisson_pvalue(shuffled_epochs(4)) < _ALARM
    assert poisson_pvalue(np.tile(drawn("poisson")[:1], (_DRAWS, 1))) < _ALARM


@pytest.mark.long
@pytest.mark.every_commit
def test_fixed_test_has_power():
    assert fixed_pvalue(drawn("poisson")) < _ALARM
    assert fixed_pvalue(shuffled_epochs(3)) < _ALARM


def test_full():
    everyone = RecordSampler("full", 5, 1.0).draw(Randomness(0).stream("sampling", 0))
    assert len(everyone) == 5
    assert torch.equal(torch.cat(list(everyone.to("cpu").split(2))), torch.arange(5))
    assert len(RecordSampler("poisson", 0, 0.5).draw(Randomness(0).stream("sampling", 0))) == 0


@pytest.mark.slow
def test_poisson_block_by_block(monkeypatch, source):
    """Blocks do not change the law. A missing block, or one count for all, is found."""
    monkeypatch.setattr(sampling, "BLOCK", 5)
    assert poisson_pvalue(drawn("poisson", source=source)) > _ALARM
    assert poisson_pvalue(drawn("poisson", size=10, source=source)[:, :_SIZE]) < _ALARM
    assert poisson_pvalue(drawn("poisson", rate=0.35, source=source)) < _ALARM


@pytest.mark.parametrize("rate", [0.001, 0.06, 0.7])
def test_one_block_draws_as_ever(rate):
    """Seeds of runs with few records do not change."""
    source = Randomness(0)
    indices = RecordSampler("poisson", 50_000, rate).draw(source.stream("sampling", 3))
    stream = source.stream("sampling", 3)
    count = stream.binomial(50_000, rate)
    expected = np.sort(stream.choice(50_000, size=count, replace=False, shuffle=False))
    assert np.array_equal(indices.numpy(), expected)


def test_at_a_small_rate_all_records_are_one_block():
    """10^12 of them take no longer than few: their blocks alone would take minutes."""
    size, rate = 10**12, 1e-9
    indices = RecordSampler("poisson", size, rate).draw(Randomness(0).stream("sampling", 0))
    # Standard deviations: 32 of the number, 0.29 / sqrt(1000) of the mean of uniform numbers.
    assert abs(len(indices) - 1000) < 6 * 32
    assert abs(indices.double().mean().item() / size - 0.5) < 6 * 0.0092
    assert (indices[1:] > indices[:-1]).all() and indices[-1] < size


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("rate", [0.06, 0.003])
def test_memory_of_a_draw(rate, secure):
    """O(batch) and a block, also where numpy would list all N to choose from."""
    sampler = RecordSampler("poisson", 3 * 10**7, rate)
    source = Randomness("system" if secure else None)
    tracemalloc.start()
    try:
        indices = sampler.draw(source.stream("sampling", 0))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * 8 * len(indices) + 40e6  # 240 MB for a list of all
    assert (indices[1:] > indices[:-1]).all() and indices[-1] < sampler.size
    assert abs(len(indices) - rate * sampler.size) < 6 * math.sqrt(rate * sampler.size)


@pytest.mark.parametrize(
    ("size", "rate", "batch"), [(100, 0.29, 29), (7, 0.5, 3), (1000, 0.0015, 1)]
)
def test_fixed_batch_size(size, rate, batch):
    """floor(rate N), not less by rounding; event and divisor use B / N."""
    sampler = RecordSampler("fixed", size, rate)
    assert len(sampler.draw(Randomness(0).stream("sampling", 0))) == batch
    assert sampler.sample_rate == batch / size


def test_fixed_batch_of_nothing():
    with pytest.raises(ConfigurationError, match="sample_rate"):
        RecordSampler("fixed", 10, 0.01)


class Rows:
    """It replaces a column, and keeps the requests."""

    def __init__(self):
        self.held, self.passes, self.chosen = torch.empty(0), 0, None

    def hold(self, indices):
        self.held, self.passes = indices, self.passes + bool(len(indices))

    def choose(self, indices, places):
        self.chosen = indices, places


class Draws:
    """A sample for each call, never the same one."""

    def __init__(self):
        self.positions, self.generator = [], torch.Generator().manual_seed(0)

    def __call__(self, position):
        self.positions.append(position)
        return (torch.rand(50, generator=self.generator) < 0.3).nonzero().flatten()


def test_each_is_drawn_and_handed_out_once():
    rows, draw, positions = [Rows(), Rows()], Draws(), range(5, 12)
    ahead = DrawnAhead(3, rows)
    found = [ahead.sample(draw, p, left=12 - p).tolist() for p in positions]
    assert draw.positions == list(positions)  # none beyond the last step
    assert rows[0].passes == rows[1].passes == 3
    again = Draws()
    assert found == [again(p).tolist() for p in positions]


def test_the_rows_of_a_step_are_among_those_that_are_held():
    rows, draw = Rows(), Draws()
    ahead = DrawnAhead(4, [rows])
    for position in range(8):
        indices = ahead.sample(draw, position, None)
        chosen, places = rows.chosen
        assert torch.equal(chosen, indices) and torch.equal(rows.held[places], indices)
        assert torch.equal(rows.held, rows.held.unique())


@pytest.mark.parametrize(
    ("asked", "drawn"), [([0, 0], [0, 1, 2, 0, 1, 2]), ([0, 2, 4], [0, 1, 2, 4, 5, 6])]
)
def test_nothing_is_used_that_was_drawn_for_another_try(asked, drawn):
    """A step that starts again draws again, and skips positions that others used."""
    draw = Draws()
    ahead = DrawnAhead(3, [Rows()])
    for position in asked:
        ahead.sample(draw, position, None)
    assert draw.positions == drawn


def test_one_step_at_a_time():
    rows, draw = Rows(), Draws()
    assert len(DrawnAhead(1, [rows]).sample(draw, 7, None)) and draw.positions == [7]
    assert rows.passes == 0 and rows.chosen is None


def test_what_is_forgotten_is_drawn_again():
    rows, draw = Rows(), Draws()
    ahead = DrawnAhead(3, [rows])
    ahead.sample(draw, 0, None)
    ahead.forget()
    assert not len(rows.held)
    ahead.sample(draw, 1, None)
    assert draw.positions == [0, 1, 2, 1, 2, 3]


def test_a_pass_that_fails_leaves_nothing():
    draw, broken = Draws(), Rows()
    ahead = DrawnAhead(3, [broken])
    hold, broken.hold = broken.hold, lambda indices: hold(indices[: 1 // len(indices)])
    for _ in range(2):
        try:
            ahead.sample(draw, 0, None)
        except ZeroDivisionError:
            pass
    assert not ahead._samples
