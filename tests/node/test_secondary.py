"""Commands that query devices: their output, bounded in time and size."""

import asyncio
import base64
import json
import os
import sys
import time
from pathlib import Path

import pytest

from patience import PATIENCE_SECONDS
from sealane.crypto.evidence import nvidia
from sealane.crypto.evidence.cmw import Item
from sealane.crypto.evidence.media_types import NVIDIA_EVIDENCE
from sealane.daemon.config import SecondaryEvidenceConfig
from sealane.daemon.node.evidence.secondary import OUTPUT_BYTES_MAX, CommandSource, collect_all
from sealane.errors import UnavailableError

NONCE = bytes(range(32))


def source(program: str, *, label: str = "gpu0", timeout_seconds: int = 30) -> CommandSource:
    command = [sys.executable, "-c", f"import json, os, sys\n{program}"]
    return CommandSource(
        SecondaryEvidenceConfig(
            label=label, type="nvidia", command=command, timeout_seconds=timeout_seconds
        )
    )


def saying(report: str, certificates: str = "chain") -> str:
    return f"print(json.dumps({{'report': {report}, 'certificates': {certificates!r}}}))"


def collect(*sources: CommandSource) -> dict[str, Item]:
    return asyncio.run(collect_all(sources, NONCE))


def failure(program: str, **options: int) -> UnavailableError:
    with pytest.raises(UnavailableError) as caught:
        collect(source(program, **options))
    assert "gpu0" in str(caught.value)
    return caught.value


def test_command_is_told_the_nonce_and_nothing_of_our_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials/sealaned.service")
    told = (
        "__import__('base64').b64encode(repr((sys.argv[1:], sorted(os.environ))).encode()).decode()"
    )
    items = collect(source(saying(told)))
    assert items["gpu0"].media_type == NVIDIA_EVIDENCE
    environment = sorted({"PATH", *(["LC_CTYPE"] if b"LC_CTYPE" in items["gpu0"].value else [])})
    said = repr(([NONCE.hex()], environment)).encode()
    assert items["gpu0"].value == nvidia.encode_evidence(said, b"chain")


def test_every_device_answers_under_its_own_label() -> None:
    sources = [source(saying(f"'{n}{n}=='"), label=f"gpu{n}") for n in range(3)]
    assert collect(*sources) == {
        f"gpu{n}": Item(
            NVIDIA_EVIDENCE, nvidia.encode_evidence(base64.b64decode(f"{n}{n}=="), b"chain")
        )
        for n in range(3)
    }
    assert collect() == {}


def test_command_that_fails_is_quoted() -> None:
    error = failure("sys.stderr.write('no GPU here' + 'x' * 100000)\nsys.exit(3)")
    assert error.reason == "evidence.secondary.failed"
    assert "status 3: no GPU here" in str(error)
    assert len(str(error)) < 500


def test_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    config = SecondaryEvidenceConfig(label="gpu0", type="nvidia", command=[missing])
    with pytest.raises(UnavailableError, match="missing") as caught:
        collect(CommandSource(config))
    assert caught.value.reason == "evidence.secondary.failed"


def test_command_that_says_too_much_is_cut_off() -> None:
    error = failure(f"sys.stdout.write('x' * {OUTPUT_BYTES_MAX + 1})")
    assert error.reason == "evidence.secondary.size"
    largest = "{" + " " * (OUTPUT_BYTES_MAX - 2) + "}"
    assert len(largest) == OUTPUT_BYTES_MAX
    assert failure(f"sys.stdout.write('{{' + ' ' * {OUTPUT_BYTES_MAX - 2} + '}}')").reason == (
        "evidence.secondary.malformed"
    )


@pytest.mark.parametrize(
    "said",
    [
        "",
        "[]",
        "{}",
        "[" * 10000,
        json.dumps({"report": "AA=="}),
        json.dumps({"report": "A", "certificates": ""}),
        json.dumps({"report": "A!==", "certificates": ""}),
        json.dumps({"report": 1, "certificates": ""}),
        json.dumps({"report": "AA==", "certificates": 1}),
        json.dumps({"report": "AA==", "certificates": "\u00e9"}),
    ],
)
def test_answer_of_another_form_is_refused(said: str) -> None:
    error = failure(f"sys.stdout.write({said!r})")
    assert error.reason == "evidence.secondary.malformed"


def test_command_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    program = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(started)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)"
    )
    assert failure(program, timeout_seconds=3).reason == "evidence.secondary.timeout"
    for number in started.read_text().split():
        deadline = time.monotonic() + PATIENCE_SECONDS
        # The orphan's new parent takes a moment to reap it.
        while _is_alive(number):
            assert time.monotonic() < deadline
            os.sched_yield()


def _is_alive(number: str) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_one_device_that_fails_fails_them_all() -> None:
    good = source(saying("''"), label="gpu1")
    with pytest.raises(UnavailableError) as caught:
        collect(good, source("sys.exit(1)"))
    assert caught.value.reason == "evidence.secondary.failed"
