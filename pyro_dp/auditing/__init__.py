"""Attacks on runs: how much of one record do they tell at the least?"""

from pyro_dp.auditing.audit import audit, audit_one_run
from pyro_dp.auditing.result import AuditResult

__all__ = ["AuditResult", "audit", "audit_one_run"]
