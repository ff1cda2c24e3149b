"""The report says what the ledger guarantees, and says so loudly where it guarantees nothing."""

import ast
import importlib.metadata
import math
import re
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from ledgers import a_run, ledger, loaded, record
from scipy.special import ndtr, ndtri

from pyro_dp import (
    ApproximateDP,
    ConfigurationError,
    DPStandardScaler,
    Noise,
    PrivacyAccountant,
    SubsampledGaussian,
)
from pyro_dp.accounting import composition, report
from pyro_dp.accounting.figures import _round_numbers, growth
from pyro_dp.accounting.trade_off import trade_off
from pyro_dp.utils.display import of_budget, spent_and_left, up

FULL = SubsampledGaussian(2.0, 1.0, "full")


def test_each_text_of_the_page_of_words_is_used():
    page = Path(report.__file__).with_name("pages") / "words.md"
    named = set(re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE))
    used = {
        node.value
        for node in ast.walk(ast.parse(Path(report.__file__).read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert named <= used and len(named) > 30


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


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_a_sentence_for_a_paper(relation):
    """It has the method, the unit, the relation and the numbers, and makes no claim of its own."""
    accountant = PrivacyAccountant(8.0, 1e-6, neighboring=relation)
    assert "For a paper" not in accountant.report()
    origin = a_run("DPSEP")
    record(accountant, origin, FULL)
    assert "differ in one record: " in accountant.report()
    accountant.describe(unit="a person")
    _, text = accountant.report().split("## For a paper")
    assert "The results by DPSEP (pyro-dp " in text
    assert f"({up(accountant.get_epsilon())}, 1e-06)-differentially private" in text
    assert "differ in one record (a person)" in text and "Add this if it is true" in text
    assert ("is empty" in text.split("##")[0]) == (relation == "add_or_remove_one")
    assert "For a paper" not in ledger((SubsampledGaussian(0.0, 1.0), 1)).report()


@pytest.mark.parametrize("relation, mu", [("add_or_remove_one", 0.5), ("replace_one", 1.0)])
def test_the_best_attackers_power(relation, mu):
    """A Gaussian's is in closed form: Dong, Roth & Su 2022, equation (6)."""
    text = ledger((FULL, 1), neighboring=relation).report()
    exact = 100 * ndtr(mu - ndtri(0.95))
    stated = float(re.search(r"at most ([\d.]+)% of cases", text)[1])
    assert exact <= stated < exact + 0.4
    assert ("contributes nothing" in text) == (relation == "add_or_remove_one")
    assert ("may be any record in either" in text) == (relation == "replace_one")


def opinion(text):
    """The paragraph about the second opinion."""
    (found,) = [line for line in text.splitlines() if re.search(r"\bby dp|^\*\*dp|<p.*dp_", line)]
    return found.replace("\\", "")


SUBSETS = SubsampledGaussian(1.0, 0.01, "fixed")


@pytest.mark.parametrize(
    "entry, settings, said",
    [
        ((FULL, 1), {}, r"^Confirmed by .* PLD .* bound 4\.38\d* .* the same to within 0\.5%\."),
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
    right = up(spent(accountant))
    monkeypatch.setattr(PrivacyAccountant, "get_epsilon", lambda *_: wrong * spent(accountant))
    text = opinion(accountant.report())
    found = float(re.match(r"\*\*dp_accounting, .* disagrees\. .* epsilon = ([\d.]+) for", text)[1])
    assert float(right) <= found < float(right) * 1.003
    assert f"and {up(wrong * spent(accountant))} is stated above" in text
    assert text.endswith("**")
    page = opinion(accountant.report("html"))
    assert page.startswith('<p class="loud">dp_accounting')


def test_no_second_opinion_breaks_a_report(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    text = opinion(ledger((FULL, 1)).report())
    assert text == "There is no second opinion by dp_accounting: it is not installed."


@pytest.mark.slow
def test_every_release_is_listed():
    entries = [
        (SubsampledGaussian(1.5, 0.05), 200),
        (SubsampledGaussian(3.0, 1.0, "full"), 2),
        (ApproximateDP(0.25, 1e-6, "private_selection among 3 settings"), 1),
    ]
    text = ledger(*entries).report()
    assert "| each record on its own, rate 0.05 | 1.5 | not recorded | 200 |" in text
    assert "| noisy sum | all records | 3 | not recorded | 2 |" in text
    assert "private\\_selection among 3 settings (epsilon = 0.25, delta = 1e-06) | " in text
    assert "The candidates of every private selection" in text
    fixed = ledger((SubsampledGaussian(1.5, 0.05, "fixed"), 7), neighboring="replace_one")
    assert "a random subset of fixed size, rate 0.05 | 1.5 | not recorded | 7 |" in fixed.report()


def cells(text):
    """The table of releases, by the names of its columns."""
    lines = text.split("## What was released")[1].split("\n\n")[2].splitlines()
    rows = [[cell.strip() for cell in line.removeprefix("|")[:-1].split("|")] for line in lines]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


@pytest.mark.slow
def test_what_each_row_costs_alone_and_with_those_above():
    """The costs are those of separate ledgers."""
    entries = [(SubsampledGaussian(2.0, 0.05), 100), (FULL, 1), (ApproximateDP(0.25, 1e-6, "x"), 2)]
    *rows, total = cells(ledger(*entries).report())
    alone = [up(ledger(entry).get_epsilon()) for entry in entries]
    so_far = [up(ledger(*entries[: k + 1]).get_epsilon()) for k in range(3)]
    assert [row["epsilon alone"] for row in rows] == alone
    assert [row["epsilon so far"] for row in rows] == so_far
    assert (total["release"], total["times"]) == ("all together", "103")
    assert total["epsilon so far"] == so_far[-1] == up(ledger(*entries).get_epsilon())
    looked = ledger(entries[1])
    looked.record_nonprivate("x")
    (row, total) = cells(looked.report())
    assert row["epsilon so far"] == alone[1] and total["epsilon so far"] == "no guarantee"


def test_runs_are_told_apart():
    """Two runs that release the same event have a row each."""
    accountant = PrivacyAccountant()
    for source in ("system", 3):
        scaler = DPStandardScaler((0, 1), accountant=accountant, noise=Noise(4.0, source=source))
        scaler.fit([[0.0, 1.0]])
    (entry,) = accountant.ledger
    accountant.record(entry.event, 5)
    by_hand, *rows, total = cells(accountant.report())
    assert (entry.count, total["times"]) == (2, "7")
    assert (by_hand["release"], by_hand["times"]) == ("noisy sum", "5")
    assert by_hand["generator"] == by_hand["began (UTC)"] == by_hand["bound C"] == "not recorded"
    assert [row["generator"] for row in rows] == ["secure", "seeded: repeatable"]


def test_bounds_and_the_clipped_fraction():
    accountant, origin = PrivacyAccountant(), a_run()
    for bound in (0.5, 2.0, math.inf, 1.0):
        record(accountant, origin, FULL, bound=bound)
    accountant.note_result(origin, (0.125, 0.01))
    accountant.note_result(a_run("another"), (0.5, 0.1))
    (row, _) = cells(accountant.report())
    assert (row["bound C"], row["clipped"]) == ("0.5 to 2", "12.5% ± 1.0%")
    assert (row["release"], row["times"]) == ("DPSVI: noisy sum", "4")
    with accountant.next_position(origin, 1.0):
        pass
    accountant.record(FULL)  # it belongs to no run
    assert len(cells(accountant.report())) == 3


def test_the_quality_of_each_result():
    accountant, origin = PrivacyAccountant(), a_run()
    other = a_run("VIPS")
    for each in (origin, other):
        record(accountant, each, FULL)
    assert "Quality of the result" not in accountant.report()
    accountant.note_result(origin, status="do not publish: early")
    accountant.note_result(origin, status="ok")  # the run went on
    accountant.note_result(a_run("another"), status="ok")
    again = loaded(accountant.state_dict())
    for text in (accountant.report(), again.report()):
        assert "| DPSVI | 2026-01-02T03:04Z | ok |" in text
        assert "early" not in text and text.count("2026-01-02T03:04Z |") == 1
    with pytest.raises(ConfigurationError, match="status"):
        accountant.note_result(origin, status="two\nlines")


def test_what_was_planned_and_not_released():
    accountant, origin = PrivacyAccountant(5.0), a_run()
    record(accountant, origin, FULL, bound=1.0, reserves={FULL: 4})
    made, planned, total = cells(accountant.report())
    assert (made["release"], made["times"]) == ("DPSVI: noisy sum", "1")
    assert planned["release"] == "DPSVI: noisy sum, planned and not released"
    assert (planned["times"], planned["bound C"], planned["clipped"]) == ("3", "", "")
    assert planned["epsilon so far"] == total["epsilon so far"] == up(accountant.get_epsilon())
    assert total["times"] == "4"
    assert "(began 2026-01-02 03:04) has planned 3 more." in accountant.report()
    assert "Confirmed by dp" in accountant.report()  # with what is planned
    numbers, epsilons = growth(accountant)
    assert numbers[-1] == 4 and epsilons[-1] == accountant.get_epsilon()
    record(accountant, origin, FULL, 3, bound=1.0)
    assert "planned and not released" not in accountant.report()


def test_many_rows_leave_the_costs_between_out():
    entries = [(SubsampledGaussian(50.0 + k, 1.0, "full"), 1) for k in range(41)]
    *rows, last, total = cells(ledger(*entries).report())
    assert {row["epsilon so far"] for row in rows} == {""}
    assert last["epsilon so far"] == total["epsilon so far"] != ""
    assert all(row["epsilon alone"] for row in [*rows, last])


def test_what_it_is_about():
    accountant = ledger((FULL, 1))
    for text in (accountant.report(), accountant.report("html")):
        assert text.count("not stated (accountant.describe)") == 5
        assert "none was kept" in text
    accountant.describe(title="A <b>study</b>", dataset="D", purpose="P", controller="C")
    accountant.describe(unit="a person | with visits", units=12345)
    text = accountant.report()
    assert text.startswith("# Privacy report: A &lt;b&gt;study&lt;/b&gt;\n")
    for line in ("Data set: D", "Purpose: P", "Controller: C", "Number of units: 12,345"):
        assert f"- {line}\n" in text
    assert "- Protected unit: a person \\| with visits\n" in text
    assert "One record is: a person \\| with visits." in text
    page = accountant.report("html")
    assert "<title>Privacy report: A &lt;b&gt;study&lt;/b&gt;</title>" in page
    assert "<b>" not in page and "<dd>12,345</dd>" in page


def test_the_journals_last_digest(tmp_path):
    accountant = PrivacyAccountant()
    with accountant.journal(tmp_path / "journal"):
        accountant.record(FULL)
        last = (tmp_path / "journal").read_text().splitlines()[-1]
        assert f"its last line has the digest {last.split()[0]}," in accountant.report()


@pytest.mark.slow
@pytest.mark.parametrize("budget, sigma", [(1.0, None), (0.3, 40.0), (2.0, None), (3.7, None)])
def test_the_report_agrees_with_print(budget, sigma):
    """Epsilon and what is left are the same texts, and add up to the budget."""
    accountant = PrivacyAccountant(budget)
    sigma = accountant.noise_multiplier(num_steps=50, sample_rate=0.1) if sigma is None else sigma
    accountant.record(SubsampledGaussian(sigma, 0.1), 50)
    shown = dict(re.findall(r"^  ([a-z ]+): (.*)$", str(accountant), re.MULTILINE))
    text, left = accountant.report(), shown["remaining"].split(" of ")[0]
    assert f"with epsilon = {shown['epsilon so far']} and" in text
    assert f"The budget is epsilon = {budget:g}; {left} remains." in text
    assert cells(text)[-1]["epsilon so far"] == shown["epsilon so far"]
    assert Decimal(left) + Decimal(shown["epsilon so far"]) == Decimal(str(budget))
    assert float(shown["epsilon so far"]) >= accountant.get_epsilon()
    pytest.importorskip("matplotlib")
    assert shown["epsilon so far"] in accountant.plot().axes[0].get_title()


def test_what_is_spent_and_left_add_up():
    assert spent_and_left(0.99982, 1.0) == ("0.9999", "0.0001")
    assert spent_and_left(0.99991, 0.99995) == ("0.99995", "0")  # rounded up it would be above
    assert spent_and_left(1.2, 1.0) == ("1.2", "0")
    assert spent_and_left(math.inf, 1.0) == ("inf", "0")


@pytest.mark.parametrize("format", ["markdown", "html"])
def test_no_number_seems_to_exceed_the_budget(format):
    """Rounding up would lift the number above it. The second opinion may exceed it and says why."""
    spent = ledger((FULL, 1)).get_epsilon()
    accountant = ledger((FULL, 1), epsilon=spent * (1 + 1e-5))
    budget = of_budget(accountant.epsilon)
    assert Decimal(up(spent)) > Decimal(budget)
    text = accountant.report(format)
    assert text.count(budget) >= 4 and text.count(up(spent)) <= 1
    assert "The epsilon that is stated first counts against the budget" in text
    pytest.importorskip("matplotlib")
    assert budget in accountant.plot().axes[0].get_title()


@pytest.mark.parametrize("engine", composition.ENGINES)
def test_how_costs_are_composed_is_said_in_words(engine):
    accountant = ledger((FULL, 1), engine=engine)
    words = composition.ENGINES[engine]
    assert f"composed by {words}." in accountant.report()
    assert f"composed by: {words} ({engine})" in repr(accountant)


@pytest.mark.long
def test_pictures_lie_in_the_page():
    """Both pictures have the page's colours and names. Without a guarantee there is none."""
    accountant = ledger((SubsampledGaussian(2.0, 0.1), 50), epsilon=3.0)
    before, page = accountant.state_dict(), accountant.report("html")
    assert page.count("<svg ") == page.count('role="img"') == page.count("<figcaption>") == 2
    assert "of a budget of 3." in page
    assert f"Epsilon after each release: {up(accountant.get_epsilon())} after all 50" in page
    pictures = "".join(re.findall("<svg.*?</svg>", page))
    assert "#" not in pictures and "style" not in pictures  # the page's dark theme reaches them
    assert "nan" not in pictures and "inf" not in pictures
    assert "<svg" not in accountant.report() and accountant.state_dict() == before
    accountant.record_nonprivate("x")
    assert "<svg" not in accountant.report("html")
    assert "<svg" not in PrivacyAccountant().report("html")


@pytest.mark.parametrize("end", [3e-7, 0.1, 0.9, 1.0, 1.06, 7.3, 41.82, 1020.0, 5.1e6])
def test_ticks_are_round_numbers(end):
    ticks = _round_numbers(end)
    assert ticks[0] == 0.0 and ticks[-1] <= end * (1 + 1e-9)
    assert 3 <= len(ticks) <= 7
    assert _round_numbers(1.02, whole=True) == [0.0, 1.0]


def test_a_release_with_a_delta_of_its_own_leaves_a_trade_off_curve():
    accountant = ledger((ApproximateDP(0.5, 5e-6, "x"), 1))
    missed = float(trade_off(accountant, 0.05))
    exact = 1 - 5e-6 - math.exp(0.5) * 0.05
    assert exact * (1 - 1e-5) < missed <= exact * (1 + 1e-9)
    assert "at most 8.3% of cases" in accountant.report()


def test_an_empty_ledger_claims_nothing():
    text = PrivacyAccountant().report()
    assert "nothing was released under this ledger so far" in text
    assert "differentially private" not in text
    assert "another implementation" not in text
    assert "at most 5.0% of cases" in text


def test_no_noise_is_no_guarantee():
    text = ledger((SubsampledGaussian(0.0, 1.0, "full"), 3)).report()
    assert "**There is no privacy guarantee: epsilon is infinite, for good." in text
    assert "noise multiplier 0" in text
    assert "0: not private | not recorded | 3 | no guarantee | no guarantee |" in text
    assert "power 100%" in text
    assert "differentially private with epsilon" not in text
    above = ledger((ApproximateDP(0.5, 1e-3, "x"), 1)).report()
    assert "**There is no privacy guarantee" in above
    assert "deltas of single releases exceed" in above


def test_looks_are_loud():
    accountant = ledger((FULL, 1))
    accountant.record_nonprivate("loss of <DPSVI> | step 3")
    time = accountant.ledger[-1].event.time
    page, text = accountant.report("html"), accountant.report()
    for each in (text, page):
        assert "There is no privacy guarantee" in each and each.count("DPSVI") == 1
        assert "Looks at the data without noise" in each
    assert f"| loss of &lt;DPSVI&gt; \\| step 3 | {time} | 1 |" in text
    for cell in ("loss of &lt;DPSVI&gt; | step 3</th>", f"{time}</td>", ">1</td>"):
        assert cell in page


@pytest.mark.parametrize(
    "source, generator, sentence",
    [
        (None, "ordinary", "the operating system's entropy"),
        (3, "seeded: repeatable", "**At least one run used a seed."),
        ("system", "secure", "At least one run was in secure mode"),
    ],
)
def test_random_numbers(source, generator, sentence):
    """The run has a row with its method, bound and time."""
    accountant = PrivacyAccountant()
    noise = Noise(4.0, source=source)
    DPStandardScaler((0, 1), accountant=accountant, noise=noise).fit([[0.0, 1.0]])
    text = accountant.report().split("## Random numbers")[1].split("##")[0].strip()
    assert sentence in text and len(text.splitlines()) == 1
    (row, _) = cells(accountant.report())
    assert (row["release"], row["generator"]) == ("DPStandardScaler: noisy sum", generator)
    assert (row["times"], row["bound C"], row["clipped"]) == ("1", "1.414", "not recorded")
    assert row["began (UTC)"] == "2026-01-02 03:04"


def test_notes_are_shown_as_they_are():
    accountant = PrivacyAccountant()
    assert "There are none." in accountant.report()
    accountant.note("<b>bold</b> *note*")
    assert "- &lt;b&gt;bold&lt;/b&gt; \\*note\\*" in accountant.report()
    assert "<li>&lt;b&gt;bold&lt;/b&gt; *note*</li>" in accountant.report("html")
    with pytest.raises(ConfigurationError, match="format"):
        accountant.report("pdf")


def test_versions(monkeypatch):
    """A source tree has no version."""
    text = PrivacyAccountant().report()
    for name in ("Python", "pyro-dp", "pyro-ppl", "torch", "dp-accounting"):
        assert re.search(rf"^\| {name} \| \S.*\|$", text, re.MULTILINE)

    def version(name):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "| torch | not installed as a package |" in PrivacyAccountant().report()


@pytest.mark.parametrize("value", [1e-300, 1e-9, 0.1, 0.99999, 1.0, 3.00001, 9.9999, 1234.56, 1e21])
def test_costs_are_rounded_up(value):
    assert value * (1 - 1e-11) <= float(up(value)) <= value * 1.0011
    assert len(up(value)) <= 9
    assert up(0.0) == "0"
