//! Commands of a host, and their conversion to submission entries.

use super::command::{
    COMPARE, DATASET_MANAGEMENT, DEALLOCATE_ATTRIBUTE, DEALLOCATE_BIT, FLUSH, FLUSH_MILESTONE,
    FORCE_UNIT_ACCESS, FUSED_FIRST, FUSED_SECOND, OPENINGS, OUTCOMES, RANGE_BYTES, READ,
    SENT_AGAIN, VERIFY, WRITE, WRITE_IF, WRITE_ZEROES,
};
use super::operation::{FUSED_BLOCKS_MAX, LbaRange, RANGES_MAX};
use super::transmit::SharedBytes;

/// Maximum blocks of one command: the 16-bit count is one less.
pub const BLOCKS_MAX: u32 = 1 << 16;

/// A command of a host. Data are whole blocks; on a secure queue they are sealed sectors, whose
/// sector MACs are set on submission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostCommand {
    /// Read blocks.
    Read {
        /// First LBA.
        lba: u64,
        /// Number of blocks.
        blocks: u32,
    },
    /// Write blocks.
    Write {
        /// First LBA.
        lba: u64,
        /// The blocks.
        data: Vec<u8>,
        /// Whether it must be durable before it completes.
        is_forced: bool,
    },
    /// Write sealed sectors that their owner keeps, to send them again: they are sent as they are,
    /// but for their sector MACs.
    WriteKept {
        /// First LBA.
        lba: u64,
        /// The sectors.
        sectors: SharedBytes,
        /// Whether it must be durable before it completes.
        is_forced: bool,
    },
    /// Secure queues only: write sectors again whose write an earlier incarnation of the target
    /// acknowledged, except those that were changed in the current one.
    WriteAgain {
        /// First LBA.
        lba: u64,
        /// The sectors.
        sectors: SharedBytes,
    },
    /// Make completed writes durable.
    Flush,
    /// Secure queues only: flush; the answer is a block that begins with the store's milestone.
    FlushMilestone,
    /// Secure queues only: request a block that lists the outcomes of the changes of another queue
    /// of this host ([`super::outcomes`]).
    Outcomes {
        /// That queue's name.
        queue: u64,
        /// Its association epoch.
        epoch: u64,
    },
    /// Secure queues only: request a block with the store's openings and how far they had come
    /// ([`crate::freshness::openings`]). Marks of later completions are relative to it.
    Openings,
    /// Make blocks read as zeros.
    WriteZeroes {
        /// First LBA.
        lba: u64,
        /// Number of blocks.
        blocks: u32,
        /// Whether the blocks may be deallocated.
        deallocate: bool,
    },
    /// Deallocate 1 to [`RANGES_MAX`] ranges. On a secure queue the list must fit the capsule.
    Deallocate(Vec<LbaRange>),
    /// Secure queues only: deallocate again, as [`Self::WriteAgain`].
    DeallocateAgain(Vec<LbaRange>),
    /// Compare the stored blocks with these.
    Compare {
        /// First LBA.
        lba: u64,
        /// The blocks that should be stored.
        data: Vec<u8>,
    },
    /// Check the stored blocks without moving them.
    Verify {
        /// First LBA.
        lba: u64,
        /// Number of blocks.
        blocks: u32,
    },
    /// Write `data` if the stored blocks equal `expected` (same length, at most
    /// [`FUSED_BLOCKS_MAX`] blocks). Takes two entries of the queue, but ends once.
    CompareAndWrite {
        /// First LBA.
        lba: u64,
        /// The blocks that must be stored now.
        expected: Vec<u8>,
        /// The blocks to store then.
        data: Vec<u8>,
    },
    /// Secure queues only: write each block if the stored IV is the one that it expects
    /// (`sector::set_expected_iv`).
    WriteIf {
        /// First LBA.
        lba: u64,
        /// The sealed blocks with their expected IVs.
        data: Vec<u8>,
        /// Whether it must be durable before it completes.
        is_forced: bool,
    },
}

/// The fields of one submission entry, and its data.
#[derive(Debug, Default)]
pub(super) struct Entry {
    pub(super) opcode: u8,
    /// Bits of the fused operation.
    pub(super) fused: u8,
    /// Command dwords 10 and 11; for ranges of blocks the first LBA.
    pub(super) cdw10_11: u64,
    pub(super) cdw12: u32,
    pub(super) cdw13: u32,
    /// Bytes to move, in either direction.
    pub(super) bytes: usize,
    /// Data for the controller.
    pub(super) data: Payload,
}

/// Data for the controller.
#[derive(Debug)]
pub(super) enum Payload {
    /// The queue's own.
    Own(Vec<u8>),
    /// Sealed sectors that somebody else keeps.
    Kept(SharedBytes),
}

impl Default for Payload {
    fn default() -> Self {
        Self::Own(Vec::new())
    }
}

impl HostCommand {
    /// Number of queue entries that it takes.
    pub(super) fn entries(&self) -> usize {
        if matches!(self, Self::CompareAndWrite { .. }) { 2 } else { 1 }
    }

