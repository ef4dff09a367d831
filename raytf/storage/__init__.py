"""Files on disk, S3, GCS and Azure behind one class: whole and conditional writes, errors that say how to fix them.

It also reads JSON and YAML that somebody else may have written, bounded in size and depth. It imports only
`raytf.errors`. The entry is `raytf.storage.storage.Storage`.
"""
