//! Reads and writes of blocks in place that lie in two extents of a store that grew: the device has
//! one for each part, and they end as one.

use std::collections::HashMap;
use std::io;

use sealane_proto::sector::BLOCK_BYTES;

use super::super::store::{StoreChannel, StoreDone, StoreRequest};
use super::fresh::geometry::Geometry;

/// Set in the tickets of parts. Those of whole operations count from 1.
const PART: u64 = 1 << 63;

/// An operation of which parts are under way.
#[derive(Debug)]
struct Whole {
    parts: usize,
    buffer: Vec<u8>,
    result: io::Result<()>,
}

/// The operations in parts of one channel.
#[derive(Debug, Default)]
pub(super) struct Parts {
    wholes: HashMap<u64, Whole>,
    /// By its ticket: whose part, and where in the buffer it begins.
    under_way: HashMap<u64, (u64, usize)>,
    next: u64,
}

impl Parts {
    /// Starts a read or write of blocks of the volume on a channel of its device.
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

    /// What has ended with this end of the device's channel. None: other parts are under way.
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
