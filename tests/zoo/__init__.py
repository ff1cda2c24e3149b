"""A zoo of models as their authors write them, each to be handed to ``DPSVI`` instead of ``SVI``.

One module for each field of application. None of them was written for this package: what an entry
had to change is its ``edit``.
"""

from . import (
    animals,
    baseball,
    counts,
    documents,
    fields,
    hierarchies,
    images,
    mixtures,
    music,
    networks,
    persons,
    questionnaires,
    regression,
    survival,
)
from .entry import Entry

_FIELDS = (
    regression,
    counts,
    baseball,
    hierarchies,
    fields,
    survival,
    questionnaires,
    images,
    mixtures,
    music,
    animals,
    documents,
    persons,
    networks,
)

ZOO: dict[str, Entry] = {each.name: each for field in _FIELDS for each in field.ENTRIES}
