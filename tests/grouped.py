"""Settings by one name each, for tests whose helpers merge several dictionaries of them.

``DPSVI(model, guide, **grouped(noise_multiplier=5.0, generator=0))`` is ``DPSVI(model, guide,
noise=Noise(5.0, source=0))``.
"""

from typing import Any

from pyro_dp import Clip, Execution, Factors, FixedSizeSampling, FullBatch, Noise, PoissonSampling

# By name: the argument, and the field of its object.
_FIELDS = {
    "noise_multiplier": ("noise", "multiplier"),
    "generator": ("noise", "source"),
    "max_grad_norm": ("clip", "bound"),
    "max_factor_norm": ("clip", "bound"),
    "privatize": ("clip", "of"),
    "loss_clip": ("clip", "loss"),
    "loss_share": ("clip", "loss_share"),
    "report_clipping": ("clip", "report"),
    "precision": ("factors", "precision"),
    "precision_weight": ("factors", "weight"),
    "centred": ("factors", "centred"),
    "site_moments": ("factors", "moments"),
    "microbatch_size": ("execution", "microbatch_size"),
    "jit": ("execution", "jit"),
    "slice_data": ("execution", "slice_data"),
    "cluster": ("execution", "peers"),
}
_KINDS = {"noise": Noise, "clip": Clip, "factors": Factors, "execution": Execution}
_SAMPLINGS = {"poisson": PoissonSampling, "fixed": FixedSizeSampling}


def grouped(**flat: Any) -> dict[str, Any]:
    """The arguments of an inference."""
    if flat.pop("secure", False) is True:
        flat["generator"] = "system"
    given: dict[str, dict[str, Any]] = {}
    for name in flat.keys() & _FIELDS.keys():
        argument, field = _FIELDS[name]
        given.setdefault(argument, {})[field] = flat.pop(name)
    flat |= {argument: _KINDS[argument](**fields) for argument, fields in given.items()}
    rate, plate = flat.pop("sample_rate", None), flat.pop("plate", None)
    kind = flat.pop("sampling", "poisson")
    if kind == "full":
        flat["sampling"] = FullBatch(plate=plate)
    elif not (isinstance(kind, str) and kind in _SAMPLINGS):
        flat["sampling"] = kind
    elif rate is not None or plate is not None or kind == "fixed":
        flat["sampling"] = _SAMPLINGS[kind](rate, plate=plate)
    return flat


def with_rows(optim: Any, flat: dict[str, Any]) -> Any:
    """The optimizer, with ``local_optim`` of the settings, which leaves them."""
    rows = flat.pop("local_optim", None)
    return optim if rows is None else (optim, rows)


def said(name: str) -> str:
    """How errors name a setting."""
    argument, field = _FIELDS.get(name, ("", ""))
    if name in ("sample_rate", "plate"):
        return f"Sampling.{name.removeprefix('sample_')}"
    return f"{_KINDS[argument].__name__}.{field}" if argument else name
