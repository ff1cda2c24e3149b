"""One door: who in the package may touch exact sums, the ledger and the noise. Nobody else does.

This reads the source, not running code. A use is any occurrence of the name: a call, an alias, an
import, a definition, a pattern, a text as in ``getattr(x, "name")``. A name that is put together at
run time is not found.
"""

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

import pyro_dp

pytestmark = pytest.mark.every_case

# Module, and the innermost class and function of each use, as often as it is used there.
USES = {
    # The sums of a batch, without noise: made and added, compared, and released.
    "_added": """
        mechanism.clipping.ClippedSum.__init__ mechanism.clipping.ClippedSum.add_sums
        mechanism.clipping.ClippedSum.add_sums mechanism.clipping.ClippedSum.add_sums
        mechanism.clipping.ClippedSum._totals mechanism.clipping.ClippedSum.over_ranks
    """,
    "_totals": """
        mechanism.clipping.ClippedSum mechanism.clipping.ClippedSum._exact_sums
        mechanism.clipping.ClippedSum.over_ranks mechanism.fixed_point.FixedPointSum._exact_sums
        mechanism.fixed_point.FixedPointSum._noisy
    """,
    # Sums of all processes of a cluster go to rank 0, and nowhere else.
    "over_ranks": "mechanism.clipping.ClippedSum mechanism.cluster.Ranks.add_up",
    # Sums of all owners of a federation go to the aggregator, with noise.
    "in_shares": """
        mechanism.fixed_point.FixedPointSum mechanism.federation.Holders.add_up
    """,
    "_total": """
        mechanism.fixed_point.FixedPointSum mechanism.fixed_point.FixedPointSum.in_shares
        mechanism.fixed_point.FixedPointSum._noisy mechanism.fixed_point.FixedPointSum._noisy
    """,
    ".reduce": """
        mechanism.cluster.Cluster.reduce mechanism.cluster.Ranks.add_up
        records.vectorised accounting.second_opinion._pld_pessimistic
        mechanism.shamir_sums.ShamirSums.add
    """,  # the last three are functools' and numpy's
    ".broadcast": """
        mechanism.cluster.Cluster.broadcast mechanism.cluster.Ranks.released
        mechanism.cluster.Ranks.released
    """,
    "_exact_sums": """
        mechanism.clipping.ClippedSum mechanism.fixed_point.FixedPointSum
        mechanism.clipping.ClippedSum._noisy mechanism.clipping.ClippedSum.require_same_as
        mechanism.clipping.ClippedSum.require_same_as
    """,
    "clipped_sums": """
        mechanism.clipping mechanism.clipping.ClippedSum mechanism.clipping.ClippedSum
        mechanism.clipping.ClippedSum mechanism.clipping.ClippedSum.add
        mechanism.fixed_point.FixedPointSum infer.padded_sum.PaddedSum.__init__
    """,
    "compiled_sums": """
        mechanism.clipping.ClippedSum mechanism.fixed_point.FixedPointSum
        infer.padded_sum.PaddedSum.__init__
    """,
    "rounded_sums": """
        mechanism.fixed_point mechanism.fixed_point.FixedPointSum
        mechanism.fixed_point.FixedPointSum
    """,
    "whole_sum": """
        mechanism.contributions.Divisible mechanism.contributions.divisible
        mechanism.contributions.Rows
        mechanism.contributions.Kept mechanism.contributions.Kept.whole_sum
        mechanism.contributions.LookedUpRows mechanism.contributions.LookedUpRows.whole_sum
        mechanism.contributions.OuterProducts mechanism.contributions.OuterProducts.whole_sum
        mechanism.contributions.Joined mechanism.contributions.Joined.whole_sum
        mechanism.fixed_point.rounded_sums tabular.cells.CellCounts
    """,
    "add_sums": """
        mechanism.clipping.ClippedSum mechanism.clipping.ClippedSum.add
        infer.padded_sum.PaddedSum.add
    """,
    # With noise: the door, and the one function that goes through it, of all inferences.
    "_noisy": """
        mechanism.clipping.ClippedSum mechanism.fixed_point.FixedPointSum
        mechanism.release.release
    """,
    "release": """
        mechanism.release mechanism.releases mechanism.releases.Releases.make accounting.ledger
        accounting.report
    """,  # the last two are headings of tables
    # The noise itself, and its streams.
    "standard_normal": "mechanism.streams.normals",
    "normals": """
        mechanism.streams mechanism.clipping mechanism.clipping.ClippedSum._noisy
    """,
    "counted_normals": "mechanism.streams mechanism.streams.normals",
    "discrete_gaussian": """
        mechanism.system_random mechanism.fixed_point
        mechanism.fixed_point.FixedPointSum._noisy
    """,
    "'noise'": """
        mechanism.streams mechanism.releases.Releases.make
        vips.e_step.MixedStatistics.state
        vips.e_step.MixedStatistics.from_state
        infer.svi.histogram_bound.HistogramBound.resumed
        infer.posterior.forecast.Forecasted._forecast
        pipeline.standard_scaler.DPStandardScaler.__getstate__
    """,  # all but the first two: how noisy is what was released, and the argument's name
    ".stream": """
        mechanism.releases.Releases.make mechanism.releases.Releases.sample
        infer.svi.stochastic_gradient_vi.StochasticGradientVI.step
        infer.ep.stochastic_ep.StochasticEP.step
        vips.inference.VIPS._released mechanism.nonprivate.NonPrivate._read
        pipeline.private_selection.private_selection
        pipeline.private_selection.private_selection
    """,  # all except the first sample records, or draw their latents
    # The ledger.
    ".record": """
        mechanism.release.release pipeline.private_selection.private_selection
        accounting.accountant.PrivacyAccountant.record_nonprivate
        accounting.accountant.PrivacyAccountant.to_autodp
        auditing.result.with_noise
        pipeline.trials.TrialAccountant.record
    """,
    ".enter": """
        accounting.accountant.PrivacyAccountant.record
        accounting.books.Books._write accounting.books.Books._write
        accounting.journal._Lines._enter
    """,  # the last three keep the ledger, and write and read its journal
    ".mirror": """
        mechanism.cluster.Ranks.released accounting.accountant.PrivacyAccountant.mirror
    """,
    "record_nonprivate": "accounting.accountant.PrivacyAccountant mechanism.nonprivate.mark_look",
    "mark_look": """
        mechanism.nonprivate mechanism.nonprivate.NonPrivate._read
    """,
    # Imports of all names. Other users keep a column of that name, which has all other columns.
    "*": """
        tabular.synthesizer._kept tabular.synthesizer.Synthesizer.__repr__
        tabular.command_line._run
    """,
}


