"""A plate of very many elements, of which a model is shown a few: for runs on placeholders."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
from pyro.poutine.subsample_messenger import SubsampleMessenger


@dataclass
class FewIndices:
    """Within: plates of this size have the first ``count`` indices, also within Pyro's blocks.

    :param size: of the plates.
    :ivar declared: the batch size that each of them declares, by name.
    """

    size: int
    count: int
    declared: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def shown(self) -> Iterator[None]:
        original = SubsampleMessenger._subsample

        def subsample(name, size=None, subsample_size=None, subsample=None, *rest):
            if size == self.size > self.count and subsample is None:
                self.declared[name] = subsample_size or size
                subsample_size, subsample = None, torch.arange(self.count)
            return original(name, size, subsample_size, subsample, *rest)

        with mock.patch.object(SubsampleMessenger, "_subsample", staticmethod(subsample)):
            yield
