"""Splits a model at its private plate into one record, the outside and the inside."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from pyro.poutine.indep_messenger import CondIndepStackFrame
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import SubsampleMessenger, _Subsample
from torch import Tensor

from pyro_dp.graphs.tracing import untraced
from pyro_dp.records.plate import PrivatePlate
from pyro_dp.utils.errors import ModelError
from pyro_dp.utils.torch_state import forked_rng, seed_torch


@dataclass(eq=False, repr=False)
class OneRecord(Messenger):
    """Run a model with the private plate holding a single index, and without the plate's scale N /
    1. (The checks show it a few.)

    The plate's own ``randperm`` indices are overridden, also where it declares ``subsample_size``.
    Scales and masks of the user are kept.

    :param index: tensor of shape (1,); of the checks, (k,).
    :param parameters: the names allowed, if any: a name that only some records use would reveal
        something by its existence.
    :param indexes: whether whole observed tensors are read at the index.
    """

    plate: PrivatePlate
    index: Tensor
    parameters: Collection[str] | None = None
    indexes: bool = True

    def __enter__(self):
        original, private = SubsampleMessenger._subsample, self.plate.name

        def subsample(name, size=None, subsample_size=None, subsample=None, *rest):
            # A declared size would be compared with the single index, and raise.
            if name == private:
                subsample_size = subsample = None
            return original(name, size, subsample_size, subsample, *rest)

        self._patch = mock.patch.object(SubsampleMessenger, "_subsample", staticmethod(subsample))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *exc_info):
        self._patch.stop()
        return super().__exit__(*exc_info)

    def _process_message(self, msg: dict) -> None:
        if msg["type"] == "param" and self.parameters is not None:
            if msg["name"] not in self.parameters:
                raise ModelError(
                    f"Parameter {msg['name']!r} appears for some records only: create every "
                    "parameter before anything depends on the data."
                )
        if msg["type"] != "sample":
            return
        if msg["name"] == self.plate.name and isinstance(msg["fn"], _Subsample):
            msg["value"] = self.index
            msg["done"] = True
        elif frame := self.plate.frame(msg):
            msg["scale"] = msg["scale"] * frame.size / frame.full_size
            if self.indexes and msg["is_observed"] and frame.dim is not None:
                msg["value"] = self._at_index(msg["value"], msg["fn"], frame)

    def _at_index(self, value: Any, fn: Any, frame: CondIndepStackFrame) -> Any:
        """For observations that are whole (by ``pyro.condition``, say) among arguments that are
        indexed: the index's rows of them. Pyro does not need this, because it sees all N records.
        """
        batch, dim = getattr(fn, "batch_shape", ()), frame.dim - getattr(fn, "event_dim", 0)
        is_whole = isinstance(value, Tensor) and value.dim() >= -dim
        is_whole = is_whole and value.shape[dim] == frame.full_size != frame.size
        if is_whole and (len(batch) < -frame.dim or batch[frame.dim] in (1, frame.size)):
            return value.index_select(dim, self.index)
        return value


@dataclass(eq=False, repr=False)
class Outside(Messenger):
    """Hide every site within the private plate from the handlers further out.

    Hidden latents still need a value for the model to run through; it is drawn without moving the
    public generator.
    """

    plate: PrivatePlate
    seed: int = 0

    def _process_message(self, msg: dict) -> None:
        if msg["type"] == "sample" and self.plate.holds(msg):
            if msg["value"] is None:
                with forked_rng(), torch.no_grad(), untraced():
                    seed_torch(self.seed)
                    msg["value"] = msg["fn"](*msg["args"], **msg["kwargs"])
                msg["done"] = True
            msg["stop"] = True


@dataclass(eq=False, repr=False)
class Inside(Messenger):
    """Hide every site outside the private plate, with the global latents fixed.

    :param values: value of each latent site outside the plate, and indices of each other plate.
    """

    plate: PrivatePlate
    values: Mapping[str, Tensor]

    def _process_message(self, msg: dict) -> None:
        if msg["type"] == "sample" and not self.plate.holds(msg):
            if msg["value"] is None and msg["name"] in self.values:
                msg["value"] = self.values[msg["name"]]
                msg["done"] = True
            # The private plate's own index site goes on to OneRecord.
            msg["stop"] = msg["name"] != self.plate.name


@dataclass(eq=False, repr=False)
class Redrawn(Messenger):
    """Latents have these values, and are drawn all the same. So other random parts, such as a
    dropout, get the same numbers as before.
    """

    values: Mapping[str, Tensor]

    def _pyro_sample(self, msg: dict) -> None:
        if msg["name"] in self.values and not msg["done"]:
            with torch.no_grad():
                msg["fn"](*msg["args"], **msg["kwargs"])
            msg["value"], msg["done"] = self.values[msg["name"]], True


def no_sites(*args: Any, **kwargs: Any) -> None:
    """Replaces a guide that has no sites, cannot run, or is not made yet."""
