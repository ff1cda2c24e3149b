"""A user's VIPS model sees one record at a time, with any E-step."""

import numpy as np
import pytest
import torch

from pyro_dp import VIPS, ModelError, Noise, PrivacyAccountant
from pyro_dp.graphs.captured_state import CapturedState
from pyro_dp.vips import LinearRegression
from pyro_dp.vips.conjugate_model import ConjugateModel, Draws, Statistic, is_reviewed, reviewed
from pyro_dp.vips.e_step import IsolatedModel

SIZE = 20


class Sums(ConjugateModel):
    """A sum of vectors, a static sum, and a function of draws."""

    statistics = {
        "sum": Statistic((2,), 10.0),
        "square": Statistic((), 100.0, static=True),
        "drawn": Statistic((3,), 100.0),
    }

    def check(self, x):
        pass

    def static_statistics(self, x):
        return {"square": x.square().sum(1)}

    def expected_statistics(self, posterior, draws, x):
        noise = draws.normal(0, 3) + draws.uniform(4, 3)
        return {"sum": self.e_step(x) + posterior, "drawn": noise * x[:, :1]}

    def e_step(self, x):
        return x

    def posterior(self, statistics, noise, size):
        return statistics["sum"] / size

    def marginals(self, posterior):
        return {}

    def guide(self, posterior):
        pass

    def model(self, x):
        pass


class Loops(Sums):
    """A loop that vmap cannot run."""

    def e_step(self, x):
        return x if float(x.sum()) > -1e9 else 2 * x


def isolated(model):
    roots = (model.expected_statistics, model.static_statistics, model.check)
    return IsolatedModel(model, CapturedState(*roots))


def rows(seed=0):
    return torch.rand(SIZE, 2, generator=torch.Generator().manual_seed(seed))


def draws():
    return Draws.by(np.random.default_rng(0), torch.arange(SIZE))


@pytest.mark.parametrize("kind", [Sums, Loops])
def test_as_the_model_itself(kind):
    """On batches and on single records, with the same draws."""
    x, posterior, model = rows(), torch.ones(2), kind()
    expected = Sums().expected_statistics(posterior, draws(), x)
    found = isolated(model).expected_statistics(posterior, draws(), x)
    one = isolated(model).expected_statistics(posterior, draws().of(3), x[3:4])
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
        torch.testing.assert_close(one[name], value[3:4])
    squares = isolated(model).static_statistics(x)["square"]
    torch.testing.assert_close(squares, x.square().sum(1))


class Centres(Sums):
    def e_step(self, x):
        return x - x.mean(0)


class Remembers(Sums):
    largest = 0.0

    def e_step(self, x):
        self.largest = max(self.largest, float(x.abs().max()))
        return x / self.largest


class Catches(Sums):
    """One of the records that run at once raises for all."""

    def e_step(self, x):
        try:
            return x + 0 * torch.linalg.cholesky((2 - x.max()).reshape(1, 1)).sum()
        except RuntimeError:
            return 2 * x


@pytest.mark.parametrize("kind", [Sums, Loops, Centres, Remembers, Catches])
def test_no_record_moves_another(kind):
    """This holds even if the checks are bypassed."""
    x, posterior = rows(), torch.zeros(2)
    other = x.clone()
    other[7] = 1e6
    model = isolated(kind())
    one = model.expected_statistics(posterior, draws(), x)
    two = model.expected_statistics(posterior, draws(), other)
    kept = [i for i in range(SIZE) if i != 7]
    for name in one:
        assert torch.equal(one[name][kept], two[name][kept])


@pytest.mark.parametrize(
    ("kind", "named"),
    [(Centres, "'sum' of a record moves"), (Remembers, "'largest' of Remembers changes")],
)
def test_refused_before_anything_is_spent(kind, named):
    accountant = PrivacyAccountant()
    vips = VIPS(kind(), accountant=accountant, num_steps=2, noise=1.0)
    with pytest.raises(ModelError, match=named):
        vips.step(rows())
    assert accountant.num_releases == 0


class KeepsInCheck(Sums):
    def check(self, x):
        self.scale = x.std()


