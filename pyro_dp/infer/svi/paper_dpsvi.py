"""DPVI as its paper has it: a bound and an optimizer of one's own, and the last iterate."""

from collections.abc import Callable
from dataclasses import replace

from pyro.optim import PyroOptim

from pyro_dp.accounting.accountant import PrivacyAccountant
from pyro_dp.infer.svi.clip_policy import by_bit
from pyro_dp.infer.svi.moves import Moves, optimizers
from pyro_dp.infer.svi.optimizers import RowAdam
from pyro_dp.infer.svi.stochastic_gradient_vi import InPlaceOfSVI, StochasticGradientVI
from pyro_dp.mechanism.clipped_fraction import AdaptiveClip
from pyro_dp.mechanism.settings import Clip, Execution, Noise, Sampling, old_names_explained
from pyro_dp.records.losses import Loss
from pyro_dp.utils.errors import ConfigurationError


class PaperDPSVI(StochasticGradientVI, InPlaceOfSVI):
    """Algorithm 1 of DPVI (Jälkö, Dikmen & Honkela 2017, arXiv 1610.08749).

    It is for comparisons with papers. The guide holds the last iterate, and its intervals ignore
    the privacy noise. The result depends on the learning rate and on the bound, whose bias no
    number of steps removes. :class:`DPSVI` has neither weakness where it makes looks.

    **Guarantee.** As :class:`DPSVI`. Instead of the histogram, the release has a block with bound
    1/2: each record's bit, whether it lies within the bound.

    **Not protected.** As :class:`DPSVI`.

    :param optim: a ``pyro.optim`` optimizer, or a tuple of it and a :class:`RowAdam`. Without the
        latter, rows have the settings of ``optim``, which must be a plain Adam then.
    :param accountant: as for :class:`DPSVI`, as are model, guide, loss, noise and execution.
    :param num_steps: number of steps of :meth:`run`; if the noise is calibrated also the most steps
        there can be, and then required.
    :param clip: C, an :class:`AdaptiveClip`, or a :class:`Clip` of either, whose bound is 1 if it
        has none. Unless it says ``report=False``, :attr:`clipped_fraction` is released.
    :param sampling: a sample rate, or an object such as :class:`PoissonSampling`. A rate of
        ``None`` is subsample_size / size of the plate.
    :raises ConfigurationError: as :class:`DPSVI`; or there is no ``optim``.

    >>> import pyro, torch
    >>> import pyro.distributions as dist
    >>> from pyro.infer.autoguide import AutoNormal
    >>> from pyro_dp import PaperDPSVI, PrivacyAccountant
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("people", len(y)):
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> accountant, adam = PrivacyAccountant(epsilon=1.0), pyro.optim.Adam({"lr": 0.1})
    >>> svi = PaperDPSVI(model, AutoNormal(model), adam, accountant=accountant, num_steps=10)
    >>> svi.run(torch.linspace(-2.0, 2.0, 500), progress=False).steps
    10
    """

    _known_as = ""

    @old_names_explained()
    def __init__(
        self,
        model: Callable,
        guide: Callable,
        optim: PyroOptim | tuple[PyroOptim, RowAdam],
        loss: Loss | None = None,
        *,
        accountant: PrivacyAccountant,
        num_steps: int | None = None,
        clip: Clip | AdaptiveClip | float = 1.0,
        noise: Noise | float | None = None,
        sampling: Sampling | float | None = None,
        execution: Execution | None = None,
    ):
        if optimizers(optim)[0] is None:
            raise ConfigurationError(
                "PaperDPSVI needs an optim, such as pyro.optim.Adam({'lr': 0.01}). DPSVI does not."
            )
        clips = Clip.read(clip)
        super().__init__(
            model,
            guide,
            optim,
            loss,
            accountant=accountant,
            num_steps=num_steps,
            clip=replace(clips, bound=1.0) if clips.bound is None else clips,
            noise=noise,
            first_policy=by_bit,
            moves=Moves,
            sampling=sampling,
            execution=execution,
        )
