"""A zoo of models as their authors write them, each to be handed to ``DPSVI`` instead of ``SVI``.

One module for each field of application. None of them was written for this package: what an entry
had to change is its ``edit``.
"""

from . import documents, hierarchies, images, mixtures, questionnaires, regression, sequences
from .entry import Entry

_FIELDS = (regression, hierarchies, questionnaires, images, mixtures, sequences, documents)

ZOO: dict[str, Entry] = {each.name: each for field in _FIELDS for each in field.ENTRIES}
