//! Which blocks of a namespace were changed since its store was opened.
//!
//! What a gateway sends again after a restart of the target is older than any of these changes, so
//! it must not replace them (`docs/understand/crash-consistency.md` §4). Who asks and who notes hold
//! the range lock of the blocks. Kept in memory: the next life of the target changes them anew.

use std::ops::Range;

use roaring::RoaringTreemap;

/// The blocks that were changed.
#[derive(Debug, Default)]
pub(super) struct Changed(RoaringTreemap);

impl Changed {
    /// Notes that these blocks were changed.
    pub(super) fn note(&mut self, blocks: Range<u64>) {
        if blocks.end - blocks.start == 1 {
            self.0.insert(blocks.start);
        } else {
            self.0.insert_range(blocks);
        }
    }

    /// Those of these blocks that were not changed, as ranges in their order.
    pub(super) fn unchanged(&self, blocks: Range<u64>) -> Vec<Range<u64>> {
        let mut unchanged: Vec<Range<u64>> = Vec::new();
        for block in blocks.filter(|block| !self.0.contains(*block)) {
            match unchanged.last_mut() {
                Some(last) if last.end == block => last.end += 1,
                _ => unchanged.push(block..block + 1),
            }
        }
        unchanged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_tells_the_blocks_between_those_that_were_changed() {
        let mut changed = Changed::default();
        changed.note(4..6);
        changed.note(8..9);
        assert_eq!(changed.unchanged(3..9), [3..4, 6..8]);
        assert_eq!(changed.unchanged(4..6), []);
        let far = 1 << 40;
        changed.note(far + 1..far + 2);
        assert_eq!(changed.unchanged(far..far + 4), [far..far + 1, far + 2..far + 4]);
    }
}
