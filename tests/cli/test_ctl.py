"""Readable output of `sealanectl`, and its refusals before any call."""

import argparse
import asyncio
import datetime as dt
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from patience import PATIENCE_SECONDS
from sealane.cli.ctl import _status_rows, exit_code_of, main
from sealane.cli.output import Output
from sealane.cli.subsystems import _subsystem_rows
from sealane.cli.volume_jobs import job_rows, parse_rate
from sealane.cli.volumes import _full, _volume_attach, parse_via
from sealane.client import (
    Attachment,
    Client,
    JobFinding,
    NodeStatus,
    Volume,
    VolumeJob,
    Volumes,
    connect,
)
from sealane.errors import UnavailableError, UsageError
from sealane.protocol.v1 import subsystems_pb2

SECRET = "DHHC-1:00:c2VjcmV0:"
NOW = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)


def _status(*, is_development: bool = True, seconds_left: int = 60) -> NodeStatus:
    return NodeStatus(
        node="n",
        version="1",
        roles=("gateway",),
        evidence_driver="software",
        is_development=is_development,
        certificate_expires=NOW + dt.timedelta(seconds=seconds_left),
        addresses={"socket": "/s", "gateway": "127.0.0.1:1"},
        started=NOW,
    )


def test_status_says_loudly_that_evidence_is_for_development() -> None:
    assert "DEVELOPMENT ONLY" in _status_rows(_status(), NOW)["WARNING"]
    assert "WARNING" not in _status_rows(_status(is_development=False), NOW)


def test_status_says_how_long_the_certificate_lives() -> None:
    assert _status_rows(_status(), NOW)["certificate"] == "until 2026-01-02 03:05:05 UTC, 60 s left"
    assert _status_rows(_status(seconds_left=-1), NOW)["certificate"].startswith("EXPIRED at ")


def test_table_is_aligned_without_trailing_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output("table")
    output.show([{"a": "long value", "b": ""}, {"a": "x", "b": 7}])
    assert capsys.readouterr().out == "a           b\nlong value\nx           7\n"
    output.show_one({"key": "v", "longer": NOW})
    assert capsys.readouterr().out == "key     v\nlonger  2026-01-02 03:04:05 UTC\n"


def test_last_column_ends_where_the_terminal_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "34")
    terminal, file = Terminal(), io.StringIO()
    row = {"key": "words that are too many for it", "longer": "", "one": "x" * 40}
    Output("table", terminal).show_one(row)
    assert terminal.getvalue().splitlines() == [
        "key     words that are too many",
        "        for it",
        "longer",
        "one     " + "x" * 40,
    ]
    Output("table", file).show_one(row)
    assert file.getvalue().splitlines()[0] == "key     words that are too many for it"


def test_text_of_a_peer_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Output("table").line({"kind": "refused", "detail": "\x1b[2Jgone\r\nforged line"})
    assert capsys.readouterr().out == "refused  ?[2Jgone??forged line\n"


def test_volume_says_its_units() -> None:
    volume = Volume(
        name="volumes/x",
        display_name="d",
        size_bytes=3 << 29,
        target_node="t",
        state="attached",
        mode="remote",
        freshness="tree",
        key_epoch=1,
        attachment=Attachment(
            traddr="127.0.0.1",
            trsvcid=4421,
            subsystem_nqn="nqn.s",
            namespace_id=1,
            host_nqn="nqn.h",
            sectors_sealed=2,
            sectors_opened=3,
            counters_used=512,
            counters_leased=1024,
            refusals=0,
        ),
    )
    shown = _full(volume)
    assert shown["size"] == "1.5 GiB (1610612736 bytes)"
    assert shown["counters"] == "512 used of 1024 leased"
    assert shown["export"] == "127.0.0.1:4421, namespace 1"
    # Missing properties of a volume take no line.
    assert not {"third party", "access", "shared with"} & shown.keys()


def _job(**values: Any) -> VolumeJob:
    job = {
        "kind": "scrub", "state": "running", "detail": "", "position": 25, "sector_count": 100,
        "checked": 20, "unchecked": 0, "refreshed": 0, "found": 2,
        "repaired": 0,
        "findings": (
            JobFinding(lba=7, reason="sector.stale", detail="sector: older", repairable=False),
        ),
        "bytes_moved": 4 << 20, "bytes_per_second": 200 << 20, "active_seconds": 2.0, "yields": 3,
        "interruptions": 1, "started": NOW, "ended": None, "seconds_left": 61.4,
    }  # fmt: skip
    return VolumeJob(**(job | values))


