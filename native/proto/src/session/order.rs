//! The order in which a message's units are first sent: all data, then parity.
//!
//! Data goes first, so a message without losses is complete when its data is, regardless of its
//! code. Parity follows in rounds: the first symbol of each block, then the second. If the blocks
//! lack few units, the first rounds suffice, and parity of blocks known to be complete by then is
//! skipped (docs/decisions/0048-parity-last.md).

use super::bitmap::Bitmap;
use super::layout::Layout;
use super::receiver::SCRATCH_BYTES_MAX;

/// Progress of a message's first transmission.
#[derive(Debug, Clone, Copy)]
pub struct Order {
    /// Number of blocks whose data is interleaved.
    depth: u32,
    /// Number of blocks whose parity is interleaved.
    breadth: u32,
    /// Units that have left or are not needed.
    passed: u32,
}

impl Order {
    /// Starts before the first unit, with the data of `depth` blocks interleaved (at least one).
    #[must_use]
    pub fn new(layout: &Layout, depth: u8) -> Self {
        // Blocks that are encoded together must fit in memory, here and at the peer.
        let parity_bytes = u64::from(layout.m()) * layout.unit_bytes();
        let breadth = (SCRATCH_BYTES_MAX as u64).checked_div(parity_bytes).unwrap_or(1);
        let blocks = if layout.is_coded() { layout.block_count() } else { 1 };
        let breadth = u32::try_from(breadth).unwrap_or(u32::MAX).clamp(1, blocks);
        Self { depth: u32::from(depth).max(1), breadth, passed: 0 }
    }

    /// Number of blocks whose parity is interleaved.
    #[must_use]
    pub fn breadth(&self) -> u32 {
        self.breadth
    }

    /// Coded index of the next unit; `None` after the last.
    #[must_use]
    pub fn next(&self, layout: &Layout) -> Option<u32> {
        let position = self.passed;
        if position >= layout.coded_units() {
            return None;
        }
        Some(match position.checked_sub(layout.data_units()) {
            None => self.data(layout, position),
            Some(position) => {
                let (first, blocks, within) = self.group(layout, position);
                let block = layout.block(first + within % blocks);
                block.coded_start + block.data_count + within / blocks
            }
        })
    }

    /// Units left to the end of the data or, after it, of the parity.
    #[must_use]
    pub fn remaining(&self, layout: &Layout) -> u32 {
        let is_data = self.passed < layout.data_units();
        let end = if is_data { layout.data_units() } else { layout.coded_units() };
        end.saturating_sub(self.passed)
    }

    /// Whether the next unit is the first parity of the message.
    #[must_use]
    pub fn is_data_sent(&self, layout: &Layout) -> bool {
        layout.is_coded() && self.passed == layout.data_units()
    }

    /// Records that the next unit has left.
    pub fn advance(&mut self) {
        self.passed += 1;
    }

    /// Skips parity that is known not to be needed.
    pub fn skip(&mut self, layout: &Layout, acknowledged: &Bitmap) {
        while let Some(position) = self.passed.checked_sub(layout.data_units())
            && let Some(coded) = self.next(layout)
        {
            let (first, blocks, within) = self.group(layout, position);
            if acknowledged.first_clear() >= layout.block(first + blocks - 1).coded_end {
                self.passed += blocks * u32::from(layout.m()) - within;
            } else if acknowledged.get(coded) {
                self.passed += 1;
            } else {
                return;
            }
        }
    }

    /// Number of a block's parity units that have left or were not needed.
    #[must_use]
    pub fn parity_passed(&self, layout: &Layout, number: u32) -> u32 {
        let position = self.passed.saturating_sub(layout.data_units());
        let first = number - number % self.breadth;
        let blocks = self.breadth.min(layout.block_count() - first);
        let m = u32::from(layout.m());
        let within = position.saturating_sub(first * m).min(blocks * m);
        within / blocks + u32::from(within % blocks > number - first)
    }

    /// The group of blocks to which the parity unit at this position belongs: first block, number
    /// of blocks, and number of the group's parity units that come before.
    fn group(&self, layout: &Layout, position: u32) -> (u32, u32, u32) {
        let within = position % (self.breadth * u32::from(layout.m()));
        let first = (position - within) / u32::from(layout.m());
        (first, self.breadth.min(layout.block_count() - first), within)
    }