def sources():
    """By module."""
    root = Path(pyro_dp.__file__).parent
    paths = {path.relative_to(root).with_suffix(""): path for path in root.rglob("*.py")}
    return {".".join(name.parts): path.read_text() for name, path in paths.items()}


@functools.cache
def uses(source: str, module: str) -> Counter:
    """How often which name of :data:`USES` stands where."""
    found = Counter()
    pending = [(ast.parse(source), module)]
    while pending:
        node, place = pending.pop()
        text = _text(node)
        words, texts = (_words(node), []) if text is None else ([], text.split("."))
        # A plain word is an attribute, or stands where it may be one.
        by_attribute = isinstance(node, ast.Attribute | ast.alias | ast.MatchClass)
        names = [name for text in texts for name in (text, "." + text, f"'{text}'")]
        names += [*words, *("." + word for word in words if by_attribute)]
        found.update((name, place) for name in names if name in USES)
        inner = place
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{place}.{node.name}"
        if text is None:
            pending += [(child, inner) for child in ast.iter_child_nodes(node)]
    return found


def _words(node: ast.AST) -> list[str]:
    """The names that a node itself holds.

    An import under another name counts twice, since the other name is not searched for.
    """
    words = [node.name] if isinstance(node, ast.alias) and node.asname else []
    for _, value in ast.iter_fields(node):
        words += value if isinstance(value, list) else [value]
    return [word for word in words if isinstance(word, str)]


