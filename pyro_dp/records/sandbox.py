"""Run user code without data in the texts of errors and warnings, and without batch statistics."""

import contextlib
import linecache
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pyro
import torch
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.distributions import Distribution
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pyro_dp.graphs.references import is_library
from pyro_dp.graphs.tracing import tracing
from pyro_dp.records.vectorised import OF_NUMBERS, UNCHECKED, promoted
from pyro_dp.utils.errors import ModelError, PrivacyError, no_warnings

PLACEHOLDERS = (
    "This run uses placeholders, which are ones (zeros for integers). The model must run on them."
)
_INDEXED = (
    "In the private plate, read all data and rows of parameters at its indices (x[idx]). Or read "
    "all of them whole, with shapes that follow from the arguments (len(x))."
)
_WHOLE = (
    "The model reads the data whole, and sees one row of them. Let all shapes follow from the "
    "arguments (len(x), x.shape), or read all of them at the plate's indices (x[idx])."
)
_WITHHELD = (
    "The text of the error is withheld because it may quote data; call the model or guide itself "
    "to see it."
)
_DISCRETE = "Continuous inference cannot handle discrete sample site"  # Pyro's words
_DISCRETE_LATENT = (
    "An autoguide has no factor for a discrete latent{where}. Mark it in the model with "
    "infer={{'enumerate': 'parallel'}} and hide it from the guide, as in "
    "AutoNormal(pyro.poutine.block(model, hide=[{site!r}]))."
)
_EMPTY = (
    "Plate {name!r} has a subsample with no element here, and Pyro divides by their number. Leave "
    "out subsample, and hide what does not count by poutine.mask: records are sampled privately."
)
_DTYPES = r"same dtype|expected scalar type|[Ff]ound dtype|can't be cast"
_OTHER_DTYPE = (
    "Data and latents differ in dtype: pass tensors of torch's default dtype, as in x.float()."
)
_ADVICE = (
    (
        r"inside plate\(",
        "A plate has another size than its sites: write pyro.plate(..., len(x)), and pass all "
        "records, not a batch.",
    ),
    (
        r"ImproperUniform does not support sampling",
        "A prior must have draws. Write a wide proper one instead, such as dist.Normal(0.0, 100.0) "
        "for a real latent or dist.LogNormal(0.0, 5.0) for a positive one.",
    ),
    (
        r"Length of all samples has to be greater than 0",
        "Lengths are zeros here: run the network on the padded tensor, as in rnn(x), and mask "
        "the steps after each record's last.",
    ),
    (
        r"size of tensor|shapes? cannot be multiplied|size mismatch|not broadcastable|"
        r"[Ss]hape mismatch|inconsistent tensor size|must match|out of bounds|out of range",
        "Shapes do not fit: look at those of the arguments, and at the plates' dimensions.",
    ),
    (
        r"positional argument|unexpected keyword argument",
        "Pass the arguments of model and guide to step() or run(), in their order.",
    ),
)
_CAUGHT = (
    "The model or guide catches an error of torch. Records run together, so another record may "
    "cause it. Ask beforehand, as torch.linalg.cholesky_ex does, and choose by torch.where."
)
_MISTAKES = (AttributeError, ImportError, KeyError, NameError, SyntaxError, TypeError)
_LONGEST = 600  # characters of a message


def whole_tensors(slice_data: bool) -> str:
    """Advice for a model that reads its data in another manner than found or declared."""
    return _WHOLE if slice_data else _INDEXED


class RaisedOnPlaceholders(ModelError):
    """User code failed on placeholders."""


class RaisedOnRecords(ModelError):
    """The records failed a check. No choice may depend on it. Users see a ModelError."""


@contextlib.contextmanager
def looking_at_records() -> Iterator[None]:
    """Inside, a :class:`ModelError` becomes a :class:`RaisedOnRecords`."""
    try:
        yield
    except ModelError as error:
        raise RaisedOnRecords(str(error)) from None


