"""Verdicts on user code that leaks: refused by name, bounded as promised, or a leak.

A case runs on a data set and on two neighbours. In these one row is replaced, by another such row
and by an outlier. Seeds are the same, and the neighbours' releases are set to those of the first
run, noise included. So any remaining difference bypassed the release.
"""

import contextlib
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pyro
import torch
from leaks import STEPS, Case, Leak
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import pyro_dp.mechanism.releases
import pyro_dp.mechanism.sampling
from pyro_dp import ConfigurationError, PrivacyAccountant, PrivacyError
from pyro_dp.mechanism.release import release

ROW = 22  # the replaced one; the structural checks' examples are others
OUTLIER = 1000.0
ROUNDING = 1e-6  # in units of the bound, and of public values
NEAR = 0.05  # a number of the data is not hit by chance: optimizers move by less, and it is far

Values = dict[str, Tensor]


@dataclass
class Run:
    """One run of a case.

    :param sums: each release's sums, before the noise: a tensor for each block.
    :param bounds: the blocks' bounds.
    :param released: the same with noise.
    :param start: the public values at the first release.
    :param public: the public values after each step.
    :param texts: warnings, by step.
    :param error: the error that ended it.
    """

    sums: list[list[Tensor]] = field(default_factory=list)
    bounds: list[list[float]] = field(default_factory=list)
    released: list[list[Tensor]] = field(default_factory=list)
    start: Values = field(default_factory=dict)
    public: list[Values] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)
    error: Exception | None = None

    @property
    def refused(self) -> bool:
        return isinstance(self.error, PrivacyError) and not self.sums


@dataclass(frozen=True)
class Verdict:
    """
    :param kind: "refused", "bounded", or the kind of leak.
    :param moved: the largest move of the sum of a release with the replaced record, in units of its
        bound C; at most 2 without a leak.
    :param others: the same for releases without that record; 0 without a leak.
    :param public: the most by which a public value moved although all releases were equal; 0
        without a leak.
    :param equal: a public value that is a number of the data, and that number.
    :param text: the refusal's.
    """

    kind: str
    moved: float = 0.0
    others: float = 0.0
    public: float = 0.0
    equal: str = ""
    text: str = ""

    @property
    def good(self) -> bool:
        return self.kind in ("refused", "bounded")

    @property
    def figures(self) -> str:
        """The movements, for a table."""
        figures = {"sum": self.moved, "without the record": self.others}
        shown = [f"{name} {value:.2f} C" for name, value in figures.items() if value > ROUNDING]
        shown += [f"public values {self.public:.3g}"] if self.public > ROUNDING else []
        shown += [self.equal] if self.equal else []
        return ", ".join(shown)


def judge(leak: Leak) -> Verdict:
    """Run it on a data set and its neighbours."""
    data = leak.data()
    first = run(leak.build, data)
    others = [(each, run(leak.build, each, first)) for each in neighbours(data)]
    runs = [(data, first), *others]
    for each, found in runs:
        said = [("a warning", text) for texts in found.texts for text in texts]
        if isinstance(found.error, PrivacyError):  # what user code raises itself is its own
            said.append(("an error", str(found.error)))
        for kind, text in said:
            if quotes(text, each):
                return Verdict(f"{kind} quotes the data", text=text)
    crashed = [r.error for _, r in runs if r.error and not isinstance(r.error, PrivacyError)]
    if crashed:
        return Verdict(f"crashes with {type(crashed[0]).__name__}", text=str(crashed[0]))
    refusals = [r.error for _, r in runs if r.refused]
    if len(refusals) == len(runs) or (refusals and leak.curator):
        text = str(refusals[0])
        named = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in leak.names)
        return Verdict("refused" if named else "refused, but not by name", text=text)
    if refusals:
        return Verdict("refused on some data only", text=str(refusals[0]))
    return _compared(runs)


def run(build: Callable[..., Case], data: tuple[Tensor, ...], like: Run | None = None) -> Run:
    """A run from a fresh start.

    :param like: a run whose releases replace this one's.
    """
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    found = Run()
    with _watched(found, like) as watch:
        try:
            with _texts(found):
                case = build(*(x.clone() for x in data))
            watch.case = case
            for _ in range(STEPS):
                with _texts(found):
                    result = case.inference.step(*case.data)
                found.public.append(public_values(case) | {"result": torch.as_tensor(result)})
        except Exception as error:
            found.error = error
    return found


