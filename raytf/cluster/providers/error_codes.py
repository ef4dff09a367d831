"""What the clouds say when they have no capacity: their words, and for what another offer may help."""

from __future__ import annotations

import re

from raytf.cluster.providers.capacity import Shortage

#: AWS, "Error codes for the Amazon EC2 API": after these another zone may do, ...
_AWS_HERE = {
    *("InsufficientCapacity", "InsufficientHostCapacity", "InsufficientInstanceCapacity"),
    *("InsufficientReservedInstanceCapacity", "SpotMaxPriceTooLow"),
}
#: ... these do not pass within minutes ...
_AWS_LASTING = {"InsufficientFreeAddressesInSubnet", "Unsupported"}
#: ... and these are quotas of the account in the region.
_AWS_QUOTAS = {"InstanceLimitExceeded", "MaxSpotInstanceCountExceeded", "VcpuLimitExceeded"}
#: Compute Engine, "Troubleshooting resource availability errors", and Cloud TPU's own words.
_GCP = (
    (r"ZONE_RESOURCE_POOL_EXHAUSTED(_WITH_DETAILS)?", False, False),
    (r"QUOTA_EXCEEDED|quotaExceeded", True, False),
    (r"no more capacity in the zone|RESOURCE_EXHAUSTED", False, False),
    (r"does not exist in zone", False, True),
)
#: Azure, "Resolve allocation failures" and "Resolve errors for SKU not available".
_AZURE = (
    (r"ZonalAllocationFailed|OverconstrainedZonalAllocationRequest", False, False),
    (r"AllocationFailed|OverconstrainedAllocationRequest", False, False),
    (r"SkuNotAvailable", False, True),
    (r"No available zones for VM size", False, True),  # Ray's own words
    (r"QuotaExceeded", True, False),
    (r"exceeding approved [\w ]*quota", True, False),
)


def aws(code: str) -> Shortage | None:
    """What an error's code says of capacity.

    Returns:
        None where it is about something else.
    """
    if code in _AWS_HERE or code in _AWS_LASTING:
        return Shortage(code, lasting=code in _AWS_LASTING)
    return Shortage(code, everywhere=True) if code in _AWS_QUOTAS else None


def gcp(text: str) -> Shortage | None:
    """What the text of an operation's error, or of an HTTP error, says of capacity."""
    return _found(text, _GCP)


def azure(text: str) -> Shortage | None:
    """What the text of a deployment's error says of capacity."""
    return _found(text, _AZURE)


def text_of(error: BaseException) -> str:
    """All that a client library's error says, with the details that its own text may leave out."""
    inner = getattr(error, "error", None)
    content = getattr(error, "content", b"")
    parts = [str(error), content.decode(errors="replace") if isinstance(content, bytes) else str(content)]
    return " ".join([*parts, *_details(inner)])


def _details(error: object, depth: int = 5) -> list[str]:
    """Codes and messages of Azure's error and of those below it."""
    if error is None or not depth:
        return []
    said = [str(getattr(error, key)) for key in ("code", "message") if getattr(error, key, None)]
    for below in getattr(error, "details", None) or ():
        said += _details(below, depth - 1)
    return said


def _found(text: str, table: tuple[tuple[str, bool, bool], ...]) -> Shortage | None:
    for pattern, everywhere, lasting in table:
        match = re.search(pattern, text)
        if match:
            return Shortage(match[0], everywhere, lasting)
    return None
