"""Attachments that outlive the gateway's process, one sealed file each (attachments.md).

A file holds what the next process needs to export the volume unchanged to its host: host NQN,
secret and size. It is sealed under a key derived from the volume's key, which only the broker can
release, so it can be opened only on a machine that may use the volume. Counters, keys and
association epochs are never saved.

The run directory, which is in memory, holds the digest of each file. Within one boot, a file that
was rolled back, or removed and later restored, is refused.
"""

import asyncio
import base64
import hashlib
import json
import secrets
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pydantic import BaseModel, ConfigDict, Field

from sealane.crypto.encoding import fields
from sealane.crypto.exchange import wipe
from sealane.crypto.keys import KEY_EPOCH_MAX, derive_attachment_key
from sealane.daemon.runtime.files import read_bounded, sync_directory, write_durably
from sealane.daemon.runtime.state_format import NEWER
from sealane.errors import Error, UnavailableError, UsageError, VerificationError
from sealane.protocol.nvme.authentication import HostSecret
from sealane.protocol.nvme.nqn import NQN_BYTES_MAX, check_nqn

FILE_NAME: Final = "attachments"
"""Name of the directory of the files in the state directory, and of their digests in the run
directory."""
ENTRY_BYTES_MAX: Final = 8192
ATTACHMENTS_MAX: Final = 4096
"""Maximum number of files that a start reads; more are refused."""
FORMAT: Final = 1
"""Format of a file."""
_NONCE_BYTES: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """Host and properties that a volume is attached with."""

    volume_id: str
    host_nqn: str
    secret: HostSecret
    generation: int
    sector_count: int
    is_read_only: bool = False
    via_traddr: str = ""
    via_trsvcid: int = 0
    fail_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedAttachment:
    """A saved attachment. `volume_id` and `key_epoch` tell which key opens it; the rest is sealed.

    `target_incarnation` is the target process that may hold acknowledged writes that are not
    flushed; 0: there are none. After a reboot no host of this machine is left that expects them;
    one that has other gateways may be.
    """

    volume_id: str
    key_epoch: int
    sealed: bytes
    target_incarnation: int = 0
    is_of_earlier_boot: bool = False


class _Content(BaseModel):
    """Sealed content of a file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    host_nqn: Annotated[str, Field(max_length=NQN_BYTES_MAX)]
    secret: str
    generation: Annotated[int, Field(ge=1)]
    sector_count: Annotated[int, Field(ge=1)]
    is_read_only: bool
    via_traddr: Annotated[str, Field(max_length=64)]
    via_trsvcid: Annotated[int, Field(ge=0, le=65535)]
    fail_over: bool = False


class _File(BaseModel):
    """Content of a file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: Literal[1]
    volume_id: str
    key_epoch: Annotated[int, Field(ge=1, le=KEY_EPOCH_MAX)]
    sealed: Annotated[str, Field(max_length=ENTRY_BYTES_MAX)]
    target_incarnation: Annotated[int, Field(ge=0, lt=1 << 64)]


def seal_attachment(
    attachment: Attachment, *, key: bytes | bytearray, key_epoch: int, node: str
) -> SealedAttachment:
    """Seal an attachment under the volume's key of one epoch, for one node."""
    content = _Content(
        host_nqn=attachment.host_nqn,
        secret=str(attachment.secret),
        generation=attachment.generation,
        sector_count=attachment.sector_count,
        is_read_only=attachment.is_read_only,
        via_traddr=attachment.via_traddr,
        via_trsvcid=attachment.via_trsvcid,
        fail_over=attachment.fail_over,
    )
    nonce = secrets.token_bytes(_NONCE_BYTES)
    context = _context(attachment.volume_id, key_epoch, node)
    sealing_key = derive_attachment_key(key, volume_id=uuid.UUID(attachment.volume_id))
    try:
        text = content.model_dump_json(exclude_defaults=True).encode()
        sealed = nonce + AESGCM(bytes(sealing_key)).encrypt(nonce, text, context)
    finally:
        wipe(sealing_key)
    return SealedAttachment(volume_id=attachment.volume_id, key_epoch=key_epoch, sealed=sealed)


def open_attachment(kept: SealedAttachment, *, key: bytes | bytearray, node: str) -> Attachment:
    """Open an attachment that `seal_attachment` made for this node.

    VerificationError `attachment.sealed` if it was changed, or belongs to another node or volume.
    """
    nonce, sealed = kept.sealed[:_NONCE_BYTES], kept.sealed[_NONCE_BYTES:]
    context = _context(kept.volume_id, kept.key_epoch, node)
    sealing_key = derive_attachment_key(key, volume_id=uuid.UUID(kept.volume_id))
    try:
        text = AESGCM(bytes(sealing_key)).decrypt(nonce, sealed, context)
        content = _Content.model_validate_json(text)
        secret = HostSecret.parse(content.secret)
        check_nqn(content.host_nqn)
    except (InvalidTag, ValueError) as error:
        raise VerificationError(
            "attachment.sealed",
            f"the saved attachment of volume {kept.volume_id} can't be decrypted: it was changed, "
            "or another node saved it",
        ) from error
    finally:
        wipe(sealing_key)
    return Attachment(
        volume_id=kept.volume_id,
        host_nqn=content.host_nqn,
        secret=secret,
        generation=content.generation,
        sector_count=content.sector_count,
        is_read_only=content.is_read_only,
        via_traddr=content.via_traddr,
        via_trsvcid=content.via_trsvcid,
        fail_over=content.fail_over,
    )


