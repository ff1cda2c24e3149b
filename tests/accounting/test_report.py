"""The report says what the ledger guarantees, and says so loudly where it guarantees nothing."""

import importlib.metadata
import math
import re
import sys

import pytest
from scipy.special import ndtr, ndtri

from pyro_dp import (
    ApproximateDP,
    ConfigurationError,
    DPStandardScaler,
    PrivacyAccountant,
    SubsampledGaussian,
)
from pyro_dp.accounting.report import _up
from pyro_dp.accounting.trade_off import trade_off


def ledger(*entries, **settings):
    accountant = PrivacyAccountant(**settings)
    for event, count in entries:
        accountant.record(event, count)
    return accountant


FULL = SubsampledGaussian(2.0, 1.0, "full")


def test_the_guarantee_in_words():
    accountant = ledger((FULL, 1), epsilon=4.0, delta=1e-6)
    text, spent = accountant.report(), accountant.get_epsilon()
    stated = float(re.search(r"with epsilon = ([\d.]+) and delta = 1e-06", text)[1])
    assert spent <= stated < spent * 1.001
    factor = float(re.search(r"that is ([\d.]+) times, plus 1e-06", text)[1])
    assert math.exp(spent) <= factor < math.exp(spent) * 1.002
    assert "The budget is epsilon = 4; " in text
    assert "private\\_selection" not in text
    assert "no privacy guarantee" not in text
    assert "Looks at the data" not in text


@pytest.mark.parametrize("relation, mu", [("add_or_remove_one", 0.5), ("replace_one", 1.0)])
def test_the_best_attackers_power(relation, mu):
    """Of a Gaussian in closed form: Dong, Roth & Su 2022, equation (6)."""
    text = ledger((FULL, 1), neighboring=relation).report()
    exact = 100 * ndtr(mu - ndtri(0.95))
    stated = float(re.search(r"at most ([\d.]+)% of the cases", text)[1])
    assert exact <= stated < exact + 0.4
    assert ("contributes nothing" in text) == (relation == "add_or_remove_one")
    assert ("any other in the other" in text) == (relation == "replace_one")


def opinion(text):
    """The paragraph about the second opinion."""
    (found,) = [line for line in text.splitlines() if re.search(r"\bby dp|^\*\*dp|<p.*dp_", line)]
    return found.replace("\\", "")


SUBSETS = SubsampledGaussian(1.0, 0.01, "fixed")


@pytest.mark.parametrize(
    "entry, settings, said",
    [
        ((FULL, 1), {}, r"^Confirmed by .* PLD .* bound 4\.38\d* .* the same to within 0\.5%\.$"),
        ((FULL, 1), {"engine": "rdp"}, r"^Confirmed by .* bound 4\.38\d* .* which is lower\.$"),
        ((SUBSETS, 9), {"engine": "rdp"}, r"^Confirmed by .* RDP accountant .* the same to within"),
        ((SUBSETS, 9), {}, r"^A second opinion .* RDP .* neither confirms nor contradicts"),
        ((FULL, 1), {"delta": 1e-20}, r"^There is no second opinion .*: its rounding errors are"),
    ],
)
def test_the_second_opinion(entry, settings, said):
    text = ledger(entry, neighboring="replace_one", **settings).report()
    assert re.search(said, opinion(text))


@pytest.mark.parametrize("wrong", [0.0, 0.9, 0.99])
def test_a_second_opinion_that_disagrees_is_loud(wrong, monkeypatch):
    spent = PrivacyAccountant.get_epsilon
    accountant = ledger((FULL, 1))
    right = _up(spent(accountant))
    monkeypatch.setattr(PrivacyAccountant, "get_epsilon", lambda *_: wrong * spent(accountant))
    text = opinion(accountant.report())
    found = float(re.match(r"\*\*dp_accounting, .* disagrees: .* epsilon = ([\d.]+) for", text)[1])
    assert float(right) <= found < float(right) * 1.003
    assert f"where {_up(wrong * spent(accountant))} is stated above" in text
    assert text.endswith("**")
    page = opinion(accountant.report("html"))
    assert page.startswith('<p class="loud">dp_accounting')