    fn data(&self, layout: &Layout, position: u32) -> u32 {
        let k = u32::from(layout.k());
        if k == 0 || self.depth == 1 {
            return layout.coded_of(position);
        }
        // All earlier groups are complete.
        let start = position - position % (k * self.depth);
        let blocks = self.depth.min(layout.block_count() - start / k);
        let short = layout.block(start / k + blocks - 1).data_count;
        let within = position - start;
        // The last block may be short; once it is finished, the others continue without it.
        let (row, block) = match within.checked_sub(short * blocks) {
            None => (within / blocks, within % blocks),
            Some(rest) => (short + rest / (blocks - 1), rest % (blocks - 1)),
        };
        layout.coded_of(start + block * k + row)
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Place;
    use super::*;
    use proptest::prelude::*;

    fn all(layout: &Layout, mut order: Order) -> Vec<u32> {
        let next = || {
            let next = order.next(layout);
            order.advance();
            next
        };
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn first_the_data_is_to_go_then_the_parity() {
        let layout = Layout::new(10 * 256, 256, 4, 1).unwrap();
        let mut order = Order::new(&layout, 1);
        let mut to_go = Vec::new();
        while order.next(&layout).is_some() {
            to_go.push(order.remaining(&layout));
            order.advance();
        }
        assert_eq!(to_go, [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 3, 2, 1]);
        assert_eq!(order.remaining(&layout), 0);
    }

    proptest! {
        #[test]
        fn all_data_leaves_in_turn_and_then_parity_in_rounds(
            units in 1_u64..400, k in 1_u8..40, m in 1_u8..100, depth in 1_u8.., large: bool,
        ) {
            let unit_bytes = if large { 65_000 } else { 256 };
            let layout = Layout::new(units * u64::from(unit_bytes), unit_bytes, k, m).unwrap();
            let order = Order::new(&layout, depth);
            let parity_bytes = order.breadth() as usize * usize::from(m) * usize::from(unit_bytes);
            prop_assert!(parity_bytes <= SCRATCH_BYTES_MAX, "what waits at either end");
            let coded = all(&layout, order);
            let mut sorted = coded.clone();
            sorted.sort_unstable();
            prop_assert!(sorted.into_iter().eq(0..layout.coded_units()));
            let (data, parity) = coded.split_at(layout.data_units() as usize);
            let group = usize::from(k) * usize::from(depth);
            let blocks: Vec<u32> = data.iter().map(|coded| {
                let Place::Data(unit) = layout.place(*coded) else { panic!("parity before data") };
                unit / u32::from(k)
            }).collect();
            let whole = data.len() / group * group;
            for (at, block) in blocks[..whole].iter().enumerate() {
                prop_assert_eq!(*block as usize, at / group * usize::from(depth) + at % usize::from(depth));
            }
            let places = parity.iter().map(|coded| match layout.place(*coded) {
                Place::Parity { block, index } => (block / order.breadth(), index, block),
                Place::Data(_) => panic!("data after parity"),
            });
            prop_assert!(places.is_sorted(), "groups, then rounds, then blocks");
            // Within a block units keep their order.
            for block in 0..layout.block_count() {
                let mine = coded.iter().filter(|coded| layout.block_of(**coded) == layout.block(block));
                prop_assert!(mine.is_sorted());
            }
        }

        #[test]
        fn what_has_passed_of_a_block_is_what_was_sent_of_it(
            units in 1_u64..200, k in 1_u8..20, m in 1_u8..10, large: bool,
        ) {
            let unit_bytes = if large { 65_000 } else { 256 };
            let layout = Layout::new(units * u64::from(unit_bytes), unit_bytes, k, m).unwrap();
            let mut order = Order::new(&layout, 2);
            let mut sent = vec![0; layout.block_count() as usize];
            while let Some(coded) = order.next(&layout) {
                for (block, sent) in (0..).zip(&sent) {
                    prop_assert_eq!(order.parity_passed(&layout, block), *sent);
                }
                if let Place::Parity { block, .. } = layout.place(coded) {
                    sent[block as usize] += 1;
                }
                order.advance();
            }
            prop_assert!(sent.iter().all(|sent| *sent == u32::from(m)));
        }
    }

    #[test]
    fn parity_of_what_is_whole_is_passed_over() {
        // Three blocks of (4, 2).
        let layout = Layout::new(12 * 256, 256, 4, 2).unwrap();
        let mut order = Order::new(&layout, 1);
        let mut acknowledged = Bitmap::new(layout.coded_units());
        acknowledged.merge(0, &[0b1100_0000, 0b1111]);
        let mut sent = Vec::new();
        loop {
            order.skip(&layout, &acknowledged);
            let Some(coded) = order.next(&layout) else { break };
            sent.push(coded);
            order.advance();
        }
        assert_eq!(sent, [0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15, 4, 16, 5, 17]);
    }

    #[test]
    fn whole_groups_are_passed_over_at_once() {
        // Blocks of (1, 128) at 65,000 bytes: two of them fit the memory for parity.
        let layout = Layout::new(5 * 65_000, 65_000, 1, 128).unwrap();
        let mut order = Order::new(&layout, 1);
        assert_eq!(order.breadth(), 2);
        let mut acknowledged = Bitmap::new(layout.coded_units());
        acknowledged.set_below(2 * 129);
        (0..5).for_each(|_| order.advance());
        order.skip(&layout, &acknowledged);
        assert_eq!(order.next(&layout), Some(2 * 129 + 1));
        assert_eq!(order.parity_passed(&layout, 1), 128);
        acknowledged.set_below(layout.coded_units());
        order.skip(&layout, &acknowledged);
        assert_eq!(order.next(&layout), None);
    }
}
