"""What was checked and built for the data of a step."""

from dataclasses import dataclass

from pyro_dp.mechanism.sampling import RecordSampler
from pyro_dp.records.records import Records


@dataclass(frozen=True, eq=False)
class Prepared:
    """It holds for these data; for others everything is looked at anew.

    :param records: the data, seen as records.
    :param sampler: of the records of a step.
    """

    records: Records
    sampler: RecordSampler