def test_no_second_opinion_breaks_a_report(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    text = opinion(ledger((FULL, 1)).report())
    assert text == "There is no second opinion by dp_accounting: it is not installed."


def test_every_release_is_listed():
    entries = [
        (SubsampledGaussian(1.5, 0.05), 200),
        (SubsampledGaussian(3.0, 1.0, "full"), 2),
        (ApproximateDP(0.25, 1e-6, "private_selection among 3 settings"), 1),
    ]
    text = ledger(*entries).report()
    assert "| noisy sum | each record on its own | 0.05 | 1.5 | 200 |" in text
    assert "| noisy sum | all records | 1 | 3 | 2 |" in text
    selection = "private\\_selection among 3 settings: epsilon = 0.25, delta = 1e-06 |  |  |  | 1 |"
    assert selection in text
    assert "The candidates of every private selection" in text
    fixed = ledger((SubsampledGaussian(1.5, 0.05, "fixed"), 7), neighboring="replace_one")
    assert "a random subset of fixed size | 0.05 | 1.5 | 7 |" in fixed.report()


def test_a_release_with_a_delta_of_its_own_leaves_a_trade_off_curve():
    accountant = ledger((ApproximateDP(0.5, 5e-6, "x"), 1))
    missed = float(trade_off(accountant, 0.05))
    assert missed == pytest.approx(1 - 5e-6 - math.exp(0.5) * 0.05)
    assert "at most 8.3% of the cases" in accountant.report()


def test_an_empty_ledger_claims_nothing():
    text = PrivacyAccountant().report()
    assert "Nothing was released under this ledger so far" in text
    assert "differentially private" not in text
    assert "another implementation" not in text
    assert "at most 5.0% of the cases" in text


def test_no_noise_is_no_guarantee():
    text = ledger((SubsampledGaussian(0.0, 1.0, "full"), 3)).report()
    assert "**There is no privacy guarantee: epsilon is infinite, for good." in text
    assert "noise multiplier 0" in text
    assert "0: not private | 3 |" in text
    assert "power 100%" in text
    assert "differentially private with epsilon" not in text
    above = ledger((ApproximateDP(0.5, 1e-3, "x"), 1)).report()
    assert "**There is no privacy guarantee" in above
    assert "deltas of single releases exceed" in above


@pytest.mark.parametrize("format", ["markdown", "html"])
def test_looks_are_loud(format):
    accountant = ledger((FULL, 1))
    accountant.record_nonprivate("loss of <DPSVI> | step 3")
    text = accountant.report(format)
    assert "There is no privacy guarantee" in text
    assert "Looks at the data without noise" in text
    time = accountant.ledger[-1].event.time
    if format == "markdown":
        assert f"| loss of &lt;DPSVI&gt; \\| step 3 | {time} | 1 |" in text
    else:
        assert f"<td>loss of &lt;DPSVI&gt; | step 3</td><td>{time}</td><td>1</td>" in text
    assert text.count("DPSVI") == 1


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (dict(), "the entropy of the operating system"),
        (dict(generator=3), "**At least one run was given a seed."),
        (dict(secure=True), "At least one run was in secure mode"),
    ],
    ids=str,
)
def test_random_numbers(settings, sentence):
    accountant = PrivacyAccountant()
    DPStandardScaler((0, 1), accountant=accountant, noise_multiplier=1.0, **settings).fit([[0.0]])
    text = accountant.report().split("## Random numbers")[1].split("##")[0].strip()
    assert sentence in text
    assert len(text.splitlines()) == 1


def test_notes_are_shown_as_they_are():
    accountant = PrivacyAccountant()
    assert "There are none." in accountant.report()
    accountant.note("<b>bold</b> *note*")
    assert "- &lt;b&gt;bold&lt;/b&gt; \\*note\\*" in accountant.report()
    assert "<li>&lt;b&gt;bold&lt;/b&gt; *note*</li>" in accountant.report("html")
    with pytest.raises(ConfigurationError, match="format"):
        accountant.report("pdf")


def test_versions():
    text = PrivacyAccountant().report()
    for name in ("Python", "pyro-dp", "pyro-ppl", "torch", "dp-accounting"):
        assert re.search(rf"^\| {name} \| \S.*\|$", text, re.MULTILINE)


def test_a_source_tree_has_no_version(monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "| torch | not installed as a package |" in PrivacyAccountant().report()


def test_reading_changes_nothing():
    accountant = ledger((FULL, 1))
    before = accountant.state_dict()
    accountant.report()
    accountant.report("html")
    assert accountant.state_dict() == before


@pytest.mark.parametrize("value", [1e-300, 1e-9, 0.1, 0.99999, 1.0, 3.00001, 9.9999, 1234.56, 1e21])
def test_costs_are_rounded_up(value):
    assert value * (1 - 1e-11) <= float(_up(value)) <= value * 1.0011
    assert len(_up(value)) <= 9
    assert _up(0.0) == "0"