    /// Whether its lengths are valid.
    pub(super) fn has_valid_length(&self, block_bytes: usize, transfer_max: usize) -> bool {
        let whole = |bytes: usize| {
            bytes > 0 && bytes <= transfer_max && bytes.is_multiple_of(block_bytes.max(1))
        };
        match self {
            Self::Read { blocks, .. } => whole((*blocks as usize).saturating_mul(block_bytes)),
            Self::WriteKept { sectors, .. } | Self::WriteAgain { sectors, .. } => {
                whole(sectors.bytes().len())
            }
            Self::Write { data, .. } | Self::Compare { data, .. } | Self::WriteIf { data, .. } => {
                whole(data.len())
            }
            Self::Flush | Self::FlushMilestone | Self::Outcomes { .. } | Self::Openings => true,
            Self::WriteZeroes { blocks, .. } | Self::Verify { blocks, .. } => {
                (1..=BLOCKS_MAX).contains(blocks)
            }
            Self::Deallocate(ranges) | Self::DeallocateAgain(ranges) => {
                (1..=RANGES_MAX).contains(&ranges.len())
            }
            Self::CompareAndWrite { expected, data, .. } => {
                whole(data.len())
                    && expected.len() == data.len()
                    && data.len() <= FUSED_BLOCKS_MAX as usize * block_bytes
            }
        }
    }

    /// The entry to submit, and the second one of a fused pair. Lengths must be valid.
    pub(super) fn into_entries(self, block_bytes: usize) -> (Entry, Option<Entry>) {
        let count = |blocks: u32| blocks.wrapping_sub(1) & 0xffff;
        let moved = |opcode: u8, lba: u64, data: Vec<u8>, control: u32| Entry {
            opcode,
            cdw10_11: lba,
            cdw12: count((data.len() / block_bytes) as u32) | control,
            bytes: data.len(),
            data: Payload::Own(data),
            ..Entry::default()
        };
        let kept = |lba: u64, sectors: SharedBytes, control: u32| {
            let bytes = sectors.bytes().len();
            Entry {
                opcode: WRITE,
                cdw10_11: lba,
                cdw12: count((bytes / block_bytes) as u32) | control,
                bytes,
                data: Payload::Kept(sectors),
                ..Entry::default()
            }
        };
        let forced = |is_forced: bool| if is_forced { FORCE_UNIT_ACCESS } else { 0 };
        let deallocated = |ranges: &[LbaRange]| {
            let data = encode_ranges(ranges);
            Entry {
                opcode: DATASET_MANAGEMENT,
                cdw10_11: (ranges.len() as u64).wrapping_sub(1) & 0xff | DEALLOCATE_ATTRIBUTE,
                bytes: data.len(),
                data: Payload::Own(data),
                ..Entry::default()
            }
        };
        let ranged = |opcode, lba, blocks, control, bytes| Entry {
            opcode,
            cdw10_11: lba,
            cdw12: count(blocks) | control,
            bytes,
            ..Entry::default()
        };
        let entry = match self {
            Self::Read { lba, blocks } => {
                ranged(READ, lba, blocks, 0, blocks as usize * block_bytes)
            }
            Self::Write { lba, data, is_forced } => moved(WRITE, lba, data, forced(is_forced)),
            Self::WriteKept { lba, sectors, is_forced } => kept(lba, sectors, forced(is_forced)),
            Self::WriteAgain { lba, sectors } => {
                Entry { cdw13: SENT_AGAIN, ..kept(lba, sectors, 0) }
            }
            Self::Flush => Entry { opcode: FLUSH, ..Entry::default() },
            Self::FlushMilestone => {
                Entry { opcode: FLUSH_MILESTONE, bytes: block_bytes, ..Entry::default() }
            }
            Self::Openings => Entry { opcode: OPENINGS, bytes: block_bytes, ..Entry::default() },
            Self::Outcomes { queue, epoch } => Entry {
                opcode: OUTCOMES,
                cdw10_11: queue,
                cdw12: epoch as u32,
                cdw13: (epoch >> 32) as u32,
                bytes: block_bytes,
                ..Entry::default()
            },
            Self::WriteZeroes { lba, blocks, deallocate } => {
                let control = if deallocate { DEALLOCATE_BIT } else { 0 };
                ranged(WRITE_ZEROES, lba, blocks, control, 0)
            }
            Self::Deallocate(ranges) => deallocated(&ranges),
            Self::DeallocateAgain(ranges) => Entry { cdw13: SENT_AGAIN, ..deallocated(&ranges) },
            Self::Compare { lba, data } => moved(COMPARE, lba, data, 0),
            Self::Verify { lba, blocks } => ranged(VERIFY, lba, blocks, 0, 0),
            Self::WriteIf { lba, data, is_forced } => moved(WRITE_IF, lba, data, forced(is_forced)),
            Self::CompareAndWrite { lba, expected, data } => {
                let first = Entry { fused: FUSED_FIRST, ..moved(COMPARE, lba, expected, 0) };
                let second = Entry { fused: FUSED_SECOND, ..moved(WRITE, lba, data, 0) };
                return (first, Some(second));
            }
        };
        (entry, None)
    }
}

/// The range list of a Dataset Management command: context attributes 0, blocks, first LBA.
fn encode_ranges(ranges: &[LbaRange]) -> Vec<u8> {
    let mut list = Vec::with_capacity(ranges.len() * RANGE_BYTES);
    for range in ranges {
        list.extend_from_slice(&[0; 4]);
        list.extend_from_slice(&range.blocks.to_le_bytes());
        list.extend_from_slice(&range.lba.to_le_bytes());
    }
    list
}
