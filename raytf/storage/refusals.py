"""Errors of storage for people, in one line: the kind of the refusal, and how to fix it."""

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
    "denied": "Check the credentials in the environment and that they may list, read, write and delete there.",
    "unreachable": "Check the endpoint, the region and the network.",
    "full": "Free some space or choose another --storage.",
    "unsupported": "The store does not know this request; another version of it, or another store, may.",
}
#: The same for errors of the operating system about a folder.
_LOCAL_FIX = {
    "missing": "Choose a folder that can be made.",
    "denied": "Choose a folder in which this user may write.",
    "damaged": "Choose a folder.",
    "full": FIX["full"],
}
#: Something of another kind lies where raytf has written.
_REASONS = {
    errno.EISDIR: "there is a folder where a file is expected",
    errno.ENOTDIR: "Not a directory, there is a file where a folder is expected",
    errno.ELOOP: "its symbolic links go round in a circle",
}
_NUMBERS = {
    "missing": (errno.ENOENT,),
    "denied": (errno.EACCES, errno.EPERM, errno.EROFS),
    "full": (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    "damaged": (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EOVERFLOW),
    "unreachable": (errno.ETIMEDOUT, errno.ECONNREFUSED),
}

#: The beginning of a file's name that is written only to see whether that is possible.
PROBE = ".raytf-probe-"


def explain(what: str, where: str, error: OSError) -> StorageError:
    """Return the error for people.

    Args:
        what: the verb for the operation that failed.
        where: the place, as shown to people.
    """
    kind, where = classify(error), where.partition(f"/{PROBE}")[0]  # a probe's name helps nobody
    if kind == "damaged" and what in ("read", "look up", "list"):
        return DamagedFileError(where, _REASONS.get(error.errno or 0, error.strerror or one_line(error, 200)))
    text = one_line(error)
    if error.errno is not None and error.strerror:  # of the operating system
        text = error.strerror
        fix = _LOCAL_FIX.get(kind, "") if what == "write" else ""
    elif kind == "missing" and not any(sign in text for sign in _NO_BUCKET):
        fix = ""
    else:
        fix = FIX.get(kind, "")
    return StorageError(f"cannot {what} {where}: {text[:400]}. {fix}".rstrip(), kind)


def classify(error: OSError) -> str:
    """Return the `kind` of a StorageError for an error of the operating system or of pyarrow."""
    text = str(error)
    by_number = (kind for kind, numbers in _NUMBERS.items() if error.errno in numbers)
    by_text = (kind for kind, signs in _SIGNS if any(sign in text for sign in signs))
    return next(by_number, None) or next(by_text, "other")


def is_unsupported(error: OSError) -> bool:
    """Return whether a store answered that it does not know the request."""
    return classify(error) == "unsupported"
