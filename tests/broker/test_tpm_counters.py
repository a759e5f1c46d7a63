"""A broker that counts start epochs and heads in a TPM."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sealane.daemon.broker.opening import STORE_NAME, opened_broker
from sealane.daemon.config import BrokerConfig
from sealane.daemon.runtime.metrics import Metrics
from sealane.errors import VerificationError
from software_tpm import SoftwareTpm, software_tpm


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[SoftwareTpm]:
    with software_tpm(tmp_path / "tpm") as tpm:
        yield tpm


@pytest.fixture
def state(tmp_path: Path) -> Path:
    key = tmp_path / "kek"
    key.write_bytes(bytes(32))
    key.chmod(0o600)
    return tmp_path


async def start(state: Path, machine: SoftwareTpm) -> int:
    """Start a broker, stop it, return its start epoch."""
    config = BrokerConfig(
        policy_file="/p",
        allow_unsigned_policy=True,
        key_file=str(state / "kek"),
        counters="tpm2",
    )
    async with opened_broker(
        config, node="b", state=state, metrics=Metrics(), tcti=machine.tcti
    ) as opened:
        return opened.instance.arena.start_epoch


def files_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.iterdir() if path.is_file()}


async def test_every_start_has_its_own_epoch(state: Path, machine: SoftwareTpm) -> None:
    epochs = [await start(state, machine) for _ in range(3)]
    machine.restart()
    epochs.append(await start(state, machine))
    assert epochs == sorted(set(epochs))


async def test_store_and_files_put_back_are_refused(state: Path, machine: SoftwareTpm) -> None:
    await start(state, machine)
    saved = files_of(state)
    assert state / STORE_NAME in saved
    await start(state, machine)
    for path, content in saved.items():
        path.write_bytes(content)
    with pytest.raises(VerificationError, match=r"broker\.store\.rolled_back"):
        await start(state, machine)


async def test_store_on_another_machine_is_refused(
    state: Path, machine: SoftwareTpm, tmp_path: Path
) -> None:
    await start(state, machine)
    with (
        software_tpm(tmp_path / "other") as other,
        pytest.raises(VerificationError, match=r"counter\.missing"),
    ):
        await start(state, other)
