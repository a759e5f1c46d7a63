//! The blocks of a namespace that have been changed since its store was opened.
//!
//! Changes that a gateway sends again after a restart of the target are older than any of these, so
//! they must not replace them (`docs/understand/crash-consistency.md` §4). Callers hold the range
//! lock of the blocks. The set is kept in memory only: it begins empty with each start of the
//! target.

use std::ops::Range;

use roaring::RoaringTreemap;

/// The changed blocks.
#[derive(Debug, Default)]
pub(super) struct Changed(RoaringTreemap);

impl Changed {
    /// Records a change of these blocks.
    pub(super) fn note(&mut self, blocks: Range<u64>) {
        if blocks.end - blocks.start == 1 {
            self.0.insert(blocks.start);
        } else {
            self.0.insert_range(blocks);
        }
    }

    /// The unchanged ones among these blocks, as ranges in ascending order.
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
    fn blocks_between_changed_ones_are_unchanged() {
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
