"""Audits: attacks on real runs give a lower bound on their epsilon."""

from pyro_dp.auditing.audit import audit, audit_one_run
from pyro_dp.auditing.result import AuditResult

__all__ = ["AuditResult", "audit", "audit_one_run"]
