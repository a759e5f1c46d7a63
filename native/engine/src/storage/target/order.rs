//! Tracks which gateway's changes of which blocks aren't flushed yet, if several gateways use a
//! volume.
//!
//! Before a gateway changes a block last changed by another gateway, the store is flushed. So after
//! a restart of the target, the store contains the older of two changes if it contains the newer
//! one, and doesn't make the older one again when its gateway sends it again
//! (`docs/understand/crash-consistency.md` §4). This costs nothing while only one gateway has used
//! the volume since its store was opened.
//!
//! Callers hold the range lock of the blocks.

use std::ops::Range;

use roaring::RoaringTreemap;

/// Maximum blocks of a command that are looked up one by one; more are counted by rank.
const FEW_BLOCKS: u64 = 64;

/// Number of a gateway of the namespace, in order of arrival.
pub(super) type Writer = usize;

/// Identifies a flush in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Token(u64);

/// Unflushed changes of one gateway.
#[derive(Debug, Default)]
struct Changes {
    /// Made since the last tracked flush began.
    since: RoaringTreemap,
    /// Made before that, while the flush is in progress.
    before: RoaringTreemap,
}

impl Changes {
    fn has(&self, blocks: &Range<u64>) -> bool {
        [&self.since, &self.before].iter().any(|changed| has_any(changed, blocks))
    }
}

fn has_any(changed: &RoaringTreemap, blocks: &Range<u64>) -> bool {
    if changed.is_empty() || blocks.is_empty() {
        return false;
    }
    if blocks.end - blocks.start <= FEW_BLOCKS {
        return blocks.clone().any(|block| changed.contains(block));
    }
    let before = blocks.start.checked_sub(1).map_or(0, |last| changed.rank(last));
    changed.rank(blocks.end - 1) > before
}

/// The gateways that have had queues since the store was opened, with their changes.
#[derive(Debug, Default)]
pub(super) struct Order {
    gateways: Vec<String>,
    changes: Vec<Changes>,
    /// Whether the first gateway has unflushed changes from the time when it was alone, whose
    /// blocks weren't recorded: made since, and before, the last tracked flush began.
    has_unnoted: [bool; 2],
    waits_for: Option<Token>,
    tokens: u64,
}

impl Order {
    /// Registers a gateway's queue; returns the gateway's number.
    pub(super) fn join(&mut self, gateway: &str) -> Writer {
        if let Some(known) = self.gateways.iter().position(|known| known == gateway) {
            return known;
        }
        self.gateways.push(gateway.to_owned());
        self.changes.push(Changes::default());
        if self.gateways.len() == 2 {
            self.has_unnoted = [true, false];
        }
        self.gateways.len() - 1
    }

    /// Whether more than one gateway has used the namespace.
    pub(super) fn is_shared(&self) -> bool {
        self.gateways.len() > 1
    }

    /// Records a completed change of these blocks.
    pub(super) fn note(&mut self, writer: Writer, blocks: Range<u64>) {
        if self.is_shared()
            && let Some(changes) = self.changes.get_mut(writer)
        {
            changes.since.insert_range(blocks);
        }
    }

    /// Whether the store must be flushed before this gateway changes these blocks.
    pub(super) fn must_flush(&self, writer: Writer, blocks: &Range<u64>) -> bool {
        let is_unnoted = writer != 0 && self.has_unnoted != [false; 2];
        let mut others = self.changes.iter().enumerate().filter(|(other, _)| *other != writer);
        is_unnoted || others.any(|(_, changes)| changes.has(blocks))
    }

    /// Begins tracking a flush. None if there is nothing to track, or another flush is being
    /// tracked.
    pub(super) fn begin_flush(&mut self) -> Option<Token> {
        if !self.is_shared() || self.waits_for.is_some() {
            return None;
        }
        for changes in &mut self.changes {
            changes.before = std::mem::take(&mut changes.since);
        }
        self.has_unnoted.swap(0, 1);
        self.tokens += 1;
        self.waits_for = Some(Token(self.tokens));
        self.waits_for
    }

