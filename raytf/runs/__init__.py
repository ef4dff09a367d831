"""The record of a run and how people read it: lease, run log, ledger and timeline, status, history, metrics, report.

Knows storage and checkpoint; nothing of training. Entries: `raytf.runs.run_log`, `raytf.runs.ledger` and
`raytf.runs.inventory`.
"""
