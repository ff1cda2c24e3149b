"""Mutations that the tests of utils must notice: see tests/mutate.py."""

from mutate import Mutation

MUTATIONS = [
    Mutation(
        "private torch draws move the public generator",
        "private_rng",
        "    with forked_rng():\n        # The whole",
        "    with contextlib.nullcontext():\n        # The whole",
        "test_streams.py",
    ),
    Mutation(
        "off-diagonals counted once",
        "stacked",
        "math.sqrt(2) * matrix[rows, columns]",
        "matrix[rows, columns]",
        "test_gaussian.py test_site_factors.py test_dpsep.py",
    ),
    Mutation(
        "Ctrl-C at once, wherever it comes",
        "Interrupts._handle",
        "if again:",
        "if True:",
        "test_run.py",
    ),
    Mutation(
        "Ctrl-C that is lost",
        "Interrupts.within",
        "if self._pending and before is not None:",
        "if False:",
        "test_dpem.py test_run.py",
    ),
    Mutation(
        "a second Ctrl-C that waits",
        "Interrupts._handle",
        "if again:",
        "if False:",
        "test_run.py",
    ),
    Mutation(
        "passes by the memory that is free, which tells of batches",
        "rows_on",
        "_, total = torch.cuda.mem_get_info(device)",
        "total, _ = torch.cuda.mem_get_info(device)",
        "test_devices.py",
    ),
    Mutation(
        "report: costs are rounded down",
        "up",
        "decimal.ROUND_CEILING",
        "decimal.ROUND_FLOOR",
        "test_report.py",
    ),
    Mutation(
        "report: what is left is rounded up",
        "spent_and_left",
        "shown, whole = up(spent)",
        'shown, whole = f"{spent:.3g}"',
        "test_report.py",
    ),
    Mutation(
        "lines that do not know those above them",
        "_digest",
        'hashlib.blake2b(before.encode() + b" " + text',
        'hashlib.blake2b(b" " + text',
        "test_journal.py",
    ),
    Mutation(
        "not private: said of the package's own line",
        "warn_not_private",
        "        stacklevel=3,\n",
        "        stacklevel=2,\n",
        "test_looks.py",
    ),
]
