"""Files on disk, S3, GCS and Azure behind one class, with atomic and conditional writes and errors that name the fix.

It also reads untrusted JSON and YAML, with limits on size and depth. Of raytf it imports only `raytf.errors` and
`raytf._process`. Start with `raytf.storage.storage.Storage`.
"""
