"""The daemon's directories: state and run directory, the locks of one start, the ready file."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sealane.daemon.runtime.files import replacing, unusable
from sealane.daemon.runtime.reserve_file import with_reserve
from sealane.daemon.runtime.state_format import check_format
from sealane.errors import UnavailableError, UsageError

SOCKET_NAME: Final = "sealaned.sock"
RING_SOCKET_NAME: Final = "ring.sock"
JOBS_SOCKET_NAME: Final = "jobs.sock"
_SHARED_DIRECTORY_MODE: Final = 0o711
READY_NAME: Final = "ready.json"
_UNIT_USER: Final = "sealane"
_UNIT_STATE: Final = "/var/lib/sealane*"
"""User and state directories of the systemd units."""
_RUN_LOCK_NAME: Final = "sealaned.lock"
_STATE_LOCK_NAME: Final = "state.lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reloaded:
    """The outcome of a reload: when it began (CLOCK_BOOTTIME), and its error, if any."""

    began_ns: int
    reason: str = ""
    message: str = ""
    exit_code: int = 0


def prepare_directory(path: Path, *, key: str) -> None:
    """Create `path` with mode 0700, or check that it is ours and closed to others.

    UsageError `directory.…`; errors of `unusable`.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(path, error, key=key) from error
    check_directory(path, key=key)


def check_directory(path: Path, *, key: str, is_shared: bool = False) -> None:
    """Check that `path` is ours and closed to others (unless `is_shared`), or can be created.

    UsageError `directory.…`; errors of `unusable`. Creates nothing.
    """
    try:
        existing = next(each for each in (path, *path.parents) if each.exists())
        status, flags = existing.stat(), os.statvfs(existing).f_flag
    except OSError as error:
        raise unusable(path, error, key=key) from error
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError("directory.unusable", f"{key} {path}: {existing} is not a directory")
    if existing == path and not is_shared:
        _check_closed(status, path, key)
    if flags & os.ST_RDONLY:
        raise UnavailableError("directory.unavailable", f"{key} {path}: {os.strerror(errno.EROFS)}")
    if not os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
        raise UsageError("directory.unusable", f"{key} {path}: {existing} is not writable")


