"""Saved attachments of a gateway: sealed, one file each, and refused if modified."""

import dataclasses
import errno
import os
import secrets
import shutil
import uuid
from pathlib import Path

import pytest

from sealane.daemon.gateway.attachments import (
    ENTRY_BYTES_MAX,
    FILE_NAME,
    Attachment,
    AttachmentFiles,
    SealedAttachment,
    open_attachment,
    seal_attachment,
)
from sealane.errors import UnavailableError, VerificationError
from sealane.protocol.nvme.authentication import HostSecret
from small_disk import fill, small_disk

KEY = bytes(range(32))
VOLUME = str(uuid.UUID(int=7))
ATTACHMENT = Attachment(
    volume_id=VOLUME,
    host_nqn="nqn.2014-08.org.nvmexpress:uuid:höst",
    secret=HostSecret.generate(secrets.token_bytes),
    generation=3,
    sector_count=256,
    via_traddr="192.0.2.1",
    via_trsvcid=4420,
)


def sealed(attachment: Attachment = ATTACHMENT, *, key_epoch: int = 2) -> SealedAttachment:
    return seal_attachment(attachment, key=KEY, key_epoch=key_epoch, node="g")


def test_a_sealed_attachment_opens_for_its_node_and_shows_no_secret() -> None:
    kept = sealed()
    assert open_attachment(kept, key=KEY, node="g") == ATTACHMENT
    assert str(ATTACHMENT.secret).encode() not in kept.sealed
    assert ATTACHMENT.host_nqn.encode() not in kept.sealed
    assert str(ATTACHMENT.secret) not in repr(ATTACHMENT)
    assert sealed().sealed != kept.sealed


@pytest.mark.parametrize(
    "change",
    [
        {"volume_id": str(uuid.UUID(int=8))},
        {"key_epoch": 1},
        {"sealed": bytes(40)},
        {"sealed": b""},
        {"node": "h"},
        {"key": bytes(32)},
    ],
    ids=str,
)
def test_nothing_else_opens_it(change: dict[str, object]) -> None:
    fields = {"volume_id", "key_epoch", "sealed"} & change.keys()
    kept = dataclasses.replace(sealed(), **{name: change[name] for name in fields})  # type: ignore[arg-type]
    key, node = change.get("key", KEY), change.get("node", "g")
    assert isinstance(key, bytes)
    assert isinstance(node, str)
    with pytest.raises(VerificationError) as caught:
        open_attachment(kept, key=key, node=node)
    assert caught.value.reason == "attachment.sealed"
    assert str(ATTACHMENT.secret) not in str(caught.value)


@pytest.mark.parametrize("place", [0, 13, -1])
def test_one_changed_bit_is_noticed(place: int) -> None:
    changed = bytearray(sealed().sealed)
    changed[place] ^= 1
    with pytest.raises(VerificationError):
        open_attachment(dataclasses.replace(sealed(), sealed=bytes(changed)), key=KEY, node="g")


