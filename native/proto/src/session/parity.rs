//! Parity of the blocks that are being sent.

use sealane_erasure::Coder;

use super::layout::{Block, Layout};
use super::types::Memory;

/// The parity symbols of a block, one behind the other.
#[derive(Debug, Default)]
struct BlockParity {
    /// Message and number of the block; `None` before the first.
    of: Option<(u64, u32)>,
    symbols: Vec<u8>,
}

/// Parity of the blocks that were encoded last: as many as go out in turn.
#[derive(Debug, Default)]
pub struct ParityCache {
    blocks: Vec<BlockParity>,
    symbols: Vec<u8>,
    coder: Coder,
}

impl ParityCache {
    /// The parity symbols of a block, one behind the other; `place` is its message, its number and
    /// how many blocks go out in turn.
    pub fn of<M: Memory>(
        &mut self,
        (message, number, depth): (u64, u32, u8),
        layout: &Layout,
        block: &Block,
        (offset, memory): (u64, &M),
    ) -> &[u8] {
        // Blocks that go out in turn have neighbouring numbers.
        let depth = usize::from(depth);
        self.blocks.resize_with(depth, Default::default);
        let index = number as usize % depth;
        let Self { blocks, symbols, coder } = self;
        let BlockParity { of, symbols: parity } = &mut blocks[index];
        if *of != Some((message, number)) {
            *of = Some((message, number));
            symbols.clear();
            symbols.resize(block.data_count as usize * block.symbol_bytes, 0);
            for (index, symbol) in symbols.chunks_exact_mut(block.symbol_bytes).enumerate() {
                let unit = block.data_start + index as u32;
                let length = layout.unit_length(unit);
                memory.read(offset + layout.unit_offset(unit), &mut symbol[..length]);
            }
            parity.resize(usize::from(layout.m()) * block.symbol_bytes, 0);
            let data: Vec<&[u8]> = symbols.chunks_exact(block.symbol_bytes).collect();
            let mut outputs: Vec<&mut [u8]> = parity.chunks_exact_mut(block.symbol_bytes).collect();
            let coded = coder.encode(&data, &mut outputs);
            debug_assert_eq!(coded, Ok(()), "a layout is a valid shape");
        }
        parity
    }
}
