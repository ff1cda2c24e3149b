"""Work on one microbatch after the other, each of which fits a processor's cache."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Within: torch uses one thread for an operation.

    A microbatch is too small for more to gain: they wait for each other, and for the threads of
    NumPy's library, up to ten times as long as one takes. (Python threads, one microbatch each,
    were not faster than one: operations so short wait for the interpreter.)
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