class AttachmentFiles:
    """The attachments of one gateway in its state directory."""

    def __init__(self, state_dir: Path, run_dir: Path) -> None:
        self._files = state_dir / FILE_NAME
        self._digests = run_dir / FILE_NAME
        self._refused: dict[str, Error] = {}

    @property
    def refused(self) -> Mapping[str, Error]:
        """Return the files that `load` refused, by name, and why."""
        return self._refused

    async def load(self) -> list[SealedAttachment]:
        """Read all files; malformed or rolled-back ones go to `refused` and are not raised.

        UnavailableError `attachment.file` if a directory can't be read or written.
        """
        return await asyncio.to_thread(self._load)

    async def put(self, kept: SealedAttachment) -> None:
        """Save an attachment durably. UnavailableError `attachment.file`."""
        await asyncio.to_thread(self._put, kept)

    async def remove(self, volume_id: str) -> None:
        """Remove a saved attachment. Idempotent. UnavailableError `attachment.file`."""
        await asyncio.to_thread(self._remove, volume_id)

    def _load(self) -> list[SealedAttachment]:
        self._refused = {}
        found: dict[str, tuple[SealedAttachment, str]] = {}
        try:
            self._files.mkdir(mode=0o700, exist_ok=True)
            names = sorted(path.name for path in self._files.iterdir())
            for name in [name for name in names if not name.endswith(".new")][:ATTACHMENTS_MAX]:
                try:
                    found[name] = self._read(name)
                except Error as error:
                    self._refused[name] = error
            if self._digests.is_dir():
                return [kept for kept, _ in found.values()]
            self._begin_boot({name: digest for name, (_, digest) in found.items()})
            return [replace(kept, is_of_earlier_boot=True) for kept, _ in found.values()]
        except OSError as error:
            raise self._failed(error) from error

    def _read(self, name: str) -> tuple[SealedAttachment, str]:
        content = read_bounded(self._files / name)
        digest = hashlib.sha256(content).hexdigest()
        if self._digests.is_dir() and digest != self._known_digest(name):
            raise VerificationError(
                "attachment.rolled_back",
                f"{self._files / name} is not what this gateway last wrote there",
            )
        found = _format(content)
        if found is not None and found != FORMAT:
            raise UsageError(
                "attachment.format",
                f"{self._files / name}: an attachment of format {found}, and this release reads "
                f"{FORMAT}: {NEWER}",
            )
        kept = _parsed(name, content)
        if kept is None:
            raise VerificationError(
                "attachment.malformed", f"{self._files / name} is not a saved attachment"
            )
        return kept, digest

    def _begin_boot(self, digests: Mapping[str, str]) -> None:
        """Accept the files as found: in the first process of a boot no digests exist."""
        draft = self._digests.with_name(f"{FILE_NAME}.new")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        for name, digest in digests.items():
            (draft / name).write_text(digest)
        draft.rename(self._digests)

    def _known_digest(self, name: str) -> str:
        try:
            return (self._digests / name).read_text()
        except FileNotFoundError:
            return ""

    def _put(self, kept: SealedAttachment) -> None:
        content = json.dumps(
            {
                "format": FORMAT,
                "volume_id": kept.volume_id,
                "key_epoch": kept.key_epoch,
                "sealed": base64.b64encode(kept.sealed).decode(),
                "target_incarnation": kept.target_incarnation,
            }
        ).encode()
        try:
            before = self._known_digest(kept.volume_id)
            # Digest first: a file without a digest counts as rolled back.
            self._write_digest(kept.volume_id, hashlib.sha256(content).hexdigest())
            try:
                write_durably(self._files / kept.volume_id, content)
            except OSError:
                self._restore_digest(kept.volume_id, before)
                raise
        except OSError as error:
            raise self._failed(error) from error

    def _restore_digest(self, name: str, before: str) -> None:
        """Record the digest of the old file if that is still there; the new one may be, instead."""
        try:
            found = hashlib.sha256(read_bounded(self._files / name)).hexdigest()
        except FileNotFoundError:
            (self._digests / name).unlink()
            return
        if found == before:
            self._write_digest(name, before)

    def _write_digest(self, name: str, digest: str) -> None:
        draft = self._digests / f"{name}.new"
        draft.write_text(digest)
        draft.replace(self._digests / name)

    def _remove(self, volume_id: str) -> None:
        try:
            (self._files / volume_id).unlink(missing_ok=True)
            sync_directory(self._files)
            (self._digests / volume_id).unlink(missing_ok=True)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> UnavailableError:
        return UnavailableError("attachment.file", f"{self._files}: {error.strerror}")


class _Format(BaseModel):
    """What files of all formats have."""

    model_config = ConfigDict(strict=True)

    format: Annotated[int, Field(ge=1)]


def _format(content: bytes) -> int | None:
    try:
        return _Format.model_validate_json(content[: ENTRY_BYTES_MAX + 1]).format
    except ValueError:
        return None


def _parsed(name: str, content: bytes) -> SealedAttachment | None:
    """Parse a file; None if it is not an attachment of the volume that it is named after."""
    try:
        if len(content) > ENTRY_BYTES_MAX or str(uuid.UUID(name)) != name:
            return None
        file = _File.model_validate_json(content)
        sealed = base64.b64decode(file.sealed, validate=True)
    except ValueError:
        return None
    if file.volume_id != name:
        return None
    return SealedAttachment(
        volume_id=name,
        key_epoch=file.key_epoch,
        sealed=sealed,
        target_incarnation=file.target_incarnation,
    )


def _context(volume_id: str, key_epoch: int, node: str) -> bytes:
    return fields(
        "sealane attachment v1",
        node.encode(),
        uuid.UUID(volume_id).bytes,
        key_epoch.to_bytes(4, "big"),
    )
