"""Remarks about a guarantee that a report reads again."""

SEEDED = (
    "A seeded generator was used: the run can be repeated, and is not private against anyone who "
    "can guess the seed."
)
SECURE = (
    "secure=True was used: noise and sampling from the operating system's cryptographic generator, "
    "sums and noise in integers. A ledger that is shared may have other runs, too."
)
