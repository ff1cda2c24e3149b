"""The site: its pages, a build without a warning, and its look in a browser."""

import doctest
import functools
import http.server
import importlib
import importlib.util
import math
import os
import pkgutil
import re
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import quote

import chromium
import pytest
import torch
import trials
from filelock import FileLock

import pyro_dp
from pyro_dp import PrivacyAccountant, SubsampledGaussian
from pyro_dp.accounting.trade_off import best_power

ROOT = Path(__file__).parents[2]
SCROLLS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
WIDE = "[...document.querySelectorAll('.table-wrapper')].some(e => e.scrollWidth > e.clientWidth)"
FIRST_RESULT = """new Promise(done => setInterval(() => {
    const link = document.querySelector("#search-results li a")
    if (link) done(link.href)
}, 20))"""
PASTED = """{
    const field = document.querySelector("input.message")
    field.value = "Running the model on placeholder data raised RuntimeError: size mismatch, got 7"
    field.dispatchEvent(new Event("input"))
}"""
SOME = (  # one of each kind, for checks that hold alike on all others
    "docs/index.html",
    "docs/methods.html",
    "docs/api/posterior.html",
    "tutorials/4_from_ep_to_dpsep.html",
)
DOCS = ROOT / "docs"
API = "\n".join(page.read_text() for page in DOCS.glob("api/*.md"))
FIRST_LINES = re.search(r"```python\n(.*?)```", API, flags=re.S)[1]
DOCUMENTED = re.findall(r"^\.\. auto(?:class|exception|function):: (\S+)$", API, flags=re.M)


def public_names():
    """Full names of what any of the package's modules lists in its `__all__`."""
    for found in pkgutil.walk_packages(pyro_dp.__path__, "pyro_dp."):
        if not found.name.endswith("__main__"):
            module = importlib.import_module(found.name)
            for name in getattr(module, "__all__", ()):
                yield f"{module.__name__}.{name}", getattr(module, name)
    for name in pyro_dp.__all__:
        yield f"pyro_dp.{name}", getattr(pyro_dp, name)


def at(name):
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def test_all_that_is_public_has_its_place():
    """docs/api lists each public object once, under a name that exports it."""
    shown = [at(name) for name in DOCUMENTED]
    assert len({id(each) for each in shown}) == len(shown)
    known = dict(public_names())
    assert not set(DOCUMENTED) - set(known)
    missing = [name for name, each in known.items() if not any(each is one for one in shown)]
    assert not missing, f"docs/api has no place for {missing}"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:numpy.core:DeprecationWarning")  # by MPyC
@pytest.mark.filterwarnings("ignore::pyro_dp.NotPrivateWarning")
@pytest.mark.parametrize("name", DOCUMENTED)
def test_example(name):
    """Each by itself, after the first lines of the index."""
    if name.endswith("_app"):
        pytest.importorskip("flwr", reason="needs the extra flower")
    torch.set_default_dtype(torch.float32)
    names = {"__name__": "__main__"}
    exec(FIRST_LINES, names)
    (found,) = doctest.DocTestFinder(recurse=False).find(at(name), name, module=False, globs=names)
    assert found.examples, "no example"
    said = []
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    doctest.DocTestRunner(optionflags=flags, verbose=False).run(found, out=said.append)
    assert not said, "".join(said)


def test_all_pages_can_be_reached():
    """Nobody finds a page that no list names, and Sphinx warns of it."""
    pages = [*DOCS.glob("*.md"), *DOCS.glob("api/*.md"), *ROOT.glob("tutorials/*.ipynb")]
    listed = {(DOCS / "index").resolve()}
    for page in DOCS.rglob("*.md"):
        for block in re.findall(r"```{toctree}\n(.*?)```", page.read_text(), flags=re.S):
            names = re.findall(r"^(?:.* <)?([\w./*]+)>?$", block, flags=re.M)
            listed |= {
                each.with_suffix("") for name in names for each in page.parent.glob(f"{name}.*")
            }
    assert not {page.with_suffix("") for page in pages} - {each.resolve() for each in listed}


def test_what_epsilon_means():
    """The table for data-protection officers, from the definition; percents are rounded up."""
    pattern = r"^\| ([\d.]+)[^|]*\| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+) \|$"
    rows = re.findall(pattern, officer(), flags=re.M)
    assert len(rows) == 7
    sheet = (DOCS / "cheat_sheet.md").read_text()
    short = re.findall(r"^\| ([\d.]+) \| ([\d.]+) \| ([\d.]+)% \| ([\d.]+)% \|$", sheet, flags=re.M)
    assert len(short) == 3 and {(row[0], *row[2:], row[1]) for row in short} <= {*rows}
    for epsilon, power, gaussian, factor in (map(float, row) for row in rows):
        delta = 1e-5 if epsilon else 0.0
        bound = min(0.05 * math.exp(epsilon) + delta, 1 - math.exp(-epsilon) * (0.95 - delta))
        assert 0 <= power - 100 * bound < 0.1
        accountant = PrivacyAccountant(delta=1e-5)
        if epsilon:
            noise = PrivacyAccountant(epsilon, 1e-5).noise_multiplier(num_steps=1)
            accountant.record(SubsampledGaussian(noise))
        assert best_power(accountant) == f"{gaussian}%"
        assert factor == pytest.approx(math.exp(epsilon), rel=5e-3)


