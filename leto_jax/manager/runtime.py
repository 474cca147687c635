"""Where the sockets of a job lie: a private directory per user, one directory per job in it.

$XDG_RUNTIME_DIR/leto/JOB/      if that variable names a directory that is ours
/tmp/leto-UID/JOB/              otherwise
    manager.sock  manager.lock  manager.log
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from leto_jax.errors import DeadlineError, JobError, ProtocolError, UsageError
from leto_jax.manager import protocol

SOCKET_NAME = "manager.sock"
LOCK_NAME = "manager.lock"
LOG_NAME = "manager.log"
_JOB_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PROBE_SECS = 1.0


def check_job_name(job: str) -> str:
    """The name itself, if it can be part of a path; `UsageError` otherwise."""
    if not isinstance(job, str) or not _JOB_NAME.fullmatch(job) or job in (".", ".."):
        raise UsageError(f"a job name is 1 to 64 of the characters A-Z a-z 0-9 . _ - (and not . or ..), found {job!r}")
    return job


def runtime_root(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of all jobs of this user. Creates nothing."""
    base = environ.get("XDG_RUNTIME_DIR", "")
    if base:
        with contextlib.suppress(OSError):  # set by another login (su, sudo): then it is not ours to use
            found = os.stat(base)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                return Path(base) / "leto"
    return Path(f"/tmp/leto-{os.geteuid()}")


def job_dir(job: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of one job; its name and the length of its socket paths are checked. Creates nothing."""
    directory = runtime_root(environ) / check_job_name(job)
    protocol.check_address(directory / SOCKET_NAME)
    return directory


def ensure_private_dir(path: str | Path) -> Path:
    """Creates `path` with mode 0700 if there is nothing (its parent must exist), and refuses whatever else is there.

    Raises:
      JobError: a symbolic link, no directory, another owner, or open to others; the message says what was found.

    *Crash*: the directory exists, possibly with a mode narrower than 0700, which the next call refuses by name.
    """
    path = Path(path)
    with contextlib.suppress(FileExistsError):
        try:
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)  # whatever the umask is
        except FileNotFoundError as error:
            raise JobError(f"cannot create the runtime directory {path}: {path.parent} does not exist") from error
        except PermissionError as error:
            raise JobError(f"cannot create the runtime directory {path}: no permission to write in {path.parent}") from error
    expected = f"expected a directory with mode 0700 of uid {os.geteuid()} at {path}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        found = os.lstat(path)
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else f"{stat.filemode(found.st_mode)} of uid {found.st_uid}"
        raise JobError(f"{expected}, found {what} ({error.strerror}): remove it, or set XDG_RUNTIME_DIR to a directory of yours") from error
    try:
        found = os.fstat(fd)
    finally:
        os.close(fd)
    if found.st_uid != os.geteuid():
        raise JobError(f"{expected}, found one of uid {found.st_uid}: set XDG_RUNTIME_DIR to a directory of yours")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o777 != 0o700:
        raise JobError(f"{expected}, found mode {mode:04o}: check what is in it, then `chmod 700 {path}`")
    return path


def ensure_job_dir(job: str, environ: Mapping[str, str] = os.environ) -> Path:
    """`job_dir`, with it and the directory above it created or checked."""
    directory = job_dir(job, environ)
    ensure_private_dir(directory.parent)
    return ensure_private_dir(directory)


def probe(path: str | Path, timeout_secs: float = _PROBE_SECS) -> protocol.Message | None:
    """What the manager behind a socket says to a hello; None if nobody answers in time. Changes nothing."""
    deadline = time.monotonic() + timeout_secs
    try:
        sock = protocol.connect(path, deadline=deadline, what="the state manager")
    except (JobError, DeadlineError):
        return None
    with sock:
        try:
            protocol.send(sock, {"op": "hello", "role": "tool", "rank": None, "incarnation": 0}, deadline=deadline)
            reply, fds = protocol.receive(sock, deadline=deadline)
        except (ProtocolError, DeadlineError):
            return None
    protocol.close_fds(fds)
    return reply if reply.get("ok") is True else None


def live_jobs(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the jobs of this user whose manager answers, sorted. Removes nothing: a dead socket is replaced by the next manager.

    *Cost*: up to 1 s per job whose manager is stopped.
    """
    root = runtime_root(environ)
    jobs = []
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return []
    for name in names:
        if not _JOB_NAME.fullmatch(name) or (root / name).is_symlink():
            continue
        with contextlib.suppress(UsageError):
            if probe(root / name / SOCKET_NAME) is not None:
                jobs.append(name)
    return jobs
