//! Bytes to transmit: small pieces are gathered, large buffers are sent without copying.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::ops::Range;
use std::sync::Arc;

use super::pdu::{FLAG_DATA_DIGEST, FLAG_HEADER_DIGEST, digest, digest_of_parts};

/// Minimum size of a buffer that becomes a piece of its own instead of being appended to the last
/// piece. Copying this many bytes costs about as much as one more entry of a gathered send.
const OWN_PIECE_BYTES: usize = 16 * 1024;

/// Minimum size of a buffer worth keeping: one block.
const BLOCK_BUFFER_BYTES: usize = 4096;

/// Maximum buffers of each kind kept for reuse.
const SPARE_BUFFERS: usize = 64;
/// Maximum size of a buffer kept for reuse, more than any transfer takes, so that one command's
/// exceptional buffer isn't kept for good.
const SPARE_BYTES_MAX: usize = 512 * 1024;

/// Bytes of a buffer that others share. As long as any part of it waits to be sent, nobody can
/// change or reuse it: `Arc` gives a buffer back only to its last holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedBytes {
    buffer: Arc<Vec<u8>>,
    range: Range<usize>,
}

impl SharedBytes {
    /// Bytes `range` of a buffer; none if it doesn't have them.
    #[must_use]
    pub fn new(buffer: Arc<Vec<u8>>, range: Range<usize>) -> Self {
        let range = if buffer.get(range.clone()).is_some() { range } else { 0..0 };
        Self { buffer, range }
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.buffer.get(self.range.clone()).unwrap_or_default()
    }

    /// Bytes `range` of these; none if there aren't so many.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Self {
        let is_within = range.end <= self.range.len();
        let start = self.range.start;
        let range = if is_within { start + range.start..start + range.end } else { 0..0 };
        Self::new(Arc::clone(&self.buffer), range)
    }
}

impl From<Vec<u8>> for SharedBytes {
    fn from(buffer: Vec<u8>) -> Self {
        let range = 0..buffer.len();
        Self::new(Arc::new(buffer), range)
    }
}

/// Bytes that one entry of a gathered send covers.
#[derive(Debug)]
enum Piece {
    Own(Vec<u8>),
    Shared(SharedBytes),
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Shared(shared) => shared.bytes(),
        }
    }
}

/// Data of a PDU.
#[derive(Debug)]
pub enum Data<'a> {
    /// No data.
    None,
    /// Data copied behind the header.
    Copied(&'a [u8]),
    /// Data sent without copying if they are large.
    Owned(Vec<u8>),
}

/// An ordered queue of bytes to send.
#[derive(Debug, Default)]
pub struct TransmitQueue {
    pieces: VecDeque<Piece>,
    /// Bytes of the first piece that are already sent.
    sent: usize,
    pending: usize,
    /// Bytes that have left, ever.
    departed: u64,
    spare: Vec<Vec<u8>>,
    /// Smaller spare buffers, of about one block; separate, so that neither kind is resized to the
    /// other.
    spare_blocks: Vec<Vec<u8>>,
}

impl TransmitQueue {
    /// Appends a copy of `bytes`.
    pub fn put(&mut self, bytes: &[u8]) {
        self.pending += bytes.len();
        match self.pieces.back_mut() {
            Some(Piece::Own(last)) if last.len() + bytes.len() <= OWN_PIECE_BYTES => {
                last.extend_from_slice(bytes);
            }
            _ => {
                // Reserve the maximum size, so that the piece isn't reallocated as it grows.
                let mut piece = self.spare.pop().unwrap_or_default();
                piece.clear();
                piece.reserve(bytes.len().max(OWN_PIECE_BYTES));
                piece.extend_from_slice(bytes);
                self.pieces.push_back(Piece::Own(piece));
            }
        }
    }

    /// Appends a PDU: header and data, each with its digest if the header's flags announce one.
    pub fn put_pdu(&mut self, header: &[u8], data: Data<'_>) {
        let has_digest = self.put_header(header);
        let bytes: &[u8] = match &data {
            Data::None => return,
            Data::Copied(bytes) => bytes,
            Data::Owned(buffer) => buffer,
        };
        let data_digest = has_digest.then(|| digest(bytes));
        match data {
            Data::Owned(buffer) => self.put_buffer(buffer),
            Data::Copied(bytes) => self.put(bytes),
            Data::None => {}
        }
        if let Some(digest) = data_digest {
            self.put(&digest.to_le_bytes());
        }
    }

