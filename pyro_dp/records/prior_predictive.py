"""Made-up outcomes of a model, from its prior predictive: for records that nobody has seen."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import Unit
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_dp.records.arguments import Arguments, as_tensors, in_memory
from pyro_dp.records.messengers import OneRecord
from pyro_dp.records.plate import PrivatePlate, find_plate, is_random
from pyro_dp.records.sandbox import guarded
from pyro_dp.records.stand_ins import is_table
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.torch_state import forked_rng

_FACTOR = (
    "pyro.factor {name!r} has no outcomes that could be drawn: write it as a pyro.sample "
    "statement with obs=, to forecast."
)
_NOT_FINITE = (
    "The prior predictive of site {name!r} has values that are not finite. Use a narrower prior "
    "or smaller features."
)
_NOT_FOUND = (
    "Site {name!r} observes something else than an argument, or a column of one, as it stands. "
    "Made-up outcomes cannot replace it. Pass its observed value as an argument of its own."
)


@dataclass(frozen=True, eq=False)
class PriorPredictive:
    """:param args: made up, as ``kwargs``; outcomes have the right shape and type, and no use."""

    model: Callable
    plate: PrivatePlate
    args: tuple
    kwargs: dict

    @staticmethod
    def of(model: Callable, args: tuple, kwargs: dict, plate: str | None) -> "PriorPredictive":
        """
        :param plate: name of the private one; None: it is found.
        :raises ModelError: there is none.
        """
        args, kwargs = in_memory(as_tensors(model, args, kwargs))
        return PriorPredictive(model, find_plate(model, args, kwargs, plate), args, kwargs)

    def draw(self, seed: int) -> Arguments:
        """The arguments with outcomes that one draw of the model's latents makes.

        :raises ModelError: the model fails on these arguments, or its outcomes are not finite, are
            no arguments, or have no distribution.
        """
        with forked_rng():
            pyro.set_rng_seed(seed)
            trace = self._traced(poutine.uncondition(self.model), (self.args, self.kwargs))
            given = self.args, self.kwargs
            for name, site in trace.nodes.items():
                if not (is_random(site) and site["infer"].get("was_observed")):
                    continue
                if isinstance(site["fn"], Unit):
                    raise ModelError(_FACTOR.format(name=name))
                if not site["value"].isfinite().all():
                    raise ModelError(_NOT_FINITE.format(name=name))
                given = self._with_outcome(given, name, trace)
            return given

    def _with_outcome(self, given: Arguments, name: str, trace: poutine.Trace) -> Arguments:
        """The arguments, that a site may observe what was drawn.

        Which of them it observes is found by trying: with the right one replaced, the site shows
        it.
        """
        site = trace.nodes[name]
        drawn, before = site["value"], site["infer"]["obs"]
        if _same(before, drawn):
            return given
        model = poutine.replay(self.model, trace=trace)
        for candidate in _replaced(given, drawn):
            try:
                shown = self._traced(model, candidate).nodes[name]["value"]
            except ModelError:  # it cannot hold outcomes
                continue
            if _same(shown, drawn):
                return candidate
        raise ModelError(_NOT_FOUND.format(name=name))

    def _traced(self, model: Callable, given: Arguments) -> poutine.Trace:
        """A run on all records at once."""
        args, kwargs = given
        tables = (leaf for leaf in pytree.tree_leaves(given) if is_table(leaf))
        indices = torch.arange(self.plate.size, device=next(tables).device)
        with (
            torch.no_grad(),
            pyro.get_param_store().scope(),
            OneRecord(self.plate, indices),
            guarded("Running the model on the made-up arguments", public=True),
        ):
            return poutine.trace(model).get_trace(*args, **kwargs)


def _replaced(given: Arguments, outcomes: Tensor) -> Iterator[Arguments]:
    """The arguments with each tensor, or column of one, of this shape in turn replaced."""
    leaves, spec = pytree.tree_flatten(given)
    for place, leaf in enumerate(leaves):
        if not is_table(leaf):
            continue
        for column in _columns(leaf, outcomes):
            new = leaf.clone()
            new[column] = outcomes.to(leaf.dtype)
            yield pytree.tree_unflatten([*leaves[:place], new, *leaves[place + 1 :]], spec)


def _columns(table: Tensor, outcomes: Tensor) -> list[Any]:
    """Indices of the table's free cells for outcomes."""
    if table.shape == outcomes.shape:
        return [...]
    if table.shape[:-1] == outcomes.shape:
        return [(..., column) for column in range(table.shape[-1])]
    return []


def _same(shown: Any, drawn: Tensor) -> bool:
    """Whether these are the outcomes, perhaps in the dtype of an argument."""
    if not isinstance(shown, Tensor) or shown.shape != drawn.shape:
        return False
    return bool(torch.isclose(shown.double(), drawn.double(), rtol=1e-5, atol=1e-30).all())
