"""An entry of the zoo: a model as its author writes it, and what a user hands over with it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import pyro
import torch
from pyro.infer import ELBO, Trace_ELBO


@dataclass(frozen=True)
class Entry:
    """A model, its guide and its data.

    :param source: the source of the model.
    :param make: a new model and a new guide, from nothing but the seeds.
    :param draw: so many records, from a model like this one: arguments of model and guide.
    :param loss: a new one.
    :param edit: the line that has to be written otherwise than the source has it.
    :param size: records of the measured table.
    :param dpsep: whether ``DPSEP`` is for it: a Gaussian guide of latents outside the plate.
    """

    name: str
    source: str
    make: Callable[[], tuple[Callable, Callable]]
    draw: Callable[[int], tuple]
    loss: Callable[[], ELBO] = Trace_ELBO
    edit: str = ""
    size: int = 5000
    dpsep: bool = False

    def data(self, size: int, seed: int = 0) -> tuple:
        """Arguments of model and guide, drawn with this seed; Pyro's generators stay as they were.

        Numbers are of torch's default type.
        """
        state = pyro.util.get_rng_state()
        pyro.set_rng_seed(seed)
        with torch.no_grad():
            data = self.draw(size)
        pyro.util.set_rng_state(state)
        return data


def plain(name: str, model: Callable, guide: Callable, draw: Callable, **options) -> Entry:
    """A model that is a function, whose docstring has the source.

    :param guide: its guide, or the class of its autoguide.
    """

    def make():
        return model, guide(model) if isinstance(guide, type) else guide

    return Entry(name, inspect.getdoc(model).rstrip("."), make, draw, **options)