    /// As [`Self::put_pdu`], with copies of these parts as its data.
    pub fn put_pdu_of<'a>(&mut self, header: &[u8], parts: impl Iterator<Item = &'a [u8]> + Clone) {
        let has_digest = self.put_header(header);
        for part in parts.clone() {
            self.put(part);
        }
        if has_digest {
            self.put(&digest_of_parts(parts).to_le_bytes());
        }
    }

    /// As [`Self::put_pdu`], with these parts as its data; they are not copied if all of them
    /// together are large.
    pub fn put_pdu_shared(&mut self, header: &[u8], parts: Vec<SharedBytes>) {
        let bytes = parts.iter().map(SharedBytes::bytes);
        let length: usize = bytes.clone().map(<[u8]>::len).sum();
        if length < OWN_PIECE_BYTES {
            self.put_pdu_of(header, bytes);
            return;
        }
        let data_digest = self.put_header(header).then(|| digest_of_parts(bytes));
        self.pending += length;
        self.pieces.extend(parts.into_iter().map(Piece::Shared));
        if let Some(digest) = data_digest {
            self.put(&digest.to_le_bytes());
        }
    }

    /// Appends a header, with its digest if its flags announce one; returns whether they announce
    /// one of the data.
    fn put_header(&mut self, header: &[u8]) -> bool {
        let flags = header.get(1).copied().unwrap_or_default();
        self.put(header);
        if flags & FLAG_HEADER_DIGEST != 0 {
            self.put(&digest(header).to_le_bytes());
        }
        flags & FLAG_DATA_DIGEST != 0
    }

    /// Appends a buffer, without copying it if it is large.
    pub fn put_buffer(&mut self, buffer: Vec<u8>) {
        if buffer.len() < OWN_PIECE_BYTES {
            self.put(&buffer);
            self.recycle(buffer);
        } else {
            self.pending += buffer.len();
            self.pieces.push_back(Piece::Own(buffer));
        }
    }

    /// The front of the queue, for one gathered send of at most `limit` pieces.
    pub fn slices<'a>(&'a self, out: &mut Vec<IoSlice<'a>>, limit: usize) {
        for (index, piece) in self.pieces.iter().take(limit).enumerate() {
            let start = if index == 0 { self.sent } else { 0 };
            out.push(IoSlice::new(piece.bytes().get(start..).unwrap_or_default()));
        }
    }

    /// Drops `bytes` from the front, as they have been sent.
    pub fn advance(&mut self, bytes: usize) {
        let departed = bytes.min(self.pending);
        self.pending -= departed;
        self.departed += departed as u64;
        let mut left = bytes + self.sent;
        while let Some(first) = self.pieces.front() {
            let length = first.bytes().len();
            if left < length {
                break;
            }
            left -= length;
            if let Some(Piece::Own(piece)) = self.pieces.pop_front() {
                self.recycle(piece);
            }
        }
        self.sent = if self.pieces.is_empty() { 0 } else { left };
    }

    /// Number of bytes waiting.
    #[must_use]
    pub fn pending_bytes(&self) -> usize {
        self.pending
    }

    /// Where the bytes put so far end, counted from the first byte ever put.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.departed + self.pending as u64
    }

    /// Whether all bytes up to `end`, a result of [`Self::end`], have been sent.
    #[must_use]
    pub fn has_left(&self, end: u64) -> bool {
        self.departed >= end
    }

    /// Takes everything that is waiting, as one buffer; for tests and small exchanges.
    #[must_use]
    pub fn take(&mut self) -> Vec<u8> {
        let mut slices = Vec::new();
        self.slices(&mut slices, usize::MAX);
        let bytes: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
        self.advance(bytes.len());
        bytes
    }

    /// Keeps a buffer for reuse.
    pub fn recycle(&mut self, buffer: Vec<u8>) {
        let spare = match buffer.capacity() {
            BLOCK_BUFFER_BYTES..OWN_PIECE_BYTES => &mut self.spare_blocks,
            bytes @ OWN_PIECE_BYTES.. if bytes <= SPARE_BYTES_MAX => &mut self.spare,
            _ => return,
        };
        if spare.len() < SPARE_BUFFERS {
            spare.push(buffer);
        }
    }

    /// A buffer of `bytes`, with unspecified but initialised contents (never another tenant's:
    /// a queue belongs to one host).
    #[must_use]
    pub fn buffer(&mut self, bytes: usize) -> Vec<u8> {
        let spare = if bytes < OWN_PIECE_BYTES { &mut self.spare_blocks } else { &mut self.spare };
        let mut buffer = spare.pop().unwrap_or_default();
        buffer.resize(bytes, 0);
        buffer
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_buffer_larger_than_any_transfer_is_not_kept() {
        let mut queue = TransmitQueue::default();
        queue.recycle(Vec::with_capacity(SPARE_BYTES_MAX + 1));
        assert_eq!(queue.buffer(OWN_PIECE_BYTES).capacity(), OWN_PIECE_BYTES);
        queue.recycle(Vec::with_capacity(SPARE_BYTES_MAX));
        assert_eq!(queue.buffer(OWN_PIECE_BYTES).capacity(), SPARE_BYTES_MAX);
    }

    #[test]
    fn a_shared_buffer_is_held_until_its_last_byte_has_left() {
        let buffer = Arc::new(vec![5; 2 * OWN_PIECE_BYTES]);
        let whole = SharedBytes::new(Arc::clone(&buffer), 0..buffer.len());
        let parts = [whole.part(1..OWN_PIECE_BYTES), whole.part(OWN_PIECE_BYTES..buffer.len())];
        drop(whole);
        let mut queue = TransmitQueue::default();
        queue.put_pdu_shared(&[0; 8], parts.into());
        assert_eq!(queue.pending_bytes(), 8 + buffer.len() - 1);
        queue.advance(8 + OWN_PIECE_BYTES - 2);
        assert_eq!(Arc::strong_count(&buffer), 3, "a byte of the first part is left");
        queue.advance(1);
        assert_eq!(Arc::strong_count(&buffer), 2);
        queue.advance(OWN_PIECE_BYTES - 1);
        assert_eq!(Arc::strong_count(&buffer), 2);
        queue.advance(1);
        assert_eq!((Arc::strong_count(&buffer), queue.pending_bytes()), (1, 0));
        // Small data are copied, and their buffer is free at once.
        queue.put_pdu_shared(&[0; 8], vec![SharedBytes::new(Arc::clone(&buffer), 0..9)]);
        assert_eq!((Arc::strong_count(&buffer), queue.pending_bytes()), (1, 17));
    }

    #[test]
    fn bytes_that_a_buffer_does_not_have_are_none() {
        let shared = SharedBytes::from(vec![1, 2, 3, 4]);
        assert_eq!(shared.part(1..4).part(1..3).bytes(), [3, 4]);
        assert_eq!(shared.part(1..3).part(0..3).bytes(), [0; 0], "beyond its part");
        assert_eq!(SharedBytes::new(Arc::new(vec![1]), 0..2).bytes(), [0; 0]);
    }

    proptest! {
        #[test]
        fn bytes_leave_in_order_however_they_are_sent(
            pieces in proptest::collection::vec((1usize..40_000, 0..4), 1..12),
            flags in 0..4u8,
            step in 1usize..50_000,
        ) {
            let mut queue = TransmitQueue::default();
            let mut expected = Vec::new();
            // The same bytes, all of them copied.
            let mut copied = TransmitQueue::default();
            for (index, (length, how)) in pieces.iter().enumerate() {
                let bytes = vec![index as u8; *length];
                let header = [index as u8, flags, 7];
                let (first, last) = bytes.split_at(length / 3);
                if *how < 2 {
                    copied.put(&bytes);
                } else {
                    copied.put_pdu(&header, Data::Copied(&bytes));
                }
                match how {
                    0 => queue.put(&bytes),
                    1 => queue.put_buffer(bytes),
                    2 => queue.put_pdu_of(&header, [first, last].into_iter()),
                    _ => {
                        let [first, last] = [first, last].map(|part| part.to_vec().into());
                        queue.put_pdu_shared(&header, vec![first, last]);
                    }
                }
            }
            expected.extend(copied.take());
            prop_assert_eq!(queue.pending_bytes(), expected.len());
            let mut sent = Vec::new();
            while queue.pending_bytes() > 0 {
                let mut slices = Vec::new();
                queue.slices(&mut slices, 4);
                let chunk: Vec<u8> =
                    slices.iter().flat_map(|slice| slice.iter().copied()).take(step).collect();
                sent.extend_from_slice(&chunk);
                queue.advance(chunk.len());
                prop_assert!(queue.has_left(sent.len() as u64));
                prop_assert!(!queue.has_left(sent.len() as u64 + 1));
                prop_assert_eq!(queue.end(), expected.len() as u64);
            }
            prop_assert_eq!(sent, expected);
        }
    }
}
