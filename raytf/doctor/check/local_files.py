"""Checks files on this machine that a cluster YAML names: keys, and files that are copied to every node."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path as File

from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, Severity, error, stops_ray_up, warning
from raytf.doctor.local_environment import Surroundings, is_user

#: Folders that Ray excludes from a working directory, and the most bytes that it accepts (runtime_env.packaging).
_RAY_LEAVES_OUT = (".git", ".venv", "venv", "__pycache__")
MOST_BYTES = 512 * 2**20
#: The most bytes that the job server accepts over HTTP. This limits the package, which is smaller than the folder.
_HTTP_BYTES = 100 * 2**20
#: The size from which a mount is reported, since rsync copies it to each node before anything runs there.
_MOUNT_BYTES = 1024 * 2**20
#: The most entries of a folder to count, since a YAML may name any folder.
_MOST_ENTRIES = 200_000
_TOKEN = ".ray/auth_token"
#: The only placeholder to search for in a command, where `<` and other placeholders have a meaning.
_YOURS = re.compile(r"\byour-\w+")
_PLACEHOLDERS = (
    "<",
    "change_me",
    "changeme",
    "change-me",
    "your-",
    "your_",
    "/path/to/",
    "xxxx",
    "replace-me",
    ":000000000000:",
    # Addresses reserved for documentation (RFC 5737).
    "192.0.2.",
    "198.51.100.",
    "203.0.113.",
)


def check(document: Document, here: Surroundings) -> Iterator[ConfigFinding]:
    """Find keys and folders that do not exist, and folders that are too large to copy."""
    yield from _user(document)
    yield from _key(document, here)
    yield from _mounts(document, here)


def _user(document: Document) -> Iterator[ConfigFinding]:
    auth, user = document.mapping("auth"), document.get("auth", "ssh_user")
    if user and not (isinstance(user, str) and is_placeholder(user)) and not is_user(user):
        why = "ssh reads it as an option, or a shell reads it as a command."
        fix = "Use letters, digits, dots, - and _; begin with a letter or a digit."
        yield error("ssh-user", ("auth", "ssh_user"), f"{user!r} is not the name of a user", why, fix)
    kind, has_auth = document.get("provider", "type"), "auth" in document.mapping()
    if (kind in ("aws", "gcp", "local") and has_auth and "ssh_user" not in auth) or (kind == "local" and not has_auth):
        path: Path = ("auth",) if has_auth else ()
        fix = "Add ssh_user, such as auth: {ssh_user: ubuntu}, with the user of the image or the hosts."
        yield stops_ray_up("ssh-user", path, "auth.ssh_user is missing", fix, "KeyError: 'ssh_user'")


def _key(document: Document, here: Surroundings) -> Iterator[ConfigFinding]:
    path, private = ("auth", "ssh_private_key"), document.get("auth", "ssh_private_key")
    if not isinstance(private, str) or is_placeholder(private):
        return
    file = here.local(private)
    refused = "ssh refuses such a key, and `ray up` waits for the node until it gives up."
    if private.endswith(".pub"):
        fix = f"Write {private.removesuffix('.pub')}."
        yield error("public-key", path, f"{private} is the public key", refused, fix)
    elif not os.path.isfile(file):  # pathlib's is_file raises for a name that is too long
        why = "Nodes start and cost money, but nobody can log in to them."
        fix = "Name the right file. On a cloud you can delete ssh_private_key to let Ray create a pair."
        yield error("key-missing", path, f"{private} is not on this machine", why, fix)
    elif (mode := stat.S_IMODE(file.stat().st_mode)) & 0o077:
        what = f"{private} can be read by others (mode {mode:o})"
        yield error("key-permissions", path, what, refused, f"chmod 600 {private}")


def _mounts(document: Document, here: Surroundings) -> Iterator[ConfigFinding]:
    excluded = [str(p) for p in document.sequence("rsync_exclude")]
    for remote, local in document.mapping("file_mounts").items():
        path = ("file_mounts", remote)
        if not isinstance(local, str) or is_placeholder(local):
            continue
        if not remote.startswith(("/", "~")):
            why = "Its location depends on the user and on Docker."
            yield error("mount-relative", path, f"{remote!r} is not absolute", why, f"Write ~/{remote}.")
        file = here.local(local)
        if os.path.exists(file):
            if file.is_dir():
                yield from _folder(path, local, file, excluded)
        elif local.endswith(_TOKEN):
            what, why = f"{local} is not on this machine yet", "The nodes get a copy of it."
            fix = "Run `ray get-auth-token --generate`."
            yield ConfigFinding("auth-token", Severity.FILL_IN, path, what, why, fix)
        else:
            what, why = f"{local} is not on this machine", "`ray up` starts the head, cannot copy it, and exits."
            fix = "Fix the path; a relative one starts in the folder where you run `ray up`."
            yield error("mount-missing", path, what, why, fix)


def _folder(path: Path, local: str, file: File, excluded: list[str]) -> Iterator[ConfigFinding]:
    if file.resolve() in (File("/"), File.home()):
        what = f"{local} is your whole {'disk' if file.resolve() == File('/') else 'home'}"
        why = "rsync copies it to each node, with every key and cache in it."
        yield error("mount-too-large", path, what, why, "Mount the project's folder.")
        return
    is_git_excluded = any(p.rstrip("/") in (".git", "**/.git", ".git/**", "**/.git/**") for p in excluded)
    if (file / ".git").exists() and not is_git_excluded:
        what = f"{local} has a .git, but rsync_exclude does not name it"
        why = "The whole history is copied to the head, and from there to each node."
        fix = "Add rsync_exclude: ['**/.git', '**/.venv'], or mount less: Ray hashes all files anyway."
        yield warning("mount-git", path, what, why, fix)
    names = [p.replace("**/", "").removesuffix("/**").rstrip("/") for p in excluded]
    if folder_bytes(file, names, _MOUNT_BYTES) > _MOUNT_BYTES:
        what = f"{local} has more than {_MOUNT_BYTES >> 30} GiB"
        why = "rsync copies it to the head, and from there to each node before the node does anything else."
        fix = "Exclude data with rsync_exclude; training data belongs in the bucket."
        yield warning("mount-too-large", path, what, why, fix)


def working_dir(folder: str, here: Surroundings) -> Iterator[ConfigFinding]:
    """Find a working directory that does not exist, or is too large for `ray job submit --working-dir`."""
    file = here.local(folder)
    if not os.path.isdir(file):
        what, fix = f"--working-dir {folder} is not a folder", "Pass the folder that contains jobs/."
        yield error("working-dir", (), what, "`ray job submit` refuses it.", fix)
        return
    patterns = [*_RAY_LEAVES_OUT, *_ignored(file)]
    size = folder_bytes(file, patterns, MOST_BYTES)
    if size >= _HTTP_BYTES:
        large = ", ".join(f"{name} ({count >> 20} MiB)" for name, count in _largest(file, patterns))
        least = MOST_BYTES if size >= MOST_BYTES else _HTTP_BYTES
        what = f"--working-dir {folder} has more than {least >> 20} MiB: {large}"
        why = "Ray packs it first, and then refuses more than 100 MiB (`ray job submit`) or 512 MiB."
        fix = "List files that the job does not need in .rayignore or .gitignore."
        yield (error if size >= MOST_BYTES else warning)("working-dir", (), what, why, fix)


def _ignored(folder: File) -> list[str]:
    patterns: list[str] = []
    for name in (".gitignore", ".rayignore"):
        file = folder / name
        if file.is_file():
            lines = (line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
            patterns += [line.strip("/") for line in lines if line and not line.startswith(("#", "!"))]
    return patterns


def _largest(folder: File, patterns: list[str]) -> list[tuple[str, int]]:
    sizes = []
    for entry in os.scandir(folder):
        if _matches(entry.name, patterns):
            continue
        sizes.append((entry.name, folder_bytes(File(entry.path), patterns) if entry.is_dir() else entry.stat().st_size))
    return sorted(sizes, key=lambda item: -item[1])[:3]


def folder_bytes(folder: File, patterns: Iterable[str], enough: int | None = None) -> int:
    """Return the bytes of a folder's files that match no pattern. Counting stops once there are more than `enough`."""
    total, entries, left_out = 0, 0, list(patterns)
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _matches(name, left_out)]
        for name in files:
            if not _matches(name, left_out):
                file = os.path.join(root, name)
                with contextlib.suppress(OSError):  # it was just deleted
                    total += 0 if os.path.islink(file) else os.path.getsize(file)
        entries += 1 + len(files)
        if (enough is not None and total > enough) or entries > _MOST_ENTRIES:
            break
    return total


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def is_placeholder(value: str) -> bool:
    """Return whether a string is a placeholder for a value that the user has to fill in."""
    folded = value.casefold()
    return any(word in folded for word in _PLACEHOLDERS)


def placeholders(document: Document) -> Iterator[ConfigFinding]:
    """Find all values that the user still has to fill in."""

    def walk(value: object, path: Path) -> Iterator[Path]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(inner, (*path, str(key)))
        elif isinstance(value, list):
            for i, inner in enumerate(value):
                yield from walk(inner, (*path, i))
        elif isinstance(value, str) and (_YOURS.search(value) if " " in value else is_placeholder(value)):
            yield path

    for path in walk(document.value, ()):
        what, why = f"{document.get(*path)!r} is a placeholder", "The clouds refuse it."
        yield ConfigFinding("placeholder", Severity.FILL_IN, path, what, why, "Write your own value.")
