import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sealane.daemon.device.anchors.choose import open_counter
from sealane.daemon.device.anchors.counter import FileCounter, MonotonicCounter
from sealane.daemon.node.tpm_connection import open_tpm
from sealane.errors import UnavailableError, VerificationError
from software_tpm import SoftwareTpm, software_tpm

INDEX = 0x01805EA1


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[SoftwareTpm]:
    with software_tpm(tmp_path / "tpm") as tpm:
        yield tpm


@pytest.fixture(params=["file", "tpm2"])
def counter(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MonotonicCounter]:
    if request.param == "file":
        yield FileCounter(tmp_path / "counter")
        return
    machine = request.getfixturevalue("machine")
    tpm, counter = connect(machine)
    yield counter
    tpm.close()


def connect(machine: SoftwareTpm) -> tuple[Any, Any]:
    from sealane.daemon.device.anchors.tpm_counter import TpmCounter
    from sealane.daemon.node.tpm import Tpm

    tpm = Tpm(machine.tcti)
    return tpm, TpmCounter(tpm, index=INDEX)


def test_counter_grows_by_one_and_reads_what_it_returned(counter: MonotonicCounter) -> None:
    first = counter.increment()
    assert first >= 1
    assert counter.read() == first
    assert [counter.increment() for _ in range(3)] == [first + 1, first + 2, first + 3]


def test_several_threads_never_get_one_value_twice(counter: MonotonicCounter) -> None:
    values: list[int] = []

    def work() -> None:
        for _ in range(20):
            values.append(counter.increment())  # noqa: PERF401 - the others append meanwhile

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(values)) == 80


def test_two_owners_of_one_file_never_get_one_value_twice(tmp_path: Path) -> None:
    counters = [FileCounter(tmp_path / "counter") for _ in range(2)]
    assert [counters[n % 2].increment() for n in range(6)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "content", [b"", b"5", b"05\n", b"-1\n", b"5\n\n", b"18446744073709551616\n", b"x\n"]
)
def test_file_that_is_no_counter_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "counter"
    path.write_bytes(content)
    with pytest.raises(VerificationError, match=r"counter\.malformed"):
        FileCounter(path).increment()
    assert path.read_bytes() == content


def test_counter_that_is_used_up_stays_so(tmp_path: Path) -> None:
    path = tmp_path / "counter"
    path.write_bytes(b"18446744073709551615\n")
    counter = FileCounter(path)
    with pytest.raises(UnavailableError, match=r"counter\.exhausted"):
        counter.increment()
    assert counter.read() == (1 << 64) - 1


def test_tpm_counter_survives_a_power_cut(machine: SoftwareTpm) -> None:
    tpm, counter = connect(machine)
    last = counter.increment()
    tpm.close()
    machine.restart()
    tpm, counter = connect(machine)
    assert counter.read() == last
    assert counter.increment() == last + 1
    tpm.close()


def test_tpm_counter_made_anew_starts_above_every_earlier_value(machine: SoftwareTpm) -> None:
    tpm, counter = connect(machine)
    values = [counter.increment() for _ in range(5)]
    tpm.call(lambda e: e.nv_undefine_space(e.tr_from_tpmpublic(INDEX)))
    tpm.close()
    tpm, counter = connect(machine)
    assert counter.increment() > max(values)
    tpm.close()


def test_tpm_without_the_counter_is_refused(machine: SoftwareTpm) -> None:
    tpm, counter = connect(machine)
    with pytest.raises(VerificationError, match=r"counter\.missing"):
        counter.read()
    tpm.close()


def test_ordinary_index_in_place_of_the_counter_is_refused(machine: SoftwareTpm) -> None:
    from tpm2_pytss import TPM2B_NV_PUBLIC, TPMS_NV_PUBLIC
    from tpm2_pytss.constants import TPM2_ALG, TPMA_NV

    tpm, counter = connect(machine)
    public = TPMS_NV_PUBLIC(
        nvIndex=INDEX,
        nameAlg=TPM2_ALG.SHA256,
        attributes=TPMA_NV.AUTHREAD | TPMA_NV.AUTHWRITE | TPMA_NV.NO_DA,
        dataSize=8,
    )
    tpm.call(lambda e: e.nv_write(e.nv_define_space(None, TPM2B_NV_PUBLIC(public)), bytes(8)))
    for use in (counter.read, counter.increment):
        with pytest.raises(VerificationError, match=r"counter\.kind"):
            use()
    tpm.close()


def test_another_process_between_the_reads_costs_a_try_and_no_value(machine: SoftwareTpm) -> None:
    tpm, counter = connect(machine)
    counter.increment()
    esapi = tpm._esapi
    real, others = esapi.nv_increment, 3

    def contended(handle: Any) -> None:
        nonlocal others
        real(handle)
        if others:
            others -= 1
            real(handle)

    esapi.nv_increment = contended
    before = counter.read()
    # Three attempts of two increments each, then ours alone.
    assert counter.increment() == before + 7
    tpm.close()


def test_without_a_tpm_the_counter_is_a_file_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counter = open_counter(tpm=None, index=INDEX, path=tmp_path / "counter")
    assert counter.increment() == 1
    assert "development_counter" in capsys.readouterr().out


def test_counter_of_a_tpm_is_chosen_where_one_is_given(machine: SoftwareTpm) -> None:
    tpm = open_tpm(machine.tcti)
    counter = open_counter(tpm=tpm, index=INDEX, path=Path("/nowhere"))
    assert counter.increment() == counter.read()
    tpm.close()


def test_tpm_that_does_not_answer_is_unavailable(machine: SoftwareTpm) -> None:
    machine.stop()
    with pytest.raises(UnavailableError, match=r"tpm\.command"):
        open_tpm(machine.tcti)
    machine.start()