def test_job_is_shown_with_progress_rate_and_findings() -> None:
    shown = job_rows(_job())
    assert shown["state"] == "running, 25 %, 2 found wrong, 0:01:01 left"
    assert shown["rate"] == "4 MiB at 2 MiB/s, 200 MiB/s at most"
    assert shown["finding 1"] == "sector 7: sector.stale, sector: older"
    assert shown["further findings"] == 1
    assert job_rows(_job(state="failed", detail="gone"))["state"] == "failed: gone"


@pytest.mark.parametrize(
    ("text", "rate"),
    [("0", 0), ("4096", 4096), ("200MiB", 200 << 20), ("1GiB/s", 1 << 30), ("2PiB", 2 << 50)],
)
def test_rates_are_numbers_with_binary_units(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["", "-1", "MiB", "1.5MiB", "9MB/s", "1/s/s", "9999999TiB", "9" * 5000]
)
def test_other_rates_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="allowed"):
        parse_rate(text)


class AttachingClient:
    """A client whose `volumes.attach` answers with a secret, or fails."""

    def __init__(self, error: UnavailableError | None = None) -> None:
        self.volumes = self
        self._error = error

    async def attach(self, name: str, **_: object) -> Volume:
        if self._error is not None:
            raise self._error
        return Volume(
            name=name,
            display_name="d",
            size_bytes=4096,
            target_node="t",
            state="attached",
            mode="remote",
            freshness="tree",
            key_epoch=1,
            attachment=Attachment(
                traddr="127.0.0.1",
                trsvcid=4421,
                subsystem_nqn="nqn.s",
                namespace_id=1,
                host_nqn="nqn.h",
                sectors_sealed=0,
                sectors_opened=0,
                counters_used=0,
                counters_leased=0,
                refusals=0,
                dhchap_secret=SECRET,
            ),
        )


async def _attach(client: AttachingClient, form: str, path: Path | None) -> None:
    options = argparse.Namespace(
        name="volumes/x", host_nqn="nqn.h", via=("", 0), secret_file=path, fail_over=False
    )
    await _volume_attach(cast("Client", client), options, Output(form))


@pytest.mark.parametrize("form", ["table", "json"])
async def test_secret_goes_to_its_file_only(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "host's secret"
    await _attach(AttachingClient(), form, path)
    shown = capsys.readouterr().out
    assert SECRET not in shown
    assert "$(cat " in shown
    assert path.read_text() == f"{SECRET}\n"
    assert path.stat().st_mode & 0o777 == 0o600
    await _attach(AttachingClient(), form, None)
    assert SECRET in capsys.readouterr().out


async def test_secret_file_that_cannot_be_is_said_before_attaching(tmp_path: Path) -> None:
    client = AttachingClient(UnavailableError("peer.unavailable", "was asked"))
    (tmp_path / "there").touch()
    for path in (tmp_path / "there", tmp_path / "no directory" / "secret"):
        with pytest.raises(UsageError) as caught:
            await _attach(client, "table", path)
        assert caught.value.reason == "key.unwritable"
    with pytest.raises(UnavailableError):
        await _attach(client, "table", tmp_path / "new")
    assert os.listdir(tmp_path) == ["there"]  # noqa: PTH208 - pathlib's is refused in a coroutine


def test_data_path_address_is_read_strictly() -> None:
    assert parse_via("192.0.2.1:4420") == ("192.0.2.1", 4420)
    assert parse_via("[2001:db8::1]:4420") == ("2001:db8::1", 4420)
    for text in ("", "h", ":1", "h:", "h:0", "h:65536", "h:99999999999999", "h:²", "h:-1"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_via(text)


def test_argument_that_is_no_text_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["volume", "get", "volumes/\udcff"])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "not UTF-8" in error


def test_form_of_the_answer_is_asked_for_before_the_noun_or_after_the_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = str(tmp_path / "key.pem")
    for arguments in (
        ["--output", "json", "key", "attestation", key],
        ["key", "fingerprint", key, "--output", "json"],
    ):
        assert main(arguments) == 0
        assert json.loads(capsys.readouterr().out)["fingerprint"].startswith("sha256:")


def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    key = str(tmp_path / "key.pem")
    program = "import sys; from sealane.cli import ctl; sys.exit(ctl.main(sys.argv[1:]))"
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program, "key", "attestation", key],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (ended.returncode, ended.stderr) == (1, "sealanectl: No space left on device\n")


@pytest.mark.parametrize("seconds", ["nan", "-1", "0", "1e9", "often"])
def test_pause_between_looks_at_a_session_is_bounded(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["session", "stat", "sessions/x", "--watch", seconds])
    assert caught.value.code == 2
    assert "allowed: 0.1 to 86400 seconds" in capsys.readouterr().err


