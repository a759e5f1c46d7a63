//! The memory of one end, with a record of all accesses that change it.

use std::collections::BTreeMap;

use sealane_proto::session::{Memory, PayloadMode};

use crate::check::{Findings, Rule};

/// Fills a buffer before a message lands in it.
const CANARY: u8 = 0xa5;
/// Gap between slot regions, which reveals writes past the end of a buffer.
const GUARD_BYTES: u64 = 64;

/// A fault that a test injects between machine and memory, to see whether a checker finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), expect(dead_code, reason = "tests make the checkers fail with these"))]
pub(crate) enum Sabotage {
    /// Flips one bit of what is written.
    FlipBit,
    /// Makes every write twice.
    WriteTwice,
    /// Also writes a byte after each write.
    WriteBeyond,
    /// Publishes chunks before the first write of their message.
    LandEarly,
    /// Writes a byte for a datagram that must not change anything.
    WriteOnRefused,
}

/// One message that is landing.
#[derive(Debug, Default, Clone)]
struct Slot {
    message: u64,
    length: u64,
    units_written: Vec<bool>,
    chunks_landed: Vec<bool>,
    /// Before that, the chunk map belongs to the previous message in the slot.
    is_cleared: bool,
}

#[derive(Debug)]
pub(crate) struct WatchedMemory {
    payload: PayloadMode,
    seed: u64,
    unit_bytes: u64,
    chunk_units: u64,
    stride: u64,
    bytes: Vec<u8>,
    slots: Vec<Slot>,
    /// Bytes of messages with contents other than the pattern.
    pub contents: BTreeMap<u64, Vec<u8>>,
    /// Number of changes to the memory or the chunk map.
    pub changes: u64,
    pub findings: Findings,
    pub sabotage: Option<Sabotage>,
}

impl WatchedMemory {
    pub fn new(scenario: &crate::Scenario) -> Self {
        let stride = scenario.message_bytes_max + GUARD_BYTES;
        let is_real = scenario.payload == PayloadMode::Real;
        let size = if is_real { stride * u64::from(scenario.slots) } else { 0 };
        Self {
            payload: scenario.payload,
            seed: scenario.seed,
            unit_bytes: scenario.unit_bytes.into(),
            chunk_units: scenario.chunk_units.into(),
            stride,
            bytes: vec![CANARY; size as usize],
            slots: vec![Slot::default(); scenario.slots.into()],
            contents: BTreeMap::new(),
            changes: 0,
            findings: Findings::default(),
            sabotage: None,
        }
    }

    /// Offset of a message's buffer.
    pub fn offset(&self, message: u64) -> u64 {
        message % self.slots.len() as u64 * self.stride
    }

    /// Writes the bytes of a message to send.
    pub fn fill(&mut self, message: u64, length: u64) {
        if self.payload == PayloadMode::Real {
            let (start, seed) = (self.offset(message) as usize, self.seed);
            let into = &mut self.bytes[start..start + length as usize];
            if let Some(bytes) = self.contents.remove(&message) {
                into.copy_from_slice(&bytes);
                return;
            }
            for (at, byte) in into.iter_mut().enumerate() {
                *byte = pattern(seed, message, at as u64);
            }
        }
    }

    /// Prepares a buffer for a message of known length.
    pub fn expect(&mut self, message: u64, length: u64) {
        let start = self.offset(message) as usize;
        if self.payload == PayloadMode::Real {
            self.bytes[start..start + self.stride as usize].fill(CANARY);
        }
        let units = length.div_ceil(self.unit_bytes).max(1);
        let index = (message % self.slots.len() as u64) as usize;
        self.slots[index] = Slot {
            message,
            length,
            units_written: vec![false; units as usize],
            chunks_landed: vec![false; units.div_ceil(self.chunk_units) as usize],
            is_cleared: false,
        };
    }

