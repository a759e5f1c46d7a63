//! The protocol without one of its rules, each in a small world in which that leads to a violation.

use super::rules::{Bounds, Layout, Policy, Rules};

/// Assumptions of a search about the device and the anchor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Adversary {
    /// Only power cuts and kills.
    None,
    /// The same, for a store without an anchor.
    Unanchored,
    /// The device answers with anything that was ever written to it.
    Device,
    /// The same, and only openings and checkpoints are anchored.
    DeviceBetween,
    /// As `Device`, without an anchor.
    DeviceUnanchored,
}

impl Adversary {
    pub fn is_honest(self) -> bool {
        matches!(self, Self::None | Self::Unanchored)
    }

    pub fn policy(self) -> Policy {
        match self {
            Self::Unanchored | Self::DeviceUnanchored => Policy::Never,
            Self::DeviceBetween => Policy::Rare,
            Self::None | Self::Device => Policy::EveryFlush,
        }
    }
}

/// A rule to leave out.
pub struct Variant {
    pub rule: &'static str,
    pub layout: Layout,
    pub adversary: Adversary,
    pub leave_out: fn(&mut Rules),
    pub bounds: Bounds,
    /// Part of the description of the resulting violation.
    pub violation: &'static str,
}

/// The smallest world: one life.
pub const ONE_LIFE: Bounds = Bounds {
    writes: 2,
    flushes: 1,
    merges: 1,
    checkpoints: 0,
    refreshes: 0,
    openings: 1,
    lost_answers: 0,
    lives: 1,
    gateways: 0,
    log_pages: 8,
};
const TWO: Bounds = Bounds { openings: 2, merges: 0, ..ONE_LIFE };
const THREE: Bounds = Bounds { openings: 3, ..TWO };
const FOUR: Bounds = Bounds { openings: 4, ..TWO };
const MERGES: Bounds = Bounds { merges: 2, flushes: 0, ..ONE_LIFE };
const CHECKPOINT: Bounds = Bounds { checkpoints: 1, merges: 1, ..TWO };
const MERGES_AND_CHECKPOINT: Bounds = Bounds { merges: 2, ..CHECKPOINT };
const REFRESH: Bounds = Bounds { refreshes: 1, ..ONE_LIFE };
const THREE_WRITES: Bounds = Bounds { writes: 3, ..TWO };
const SLOT_TURNOVER: Bounds = Bounds { writes: 3, flushes: 0, ..MERGES_AND_CHECKPOINT };
const SHORT_LOG: Bounds = Bounds { writes: 3, flushes: 3, log_pages: 2, ..TWO };
const LOST_ANSWER: Bounds = Bounds { lost_answers: 1, ..TWO };
const FORK: Bounds = Bounds { lives: 2, flushes: 2, openings: 3, ..TWO };
/// With a gateway that keeps running.
const GATEWAY: Bounds = Bounds { gateways: 1, writes: 1, ..TWO };
const GATEWAY_TWO_WRITES: Bounds = Bounds { writes: 2, ..GATEWAY };
const GATEWAY_TWO_FLUSHES: Bounds = Bounds { writes: 2, flushes: 2, ..GATEWAY };
const GATEWAY_THREE_OPENINGS: Bounds = Bounds { openings: 3, ..GATEWAY };
const GATEWAY_CHECKPOINT: Bounds = Bounds { merges: 1, checkpoints: 1, ..GATEWAY_TWO_FLUSHES };
const GATEWAY_SLOT_TURNOVER: Bounds = Bounds { writes: 3, flushes: 2, ..GATEWAY };

const WRONG: &str = "reads as version";
const SECTOR_REFUSED: &str = "an honest device's sector is refused";
const STORE_REFUSED: &str = "an honest device is refused";
const ANCHOR_REFUSES: &str = "an honest store is refused by its anchor";
const GATEWAY_REFUSES: &str = "the gateway refuses an honest device";

macro_rules! variant {
    ($rule:ident, $layout:ident, $adversary:ident, $bounds:expr, $violation:expr) => {
        Variant {
            rule: stringify!($rule),
            layout: Layout::$layout,
            adversary: Adversary::$adversary,
            leave_out: |rules| rules.$rule = false,
            bounds: $bounds,
            violation: $violation,
        }
    };
}

