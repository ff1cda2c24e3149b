"""The report and what notebooks show, in a browser: accessible, light and dark, narrow and printed.

axe-core checks contrast, landmarks, names, scopes and much else; what it finds is WCAG 2.2, AA, and
good practice. Chromium and axe-core are fetched by hand (CONTRIBUTING.md), and not here.
"""

import re

import chromium
import pyro
import pytest
import torch
from saved_runs import data, model

from pyro_dp import DPSEP, ApproximateDP, Noise, PrivacyAccountant, SubsampledGaussian
from pyro_dp.accounting.origins import Origin

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.missing() is not None, reason=str(chromium.missing())),
]
LOOKS = {
    "light": {},
    "dark": {"dark": True},
    "phone": {"width": 390},
    "dark phone": {"width": 390, "dark": True},
    "least": {"width": 320},  # WCAG 2.2, 1.4.10
    "tablet": {"width": 820},
    "print": {"media": "print"},
}
SCROLLS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
DARK, WHITE = "rgb(21, 24, 28)", "rgb(255, 255, 255)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = chromium.Chromium(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def described():
    """All that a report may have, in words that are too long to be broken between them."""
    accountant = PrivacyAccountant(2.0)
    accountant.describe(
        title="Visits to doctors & <cost> " + "x" * 150,
        dataset="https://example.org/" + "a-long-path/" * 20,
        purpose="To learn whether cost sharing changes how often people see a doctor. " * 8,
        controller="Statistical office",
        unit="a person, with all years in which they were observed",
        units=5908,
    )
    for method, seeded, secure in [("DPSVI", 1, 0), ("DPSEP", 0, 1), ("A" * 100, 0, 0)]:
        origin = Origin.now(method, seeded=seeded, secure=secure)
        for bound in (0.123456, 1234567.8):
            with accountant.next_position(origin, bound):
                accountant.record(SubsampledGaussian(8.0, 0.0123456), 1234)
        accountant.note_result(origin, (0.1, 0.02))
    accountant.record(ApproximateDP(0.1, 1e-7, "private_selection among 3 settings, " + "y" * 100))
    accountant.note("A note. " + "z" * 200)
    return accountant


def looked_at():
    accountant = described()
    accountant.record_nonprivate("loss of DPSVI")
    return accountant


PAGES = {"described": described, "looked at": looked_at, "empty": PrivacyAccountant}


@pytest.fixture(scope="module")
def pages():
    return {name: make().report("html") for name, make in PAGES.items()}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", PAGES)
def test_reports(browser, pages, name, look):
    """No violation, no sideways scrolling, and dark pages for people who want them."""
    browser.show(pages[name], **LOOKS[look])
    assert browser.run("performance.getEntriesByType('resource').length") == 0  # fetched
    assert browser.violations() == {}
    assert browser.run(SCROLLS) <= 0
    assert browser.run(BACKGROUND) == (DARK if "dark" in look else WHITE)
    assert browser.run("document.querySelectorAll('svg').length") == 2 * (name == "described")


def test_dark_paper_is_white(browser, pages):
    browser.show(pages["described"], dark=True, media="print")
    assert browser.run(BACKGROUND) == WHITE
    assert browser.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    pdf = browser.printed()
    assert pdf.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 6


def test_a_phone_shows_cards_with_the_names_of_columns(browser, pages):
    """People who hear the page still have a table."""
    browser.show(pages["described"], width=390)
    name = "getComputedStyle(document.querySelector('.wide td'), '::before').content"
    assert browser.run(name) == '"who takes part"'
    browser.do("Accessibility.enable")
    nodes = browser.do("Accessibility.getFullAXTree")["nodes"]
    roles = [each["role"]["value"] for each in nodes if not each["ignored"]]
    for role in ("banner", "navigation", "main", "table", "row", "rowheader", "columnheader"):
        assert role in roles
    assert roles.count("columnheader") == 10 + 2


def test_the_checks_find_what_is_wrong(browser):
    """A page with two mistakes, and one that is too wide."""
    pale = "<p style='color:#999;background:#fff'>Too pale.<img src=data:,></p>"
    wrong = f"{pale}<p style='width:900px'>Too wide.</p>"
    browser.show(wrong, width=390)
    assert {"color-contrast", "image-alt", "document-title"} <= browser.violations().keys()
    assert browser.run(SCROLLS) > 0


@pytest.fixture(scope="module")
def cells():
    """A notebook's display of an accountant, an inference, a run and a posterior."""
    torch.set_default_dtype(torch.float64)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    accountant = described()
    guide = pyro.infer.autoguide.AutoMultivariateNormal(model)
    inference = DPSEP(model, guide, accountant=accountant, noise=Noise(200.0, source=0))
    result = inference.run(*data(), progress=False)
    return [each._repr_html_() for each in (accountant, inference, result, inference.posterior())]


@pytest.mark.parametrize("dark", [False, True])
def test_notebooks(browser, cells, dark):
    """In the colours of JupyterLab's themes."""
    ink, paper = ("#e0e0e0", "#111111") if dark else ("#212121", "#ffffff")
    page = (
        f"<!DOCTYPE html><html lang='en'><title>T</title><body style='color:{ink};"
        f"background:{paper}'><main><h1>T</h1>{''.join(cells)}</main>"
    )
    browser.show(page, dark=dark)
    assert browser.violations() == {}
    colours = (
        "[...document.querySelectorAll('caption,th,td,p')].map(x => getComputedStyle(x).color)"
    )
    assert len(set(browser.run(colours))) == 1