def test_a_check_that_keeps_something():
    model, accountant = KeepsInCheck(), PrivacyAccountant()
    vips = VIPS(model, accountant=accountant, num_steps=2, noise=1.0)
    with pytest.raises(ModelError, match="'scale' of KeepsInCheck"):
        vips.step(rows())
    assert accountant.num_releases == 0 and not hasattr(model, "scale")


class Fails(Sums):
    def e_step(self, x):
        if float(x.max()) > 5.0:
            raise ArithmeticError(f"too large: {x.max()}")
        return x


class FailsOnAll(Sums):
    def e_step(self, x):
        raise ArithmeticError(f"never: {x.max()}")


def sums(model, x):
    """Sums of all records, released without noise."""
    vips = VIPS(model, accountant=PrivacyAccountant(), num_steps=1, noise=0.0)
    vips.step(x)
    return vips._found.mixed.values


class CountsThrice(Sums):
    def e_step(self, x):
        return x if float(x.max()) < 5.0 else torch.cat([x, x, x])


class HasAnotherShape(Sums):
    def e_step(self, x):
        return x if float(x.max()) < 5.0 else x[0, 0]


@pytest.mark.parametrize("kind", [Fails, CountsThrice, HasAnotherShape])
def test_a_record_on_which_it_fails_counts_as_zero(kind):
    """It adds zero to every statistic of the release, without a warning."""
    x = rows()
    x[7] = 6.0
    rest = torch.cat([x[:7], x[8:]])
    torch.testing.assert_close(sums(kind(), x)["sum"], rest.sum(0).double())


def test_an_error_that_the_model_catches_is_one_records():
    x = rows()
    x[7] = 2.5
    expected = x.sum(0) + x[7]
    torch.testing.assert_close(sums(Catches(), x)["sum"], expected.double())


def test_an_error_on_public_rows_has_its_text():
    with pytest.raises(ModelError, match="ArithmeticError.*in e_step: raise.*never"):
        sums(FailsOnAll(), rows())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda parts: parts.pop("sum"), "no statistic 'sum'"),
        (lambda parts: parts.update(sum=parts["sum"][:, :1]), "'sum' does not have the shape"),
    ],
)
def test_parts_that_do_not_fit(change, named):
    class Other(Sums):
        def expected_statistics(self, posterior, draws, x):
            parts = super().expected_statistics(posterior, draws, x)
            change(parts)
            return parts

    accountant = PrivacyAccountant()
    vips = VIPS(Other(), accountant=accountant, num_steps=1, noise=1.0)
    with pytest.raises(ModelError, match=named):
        vips.step(rows())
    assert accountant.num_releases == 0


def test_data_held_by_the_model():
    x = rows()

    class Holds(Sums):
        def __init__(self):
            self.table = x

    with pytest.raises(ModelError, match="'table' of Holds"):
        sums(Holds(), x)


def test_whole_runs_agree():
    """The model of the package, which sees batches, gives the same run."""
    ends = []
    for model in (Sums(), reviewed(type("Reviewed", (Sums,), {}))()):
        vips = VIPS(model, accountant=PrivacyAccountant(), num_steps=3, noise=Noise(1.0, source=0))
        assert isinstance(vips._e_step, IsolatedModel) is not is_reviewed(model)
        vips.run(rows(), progress=False)
        ends.append(vips._found.mixed.values)
    torch.testing.assert_close(*ends, rtol=0.0, atol=1e-9)


def test_only_classes_of_the_package_as_they_are_earn_trust():
    named = type("Named", (Sums,), {"__module__": "pyro_dp.vips.models.mine"})
    derived = type("Derived", (LinearRegression,), {"__module__": "pyro_dp.vips.models.mine"})
    bounds = {"x_bound": 1.0, "y_bound": 1.0}
    changed = LinearRegression(1, **bounds)
    changed.static_statistics = lambda *rows: LinearRegression.static_statistics(changed, *rows)
    for model, trusted in (
        (named(), False),
        (changed, False),
        (derived(1, **bounds), False),
        (LinearRegression(1, **bounds), True),
    ):
        assert is_reviewed(model) is trusted
        accountant = PrivacyAccountant()
        vips = VIPS(model, accountant=accountant, num_steps=1, noise=1.0)
        assert isinstance(vips._e_step, IsolatedModel) is not trusted