    /// Ends tracking a flush.
    pub(super) fn end_flush(&mut self, token: Token, is_flushed: bool) {
        if self.waits_for != Some(token) {
            return;
        }
        self.waits_for = None;
        let had_unnoted = std::mem::take(&mut self.has_unnoted[1]);
        self.has_unnoted[0] |= had_unnoted && !is_flushed;
        for changes in &mut self.changes {
            let before = std::mem::take(&mut changes.before);
            if !is_flushed {
                changes.since |= before;
            }
        }
    }

    /// A flush that began while the caller held the range of these blocks has succeeded.
    pub(super) fn flushed(&mut self, blocks: &Range<u64>) {
        for changes in &mut self.changes {
            changes.since.remove_range(blocks.clone());
            changes.before.remove_range(blocks.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two gateways without changes from the time when one of them was alone.
    fn shared() -> Order {
        let mut order = Order::default();
        assert_eq!([order.join("a"), order.join("b"), order.join("a")], [0, 1, 0]);
        let token = order.begin_flush().expect("it is shared");
        order.end_flush(token, true);
        order
    }

    #[test]
    fn a_single_gateway_never_waits_and_its_changes_are_not_recorded() {
        let mut order = Order::default();
        let alone = order.join("a");
        order.note(alone, 3..9);
        assert!(!order.must_flush(alone, &(3..9)));
        assert_eq!(order.begin_flush(), None);
        assert!(order.changes[0].since.is_empty());
    }

    #[test]
    fn changes_made_by_a_single_gateway_are_flushed_before_another_one_changes_anything() {
        let mut order = Order::default();
        let (first, second) = (order.join("a"), order.join("b"));
        assert!(order.must_flush(second, &(0..1)) && !order.must_flush(first, &(0..1)));
        let token = order.begin_flush().expect("it is shared");
        assert!(order.must_flush(second, &(0..1)), "it has not ended");
        order.end_flush(token, false);
        assert!(order.must_flush(second, &(0..1)), "it failed");
        let token = order.begin_flush().expect("none is waited for");
        order.end_flush(token, true);
        assert!(!order.must_flush(second, &(0..1)));
        assert_eq!(order.join("c"), 2);
        assert!(!order.must_flush(2, &(0..1)), "all changes are recorded by now");
    }

    #[test]
    fn blocks_changed_by_another_gateway_since_the_last_flush_began_need_a_flush() {
        let mut order = shared();
        order.note(0, 4..6);
        assert!(!order.must_flush(0, &(0..9)), "its own changes");
        assert!(order.must_flush(1, &(5..9)) && !order.must_flush(1, &(6..9)));
        assert!(order.must_flush(1, &(0..1000)) && !order.must_flush(1, &(6..1000)));
        let token = order.begin_flush().expect("none is waited for");
        order.note(0, 8..9);
        assert_eq!(order.begin_flush(), None, "one at a time");
        assert!(order.must_flush(1, &(4..5)), "it has not ended");
        order.end_flush(token, true);
        assert!(!order.must_flush(1, &(4..6)));
        assert!(order.must_flush(1, &(8..9)), "changed after it began");
    }

    #[test]
    fn a_failed_flush_covers_nothing() {
        let mut order = shared();
        order.note(0, 4..6);
        let token = order.begin_flush().expect("none is waited for");
        order.note(0, 8..9);
        order.end_flush(token, false);
        assert!(order.must_flush(1, &(4..5)) && order.must_flush(1, &(8..9)));
        order.end_flush(token, true);
        assert!(order.must_flush(1, &(4..5)), "its token is no longer valid");
    }

    #[test]
    fn a_flush_for_some_blocks_covers_these() {
        let mut order = shared();
        order.note(0, 4..8);
        order.flushed(&(5..6));
        assert!(!order.must_flush(1, &(5..6)));
        assert!(order.must_flush(1, &(4..5)) && order.must_flush(1, &(6..7)));
    }
}
