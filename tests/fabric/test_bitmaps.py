"""The bitmap of a receive as a live view, like SDR's `recv_bitmap_get`."""

import asyncio
import ctypes
import errno
import mmap
import random
from typing import Any

import numpy as np
import pytest

from patience import PATIENCE_SECONDS
from sealane.client import ChunkBitmap, ReceiveOperation, Session
from session_pairs import REGION, connected

PAGE = mmap.PAGESIZE


async def posted(session: Session, length: int = REGION) -> tuple[ReceiveOperation, ChunkBitmap]:
    """Post a receive; return it and its bitmap once the fabric has accepted it."""
    receiving = await session.post_receive(offset=0, length=length)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (bitmap := receiving.bitmap()) is None:  # noqa: ASYNC110 - no event announces it
            await asyncio.sleep(0)
    return receiving, bitmap


async def test_view_shows_chunks_as_they_land(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        content = random.Random(9).randbytes(REGION)
        left.region[:] = content
        receiving, bitmap = await posted(right)
        view = np.frombuffer(bitmap, np.uint8)
        assert view.shape == (receiving.chunk_count,) == (len(bitmap),)
        assert not view.any()
        sending = await left.post_send(offset=0, length=REGION)
        await receiving.wait_chunks(0, 2, timeout_seconds=PATIENCE_SECONDS)
        assert view[:2].all()
        assert not receiving.done(), "a message of 84 ms can't be over"
        assert bytes(right.region[: 2 * right.chunk_bytes]) == content[: 2 * right.chunk_bytes]
        await asyncio.gather(sending, receiving)
        assert view.all()
        assert bitmap.read() == bytes(view) == receiving.chunks()


async def test_view_is_of_its_receive_as_long_as_that_has_the_slot(
    fabrics: tuple[Any, Any],
) -> None:
    async with connected(*fabrics) as (left, right):
        receiving, bitmap = await posted(right, 8)
        view = memoryview(bitmap)
        await left.send(offset=0, length=8)
        await receiving
        assert bitmap.is_current
        assert receiving.bitmap() is bitmap
        assert view == b"\x01"
        for _ in range(right.ring.slots - 1):
            other = await right.post_receive(offset=0, length=8)
            await left.send(offset=0, length=0)
            await other
        assert bitmap.is_current
        await posted(right, 8)
        assert not bitmap.is_current
        assert bitmap.read() is receiving.chunks() is None
        assert view == b"\x00", "the later one's"
        right.close()
        assert (view[0], len(bitmap)) == (0, 1), "readable as long as somebody looks"
        assert ReceiveOperation(right.posts, None, offset=0, length=8).bitmap() is None


async def test_job_can_not_make_its_view_writable(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (_, right):
        _, bitmap = await posted(right)
        view = memoryview(bitmap)
        assert view.readonly
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 1
        with pytest.raises(TypeError, match="not writable"):
            (ctypes.c_char * 1).from_buffer(bitmap)
        start = np.frombuffer(bitmap, np.uint8).__array_interface__["data"][0]
        libc = ctypes.CDLL(None, use_errno=True)
        page = ctypes.c_void_p(start // PAGE * PAGE)
        assert libc.mprotect(page, PAGE, mmap.PROT_READ | mmap.PROT_WRITE) == -1
        assert ctypes.get_errno() == errno.EACCES


async def test_immediate_is_known_before_the_message_is_whole(fabrics: tuple[Any, Any]) -> None:
    async with connected(*fabrics) as (left, right):
        unit = left.session.unit_bytes
        receiving, _ = await posted(right)
        assert await receiving.immediate() is None
        stream = await left.post_stream(4 * unit, immediate=77)
        await stream.write(2 * unit, offset=0, length=unit)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (immediate := await receiving.immediate()) is None:
                pass
        assert immediate == 77
        assert not receiving.done()
        await stream.end()
        await asyncio.gather(stream, receiving)
        assert await receiving.immediate() == 77
        plain = await right.post_receive(offset=0, length=8)
        await left.send(offset=0, length=8)
        await plain
        assert await plain.immediate() is None