@contextlib.contextmanager
def guarded(doing: str, *, public: bool = False, hint: str = "") -> Iterator[None]:
    """Run a model or guide.

    * An exception becomes a :class:`ModelError` with its type, the Pyro site and the line of user
      code. Pyro and torch quote values in their texts. So the message quotes the text only for
      placeholders. The original exception, which becomes ``__context__``, also loses its text.
      ``SystemExit`` is caught as well, because one record must not end the program.
    * For data, warnings are suppressed.
    * Products and likelihoods may mix integers and floats (:mod:`pyro_dp.records.vectorised`).
    * Batch statistics are refused: they mix records, and running averages would keep them.
    * User code may catch an error of torch. Its reaction would apply to all records that run at
      once, or to all calls of a graph. So this raises an error, and records run one at a time.
    * Validation is off, also for distributions that demand it. It reads values, so it can be
      neither vectorised over records nor traced.
    * A function under ``torch.compile`` runs as written. Compiled, it could not be vectorised or
      traced, and would be compiled again for each form of its arguments.

    :param doing: the beginning of the new message.
    :param public: whether the run sees only placeholders.
    :param hint: the end of the message: the remedy, if the exception does not suggest one.
    """
    alone = _RecordByRecord()
    try:
        with (
            contextlib.nullcontext() if public else no_warnings(),
            pyro.validation_enabled(False),
            mock.patch.object(Distribution, "_validate_sample", lambda self, value: None),
            alone,
            _not_compiled(),
        ):
            yield
        if alone.failed:
            raise ModelError(_CAUGHT)
    except PrivacyError as error:
        text = str(error).split("Trace Shapes:")[0].strip()
        if text == str(error):
            raise
        raise type(error)(text) from None  # without the shapes of all sites, which Pyro appended
    except (Exception, SystemExit) as error:
        text, where = str(error).split("Trace Shapes:")[0].strip(), _location(error)
        advice = _advice(error, hint) if public else hint
        error.args, error.__cause__, error.__context__ = (), None, None
        if text.startswith(_DISCRETE):
            found = re.search(r"'([^']+)'", text)
            site = found.group(1) if found else "assignment"
            raise ModelError(_DISCRETE_LATENT.format(where=where, site=site)) from None
        message = f"{doing} raised {type(error).__name__}{where}"
        if public:
            raise RaisedOnPlaceholders(f"{message}: {_shortened(text)} {advice}") from None
        raise ModelError(f"{message}. {_WITHHELD} {advice}".rstrip()) from None


@contextlib.contextmanager
def _not_compiled() -> Iterator[None]:
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:  # not imported, so nothing is compiled; the import takes a second
        yield
        return
    config = dynamo.config  # its patch() makes a class in each call
    before, config.error_on_nested_fx_trace = config.error_on_nested_fx_trace, False
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        config.error_on_nested_fx_trace = before


class _RecordByRecord(TorchFunctionMode):
    """A mode that refuses batch statistics, and promotes numbers of different dtypes.

    :ivar failed: whether a function raised while all records ran at once, or during tracing.
    """

    failed = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in OF_NUMBERS:
            args, kwargs = promoted(args, kwargs)
        if func is functional.batch_norm and (
            kwargs.get("training") or (len(args) > 5 and args[5])
        ):
            raise ModelError(
                "Batch normalisation in training mode mixes records: call .eval(), or normalise "
                "each record."
            )
        try:
            return UNCHECKED.get(func, func)(*args, **kwargs)
        except Exception:
            levels = get_interpreter_stack() or ()
            self.failed |= tracing() or any(x.key() == TransformType.Vmap for x in levels)
            raise


def _location(error: BaseException) -> str:
    """The Pyro site and the line of user code that an exception came from."""
    site = line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        message = frame.f_locals.get("msg")
        if isinstance(message, dict) and "name" in message:
            site = f" at site {message['name']!r}"
        if not is_library(frame.f_globals.get("__name__") or ""):
            file = frame.f_code.co_filename
            source = linecache.getline(file, number, frame.f_globals).strip()
            line = f" ({Path(file).name}:{number}, in {frame.f_code.co_name}"
            line += f": {source})" if source else ")"
    return site + line


def _plate_of(error: BaseException) -> str:
    """The name of the plate whose code raised the exception; empty if none did."""
    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    owner = frame.f_locals.get("self")
    return owner.name if isinstance(owner, pyro.plate) else ""


def _advice(error: BaseException, hint: str) -> str:
    """Advice on an exception: a certain diagnosis, else the hint, else a possible diagnosis."""
    text = str(error)
    if isinstance(error, ZeroDivisionError) and (plate := _plate_of(error)):
        return _EMPTY.format(name=plate)
    if re.search(_DTYPES, text):
        return _OTHER_DTYPE
    if hint:
        return hint
    for pattern, advice in _ADVICE:
        if re.search(pattern, text):
            return advice
    return "Mend this line." if isinstance(error, _MISTAKES) else PLACEHOLDERS


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ..."
    return text if text.endswith((".", "!", "?", "...")) else f"{text}."