def test_what_epsilon_means_for_several_rows():
    """A person's rows move a sum as many times as far; rounded up."""
    noise = PrivacyAccountant(1.0, 1e-5).noise_multiplier(num_steps=1)
    found = re.search(r"epsilon of the person \| ([\d. |]+) \|", officer())[1].split(" | ")
    assert len(found) == 5
    for rows, epsilon in enumerate(map(float, found), start=1):
        accountant = PrivacyAccountant(delta=1e-5)
        accountant.record(SubsampledGaussian(noise / rows))
        assert 0 <= epsilon - accountant.get_epsilon() < 0.01


def officer():
    return (DOCS / "officer.md").read_text()


def module_at(path):
    specification = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def results(name):
    """A result of the benchmarks, as a frame."""
    pd = pytest.importorskip("pandas")
    path = ROOT / "benchmarks" / "results" / name
    if not path.exists():
        pytest.skip("an sdist has no results")
    return pd.read_csv(path)


def test_how_often_intervals_hold():
    """The rows of DPSVI in docs/explain.md are those of the simulations."""
    text = (DOCS / "explain.md").read_text()
    rows = re.findall(r"^\| (?:`DPSVI` )?\| ([\d,]+) \| ([\d.]+) \| (.*) \|$", text, flags=re.M)
    runs = results("coverage.csv")
    for size, epsilon, cells in rows[:4]:
        number = int(size.replace(",", ""))
        chosen = runs[(runs["size"] == number) & (runs.epsilon == float(epsilon))]
        held = chosen.groupby("doubtful").covered.mean().reindex([0, 1])
        for cell, found in zip(cells.split("|"), [chosen.doubtful.mean(), *held], strict=True):
            shown = cell.strip()
            assert shown == ("" if math.isnan(found) else f"{found:.{len(shown[2:])}f}")


def test_distances_to_the_exact_posterior():
    """The table of docs/methods.md, to its two digits."""
    rows = re.findall(
        r"^\| (0\.3|1|4) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$",
        (DOCS / "methods.md").read_text(),
        flags=re.M,
    )
    assert len(rows) == 3
    means = results("methods.csv").groupby(["method", "epsilon"]).kl.mean()
    for epsilon, *cells in rows:
        for method, cell in zip(
            ("DPSVI, nothing set, plain", "DP-SGLD", "VIPS"), cells, strict=True
        ):
            assert float(cell) == pytest.approx(means[method, float(epsilon)], rel=0.05)


@pytest.mark.slow
def test_results_are_those_of_the_benchmarks():
    """The page and its figures are what their command writes; other numbers are settings."""
    pytest.importorskip("matplotlib")
    results("methods.csv")
    summary = module_at(ROOT / "benchmarks" / "summary.py")
    page, figures = summary.made()
    assert summary.PAGE.read_text() == page
    assert {each.stem: each.read_text() for each in summary.FIGURES.iterdir()} == figures
    prose = re.sub(r"\]\(\S+\)|\{\w+\}", "", summary.TEMPLATE)
    settings = {"1e-5", "0.3", "1", "4", "95", "20,000", "5,000", "75", "569"}
    assert set(re.findall(r"\d(?:[\d.,e-]*\d)?", prose)) == settings


def test_data_of_the_figures_that_react():
    """They are those of the benchmarks, and complete."""
    pytest.importorskip("statsmodels")
    fits, people = results("slider.csv"), results("people.csv")
    assert len(fits) == 12 * 20 * 10 and len(people) == 3 * 4 * 8 * 5
    play = module_at(ROOT / "benchmarks" / "play.py")
    assert play.DATA.read_text() == play.page()


def test_inventories_are_what_their_command_writes():
    inventories = module_at(DOCS / "inventories.py")
    for project in inventories.PAGES:
        written = (inventories.FOLDER / f"{project}.inv").read_bytes()
        assert written == inventories.inventory(project)


@pytest.fixture(scope="module")
def site():
    """The folder of the built site: `make docs`, into a folder of its own, once in a test run."""
    pytest.importorskip("sphinx", reason="needs the extra docs")
    if not (ROOT / "benchmarks" / "figures").exists():
        pytest.skip("an sdist has no figures of the results")
    folder = trials.folder / "site"
    with FileLock(f"{folder}.lock"):
        if not (folder / "built").exists():
            _build(folder)
            (folder / "built").touch()
    return folder / "html"


