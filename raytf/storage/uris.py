"""Parses storage URIs, distinguishes them from folders, and refuses secrets in them.

    runs   ./a:b   ~/runs   /data/runs                     a folder
    s3://BUCKET/PREFIX?region=eu-central-1                  an object store
    s3:/bucket   S3://bucket   s3%3A//bucket   https://...  neither: refused

A text that looks like a URI is never treated as a folder: it may contain a secret, which would become a folder's name.
A folder whose name looks like a URI needs a path: `./a:b`. Errors show no part of the text that may be a secret. A URI
that `parse` accepts contains no secret, so it may be shown and stored.
"""

from __future__ import annotations

import re
import urllib.parse
from dataclasses import dataclass

from raytf.errors import ConfigError

EXPECTED = "Expected a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"
_SCHEMES = ("s3", "gs", "gcs", "az")
_OPTIONS = {
    "s3": ("endpoint_override", "scheme", "region"),
    "gs": ("endpoint_override", "scheme", "project_id", "anonymous"),
    "az": ("endpoint_override", "scheme", "account_name"),
}
#: The pattern of each option's value, and its description for people.
_VALUES = {
    "endpoint_override": (
        re.compile(r"(https?://)?[\w.\-]+(:\d+)?/?|(https?://)?\[[0-9a-fA-F:]+\](:\d+)?/?"),
        "HOST:PORT",
    ),
    "scheme": (re.compile(r"https?"), "http or https"),
    "region": (re.compile(r"[\w.\-]*"), "a region such as eu-central-1"),
    "project_id": (re.compile(r"[\w.:\-]*"), "a project's name"),
    "account_name": (re.compile(r"[a-z0-9]{3,24}"), "3 to 24 small letters and digits"),
    "anonymous": (re.compile(r"\w*"), "true or false"),
}
#: The beginning of a folder's path, whatever follows.
_EXPLICIT = re.compile(r"/|~|\.{1,2}(/|$)")
#: A colon before the first slash, a scheme without a colon, or a text like NAME:PASSWORD@.
_LIKE_URI = re.compile(r"[^/:]*:|\s*(s3|gs|gcs|az|https?)[;.,]?//|(.*/)?[^/]*:[^/]*@", re.IGNORECASE)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]*")
_SECRET = re.compile(
    r"[^/]*:[^/]*@|(AKIA|ASIA)[A-Z0-9]{16}|(secret|token|passw|access_?-?key|credential|signature)[^/=&]*=",
    re.IGNORECASE,
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class StorageUri:
    """The parts of a URI.

    Attributes:
        scheme: s3, gs or az; empty for a folder.
        location: BUCKET/PREFIX, or the folder unchanged.
        options: names and values after the question mark.
    """

    scheme: str
    location: str
    options: dict[str, str]


def parse(uri: str) -> StorageUri:
    """Return the parts of a URI.

    Raises:
        ConfigError: it is neither a URI nor a folder, or may contain a secret, which the message omits.
    """
    if _CONTROL.search(uri):
        raise ConfigError(f"storage: the name contains a control character. {EXPECTED}.")
    scheme, mark, rest = uri.partition("://")
    if not mark or scheme not in _SCHEMES:
        _check_folder(uri)
        return StorageUri("", uri, {})
    if "#" in rest:
        raise ConfigError(f"storage {scheme}://...: it contains a #. Expected {scheme}://BUCKET/PREFIX?OPTION=VALUE.")
    location, _, query = rest.partition("?")
    if _has_secret(location) or "@" in location.partition("/")[0]:
        raise _credentials()
    if not location.strip("/") or location.startswith("/"):
        raise ConfigError(f"storage {scheme}://... names no bucket. Expected {scheme}://BUCKET/PREFIX.")
    if not _BUCKET.fullmatch(location.partition("/")[0]):
        raise ConfigError(
            f"storage {scheme}://...: the bucket's name may have only letters, digits, dots, hyphens and underscores. "
            f"Expected {scheme}://BUCKET/PREFIX."
        )
    family = "gs" if scheme == "gcs" else scheme
    return StorageUri(family, location.strip("/"), _options(query, f"{scheme}://{location}", _OPTIONS[family]))


def is_folder(uri: str) -> bool:
    """Return whether a URI is a local folder or file.

    Raises:
        ConfigError: as in `parse`.
    """
    return not parse(uri).scheme


def shown(uri: str) -> str:
    """Return a URI without its options, which may contain a secret by mistake; show nothing of an invalid URI."""
    try:
        return uri if is_folder(uri) else uri.partition("?")[0]
    except ConfigError:
        return "(an invalid URI)"


def _check_folder(uri: str) -> None:
    if _EXPLICIT.match(uri):
        return
    plain = uri
    for _ in range(3):  # it may be percent-encoded more than once
        scheme = re.match(r"\s*([A-Za-z][A-Za-z0-9]{0,4})://", plain)
        if scheme and plain is uri:
            known = scheme[1].lower() in _SCHEMES
            what = f"{scheme[1].lower()}:// must be in lower case" if known else f"{scheme[1]}:// is not known"
            raise ConfigError(f"storage {scheme[1]}://...: {what}. {EXPECTED}.")
        if plain.startswith("://"):
            raise ConfigError(f"storage ://...: the scheme is empty. {EXPECTED}.")
        if _LIKE_URI.match(plain):
            word = re.match(r"(s3|gs|gcs|az):/", uri)
            such = f", such as {word[0]}..." if word else ""
            hint = f" with two slashes, as in {word[1]}://BUCKET/PREFIX" if word else ""
            raise ConfigError(
                f"storage: the text looks like a URI but is not one{such}. "
                f"{EXPECTED}{hint}. Write a folder whose name has a colon as ./NAME."
            )
        plain = urllib.parse.unquote(plain)


def _has_secret(text: str) -> bool:
    variants = (text, urllib.parse.unquote(text), urllib.parse.unquote_plus(text))
    return any(_SECRET.search(variant) for variant in variants)


def _credentials() -> ConfigError:
    return ConfigError("storage: the URI contains credentials. Set them in the environment instead.")


def _options(query: str, plain: str, known: tuple[str, ...]) -> dict[str, str]:
    pairs = urllib.parse.parse_qsl(query, keep_blank_values=True)
    if any(word in name.lower() for name, _ in pairs for word in ("key", "token", "secret", "passw", "credential")):
        raise _credentials()
    for name, value in pairs:
        if name not in known:
            # A word without a value may be a secret itself.
            what = f"unknown option {name!r}" if value and re.fullmatch(r"[a-z_]{1,24}", name) else "an unknown option"
            raise ConfigError(f"storage {plain!r}: {what}. Known are {', '.join(known)}.")
        pattern, expected = _VALUES[name]
        if not pattern.fullmatch(value):
            raise ConfigError(f"storage {plain!r}: the value of {name} is invalid. Expected {expected}.")
    return dict(pairs)
