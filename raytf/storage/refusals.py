"""Turns storage errors into one-line messages for people, with the kind of the error and how to fix it."""

from __future__ import annotations

import errno

from raytf.errors import DamagedFileError, StorageError, one_line

_NO_BUCKET = ("NO_SUCH_BUCKET", "NoSuchBucket", "bucket does not exist", "ContainerNotFound")
_SIGNS = (
    ("missing", (*_NO_BUCKET, "NOT_FOUND", "[code: 404]")),
    (
        "denied",
        (
            "ACCESS_DENIED",
            "SIGNATURE_DOES_NOT_MATCH",
            "INVALID_ACCESS_KEY_ID",
            "INVALID_CLIENT_TOKEN",
            "EXPIRED_TOKEN",
            "ExpiredToken",
            "HTTP response code: 403",
            "HTTP status 403",
            "AccessDenied",
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "PERMISSION_DENIED",
            "UNAUTHENTICATED",
            "HTTP status 401",
            "No credentials",
        ),
    ),
    (
        "unreachable",
        (
            "NETWORK_CONNECTION",
            "curlCode",
            "Could not connect",
            "Couldn't resolve",
            "timed out",
            "Timeout",
            "REQUEST_TIMEOUT",
        ),
    ),
    ("full", ("No space left", "Disk quota exceeded")),
    ("unsupported", ("NotImplemented", "NOT_IMPLEMENTED", "HTTP status 501")),
)
FIX = {
    "missing": "Create the bucket or correct its name; raytf makes folders but no buckets.",
    "denied": "Check the credentials in the environment: they must allow listing, reading, writing and deleting there.",
    "unreachable": "Check the endpoint, the region and the network.",
    "full": "Free some space or choose another --storage.",
    "unsupported": "The store does not know this request. Use a newer version of it, or another store.",
}
#: Fixes for the operating system's errors about a local folder.
_LOCAL_FIX = {
    "missing": "Choose a folder that can be created.",
    "denied": "Choose a folder in which this user may write.",
    "damaged": "Choose a folder.",
    "full": FIX["full"],
}
#: Descriptions of errors when something else is in the place of raytf's file or folder.
_REASONS = {
    errno.EISDIR: "there is a folder where a file is expected",
    errno.ENOTDIR: "Not a directory, there is a file where a folder is expected",
    errno.ELOOP: "its symbolic links form a cycle",
}
_NUMBERS = {
    "missing": (errno.ENOENT,),
    "denied": (errno.EACCES, errno.EPERM, errno.EROFS),
    "full": (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    "damaged": (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EOVERFLOW),
    "unreachable": (errno.ETIMEDOUT, errno.ECONNREFUSED),
}

#: Prefix of the names of files that are written only to test whether writing works.
PROBE = ".raytf-probe-"


def explain(what: str, where: str, error: OSError) -> StorageError:
    """Return the storage error, with a message for people.

    Args:
        what: the verb for the operation that failed.
        where: the place, as shown to people.
    """
    kind, where = classify(error), where.partition(f"/{PROBE}")[0]  # do not show a probe's name
    if kind == "damaged" and what in ("read", "look up", "list"):
        return DamagedFileError(where, _REASONS.get(error.errno or 0, error.strerror or one_line(error, 200)))
    text = one_line(error)
    if error.errno is not None and error.strerror:  # from the operating system
        text = error.strerror
        fix = _LOCAL_FIX.get(kind, "") if what == "write" else ""
    elif kind == "missing" and not any(sign in text for sign in _NO_BUCKET):
        fix = ""
    else:
        fix = FIX.get(kind, "")
    return StorageError(f"cannot {what} {where}: {text[:400]}. {fix}".rstrip(), kind)


def classify(error: OSError) -> str:
    """Return the `kind` of a StorageError for an error from the operating system or pyarrow."""
    text = str(error)
    by_number = (kind for kind, numbers in _NUMBERS.items() if error.errno in numbers)
    by_text = (kind for kind, signs in _SIGNS if any(sign in text for sign in signs))
    return next(by_number, None) or next(by_text, "other")


def is_unsupported(error: OSError) -> bool:
    """Return whether an error means that the store does not know the request."""
    return classify(error) == "unsupported"