def _text(node: ast.AST) -> str | None:
    """The text of a constant, or of constants that are put together."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [_text(node.left), _text(node.right)]
    elif isinstance(node, ast.JoinedStr):
        parts = [_text(part) for part in node.values]
    elif isinstance(node, ast.FormattedValue):
        return _text(node.value)
    else:
        return None
    return None if None in parts else "".join(parts)


def wrong(modules: dict[str, str]) -> list[str]:
    """Uses that USES does not list, or lists in vain."""
    found = Counter()
    for module, source in modules.items():
        found.update(uses(source, module))
    stated = Counter((name, place) for name, places in USES.items() for place in places.split())
    return [
        *(f"{name} is used in {place}" for name, place in found - stated),
        *(f"{name} is not used in {place}" for name, place in stated - found),
    ]


@pytest.mark.slow
@pytest.mark.every_commit
def test_nobody_else():
    assert wrong(sources()) == []


_DOOR = "from pyro_dp.mechanism.release import release"
# A module, the code that is added to it, and the name and scope of the use that is found.
PLANTED = {
    "called": ("svi", "def f(clipped): return clipped._noisy([0.0], None)", "_noisy", ".f"),
    "exact": ("steps", "def f(clipped): return clipped._exact_sums", "_exact_sums", ".f"),
    "its field": ("factors", "def f(c): return c._totals", "_totals", ".f"),
    "in units": ("vips.e_step", "def f(c): return c._added", "_added", ".f"),
    "getattr": ("sep", "def f(c): return getattr(c, '_noisy')([0.0], None)", "_noisy", ".f"),
    "getattr in parts": ("sep", "def f(c): return getattr(c, '_no' + 'isy')", "_noisy", ".f"),
    "formatted": ("sep", "def f(c): return getattr(c, f'_no{\"isy\"}')", "_noisy", ".f"),
    "attrgetter": ("sep", "f = attrgetter('_sum._totals')", "_totals", ""),
    "by dictionary": ("sep", "def f(c): return vars(c)['_totals']", "_totals", ".f"),
    "by pattern": ("sep", "match c:\n case ClippedSum(_totals=t): print(t)", "_totals", ""),
    "alias": ("mechanism.releases", "peek = ClippedSum._noisy", "_noisy", ""),
    "alias within": ("mechanism.clipping", "peek = ClippedSum._noisy", "_noisy", ""),
    "alias of the door": ("mechanism.releases", "again = release", "release", ""),
    "subclass": ("sep", "class Mine(ClippedSum):\n def _noisy(self): pass", "_noisy", ".Mine"),
    "through super": ("svi", "def f(self): return super(A, self)._exact_sums", "_exact_sums", ".f"),
    "imported": ("svi", _DOOR, "release", ""),
    "imported as": ("svi", f"{_DOOR} as r", "release", ""),
    "again as": ("mechanism.releases", f"{_DOOR} as r", "release", ""),
    "from another": ("svi", "from pyro_dp.mechanism.releases import release", "release", ""),
    "module": ("vips", "def f(m, c): return m.clipped_sums([c], [1.0])", "clipped_sums", ".f"),
    "all imported": ("svi", "from pyro_dp.mechanism.clipping import *", "*", ""),
    "sums of a graph": ("svi", "def f(g, c): c.add_sums(g())", "add_sums", ".f"),
    "rounded": (
        "svi",
        "from pyro_dp.mechanism.fixed_point import rounded_sums",
        "rounded_sums",
        "",
    ),
    "recorded": ("svi", "def f(a, event): a.record(event)", ".record", ".f"),
    "recorded by alias": ("svi", "def f(a): return a.record", ".record", ".f"),
    "recorded by getattr": ("svi", "def f(a): return getattr(a, 'record')", ".record", ".f"),
    "a look": ("theory", "def f(a): a.record_nonprivate('x')", "record_nonprivate", ".f"),
    "a marked look": ("svi", "from pyro_dp.mechanism.nonprivate import mark_look", "mark_look", ""),
    "stream": ("scaler", "def f(r): return r.stream('noise', 0)", "'noise'", ".f"),
    "stream of a name": ("scaler", "def f(r, p): return r.stream(p, 0)", ".stream", ".f"),
    "purpose": ("scaler", "P = 'noise'", "'noise'", ""),
    "normals": ("svi", "def f(g): return g.standard_normal(3)", "standard_normal", ".f"),
    "integers": ("svi", "from m import discrete_gaussian as draw", "discrete_gaussian", ""),
    "a new module": ("leak", "def f(c): return c._noisy([0.0], None)", "_noisy", ".f"),
    "deep inside": (
        "leak",
        "class A:\n async def g(self): (lambda c: c._noisy)(1)",
        "_noisy",
        ".A.g",
    ),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_second_one_is_found(kind):
    module, source, name, place = PLANTED[kind]
    modules = sources()
    modules[module] = f"{modules.get(module, '')}\n{source}\n"
    assert f"{name} is used in {module}{place}" in wrong(modules)


_NOISY = "clipped._noisy(sigmas, noise)"


@pytest.mark.parametrize(
    "module, old, new",
    [
        ("mechanism.release", f"return {_NOISY}", f"a = {_NOISY}"),
        ("mechanism.release", "    accountant.record(event)\n", ""),
        ("mechanism.releases", "import release\n", "import release as r\n"),
        ("mechanism.releases", "release,\n            clipped,", "r,\n            clipped,"),
    ],
)
def test_neither_twice_nor_left_out(module, old, new):
    """Two uses in one function count, as for the mean of two draws; so does a use that is gone."""
    modules = sources()
    assert modules[module].count(old) == 1
    double = f"{new}\n    {old}" if "_noisy" in old else new
    assert wrong(modules | {module: modules[module].replace(old, double)})


def test_the_guarantee_lists_the_code_to_review():
    """docs/guarantee.md names each file once, with its lines to the nearest hundred or so."""
    root = Path(pyro_dp.__file__).parent
    page = (root.parent / "docs" / "guarantee.md").read_text().replace(",", "")
    named, stated = re.search(r"These (\d+) files .* about (\d+) lines", page).groups()
    rows = re.findall(r"^\|.*\| `(\w+)` \| (.*) \| (\d+) \|$", page, re.MULTILINE)
    sizes = {}
    for room, files, lines in rows:
        own = [root / room / f"{name}.py" for name in files.split()]
        sizes |= {path: len(path.read_text().splitlines()) for path in own}
        assert sum(map(sizes.get, own)) == pytest.approx(int(lines), abs=120), room
    assert len(sizes) == int(named)
    assert sum(sizes.values()) == pytest.approx(int(stated), abs=400)