def _build(folder):
    # A build keeps what it makes. Looking for garbage takes a seventh of its time.
    build = "import gc; gc.disable(); import sphinx.cmd.build as b; raise SystemExit(b.main())"
    options = "--quiet --fail-on-warning --keep-going -c docs".split()
    places = ["-d", folder / "trees", ROOT, folder / "html"]
    done = subprocess.run(
        [sys.executable, "-c", build, *options, *places],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def address(site):
    """The address of a server of the site on this machine."""
    handler = functools.partial(_Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.mark.slow
def test_links_within_the_site(site):
    """Sphinx checks the links that it makes. This test follows all links and anchors."""
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()}
    broken = []
    for page, text in pages.items():
        for link in set(re.findall(r'\b(?:href|src)="([^"]+)"', text)):
            path, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link) or link == "#":
                continue
            target = (page.parent / path.split("?")[0]).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors.get(target, {anchor})):
                broken.append((page.relative_to(site).as_posix(), link))
    assert not broken


@pytest.fixture
def browser(tmp_path):
    if (missing := chromium.missing()) is not None:
        pytest.skip(missing)
    opened = chromium.Chromium(tmp_path)
    yield opened
    opened.close()


@pytest.mark.slow
def test_in_a_browser(site, address, browser):
    """Check all pages on a desktop, and some in the dark, on a phone and a wide screen."""
    paths = sorted(page.relative_to(site).as_posix() for page in site.rglob("*.html"))
    paths.remove("index.html")  # leads to the first page
    assert len(paths) > 30
    faults = []
    wide, phone = dict(width=1440, dark=True), dict(width=390, dark=True)
    for look, searched in ((dict(width=1280), paths), (wide, SOME), (phone, SOME)):
        browser.look(**look)
        for path in paths:
            found = browser.open(f"{address}/{path}")
            if (pixels := browser.run(SCROLLS)) > 0:
                found.append(f"scrolls sideways by {pixels} pixels")
            if look == phone and path.startswith("docs/") and browser.run(WIDE):
                found.append("a table scrolls sideways")
            if path in searched:
                found.append(browser.violations(contrast=path in SOME))
            faults += [(path, look, fault) for fault in found if fault]
    assert not faults


@pytest.mark.slow
def test_search(site, address, browser):
    """Each word of docs/found.py leads to its page, before all other results."""
    words = module_at(DOCS / "found.py").WORDS
    for target, entries in words.items():
        for entry in entries:
            assert not browser.open(f"{address}/search.html?q={quote(entry)}")
            found = browser.run(FIRST_RESULT)
            assert re.sub(r"^.*/(?=docs/)|\.html|\?[^#]*", "", found) == target, entry


@pytest.mark.slow
def test_an_error_is_found_by_its_message(address, browser):
    browser.open(f"{address}/docs/errors.html")
    browser.run(PASTED)
    left = browser.run("document.querySelector('#what-errors-say li:not([hidden])').textContent")
    assert "size mismatch" in left and "Shapes do not fit" in left


@pytest.mark.slow
def test_the_cheat_sheet_is_one_page_of_paper(address, browser):
    browser.open(f"{address}/docs/cheat_sheet.html")
    assert len(re.findall(rb"/Type\s*/Page\b", browser.printed())) == 1


def test_the_cheat_sheet_as_pdf():
    """`make slides` made it, of one page, from the page as it is."""
    pdf = (DOCS / "cheat_sheet.pdf").read_bytes()
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == 1 and b"file:" not in pdf
    assert pdf.endswith(module_at(DOCS / "cheat_sheet.py").digest())


@pytest.mark.slow
def test_figures_react(site, browser):
    """From the disk, without a server."""
    browser.look()
    assert not browser.open(f"file://{site}/docs/play.html")

    def said(figure):
        return browser.run(f"document.querySelector('#play-{figure}').innerText")

    def act(figure, control, value, event):
        place = f"document.querySelector('#play-{figure} {control}')"
        browser.run(f"{place}.value = {value}; {place}.dispatchEvent(new Event('{event}'))")

    assert "factor of at most 2.72" in said("epsilon")
    act("epsilon", "input", 1, "input")  # 0.1
    assert "factor of at most 1.11" in said("epsilon")
    first = browser.run("document.querySelector('#play-epsilon svg').innerHTML")
    browser.run("document.querySelector('#play-epsilon button').click()")
    assert browser.run("document.querySelector('#play-epsilon svg').innerHTML") != first
    many = []
    for epsilon in (0.1, 0.3, 1, 3):
        act("people", "label:nth-of-type(2) select", epsilon, "change")
        many.append(int(re.sub(r"\D", "", said("people").splitlines()[-1])))
    assert many == sorted(many, reverse=True) and many[0] > many[-1]
    for _ in range(3):
        browser.run("document.querySelector('#play-attacker button').click()")
    assert "of 3 rounds" in said("attacker")
