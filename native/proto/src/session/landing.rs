//! One message on its way in: which units have landed, and the parity that waits for the rest.

use std::collections::BTreeMap;

use sealane_erasure::Coder;

use super::bitmap::Bitmap;
use super::layout::{Block, Layout};
use super::requests::Memory;

/// What every packet of a message says of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Description {
    /// How it is cut.
    pub layout: Layout,
    /// Whether its units are named as it goes.
    pub is_stream: bool,
    /// The word sent along.
    pub immediate: Option<u32>,
}

/// One message on its way in.
#[derive(Debug)]
pub struct Landing {
    /// What its packets say of it.
    pub description: Description,
    /// By coded index: landed, or not needed any more.
    pub arrived: Bitmap,
    /// Units that each chunk still waits for.
    chunk_missing: Vec<u16>,
    /// Units of an ended stream.
    stream_units: Option<u32>,
    /// Parity symbols of blocks that are not whole yet.
    pub parity: BTreeMap<u32, Vec<(u8, Vec<u8>)>>,
}

impl Landing {
    /// A message of which nothing has arrived.
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

    /// Chunks of the message.
    #[must_use]
    pub fn chunk_count(&self) -> u32 {
        self.chunk_missing.len() as u32
    }

    /// A data unit is in memory; the last one of a chunk publishes the chunk.
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

    /// The sender has named this many units of a stream and names no more. Said more than once, the
    /// first counts.
    pub fn stream_ended(&mut self, units: u32) {
        self.stream_units.get_or_insert(units);
    }

    /// Whether nothing more is to come.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        if self.description.is_stream {
            return self.stream_units.is_some_and(|units| self.arrived.set_count() >= units);
        }
        self.arrived.is_full()
    }

    /// Bytes of the message that are in memory, the rest of a short last unit included.
    #[must_use]
    pub fn landed_bytes(&self) -> u64 {
        let layout = &self.description.layout;
        if self.description.is_stream {
            return layout.length().min(u64::from(self.arrived.set_count()) * layout.unit_bytes());
        }
        layout.length()
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
    /// The data symbols of one block, padded.
    symbols: Vec<u8>,
}

impl Restorer {
    /// Computes the missing data units of a block, which has enough parity, and writes them to their
    /// place in the message that starts at the offset.
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
