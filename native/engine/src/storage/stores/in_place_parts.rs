//! Splits reads and writes in place whose blocks lie in several extents of a store that grew: the
//! device gets one operation for each extent, and they complete as one.

use std::collections::HashMap;
use std::io;

use sealane_proto::sector::BLOCK_BYTES;

use super::super::store::{StoreChannel, StoreDone, StoreRequest};
use super::fresh::geometry::Geometry;

/// Set in the tickets of parts. Other tickets count from 1.
const PART: u64 = 1 << 63;

/// An operation whose parts are in flight.
#[derive(Debug)]
struct Whole {
    parts: usize,
    buffer: Vec<u8>,
    result: io::Result<()>,
}

/// The split operations of one channel.
#[derive(Debug, Default)]
pub(super) struct Parts {
    wholes: HashMap<u64, Whole>,
    /// By ticket: the operation's ticket, and where the part starts in its buffer.
    under_way: HashMap<u64, (u64, usize)>,
    next: u64,
}

impl Parts {
    /// Submits a read or write of the volume's blocks to a channel of its device.
    pub fn submit(
        &mut self,
        raw: &mut dyn StoreChannel,
        geometry: &Geometry,
        ticket: u64,
        request: StoreRequest,
    ) {
        let (first, is_write) = match &request {
            StoreRequest::Read { lba, .. } => (*lba, false),
            StoreRequest::Write { lba, .. } => (*lba, true),
            StoreRequest::Flush | StoreRequest::Deallocate { .. } => {
                return raw.submit(ticket, request);
            }
        };
        let buffer = request.into_buffer();
        let part = |lba: u64, buffer: Vec<u8>| {
            let lba = geometry.in_place_block(lba);
            if is_write {
                StoreRequest::Write { lba, buffer, durable: false }
            } else {
                StoreRequest::Read { lba, buffer }
            }
        };
        if (buffer.len() / BLOCK_BYTES) as u64 <= geometry.blocks_together(first) {
            return raw.submit(ticket, part(first, buffer));
        }
        let (mut start, mut parts) = (0, 0);
        while start < buffer.len() {
            let lba = first + (start / BLOCK_BYTES) as u64;
            let together = geometry.blocks_together(lba).saturating_mul(BLOCK_BYTES as u64);
            let end = buffer.len().min(start.saturating_add(together as usize));
            self.next += 1;
            self.under_way.insert(PART | self.next, (ticket, start));
            raw.submit(PART | self.next, part(lba, buffer[start..end].to_vec()));
            (start, parts) = (end, parts + 1);
        }
        self.wholes.insert(ticket, Whole { parts, buffer, result: Ok(()) });
    }

    /// Handles a completion of the device's channel. Returns the completion of the whole operation,
    /// or `None` if other parts of it are in flight.
    pub fn ended(&mut self, done: StoreDone) -> Option<StoreDone> {
        let Some((ticket, start)) = self.under_way.remove(&done.ticket) else { return Some(done) };
        let whole = self.wholes.get_mut(&ticket)?;
        if let Some(place) = whole.buffer.get_mut(start..start + done.buffer.len()) {
            place.copy_from_slice(&done.buffer);
        }
        if done.result.is_err() {
            whole.result = done.result;
        }
        whole.parts -= 1;
        if whole.parts > 0 {
            return None;
        }
        let Whole { buffer, result, .. } = self.wholes.remove(&ticket)?;
        Some(StoreDone { ticket, result, buffer })
    }
}
