"""Files on disk, S3, GCS and Azure behind one class: whole and conditional writes, errors that say how to fix them.

Also what reads files that somebody else may have written: JSON and YAML, bounded in size and depth. Knows
`raytf.errors` alone. The entry is `raytf.storage.storage.Storage`.
"""
