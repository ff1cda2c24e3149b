"""A clear error for an argument that only a related class takes."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from pyro_dp.utils.errors import ConfigurationError

Init = TypeVar("Init", bound=Callable[..., None])


def arguments_moved_to(other: type) -> Callable[[Init], Init]:
    """Decorate an ``__init__`` so its error names the class that takes an argument.

    :param other: the related class.
    """

    def decorated(init: Init) -> Init:
        own, theirs = inspect.signature(init).parameters, inspect.signature(other).parameters

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name in theirs and name not in own:
                    raise ConfigurationError(
                        f"{type(self).__name__} takes no {name}. Leave it out, or use "
                        f"{other.__name__}(..., {name}=...)."
                    )
            init(self, *args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorated
