//! Bytes to transmit: small pieces are gathered, large buffers are sent without copying.

use std::collections::VecDeque;
use std::io::IoSlice;

use super::pdu::{FLAG_DATA_DIGEST, FLAG_HEADER_DIGEST, digest};

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
    pieces: VecDeque<Vec<u8>>,
    /// Bytes of the first piece that are already sent.
    sent: usize,
    pending: usize,
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
            Some(last) if last.len() + bytes.len() <= OWN_PIECE_BYTES => {
                last.extend_from_slice(bytes);
            }
            _ => {
                // Reserve the maximum size, so that the piece isn't reallocated as it grows.
                let mut piece = self.spare.pop().unwrap_or_default();
                piece.clear();
                piece.reserve(bytes.len().max(OWN_PIECE_BYTES));
                piece.extend_from_slice(bytes);
                self.pieces.push_back(piece);
            }
        }
    }

    /// Appends a PDU: header and data, each with its digest if the header's flags announce one.
    pub fn put_pdu(&mut self, header: &[u8], data: Data<'_>) {
        let flags = header.get(1).copied().unwrap_or_default();
        self.put(header);
        if flags & FLAG_HEADER_DIGEST != 0 {
            self.put(&digest(header).to_le_bytes());
        }
        let bytes: &[u8] = match &data {
            Data::None => return,
            Data::Copied(bytes) => bytes,
            Data::Owned(buffer) => buffer,
        };
        let data_digest = (flags & FLAG_DATA_DIGEST != 0).then(|| digest(bytes));
        match data {
            Data::Owned(buffer) => self.put_buffer(buffer),
            Data::Copied(bytes) => self.put(bytes),
            Data::None => {}
        }
        if let Some(digest) = data_digest {
            self.put(&digest.to_le_bytes());
        }
    }

    /// Appends a buffer, without copying it if it is large.
    pub fn put_buffer(&mut self, buffer: Vec<u8>) {
        if buffer.len() < OWN_PIECE_BYTES {
            self.put(&buffer);
            self.recycle(buffer);
        } else {
            self.pending += buffer.len();
            self.pieces.push_back(buffer);
        }
    }

    /// The front of the queue, for one gathered send of at most `limit` pieces.
    pub fn slices<'a>(&'a self, out: &mut Vec<IoSlice<'a>>, limit: usize) {
        for (index, piece) in self.pieces.iter().take(limit).enumerate() {
            let start = if index == 0 { self.sent } else { 0 };
            out.push(IoSlice::new(piece.get(start..).unwrap_or_default()));
        }
    }

    /// Drops `bytes` from the front, as they have been sent.
    pub fn advance(&mut self, bytes: usize) {
        self.pending = self.pending.saturating_sub(bytes);
        let mut left = bytes + self.sent;
        while let Some(first) = self.pieces.front() {
            if left < first.len() {
                break;
            }
            left -= first.len();
            if let Some(piece) = self.pieces.pop_front() {
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

    proptest! {
        #[test]
        fn bytes_leave_in_order_however_they_are_sent(
            pieces in proptest::collection::vec((1usize..40_000, any::<bool>()), 1..12),
            step in 1usize..50_000,
        ) {
            let mut queue = TransmitQueue::default();
            let mut expected = Vec::new();
            for (index, (length, owned)) in pieces.iter().enumerate() {
                let bytes = vec![index as u8; *length];
                expected.extend_from_slice(&bytes);
                if *owned { queue.put_buffer(bytes) } else { queue.put(&bytes) }
            }
            prop_assert_eq!(queue.pending_bytes(), expected.len());
            let mut sent = Vec::new();
            while queue.pending_bytes() > 0 {
                let mut slices = Vec::new();
                queue.slices(&mut slices, 4);
                let chunk: Vec<u8> =
                    slices.iter().flat_map(|slice| slice.iter().copied()).take(step).collect();
                sent.extend_from_slice(&chunk);
                queue.advance(chunk.len());
            }
            prop_assert_eq!(sent, expected);
        }
    }
}