    /// Checks a completed message; returns its bytes unless they are the pattern.
    pub fn verify(&mut self, message: u64, length: u64) -> Option<Vec<u8>> {
        let index = (message % self.slots.len() as u64) as usize;
        let Slot { message: expected, length: posted, ref chunks_landed, .. } = self.slots[index];
        if (message, length) != (expected, posted) {
            self.findings.add(Rule::PayloadEqual, || {
                format!("message {message} has {length} bytes; expected message {expected} with {posted}")
            });
        } else if !chunks_landed.iter().all(|landed| *landed) {
            let detail = || format!("message {message} completed with chunks missing");
            self.findings.add(Rule::ChunkLanded, detail);
        }
        if self.payload == PayloadMode::LengthsOnly {
            return None;
        }
        let start = self.offset(message) as usize;
        let region = &self.bytes[start..start + self.stride as usize];
        let (seed, contents) = (self.seed, self.contents.remove(&message));
        let byte_at = |at: usize| match &contents {
            _ if at as u64 >= length => CANARY,
            Some(bytes) => bytes.get(at).copied().unwrap_or(CANARY),
            None => pattern(seed, message, at as u64),
        };
        if let Some(at) = region.iter().enumerate().position(|(at, byte)| *byte != byte_at(at)) {
            let detail = || format!("message {message} differs at byte {at} of {length}");
            self.findings.add(Rule::PayloadEqual, detail);
        }
        contents.map(|_| region.iter().copied().take(length as usize).collect())
    }

    fn note_write(&mut self, offset: u64, length: u64) {
        self.changes += 1;
        let slot = &mut self.slots[(offset / self.stride) as usize];
        let within = offset % self.stride;
        let unit = within / self.unit_bytes;
        let is_unit = within.is_multiple_of(self.unit_bytes)
            && length == self.unit_bytes.min(slot.length.saturating_sub(within));
        let message = slot.message;
        match slot.units_written.get_mut(unit as usize) {
            Some(written) if is_unit && !*written => *written = true,
            found => self.findings.add(Rule::WrittenOnce, || {
                format!("{length} bytes written at {within} of message {message}, written before: {found:?}")
            }),
        }
    }
}

impl Memory for WatchedMemory {
    fn read(&self, offset: u64, into: &mut [u8]) {
        let start = offset as usize;
        into.copy_from_slice(&self.bytes[start..start + into.len()]);
    }

    fn write(&mut self, offset: u64, from: &[u8]) {
        let start = offset as usize;
        self.note_write(offset, from.len() as u64);
        self.bytes[start..start + from.len()].copy_from_slice(from);
        match self.sabotage {
            Some(Sabotage::FlipBit) if !from.is_empty() => self.bytes[start] ^= 1,
            Some(Sabotage::WriteTwice) => self.note_write(offset, from.len() as u64),
            Some(Sabotage::WriteBeyond) => self.bytes[start + from.len()] ^= 1,
            _ => {}
        }
    }

    fn chunk_landed(&mut self, slot: u16, chunk: u32) {
        self.changes += 1;
        let chunk_units = self.chunk_units as usize;
        let is_real = self.payload == PayloadMode::Real;
        let slot = &mut self.slots[usize::from(slot)];
        let units = slot.units_written.chunks(chunk_units).nth(chunk as usize);
        let is_written = !is_real || units.is_some_and(|units| units.iter().all(|unit| *unit));
        let (message, is_cleared) = (slot.message, slot.is_cleared);
        match slot.chunks_landed.get_mut(chunk as usize) {
            Some(landed) if !*landed && is_written && is_cleared => *landed = true,
            found => self.findings.add(Rule::ChunkLanded, || {
                format!(
                    "chunk {chunk} of message {message}, written: {is_written}, cleared: \
                     {is_cleared}, landed before: {found:?}"
                )
            }),
        }
    }

    fn chunks_cleared(&mut self, slot: u16, chunk_count: u32) {
        self.changes += 1;
        let record = &mut self.slots[usize::from(slot)];
        let is_fresh = !std::mem::replace(&mut record.is_cleared, true);
        let (message, expected) = (record.message, record.chunks_landed.len());
        if !is_fresh || expected != chunk_count as usize {
            self.findings.add(Rule::ChunkLanded, || {
                format!("message {message}: {chunk_count} chunks cleared, {expected} expected")
            });
        }
        if self.sabotage == Some(Sabotage::LandEarly) {
            self.chunk_landed(slot, 0);
        }
    }
}

/// Byte `at` of a message; differs between messages, positions and seeds.
fn pattern(seed: u64, message: u64, at: u64) -> u8 {
    let word =
        (seed ^ message.rotate_left(40)).wrapping_add(at / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (word ^ word >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed >> (at % 8 * 8)) as u8
}
