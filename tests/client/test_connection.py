"""Which socket a client uses, and what it says when it isn't served there."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sealane.client import connection
from sealane.client.connection import connect, default_socket
from sealane.errors import Error, UnavailableError, VerificationError
from sealane.protocol.refusal import REFUSED, refusal, refusal_of


@contextlib.contextmanager
def answering(path: Path, answer: bytes) -> Iterator[None]:
    """Have a socket answer the first connection and end it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            with listener.accept()[0] as caller:
                caller.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            thread.join()


async def test_a_client_that_is_refused_says_why(tmp_path: Path) -> None:
    error = VerificationError("door.user.refused", "neither user 7 nor a group")
    with answering(tmp_path / "s", refusal(error)), pytest.raises(Error) as refused:
        async with connect(tmp_path / "s"):
            pass
    assert (type(refused.value), *refused.value.args) == (VerificationError, *error.args)
    assert refused.value.reason == "door.user.refused"


@pytest.mark.parametrize("answer", [b"", b"\0\0\x18\4", REFUSED, REFUSED + b"Not A Reason x\n"])
async def test_any_other_answer_is_left_to_the_calls(tmp_path: Path, answer: bytes) -> None:
    with answering(tmp_path / "s", answer):
        async with connect(tmp_path / "s"):
            pass


async def test_a_socket_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError) as absent:
        async with connect(tmp_path / "s"):
            pass
    assert absent.value.reason == "daemon.unreachable"


def test_a_refusal_is_one_line_of_limited_length() -> None:
    line = refusal(VerificationError("door.user.refused", "long " * 1000))
    assert (len(line), line[-1:]) == (512, b"\n")
    found = refusal_of(line)
    assert found is not None
    assert found.reason == "door.user.refused"


def test_the_daemons_socket_comes_first_where_it_may_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, jobs = tmp_path / "own", tmp_path / "jobs"
    monkeypatch.setattr(connection, "DEFAULT_SOCKET", str(own))
    monkeypatch.setattr(connection, "JOBS_SOCKET", str(jobs))
    monkeypatch.delenv("SEALANE_SOCKET", raising=False)
    assert default_socket() == str(own)
    jobs.touch()
    # A daemon that isn't running is unreachable, whatever other sockets there are.
    assert default_socket() == str(own)
    own.touch()
    assert default_socket() == str(own)

    def closed(path: str, mode: int, *, effective_ids: bool = False) -> bool:
        assert (mode, effective_ids) == (os.W_OK, True)
        return path != str(own)

    monkeypatch.setattr(os, "access", closed)
    assert default_socket() == str(jobs)
    jobs.unlink()
    assert default_socket() == str(own)
    jobs.touch()

    def hidden(path: str) -> None:
        raise PermissionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(connection.os, "access", lambda *_, **__: True)
        patch.setattr(connection.os, "stat", hidden)
        patch.setattr(connection.os.path, "exists", lambda path: path == str(jobs))
        assert default_socket() == str(jobs)
    monkeypatch.setenv("SEALANE_SOCKET", "/elsewhere")
    assert default_socket() == "/elsewhere"
