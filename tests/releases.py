"""Releases as tests see them: their input, the source of their noise, and their output."""

import pytest
import torch
from sums import exact_sums

import pyro_dp.mechanism.releases
import pyro_dp.mechanism.sampling
from pyro_dp.mechanism.release import release


class Releases:
    """Keeps all releases of the inferences, from now until the patch is undone.

    :ivar blocks: each release's blocks.
    :ivar events: each release's event in the ledger.
    :ivar sums: each release's exact sums, one for each block.
    :ivar released: each release's noisy sums.
    :ivar streams: each release's generator of noise.
    :ivar counted: how many releases the ledger counted, whenever something was drawn as noise.
    """

    def __init__(self, monkeypatch):
        self.blocks, self.events, self.sums, self.released = [], [], [], []
        self.streams, self.counted = [], []

        def spy(clipped, *, accountant, event, noise):
            watched = _Watched(noise, lambda: self.counted.append(accountant.num_releases))
            values = release(clipped, accountant=accountant, event=event, noise=watched)
            self.blocks.append(clipped.blocks)
            self.events.append(event)
            self.sums.append([total.clone() for total in exact_sums(clipped)])
            self.released.append([value.clone() for value in values])
            self.streams.append(noise)
            return values

        monkeypatch.setattr(pyro_dp.mechanism.releases, "release", spy)

    @property
    def noise(self):
        """Each release's and block's noise, in the units that sigma, bound and share imply."""
        return [
            [
                (value - total) / (event.noise_multiplier * block.bound / block.share**0.5)
                for value, total, block in zip(values, totals, blocks, strict=True)
            ]
            for values, totals, blocks, event in zip(
                self.released, self.sums, self.blocks, self.events, strict=True
            )
        ]


class _Tried(Exception):
    pass


def planned(step):
    """Blocks and exact sums of the release that a step would make. The step is left undone.

    :param step: takes pytest's MonkeyPatch, for what is to hold in this step only.
    """
    found = []

    def spy(clipped, **_):
        found.append((clipped.blocks, [total.clone() for total in exact_sums(clipped)]))
        raise _Tried

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyro_dp.mechanism.releases, "release", spy)
        with pytest.raises(_Tried):
            step(patch)
    return found[0]


def gradients(monkeypatch, svi, *data):
    """The exact sum of a step's first block, as a function of the records that take part."""
    seen = Releases(monkeypatch)

    def gradient(batch):
        take(monkeypatch, batch)
        torch.manual_seed(1)
        svi.step(*data)
        return seen.sums[-1][0]

    return gradient


def require_bound(gradient, size, records, bound=0.5):
    """Each of these records moves the sum by its bound at most, and by something."""
    everyone = list(range(size))
    for record in records:
        others = [i for i in everyone if i != record]
        moved = (gradient(everyone) - gradient(others)).norm().item()
        assert 0 < moved <= bound * (1 + 1e-9)


class _Watched:
    """A generator that tells when it is used."""

    def __init__(self, stream, tell):
        self._stream, self._tell = stream, tell

    @property
    def __class__(self):  # for isinstance
        return type(self._stream)

    def __getattr__(self, name):
        self._tell()
        return getattr(self._stream, name)


def take(monkeypatch, batch):
    """From now on exactly these records take part in every step."""
    indices = torch.tensor(batch, dtype=torch.long)
    monkeypatch.setattr(
        pyro_dp.mechanism.sampling.RecordSampler, "draw", lambda sampler, stream: indices
    )


def batches(monkeypatch):
    """A list that gets the records of each step from now on."""
    drawn, draw = [], pyro_dp.mechanism.sampling.RecordSampler.draw

    def spy(sampler, stream):
        drawn.append(draw(sampler, stream))
        return drawn[-1]

    monkeypatch.setattr(pyro_dp.mechanism.sampling.RecordSampler, "draw", spy)
    return drawn