#[rustfmt::skip] // A table.
pub fn all() -> Vec<Variant> {
    vec![
        variant!(intents_are_durable_before_data, InPlace, None, TWO, SECTOR_REFUSED),
        variant!(flush_syncs, Placed, None, TWO, STORE_REFUSED),
        variant!(flush_anchors_before_it_answers, Placed, Device, TWO, WRONG),
        variant!(anchor_comes_after_sync, Placed, None, TWO, STORE_REFUSED),
        variant!(flush_carries_intents_in_flight, InPlace, None, TWO, SECTOR_REFUSED),
        variant!(marker_speaks_of_earlier_syncs, Placed, None, TWO, SECTOR_REFUSED),
        variant!(replaced_slots_wait_for_the_record, Placed, None, THREE_WRITES, SECTOR_REFUSED),
        variant!(merge_writes_the_other_copy, Placed, None, CHECKPOINT, STORE_REFUSED),
        variant!(merge_waits_for_a_checkpoint, Placed, None, MERGES_AND_CHECKPOINT, STORE_REFUSED),
        variant!(checkpoint_carries_intents_in_flight, InPlace, None, CHECKPOINT, WRONG),
        variant!(checkpoint_syncs_leaves_first, Placed, Unanchored, CHECKPOINT, STORE_REFUSED),
        variant!(checkpoint_is_durable_before_the_anchor, Placed, None, CHECKPOINT, STORE_REFUSED),
        variant!(merged_leaves_are_written, Placed, None, CHECKPOINT, STORE_REFUSED),
        variant!(merged_slots_wait_for_the_checkpoint, Placed, None, SLOT_TURNOVER, SECTOR_REFUSED),
        variant!(log_waits_for_the_checkpoint, Placed, None, SHORT_LOG, STORE_REFUSED),
        variant!(reads_look_at_pending_first, InPlace, Device, ONE_LIFE, WRONG),
        variant!(leaves_are_checked, Placed, Device, MERGES, WRONG),
        variant!(fast_mac_covers_the_iv, InPlace, Device, TWO, WRONG),
        variant!(refresh_checks_in_full, InPlace, Device, REFRESH, WRONG),
        variant!(checkpoint_is_the_anchored_one, Placed, Device, TWO, WRONG),
        variant!(root_is_checked, Placed, Device, MERGES_AND_CHECKPOINT, WRONG),
        variant!(chain_is_checked, Placed, Device, FOUR, WRONG),
        variant!(log_reaches_the_anchored_head, Placed, Device, TWO, WRONG),
        variant!(log_counts_beyond_the_head, InPlace, None, TWO, SECTOR_REFUSED),
        variant!(unflushed_records_need_their_data, Placed, None, TWO, SECTOR_REFUSED),
        variant!(carried_intents_are_not_flushed, InPlace, None, TWO, SECTOR_REFUSED),
        variant!(sectors_with_intents_are_looked_at, InPlace, None, TWO, SECTOR_REFUSED),
        variant!(opening_draws_a_nonce, Placed, Device, FOUR, WRONG),
        variant!(opening_takes_a_new_epoch, Placed, Device, THREE, WRONG),
        variant!(opening_keeps_the_old_log, Placed, None, THREE, STORE_REFUSED),
        variant!(opening_logs_pending_anew, Placed, None, THREE, WRONG),
        variant!(opening_syncs_the_log_first, Placed, Unanchored, THREE, STORE_REFUSED),
        variant!(opening_syncs, Placed, None, THREE, STORE_REFUSED),
        variant!(opening_anchors_before_io, Placed, Device, THREE, WRONG),
        variant!(opening_waits_for_late_writes, InPlace, None, TWO, SECTOR_REFUSED),
        variant!(anchor_compares, Placed, Device, FORK, WRONG),
        variant!(anchor_repeats_what_was_not_answered, Placed, None, LOST_ANSWER, ANCHOR_REFUSES),
        variant!(log_reaches_what_its_checkpoint_calls_flushed, Placed, DeviceUnanchored, GATEWAY_THREE_OPENINGS, WRONG),
        variant!(gateway_names_its_milestone, Placed, DeviceBetween, GATEWAY, WRONG),
        variant!(milestone_names_the_opening, Placed, DeviceBetween, GATEWAY_TWO_FLUSHES, WRONG),
        variant!(milestone_counts_checkpoints, Placed, DeviceUnanchored, GATEWAY_CHECKPOINT, WRONG),
        variant!(milestone_follows_the_sync, Placed, None, GATEWAY, GATEWAY_REFUSES),
        variant!(openings_keep_those_before, Placed, None, GATEWAY_THREE_OPENINGS, GATEWAY_REFUSES),
        variant!(found_ends_before_what_is_lost, Placed, DeviceBetween, GATEWAY, WRONG),
        variant!(later_records_make_up_for_lost_ones, Placed, Unanchored, GATEWAY_SLOT_TURNOVER, GATEWAY_REFUSES),
        variant!(gateway_sends_its_changes_again, Placed, None, GATEWAY, WRONG),
        variant!(reads_wait_for_what_is_sent_again, Placed, None, GATEWAY, WRONG),
        variant!(journal_keeps_what_ended_during_the_flush, Placed, None, GATEWAY_TWO_WRITES, WRONG),
    ]
}
