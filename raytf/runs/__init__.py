"""The records of a run and their presentation: lease, run log, ledger, timeline, status, history, metrics, report.

It depends on storage and checkpoint, but not on training. Entries: `raytf.runs.run_log`, `raytf.runs.ledger` and
`raytf.runs.inventory`.
"""