@pytest.fixture
def directories(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("state", "run"):
        (tmp_path / name).mkdir(mode=0o700)
    return tmp_path / "state", tmp_path / "run"


async def test_what_was_put_is_loaded_until_it_is_removed(directories: tuple[Path, Path]) -> None:
    files = AttachmentFiles(*directories)
    assert await files.load() == []
    kept = sealed()
    await files.put(kept)
    path = directories[0] / FILE_NAME / VOLUME
    assert path.stat().st_mode & 0o777 == 0o600
    again = AttachmentFiles(*directories)
    assert await again.load() == [kept]
    assert not again.refused
    await again.remove(VOLUME)
    await again.remove(VOLUME)
    assert await AttachmentFiles(*directories).load() == []
    assert not path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
async def test_a_file_that_found_no_space_leaves_the_old_one_valid(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with small_disk(tmp_path / "state", size_bytes=1 << 20) as state:
        files = AttachmentFiles(state, tmp_path / "run")
        await files.load()
        kept = sealed()
        await files.put(kept)
        fill(state / "others")
        other = dataclasses.replace(kept, volume_id=str(uuid.UUID(int=9)))
        for refused in (dataclasses.replace(kept, target_incarnation=9), other):
            with pytest.raises(UnavailableError) as caught:
                await files.put(refused)
            assert caught.value.reason == "attachment.file"
        again = AttachmentFiles(state, tmp_path / "run")
        assert await again.load() == [kept]
        assert not again.refused
        assert [path.name for path in (tmp_path / "run" / FILE_NAME).iterdir()] == [VOLUME]


async def test_a_file_whose_directory_can_not_be_synced_is_valid_as_it_is(
    directories: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, str(path))

    files = AttachmentFiles(*directories)
    await files.load()
    kept = sealed()
    await files.put(kept)
    later = dataclasses.replace(kept, target_incarnation=9)
    with monkeypatch.context() as patched:
        patched.setattr("sealane.daemon.runtime.files.sync_directory", refuse)
        with pytest.raises(UnavailableError):
            await files.put(later)
    again = AttachmentFiles(*directories)
    assert await again.load() == [later]
    assert not again.refused


async def refusals(directories: tuple[Path, Path]) -> list[str]:
    files = AttachmentFiles(*directories)
    assert await files.load() == []
    return [getattr(error, "reason", "") for error in files.refused.values()]


async def test_a_file_that_was_put_back_within_a_boot_is_refused(
    directories: tuple[Path, Path], tmp_path: Path
) -> None:
    files = AttachmentFiles(*directories)
    await files.load()
    await files.put(sealed())
    path = directories[0] / FILE_NAME / VOLUME
    shutil.copy(path, tmp_path / "old")
    await files.remove(VOLUME)
    shutil.copy(tmp_path / "old", path)
    assert await refusals(directories) == ["attachment.rolled_back"]
    # Attached again, to any host: the old file isn't valid for the new attachment.
    await files.put(sealed())
    shutil.copy(tmp_path / "old", path)
    assert await refusals(directories) == ["attachment.rolled_back"]


async def test_after_a_reboot_the_files_are_believed_once(
    directories: tuple[Path, Path], tmp_path: Path
) -> None:
    files = AttachmentFiles(*directories)
    await files.load()
    kept = dataclasses.replace(sealed(), target_incarnation=9)
    await files.put(kept)
    path = directories[0] / FILE_NAME / VOLUME
    shutil.copy(path, tmp_path / "old")
    (directories[1] / FILE_NAME).rename(directories[1] / "x")
    assert await files.load() == [dataclasses.replace(kept, is_of_earlier_boot=True)]
    assert await files.load() == [kept]
    await files.remove(VOLUME)
    shutil.copy(tmp_path / "old", path)
    assert await refusals(directories) == ["attachment.rolled_back"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"\0" * (ENTRY_BYTES_MAX + 1), b'{"format": "2"}', b"[" * 5000],
    ids=["empty", "no fields", "long", "format", "nested"],
)
async def test_a_malformed_file_is_refused_and_left_alone(
    directories: tuple[Path, Path], content: bytes
) -> None:
    path = directories[0] / FILE_NAME / VOLUME
    path.parent.mkdir()
    path.write_bytes(content)
    assert await refusals(directories) == ["attachment.malformed"]
    assert path.read_bytes() == content


async def test_a_file_of_a_later_format_is_refused_by_number_and_left_alone(
    directories: tuple[Path, Path],
) -> None:
    path = directories[0] / FILE_NAME / VOLUME
    path.parent.mkdir()
    path.write_bytes(b'{"format": 2, "unknown": true}')
    files = AttachmentFiles(*directories)
    assert await files.load() == []
    [error] = files.refused.values()
    assert error.reason == "attachment.format"
    assert "format 2, and this release reads 1: start" in str(error)
    assert path.exists()


async def test_a_long_file_is_refused_unread(directories: tuple[Path, Path]) -> None:
    files = AttachmentFiles(*directories)
    await files.load()
    await files.put(sealed())
    path = directories[0] / FILE_NAME / VOLUME
    path.write_bytes(path.read_bytes() + b" " * ENTRY_BYTES_MAX)
    shutil.rmtree(directories[1] / FILE_NAME)
    assert await refusals(directories) == ["attachment.malformed"]


async def test_a_file_named_by_another_volume_is_refused(directories: tuple[Path, Path]) -> None:
    files = AttachmentFiles(*directories)
    await files.load()
    await files.put(sealed())
    path = directories[0] / FILE_NAME / VOLUME
    shutil.rmtree(directories[1] / FILE_NAME)
    for name in (str(uuid.UUID(int=8)), "x", VOLUME.upper()):
        path.rename(path.with_name(name))
        if name != VOLUME:
            assert await refusals(directories) == ["attachment.malformed"]
            shutil.rmtree(directories[1] / FILE_NAME)
        path.with_name(name).rename(path)


async def test_a_directory_that_cant_be_written_is_an_error(
    directories: tuple[Path, Path],
) -> None:
    files = AttachmentFiles(*directories)
    await files.load()
    (directories[0] / FILE_NAME).rmdir()
    (directories[0] / FILE_NAME).write_text("not a directory")
    for call in (files.load(), files.put(sealed()), files.remove(VOLUME)):
        with pytest.raises(UnavailableError) as caught:
            await call
        assert caught.value.reason == "attachment.file"
