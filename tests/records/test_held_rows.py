"""Runs on Parquet whose steps draw ahead: the numbers are those of tensors, in fewer passes."""

import pyarrow.parquet as pq
import pyro
import pytest
import torch
from contract import same
from problems import logistic, new_paper_dpsvi
from pyro.infer.autoguide import AutoMultivariateNormal
from test_arrow import NUMBERS, arrow_table
from test_columns import N, X, Y

import pyro_dp
from pyro_dp import VIPS, Execution, FixedSizeSampling, Noise, PaperDPSEP, PrivacyAccountant
from pyro_dp.records import column
from pyro_dp.records.column import ArrayColumn, Column, HeldRows, StackedColumn
from pyro_dp.vips import LogisticRegression


@pytest.fixture
def path(tmp_path):
    pq.write_table(arrow_table(), tmp_path / "data.parquet", row_group_size=50)
    return tmp_path / "data.parquet"


def dpsvi(microbatch_size=None, **options):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    own = {"sampling": 0.3, "noise": Noise(1.0, source=0), "num_steps": 7} | options
    own["execution"] = Execution(microbatch_size, jit="none")
    return new_paper_dpsvi(logistic, AutoMultivariateNormal(logistic), **own)


def result(svi):
    return [p.detach().clone() for p in svi.guide.parameters()]


def counted_passes(svi, data):
    """How often all that is asked for of a column is read, in a run."""
    found = []
    hold = HeldRows.hold

    def counted(column, indices):
        if len(indices) and not column.row_shape:
            found.append(len(indices))
        hold(column, indices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeldRows, "hold", counted)
        svi.run(*data, progress=False)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("sampling", "microbatch"), [(0.3, 40), (FixedSizeSampling(0.3), None)])
def test_runs_are_those_of_tensors(path, sampling, microbatch, monkeypatch):
    """To the last bit, however many steps are drawn at once."""

    def new():
        accountant = PrivacyAccountant(neighboring="replace_one")
        return dpsvi(microbatch, accountant=accountant, sampling=sampling)

    svi = new()
    svi.run(X, Y, progress=False)
    wanted, size = result(svi), svi._kept.prepared.sampler.usual_size * 48
    for steps, passes in ((1, 0), (3, 3), (100, 1)):
        monkeypatch.setattr(column, "_MOST_HELD", steps * size)
        svi = new()
        data = pyro_dp.columns(path, NUMBERS, "y")
        assert len(counted_passes(svi, data)) == passes
        assert same(result(svi), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda own: VIPS(LogisticRegression(3), **own),
        lambda own: PaperDPSEP(logistic, AutoMultivariateNormal(logistic), clip=1.0, **own),
    ],
    ids=["vips", "dpsep"],
)
def test_other_methods(path, make):
    found = []
    for data in ((X, Y), pyro_dp.columns(path, NUMBERS, "y")):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        own = {"accountant": PrivacyAccountant(), "noise": Noise(1.0, source=0)}
        run = make(own | {"sampling": 0.3, "num_steps": 3})
        assert len(counted_passes(run, data)) <= 2 * isinstance(data[0], Column)
        found.append(run.posterior())
    for name in ("mean", "covariance_matrix"):
        assert torch.equal(*(getattr(each, name) for each in found))


@pytest.mark.slow
@pytest.mark.every_commit
def test_a_step_that_is_undone(path):
    """A step that was paid for and lost counts, too."""
    found = []
    for data in ((X, Y), pyro_dp.columns(path, NUMBERS, "y")):
        svi = dpsvi()
        svi.step(*data)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(svi._kept.prepared.step.eager, "add", _fails)
            with pytest.raises(ZeroDivisionError):
                svi.step(*data)
        svi.step(*data)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pyro_dp.mechanism.clipping.ClippedSum._noisy", _fails)
            with pytest.raises(ZeroDivisionError):
                svi.step(*data)
        svi.run(*data, progress=False)
        found.append(result(svi))
    assert same(*found)


def _fails(*_, **__):
    raise ZeroDivisionError


@pytest.mark.every_commit
@pytest.mark.slow
def test_two_that_share_an_accountant(path):
    found = []
    for data in ((X, Y), pyro_dp.columns(path, NUMBERS, "y")):
        accountant = PrivacyAccountant()
        one, other = (
            dpsvi(accountant=accountant, noise=Noise(1.0, source=seed)) for seed in (0, 1)
        )
        for _ in range(3):
            one.step(*data)
            other.step(*data)
        found.append(result(one))
    assert same(*found)


@pytest.mark.long
@pytest.mark.every_commit
def test_secure_mode_does_not_draw_ahead(path):
    svi = dpsvi(noise=Noise(1.0, source="system"))
    assert counted_passes(svi, pyro_dp.columns(path, NUMBERS, "y")) == []


@pytest.mark.slow
@pytest.mark.every_commit
def test_nothing_is_held_after_a_run_or_for_other_data(path):
    data = pyro_dp.columns(path, NUMBERS, "y")
    svi = dpsvi()
    svi.step(*data)
    held = svi._kept.prepared.records.columns
    assert all(len(x._held) > 0.5 * N for x in held)
    svi.step(*pyro_dp.columns(path, NUMBERS, "y"))
    assert not any(len(x._held) for x in held)
    svi.run(*data, progress=False)
    assert not any(len(x._held) for x in svi._kept.prepared.records.columns)


def test_what_is_not_held_is_read():
    x = HeldRows(ArrayColumn(X.numpy()))
    some = torch.tensor([3, 5, 200, 201, 499])
    x.hold(some)
    x.choose(some[1:4], torch.tensor([1, 2, 3]))
    for indices in ([5, 200, 201], [200], [5, 201], [3, 5], [499], [201, 202], [0], []):
        chosen = torch.tensor(indices, dtype=torch.long)
        assert torch.equal(x.take(chosen), X[chosen])
    assert torch.equal(x.repeated_rows(torch.tensor([201, 5, 5])), X[[201, 5, 5]])
    x.take(torch.tensor([5])).zero_()  # what is read is a copy
    assert torch.equal(x.take(torch.tensor([5])), X[[5]])
    torch.set_default_dtype(torch.float32)
    assert torch.equal(x.take(torch.tensor([5])), X[[5]].float())


def test_columns_of_columns(path):
    single = pyro_dp.columns(path, *NUMBERS)
    found = pyro_dp.columns(dict(zip(NUMBERS, single, strict=True)), NUMBERS)
    assert isinstance(found, StackedColumn) and found.sequential
    assert not StackedColumn([ArrayColumn(Y.numpy())]).sequential
