"""Running user code: no data in the texts of exceptions or in the buffers of modules."""

import contextlib
from collections.abc import Iterator

import pyro
import torch
from torch.distributions import Distribution
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pyro_dp.errors import ModelError, PrivacyError

PLACEHOLDERS = (
    "Where no data may be read their rows are ones (zeros for integers): the model must run on "
    "them."
)
WHOLE_TENSORS = (
    "In the private plate, index what is read (with pyro.plate(...) as idx: ... x[idx]), or use "
    "slice_data=True for a model that is written for whole tensors."
)
_DISCRETE = "Continuous inference cannot handle discrete sample site"  # Pyro's words
_LIBRARIES = ("pyro", "pyro_dp", "torch", "contextlib", "functools")


@contextlib.contextmanager
def guarded(doing: str, *, hint: str = "") -> Iterator[None]:
    """Run a model or guide.

    * An exception becomes a :class:`ModelError` that tells its type, the Pyro site and the line of
      user code, but not its text: Pyro's and torch's messages quote values. The text is removed
      from the original as well, which stays the new one's ``__context__``.
    * Batch statistics are refused: they mix records, and running averages would keep them.
    * Validation is off, also of distributions that were made with it: it reads values, which can
      be neither vectorised over records nor traced.

    :param doing: the beginning of the new message.
    :param hint: its end: what often is the cause, and the remedy.
    """
    try:
        with pyro.validation_enabled(False), _no_sample_validation(), _NoBatchStatistics():
            yield
    except PrivacyError:
        raise
    except Exception as error:
        discrete, location = str(error).startswith(_DISCRETE), _location(error)
        error.args, error.__cause__, error.__context__ = (), None, None
        if discrete:
            raise ModelError(
                f"An autoguide has no place for a discrete latent{location}: mark it in "
                "the model with infer={'enumerate': 'parallel'} and hide it from the guide, as in "
                "AutoNormal(pyro.poutine.block(model, hide=['assignment']))."
            ) from None
        raise ModelError(
            f"{doing} raised {type(error).__name__}{location}. The text of the error is "
            "withheld because it may quote data; call the model or guide itself to see it."
            + (f" {hint}" if hint else "")
        ) from None


@contextlib.contextmanager
def _no_sample_validation() -> Iterator[None]:
    original = Distribution._validate_sample
    Distribution._validate_sample = lambda self, value: None
    try:
        yield
    finally:
        Distribution._validate_sample = original


@contextlib.contextmanager
def unchanged_buffers() -> Iterator[None]:
    """Refuse modules that keep something of what they see, such as running averages.

    Their buffers are put back.

    :raises ModelError: names the module's class and the buffer.
    """
    before: dict[int, tuple[torch.nn.Module, dict[str, torch.Tensor]]] = {}

    def remember(module, inputs):
        own = module.named_buffers(recurse=False)
        before.setdefault(id(module), (module, {name: x.detach().clone() for name, x in own}))

    hook = torch.nn.modules.module.register_module_forward_pre_hook(remember)
    try:
        yield
    finally:
        hook.remove()
    for module, buffers in before.values():
        for name, value in buffers.items():
            buffer = getattr(module, name)
            if not torch.equal(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)
                raise ModelError(
                    f"Buffer {name!r} of {type(module).__name__} changes with the data and would "
                    "keep something of them: call .eval(), or do without running averages."
                )


class _NoBatchStatistics(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.batch_norm and (
            kwargs.get("training") or (len(args) > 5 and args[5])
        ):
            raise ModelError(
                "Batch normalisation in training mode mixes records: call .eval(), or normalise "
                "each record."
            )
        return func(*args, **kwargs)


def _location(error: Exception) -> str:
    site = line = ""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        message = frame.f_locals.get("msg")
        if isinstance(message, dict) and "name" in message:
            site = f" at site {message['name']!r}"
        if frame.f_globals.get("__name__", "").split(".")[0] not in _LIBRARIES:
            line = f" (line {trace.tb_lineno}, in {frame.f_code.co_name})"
        trace = trace.tb_next
    return site + line
