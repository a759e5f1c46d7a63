//! The rules of the protocol; a search can leave out each of them.

/// Where data are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Out of place: a write takes a free slot; its record is logged afterwards.
    Placed,
    /// In place: the intent is logged before the data are written.
    InPlace,
}

/// When the anchor is advanced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    EveryFlush,
    /// At opening and checkpoint.
    Rare,
    /// No anchor: the last checkpoint on the device and its log count.
    Never,
}

/// Rules, which the variants leave out one at a time. With all of them, this is the protocol.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::struct_excessive_bools, reason = "each rule is kept or left out")]
pub struct Rules {
    // Writing.
    pub intents_are_durable_before_data: bool,
    pub flush_syncs: bool,
    pub flush_anchors_before_it_answers: bool,
    pub anchor_comes_after_sync: bool,
    pub flush_carries_intents_in_flight: bool,
    pub marker_speaks_of_earlier_syncs: bool,
    pub replaced_slots_wait_for_the_record: bool,
    // Merge and checkpoint.
    pub merge_writes_the_other_copy: bool,
    pub merge_waits_for_a_checkpoint: bool,
    pub checkpoint_carries_intents_in_flight: bool,
    pub checkpoint_syncs_leaves_first: bool,
    pub checkpoint_is_durable_before_the_anchor: bool,
    pub merged_leaves_are_written: bool,
    pub merged_slots_wait_for_the_checkpoint: bool,
    pub log_waits_for_the_checkpoint: bool,
    // Reading.
    pub reads_look_at_pending_first: bool,
    pub leaves_are_checked: bool,
    pub fast_mac_covers_the_iv: bool,
    pub refresh_checks_in_full: bool,
    // Opening.
    pub checkpoint_is_the_anchored_one: bool,
    pub root_is_checked: bool,
    pub chain_is_checked: bool,
    pub log_reaches_the_anchored_head: bool,
    pub log_counts_beyond_the_head: bool,
    pub log_reaches_what_its_checkpoint_calls_flushed: bool,
    pub unflushed_records_need_their_data: bool,
    pub carried_intents_are_not_flushed: bool,
    pub sectors_with_intents_are_looked_at: bool,
    pub opening_draws_a_nonce: bool,
    pub opening_takes_a_new_epoch: bool,
    pub opening_keeps_the_old_log: bool,
    pub opening_logs_pending_anew: bool,
    pub opening_syncs_the_log_first: bool,
    pub opening_syncs: bool,
    pub opening_anchors_before_io: bool,
    pub opening_waits_for_late_writes: bool,
    // Anchor.
    pub anchor_compares: bool,
    pub anchor_repeats_what_was_not_answered: bool,
    // A gateway that lives.
    pub gateway_names_its_milestone: bool,
    pub milestone_names_the_opening: bool,
    pub milestone_counts_checkpoints: bool,
    pub milestone_follows_the_sync: bool,
    pub openings_keep_those_before: bool,
    pub found_ends_before_what_is_lost: bool,
    pub later_records_make_up_for_lost_ones: bool,
    pub gateway_sends_its_changes_again: bool,
    pub reads_wait_for_what_is_sent_again: bool,
    pub journal_keeps_what_ended_during_the_flush: bool,
}

impl Rules {
    pub const ALL: Self = Self {
        intents_are_durable_before_data: true,
        flush_syncs: true,
        flush_anchors_before_it_answers: true,
        anchor_comes_after_sync: true,
        flush_carries_intents_in_flight: true,
        marker_speaks_of_earlier_syncs: true,
        replaced_slots_wait_for_the_record: true,
        merge_writes_the_other_copy: true,
        merge_waits_for_a_checkpoint: true,
        checkpoint_carries_intents_in_flight: true,
        checkpoint_syncs_leaves_first: true,
        checkpoint_is_durable_before_the_anchor: true,
        merged_leaves_are_written: true,
        merged_slots_wait_for_the_checkpoint: true,
        log_waits_for_the_checkpoint: true,
        reads_look_at_pending_first: true,
        leaves_are_checked: true,
        fast_mac_covers_the_iv: true,
        refresh_checks_in_full: true,
        checkpoint_is_the_anchored_one: true,
        root_is_checked: true,
        chain_is_checked: true,
        log_reaches_the_anchored_head: true,
        log_counts_beyond_the_head: true,
        log_reaches_what_its_checkpoint_calls_flushed: true,
        unflushed_records_need_their_data: true,
        carried_intents_are_not_flushed: true,
        sectors_with_intents_are_looked_at: true,
        opening_draws_a_nonce: true,
        opening_takes_a_new_epoch: true,
        opening_keeps_the_old_log: true,
        opening_logs_pending_anew: true,
        opening_syncs_the_log_first: true,
        opening_syncs: true,
        opening_anchors_before_io: true,
        opening_waits_for_late_writes: true,
        anchor_compares: true,
        anchor_repeats_what_was_not_answered: true,
        gateway_names_its_milestone: true,
        milestone_names_the_opening: true,
        milestone_counts_checkpoints: true,
        milestone_follows_the_sync: true,
        openings_keep_those_before: true,
        found_ends_before_what_is_lost: true,
        later_records_make_up_for_lost_ones: true,
        gateway_sends_its_changes_again: true,
        reads_wait_for_what_is_sent_again: true,
        journal_keeps_what_ended_during_the_flush: true,
    };
}

/// Bounds of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Bounds {
    pub writes: u8,
    pub flushes: u8,
    pub merges: u8,
    pub checkpoints: u8,
    pub refreshes: u8,
    pub openings: u8,
    pub lost_answers: u8,
    /// Concurrent lives.
    pub lives: usize,
    /// Number of gateways, 0 or 1, that keep running through everything and make all reads and
    /// writes. With 0, each life has gateways of its own.
    pub gateways: usize,
    /// Log pages of the ring.
    pub log_pages: u8,
}

/// Slots of the placed layout.
pub const SLOTS: u8 = 4;

/// Parameters of a search.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    pub layout: Layout,
    pub policy: Policy,
    pub rules: Rules,
    pub bounds: Bounds,
}
