//! Parity of the blocks that are being sent.

use sealane_erasure::Coder;

use super::layout::{Block, Layout};
use super::requests::Memory;

/// Parity of the most recently encoded blocks, as many as are interleaved.
#[derive(Debug, Default)]
pub struct ParityCache {
    /// Message and block number of each entry.
    owners: Vec<Option<(u64, u32)>>,
    /// Bytes of an entry.
    stride: usize,
    /// The concatenated parity symbols of each entry.
    parity: Vec<u8>,
    data: Vec<u8>,
    coder: Coder,
}

impl ParityCache {
    /// The concatenated parity symbols of a block. The tuple is its message, its number, and the
    /// number of interleaved blocks ([`super::order::Order::breadth`]).
    pub fn of<M: Memory>(
        &mut self,
        (message, number, breadth): (u64, u32, u32),
        layout: &Layout,
        block: &Block,
        (offset, memory): (u64, &M),
    ) -> &[u8] {
        let parity_bytes = usize::from(layout.m()) * block.symbol_bytes;
        // Interleaved blocks have consecutive numbers.
        let start = self.place_of(number % breadth, layout);
        let Self { data, parity, coder, owners, .. } = self;
        let parity = &mut parity[start..start + parity_bytes];
        let owner = &mut owners[(number % breadth) as usize];
        if *owner != Some((message, number)) {
            *owner = Some((message, number));
            data.clear();
            data.resize(block.data_count as usize * block.symbol_bytes, 0);
            for (index, symbol) in data.chunks_exact_mut(block.symbol_bytes).enumerate() {
                let unit = block.data_start + index as u32;
                let length = layout.unit_length(unit);
                memory.read(offset + layout.unit_offset(unit), &mut symbol[..length]);
            }
            let data: Vec<&[u8]> = data.chunks_exact(block.symbol_bytes).collect();
            let mut outputs: Vec<&mut [u8]> = parity.chunks_exact_mut(block.symbol_bytes).collect();
            let coded = coder.encode(&data, &mut outputs);
            debug_assert_eq!(coded, Ok(()), "a layout is a valid shape");
        }
        parity
    }

    /// Offset of an entry, which is created if it doesn't exist.
    fn place_of(&mut self, index: u32, layout: &Layout) -> usize {
        let stride = usize::from(layout.m()) * layout.unit_bytes() as usize;
        if stride != self.stride {
            self.owners.clear();
            self.stride = stride;
        }
        let index = index as usize;
        if index >= self.owners.len() {
            self.owners.resize(index + 1, None);
        }
        let end = (index + 1) * stride;
        if end > self.parity.len() {
            self.parity.resize(end, 0);
        }
        end - stride
    }
}
