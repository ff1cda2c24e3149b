"""Settings by one name each, for tests whose helpers merge them from several places.

``DPSVI(model, guide, **grouped(noise_multiplier=5.0, generator=0))`` is ``DPSVI(model, guide,
noise=Noise(5.0, source=0))``.
"""

from typing import Any

from pyro_dp import Clip, Execution, Factors, FixedSizeSampling, FullBatch, Noise, PoissonSampling

_OBJECTS = {
    "noise": (Noise, {"noise_multiplier": "multiplier", "generator": "source"}),
    "clip": (
        Clip,
        {
            **dict.fromkeys(("max_grad_norm", "max_factor_norm"), "bound"),
            **{"privatize": "of", "report_clipping": "report"},
            **{"loss_clip": "loss", "loss_share": "loss_share"},
        },
    ),
    "factors": (
        Factors,
        {
            **{name: name for name in ("precision", "centred")},
            **{"precision_weight": "weight", "site_moments": "moments"},
        },
    ),
    "execution": (
        Execution,
        {
            **{name: name for name in ("microbatch_size", "jit", "slice_data")},
            "cluster": "peers",
        },
    ),
}
_SAMPLINGS = {"poisson": PoissonSampling, "fixed": FixedSizeSampling}


def grouped(**flat: Any) -> dict[str, Any]:
    """The arguments of an inference."""
    if flat.pop("secure", False) is True:
        flat["generator"] = "system"
    for argument, (kind, names) in _OBJECTS.items():
        given = {new: flat.pop(old) for old, new in names.items() if old in flat}
        if given:
            flat[argument] = kind(**given)
    if "local_optim" in flat:
        flat["optim"] = flat.pop("local_optim")
    rate, plate = flat.pop("sample_rate", None), flat.pop("plate", None)
    kind = flat.pop("sampling", "poisson")
    if kind == "full":
        flat["sampling"] = FullBatch(plate=plate)
    elif not (isinstance(kind, str) and kind in _SAMPLINGS):
        flat["sampling"] = kind
    elif rate is not None or plate is not None or kind == "fixed":
        flat["sampling"] = _SAMPLINGS[kind](rate, plate=plate)
    return flat