@pytest.mark.parametrize("size_bytes", [-1, 1 << 64, "many"])
async def test_numbers_that_no_request_can_have_are_refused(size_bytes: Any) -> None:
    async with grpc.aio.insecure_channel("unix:/nowhere") as channel:
        for call in (
            Volumes(channel).create(size_bytes=size_bytes),
            Volumes(channel).resize("volumes/x", size_bytes=size_bytes),
            Volumes(channel).start_job("volumes/x", "scrub", bytes_per_second=size_bytes),
            Volumes(channel).change_job("volumes/x", "scrub", bytes_per_second=size_bytes),
            Volumes(channel).attach("volumes/x", host_nqn="nqn.h", via_trsvcid=size_bytes),
        ):
            with pytest.raises(UsageError) as caught:
                await call
            assert caught.value.reason == "volume.request.range"


async def test_a_job_has_ended_when_its_end_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [_job(state="finished", ended=ended) for ended in (None, None, NOW)]

    async def get(_volumes: Volumes, _name: str, *, with_store: bool) -> Any:
        assert with_store
        return SimpleNamespace(store=SimpleNamespace(jobs=[jobs.pop(0)]))

    monkeypatch.setattr(Volumes, "get", get)
    monkeypatch.setattr("sealane.client.volumes._JOB_POLL_SECONDS", 0.0)
    async with grpc.aio.insecure_channel("unix:/nowhere") as channel:
        assert (await Volumes(channel).wait_job("volumes/x", "scrub")).ended == NOW
    assert jobs == []


@pytest.mark.parametrize("length", [10, 300])
def test_socket_that_cannot_be_is_named_with_the_reason(
    length: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--socket", str(tmp_path / ("s" * length)), "status"]) == 4
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "[daemon.unreachable]" in error
    assert "None" not in error


@pytest.mark.slow
async def test_watch_of_a_silent_daemon_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sealane.client.volumes.CALL_SECONDS", 0.2)
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(path)
        silent.listen()
        async with connect(path) as client:
            with pytest.raises(UnavailableError) as caught:
                async with asyncio.timeout(PATIENCE_SECONDS), client.volumes.watch("volumes/x"):
                    pass
    assert caught.value.reason == "peer.deadline_exceeded"


def test_subsystem_says_who_sees_what(capsys: pytest.CaptureFixture[str]) -> None:
    subsystem = subsystems_pb2.Subsystem(nqn="nqn.x", serial="s")
    subsystem.namespaces.add(
        nsid=2, store="file", size_bytes=1 << 20, uuid="u", ana_state="change", host_nqns=["nqn.h"]
    )
    subsystem.controllers.add(controller_id=1, host_nqn="nqn.h", io_queues=3, authenticated=True)
    Output("table").show_one(_subsystem_rows(subsystem))
    lines = [line.split("  ")[-1].strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "nqn.x",
        "s",
        "any",
        "1 MiB, file, change, u, for nqn.h",
        "nqn.h, 3 I/O queues, authenticated",
    ]


def test_a_daemon_imports_nothing_that_draws():
    roles = [f"sealane.daemon.{role}.role" for role in ("broker", "fabric", "gateway", "target")]
    program = (
        f"import sys, sealane.daemon.main, {', '.join(roles)}\n"
        "print(*(m for m in sys.modules if m in sys.argv))"
    )
    drawing = ["sealane.daemon.broker.role", "matplotlib", "PIL", "pyroute2"]
    done = subprocess.run(
        [sys.executable, "-c", program, *drawing], check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == ["sealane.daemon.broker.role"]


@pytest.mark.parametrize("arguments", [["lab", "show"], ["demo"]])
def test_what_needs_an_extra_names_it(arguments: list[str]) -> None:
    program = (
        "import sys; sys.modules['pyroute2'] = None; from sealane.cli import entry\n"
        "sys.exit(entry.sealane())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], check=False, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.endswith(": pyroute2 is not installed: pip install 'sealane[lab]'\n")


def test_a_command_imports_its_own_noun_only():
    program = (
        "import sys; from sealane.cli import ctl\n"
        "try: ctl.main(['volume', 'list', '--help'])\n"
        "except SystemExit: print(*(m for m in sys.modules if m in sys.argv))"
    )
    heavy = ["sealane.cli.volumes", "sealane.cli.attest", "matplotlib", "numpy"]
    done = subprocess.run(
        [sys.executable, "-c", program, *heavy], check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "sealane.cli.volumes"


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("volume.not_found", 4),
        ("device.not_found", 4),
        ("volume.attached.state", 2),
        ("hsm.key.not_found", 2),
    ],
)
def test_a_typo_is_exit_code_4(reason: Any, code: int) -> None:
    assert exit_code_of(UsageError(reason, "…")) == code
