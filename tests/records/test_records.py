"""The arguments of a model, seen as records."""

import pyro
import pytest
import torch

from pyro_dp import ModelError, PrivacyWarning
from pyro_dp.records.plate import PrivatePlate
from pyro_dp.records.records import Reading, Records

PLATE = PrivatePlate("data", 6, 6)


def model(x, public, options, *, y, flag=True):
    pass


def records(reading=Reading.BY_INDEX):
    x, y = torch.randn(6, 2), torch.arange(6)
    options = {"z": torch.rand(6), "edges": torch.ones(3), "name": "six"}
    args, kwargs = (x, torch.eye(4), options), {"y": y, "flag": False}
    return Records(model, PLATE, args, kwargs, reading), args, kwargs


@pytest.mark.parametrize("index", [0, 4])
@pytest.mark.parametrize("reading", Reading)
def test_a_model_sees_one_record_only(index, reading):
    """Its row, repeated or alone; public arguments as they are."""
    seen, args, kwargs = records(reading)
    row = [rows[0] for rows in seen.rows(torch.tensor([index]))]
    (x, public, options), named = seen.arguments(row)
    length = 6 if reading is Reading.BY_INDEX else 1
    for got, given in ((x, args[0]), (options["z"], args[2]["z"]), (named["y"], kwargs["y"])):
        assert got.shape == (length, *given.shape[1:])
        assert (got == given[index]).all()
    assert public is args[1] and options["edges"] is args[2]["edges"]
    assert options["name"] == "six" and named["flag"] is False


def test_a_number_of_records_follows_what_is_shown():
    """It is one for one record and N for all. Other numbers, and flags, stay."""
    arguments = (torch.ones(6), 6, 7), {"n": 6, "flag": True}
    seen = Records(dict, PLATE, *arguments, Reading.COUNTED)
    row = seen.placeholder()
    assert [seen.arguments(row)[0][1:], seen.arguments(row)[1]] == [(1, 7), {"n": 1, "flag": True}]
    assert seen.arguments(row, length=6)[0][1:] == (6, 7)
    whole = Records(dict, PLATE, *arguments, Reading.WHOLE)
    assert whole.arguments(row)[0][1:] == (6, 7)


def test_repeating_a_row_copies_nothing():
    seen, *_ = records()
    (x, *_), _ = seen.arguments([rows[0] for rows in seen.rows(torch.tensor([2]))])
    assert x.stride(0) == 0


def test_placeholders_are_constants():
    one, _, _ = records()
    other, args, _ = records()
    args[0].fill_(7.0)
    for a, b in zip(one.placeholder(), other.placeholder(), strict=True):
        assert torch.equal(a, b)
    assert [p.dtype for p in one.placeholder()] == [torch.float64, torch.float64, torch.int64]


def test_same_arguments():
    seen, args, kwargs = records()
    assert seen.same_as(args, kwargs)
    assert seen.same_as((args[0], args[1], dict(args[2])), dict(kwargs))
    assert not seen.same_as((args[0].clone(), *args[1:]), kwargs)
    assert not seen.same_as(args, kwargs | {"flag": True})
    assert not seen.same_as(args, kwargs | {"flag": 0})
    assert not seen.same_as(args[:2], kwargs)
    args[2]["z"][3] = 0.0  # overwritten
    assert not seen.same_as(args, kwargs)


def test_tensors_of_inference_mode_are_data():
    """They do not tell how often they were changed."""
    with torch.inference_mode():
        args = torch.randn(6, 2), torch.eye(4), {}
    seen = Records(model, PLATE, args, {"y": torch.arange(6)}, Reading.BY_INDEX)
    assert torch.equal(seen.row(2)[0], args[0][2])
    assert seen.same_as(args, {"y": seen.columns[1].tensor})


def require_finite(seen):
    for chosen in seen.blocks(4):
        seen.require_finite(seen.rows(chosen))


@pytest.mark.parametrize(("change", "named"), [("x", "'x'"), ("z", "'options'"), ("y", "'y'")])
def test_missing_values_name_the_argument(change, named):
    _, args, kwargs = records()
    kwargs["y"] = kwargs["y"].double()
    {"x": args[0], "z": args[2]["z"], "y": kwargs["y"]}[change][3] = torch.nan
    with pytest.raises(ModelError, match=named):
        require_finite(Records(model, PLATE, args, kwargs, Reading.BY_INDEX))


def standardised(x, correction=1):
    return (x - x.mean(0)) / x.std(0, correction=correction)


@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_data_with_moments_of_their_own(dtype, correction):
    """Each record has moved all others. The ledger is public, and has no note of it."""
    x = torch.rand(2000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 0] = standardised(x[:, 0], correction)
    with pytest.warns(PrivacyWarning, match="Argument 'x' has .*curator"):
        assert checked(x.to(dtype)) == 2000
    for public in (standardised(x)[:-1], x + 1e-3):
        assert checked(public.to(dtype)) == len(public)


def checked(x):
    """How many records."""
    seen = Records(lambda x: None, PrivatePlate("p", len(x), len(x)), (x,), {}, Reading.BY_INDEX)
    return sum(len(chosen) for chosen, _ in seen.checked(300))


def test_codes_of_balanced_groups_are_no_moments():
    codes = torch.tensor([-1.0, 1.0]).repeat(100_000)
    assert checked(codes) == len(codes)


@pytest.mark.parametrize("other", [torch.ones(6).numpy(), range(6)])
def test_data_that_are_no_tensor(other):
    with pytest.raises(ModelError, match="'public'"):
        Records(model, PLATE, (torch.ones(6), other), {}, Reading.BY_INDEX)


def test_module_signature():
    class Model(pyro.nn.PyroModule):
        def forward(self, features):
            pass

    with pytest.raises(ModelError, match="'features'"):
        infinite = (torch.full((6,), torch.inf),)
        require_finite(Records(Model(), PLATE, infinite, {}, Reading.BY_INDEX))
