//! An incoming message: its landed units, and the parity kept until the rest arrives.

use std::collections::BTreeMap;

use sealane_erasure::Coder;

use super::bitmap::Bitmap;
use super::layout::{Block, Layout};
use super::requests::Memory;

/// Properties of a message that all its packets state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Description {
    /// Its division into units.
    pub layout: Layout,
    /// Whether it is a stream, whose units are announced as it goes.
    pub is_stream: bool,
    /// The immediate.
    pub immediate: Option<u32>,
}

/// An incoming message.
#[derive(Debug)]
pub struct Landing {
    /// The properties stated by its packets.
    pub description: Description,
    /// By coded index: landed or no longer needed.
    pub arrived: Bitmap,
    /// Number of units that each chunk still lacks.
    chunk_missing: Vec<u16>,
    /// Number of units of an ended stream.
    stream_units: Option<u32>,
    /// Parity symbols of incomplete blocks.
    pub parity: BTreeMap<u32, Vec<(u8, Vec<u8>)>>,
}

impl Landing {
    /// Creates a message of which nothing has arrived.
    #[must_use]
    pub fn new(description: Description, chunk_units: u16) -> Self {
        let units = description.layout.data_units();
        let grain = u32::from(chunk_units);
        let size = |chunk: u32| grain.min(units - chunk * grain) as u16;
        Self {
            description,
            arrived: Bitmap::new(description.layout.coded_units()),
            chunk_missing: (0..units.div_ceil(grain)).map(size).collect(),
            stream_units: None,
            parity: BTreeMap::new(),
        }
    }

    /// Number of chunks of the message.
    #[must_use]
    pub fn chunk_count(&self) -> u32 {
        self.chunk_missing.len() as u32
    }

    /// Records that a data unit is in memory; the last one of a chunk publishes the chunk.
    pub fn unit_landed(
        &mut self,
        unit: u32,
        chunk_units: u16,
        slot: u16,
        memory: &mut impl Memory,
    ) {
        let chunk = unit / u32::from(chunk_units);
        if let Some(missing) = self.chunk_missing.get_mut(chunk as usize) {
            *missing -= 1;
            if *missing == 0 {
                memory.chunk_landed(slot, chunk);
            }
        }
    }

    /// Records the final number of units of a stream. If it is stated again, the first value
    /// counts.
    pub fn stream_ended(&mut self, units: u32) {
        self.stream_units.get_or_insert(units);
    }

    /// Whether all that the sender sends of the message has arrived.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        if self.description.is_stream {
            return self.stream_units.is_some_and(|units| self.arrived.set_count() >= units);
        }
        self.arrived.is_full()
    }

    /// Whether the sender left out units: a stream that ended with gaps.
    #[must_use]
    pub fn has_gaps(&self) -> bool {
        let announced = self.stream_units.unwrap_or(0);
        self.description.is_stream && announced < self.description.layout.data_units()
    }

    /// Bytes of the message in memory; a short last unit counts in full.
    #[must_use]
    pub fn landed_bytes(&self) -> u64 {
        let layout = &self.description.layout;
        let missing: u64 = self.chunk_missing.iter().map(|units| u64::from(*units)).sum();
        let landed = u64::from(layout.data_units()) - missing;
        layout.length().min(landed * layout.unit_bytes())
    }

    /// Whether a data unit is in memory.
    #[must_use]
    pub fn has_unit(&self, unit: u32) -> bool {
        self.arrived.get(self.description.layout.coded_of(unit))
    }
}

/// Decodes blocks in private memory.
#[derive(Debug, Default)]
pub struct Restorer {
    coder: Coder,
    /// The padded data symbols of one block.
    symbols: Vec<u8>,
}

impl Restorer {
    /// Computes the missing data units of a block that has enough parity, and writes them to their
    /// place in the message that starts at `offset`.
    pub fn restore<M: Memory>(
        &mut self,
        layout: &Layout,
        block: &Block,
        missing: &[u32],
        parity: &[(u8, Vec<u8>)],
        (offset, memory): (u64, &mut M),
    ) {
        self.symbols.clear();
        self.symbols.resize(block.data_count as usize * block.symbol_bytes, 0);
        let mut present = Vec::with_capacity(block.data_count as usize);
        let mut restored = Vec::with_capacity(missing.len());
        for (i, symbol) in self.symbols.chunks_exact_mut(block.symbol_bytes).enumerate() {
            if missing.contains(&(i as u32)) {
                restored.push((i, symbol));
                continue;
            }
            let unit = block.data_start + i as u32;
            let length = layout.unit_length(unit);
            memory.read(offset + layout.unit_offset(unit), &mut symbol[..length]);
            present.push((i, &*symbol));
        }
        let parity = parity.iter().map(|(i, symbol)| (usize::from(*i), &symbol[..]));
        let parity: Vec<(usize, &[u8])> = parity.collect();
        let decoded = self.coder.decode(&present, &parity, &mut restored);
        debug_assert_eq!(decoded, Ok(()), "k symbols of a layout's shape decode");
        for (i, symbol) in restored {
            let unit = block.data_start + i as u32;
            let length = layout.unit_length(unit);
            memory.write(offset + layout.unit_offset(unit), &symbol[..length]);
        }
    }
}