def neighbours(data: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """One row is replaced: by another such row, and by an outlier."""
    typical = tuple(x.clone() for x in data)
    outlier = tuple(x.clone() for x in data)
    for x, one, other in zip(data, typical, outlier, strict=True):
        one[ROW] = x[3] + 0.5 * (x[5] - x[8])
        other[ROW] = OUTLIER
    yield typical
    yield outlier


def public_values(case: Case) -> Values:
    """Everything that a user may publish after a step."""
    inference, found = case.inference, _parameters(case)
    with contextlib.suppress(ConfigurationError):  # not before the first step
        state = {n: x for n, x in inference.state_dict().items() if n != "accountant"}
        found |= _flat("state", state)
    if hasattr(inference, "posterior"):
        found |= _flat("posterior", _moments(inference.posterior()))
    if hasattr(inference, "get_samples"):
        found |= _flat("samples", inference.get_samples())
    guide = getattr(inference, "guide", None)
    if isinstance(guide, nn.Module) and not hasattr(inference, "get_samples"):
        found |= _flat("median", guide.median(*case.data) if hasattr(guide, "median") else {})
    found["generator"] = torch.get_rng_state()
    return {name: torch.as_tensor(x).detach().clone() for name, x in found.items()}


def _parameters(case: Case) -> Values:
    store = pyro.get_param_store()
    found = {f"store.{name}": store[name] for name in store}
    roots = (case.inference.model, getattr(case.inference, "guide", None), *case.publishes)
    for k, module in enumerate(roots):
        if isinstance(module, nn.Module):
            found |= _flat(f"module {k}", module.state_dict())
    return {name: x.detach().clone() for name, x in found.items()}


def _moments(posterior: Any) -> dict[str, tuple[Tensor, Tensor]]:
    each = posterior if isinstance(posterior, Mapping) else {"": posterior}
    return {name: (d.mean, d.variance) for name, d in each.items()}


def _flat(prefix: str, tree: Any) -> Values:
    leaves, _ = pytree.tree_flatten_with_path(tree)
    kept = [(path, x) for path, x in leaves if isinstance(x, (Tensor, float))]
    return {prefix + pytree.keystr(path): torch.as_tensor(x) for path, x in kept}


class _Watch:
    """Replace the functions that sample and release."""

    def __init__(self, found: Run, like: Run | None):
        self.found, self.like = found, like
        self.case: Case | None = None
        self.drawn = 0

    def draw(self, sampler: Any, stream: Any) -> Tensor:
        """All records in the first and third release, all but one in the second."""
        self.drawn += 1
        everybody = torch.arange(sampler.size)
        return everybody if self.drawn % 2 else everybody[everybody != ROW]

    def release(self, clipped: Any, *, accountant: Any, event: Any, noise: Any) -> list[Tensor]:
        found, count = self.found, len(self.found.sums)
        if not count:
            found.start = _parameters(self.case)
        silent = dict(accountant=PrivacyAccountant(), event=replace(event, noise_multiplier=0.0))
        found.sums.append(release(clipped, **silent, noise=noise))
        found.bounds.append([block.bound for block in clipped.blocks])
        released = release(clipped, accountant=accountant, event=event, noise=noise)
        if self.like and count < len(self.like.released):
            same = self.like.released[count]
            if [x.shape for x in same] == [x.shape for x in released]:
                released = [x.clone() for x in same]
        found.released.append([x.clone() for x in released])
        return released


@contextlib.contextmanager
def _watched(found: Run, like: Run | None) -> Iterator[_Watch]:
    watch = _Watch(found, like)
    sampler = pyro_dp.mechanism.sampling.RecordSampler
    draw = lambda self, stream: watch.draw(self, stream)  # noqa: E731
    with (
        mock.patch.object(sampler, "draw", draw),
        mock.patch.object(pyro_dp.mechanism.releases, "release", watch.release),
    ):
        yield watch


@contextlib.contextmanager
def _texts(found: Run) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            found.texts.append([str(each.message) for each in caught])


def _compared(runs: list[tuple[tuple[Tensor, ...], Run]]) -> Verdict:
    (_, first), *others = runs
    moved = without = public = 0.0
    kinds: list[str] = []
    for _, other in others:
        for k, (ours, theirs) in enumerate(zip(first.sums, other.sums, strict=False)):
            distance = _in_bounds(ours, theirs, first.bounds[k])
            if k % 2:
                without = max(without, distance)
            else:
                moved = max(moved, distance)
        states = [(first.start, other.start), *zip(first.public, other.public, strict=False)]
        public = max(public, *(_distance(ours, theirs) for ours, theirs in states))
        if str(first.error) != str(other.error) or len(first.sums) != len(other.sums):
            kinds.append("an error tells")
        # Building, and the first step with its checks, are for the curator.
        later = zip(first.texts[2:], other.texts[2:], strict=False)
        if any(ours != theirs for ours, theirs in later):
            kinds.append("a warning tells")
    equal = next(filter(None, (_number_in(r, data) for data, r in runs)), "")
    if equal:
        kinds.insert(0, "a number of the data is public")
    if public > ROUNDING:
        kinds.insert(0, "public values move")
    if moved > 2 + ROUNDING or without > ROUNDING:
        kinds.insert(0, "the sum moves")
    text = str(first.error or "")
    return Verdict(", ".join(kinds) or "bounded", moved, without, public, equal, text)


def _in_bounds(ours: list[Tensor], theirs: list[Tensor], bounds: list[float]) -> float:
    """The most by which a block moved, in units of its bound."""
    if [x.shape for x in ours] != [x.shape for x in theirs]:
        return math.inf
    blocks = zip(ours, theirs, bounds, strict=True)
    return max(torch.linalg.vector_norm(x - z).item() / bound for x, z, bound in blocks)


def _distance(ours: Values, theirs: Values) -> float:
    """The most by which a value differs, beyond rounding."""
    if {n: x.shape for n, x in ours.items()} != {n: x.shape for n, x in theirs.items()}:
        return math.inf
    worst = 0.0
    for name, x in ours.items():
        one, other = x.double(), theirs[name].double()
        difference = (one - other).abs().where(~(one.isnan() & other.isnan()), 0.0)
        rounding = ROUNDING * one.abs().nan_to_num(0.0).clamp(min=1.0)
        difference = difference.nan_to_num(math.inf).where(difference > rounding, 0.0)
        worst = max(worst, difference.amax().item() if x.numel() else 0.0)
    return worst


def numbers(data: tuple[Tensor, ...]) -> Tensor:
    """Means, standard deviations, medians and extremes of the columns."""
    columns = [x if x.dim() > 1 else x[:, None] for x in data]
    x = torch.cat(columns, dim=1).double()
    extremes = (x.amin(0), x.amax(0), x.median(0).values)
    return torch.cat([x.mean(0), x.std(0), x.std(0, correction=0), *extremes])


def _number_in(found: Run, data: tuple[Tensor, ...]) -> str:
    """A parameter or buffer that is, up to its sign, a number of the data, or in a row of them.

    Values computed from releases, such as an optimizer's state, may come near one by chance.
    """
    known = numbers(data).abs()
    rows = [x.double().abs() for x in data if x.dim() == 2]
    for name, value in (item for values in (found.start, *found.public) for item in values.items()):
        if not name.startswith(("store", "module")) or not value.is_floating_point():
            continue
        x = value.double().abs()
        pairs = [(x.reshape(-1, 1), known)]
        for each in rows:
            if x.dim() and x.shape[-1] == each.shape[1]:
                ours = x.reshape(-1, 1, x.shape[-1]).expand(-1, len(each), -1)
                same = ((ours - each).abs() < NEAR).all(-1)
                pairs.append((ours[same], each.expand_as(ours)[same]))
        for one, other in pairs:
            one, other = torch.broadcast_tensors(one, other)
            near = (one - other).abs() < NEAR
            if near.any():
                return f"{name} is {one[near][0]:.2f} (data: {other[near][0]:.2f})"
    return ""


def quotes(text: str, data: tuple[Tensor, ...]) -> bool:
    """Whether a text has a number of the data, rounded or not."""
    entries = [x.flatten().double() for x in data]
    known = torch.cat([numbers(data), *entries]).abs()
    for whole, digits in re.findall(r"(\d{2,})(?:\.(\d+))?", text):
        if digits:
            value, step = float(f"{whole}.{digits}"), 0.5 * 10.0 ** -len(digits)
        else:
            value, step = float(whole), 1e-9
        if ((known - value).abs() <= step + 1e-9).any():
            return True
    return False