def _check_closed(status: os.stat_result, path: Path, key: str) -> None:
    if status.st_uid != os.geteuid():
        raise UsageError(
            "directory.owner", f"{key} {path}: owner {status.st_uid}; allowed: {os.geteuid()}"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise UsageError("directory.mode", f"{key} {path}: mode {mode:04o}; allowed: 0700")


class SharedDirectory:
    """The directory of the sockets that other users reach; `key` is its configuration key.

    Only the daemon may write in it: whoever can replace a socket is the daemon to those that
    connect next.
    """

    def __init__(self, path: Path, *, key: str) -> None:
        self._path = path
        self._key = key
        self.socket = path / JOBS_SOCKET_NAME
        self.ring_socket = path / RING_SOCKET_NAME

    def check(self) -> None:
        """Raise UsageError `directory.…` unless it can be used, or created."""
        check_directory(self._path, key=self._key, is_shared=True)
        for each in (self._path, *self._path.parents):
            if each.exists():
                _check_enterable(each, key=self._key, is_own=each == self._path)

    def prepare(self) -> None:
        """Create it with mode 0711 if it is missing, and check it."""
        if not self._path.exists():
            try:
                self._path.mkdir()
                self._path.chmod(_SHARED_DIRECTORY_MODE)
            except OSError as error:
                raise unusable(self._path, error, key=self._key) from error
        self.check()


def _check_enterable(path: Path, *, key: str, is_own: bool) -> None:
    """Raise UsageError if only the owner may enter `path`, or others may replace what is in it."""
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in {0, os.geteuid()}:
        raise UsageError(
            "directory.owner",
            f"{key} {path}: owner {status.st_uid}; allowed: {os.geteuid()}, or root",
        )
    # In a directory with the sticky bit nobody renames or removes what isn't his.
    is_writable = mode & 0o022 and (is_own or not mode & stat.S_ISVTX)
    if is_writable or not mode & 0o011:
        raise UsageError(
            "directory.mode",
            f"{key} {path}: mode {mode:04o}; allowed: closed to writing by others, and open to "
            "entering by others, as 0711 is",
        )


def daemon_user(state_dir: Path) -> tuple[int, int]:
    """Return user and group of the daemon, for root who prepares or checks its start.

    That is the owner of its state directory; before there is one, the units' user if it is where a
    unit has it. Otherwise, and for anyone but root, it is us.
    """
    if os.geteuid() == 0:
        with contextlib.suppress(OSError, KeyError):
            if state_dir.exists():
                status = state_dir.stat()
                return status.st_uid, status.st_gid
            if state_dir.match(_UNIT_STATE):
                known = pwd.getpwnam(_UNIT_USER)
                return known.pw_uid, known.pw_gid
    return os.geteuid(), os.getegid()


@contextlib.contextmanager
def as_daemon(state_dir: Path) -> Iterator[None]:
    """Act as the daemon's user if we are root: so a check finds what that user can't use."""
    user, group = daemon_user(state_dir)
    if user == os.geteuid():
        yield
        return
    groups = os.getgroups()
    os.setgroups(_groups_of(user, group))
    os.setegid(group)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(os.getgid())
        os.setgroups(groups)


def is_for_another() -> bool:
    """Return True while root acts as the daemon's user."""
    return os.getuid() == 0 != os.geteuid()


def _groups_of(user: int, group: int) -> list[int]:
    try:
        return os.getgrouplist(pwd.getpwuid(user).pw_name, group)
    except KeyError:
        return [group]


def has_started(state_dir: Path) -> bool:
    """Return True if a daemon has held this state directory before."""
    return (state_dir / _STATE_LOCK_NAME).exists()


@contextlib.contextmanager
def claimed_state(path: Path) -> Iterator[None]:
    """Hold a state directory; UnavailableError `daemon.running` if another daemon holds it.

    Errors of `prepare_directory`, and of `check_format` if a later release wrote it.

    Must precede enrolment: otherwise a second daemon would be certified as the node, and the first
    refused from then on.
    """
    prepare_directory(path, key="node.state_dir")
    with _locked(path / _STATE_LOCK_NAME, in_use=path, key="node.state_dir"):
        check_format(path)
        yield


class RunDirectory:
    """A daemon's run directory: its sockets and its ready file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.socket = path / SOCKET_NAME
        self.ring_socket = path / RING_SOCKET_NAME
        self.shared_inner = path / JOBS_SOCKET_NAME
        """Where the servers behind the shared socket have a name for a moment."""
        self.ready_file = path / READY_NAME
        self.failed_stores = path / "failed-stores.json"
        """Why the last process ended, if it was for failed stores; outlasts a restart."""

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the directory; UnavailableError `daemon.running` if another daemon holds it.

        The lock ends with its process, so the files of a killed daemon can be removed safely.
        """
        prepare_directory(self._path, key="node.run_dir")
        lock = self._path / _RUN_LOCK_NAME
        with _locked(lock, in_use=self.socket, key="node.run_dir"):
            self._remove_leftovers()
            try:
                yield
            finally:
                self._remove_leftovers()

    def write_ready(
        self, *, node: str, addresses: Mapping[str, str], reload: Reloaded | None = None
    ) -> None:
        """Replace the ready file atomically: pid, node, addresses, outcome of the last reload."""
        content: dict[str, object] = {
            "pid": os.getpid(),
            "node": node,
            "addresses": dict(addresses),
        }
        if reload is not None:
            content["reload"] = dataclasses.asdict(reload)
        replace_file(self.ready_file, (json.dumps(content, indent=2) + "\n").encode())

    @property
    def is_claimed(self) -> bool:
        """True if a daemon holds the directory now."""
        try:
            with (self._path / _RUN_LOCK_NAME).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def _remove_leftovers(self) -> None:
        draft = _draft_of(self.ready_file)
        for path in (self.ready_file, draft, self.socket, self.ring_socket):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise UsageError(
                    "directory.unusable", f"{path}: can't be removed: {error.strerror}"
                ) from error


@contextlib.contextmanager
def _locked(lock: Path, *, in_use: Path, key: str) -> Iterator[None]:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode=0o600)
    except OSError as error:
        raise unusable(lock, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UnavailableError(
                "daemon.running",
                f"{in_use}: in use by a running sealaned; configure another {key}",
            ) from error
        yield
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically unless it has this content, if need be with space of the reserve.

    Errors of `unusable` if it can't be written.
    """
    draft = _draft_of(path)

    def write() -> None:
        with replacing(path, draft):
            draft.write_bytes(content)

    try:
        if not path.is_file() or path.read_bytes() != content:
            with_reserve(path, len(content), write)
    except OSError as error:
        raise unusable(path, error) from error


def _draft_of(path: Path) -> Path:
    # Hidden, and with the whole name: `policy.toml.new` may be somebody's own file.
    return path.with_name(f".{path.name}.new")
