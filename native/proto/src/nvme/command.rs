//! Submission entries (64 bytes) and completion entries (16 bytes), little endian
//! (NVMe Base 2.0 §3.3.3, NVM Command Set 1.0 §3.2).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a submission entry.
pub const SUBMISSION_BYTES: usize = 64;
/// Bytes of a completion entry.
pub const COMPLETION_BYTES: usize = 16;

/// Opcode: make written data durable.
pub const FLUSH: u8 = 0x00;
/// Opcode: write.
pub const WRITE: u8 = 0x01;
/// Opcode: read.
pub const READ: u8 = 0x02;
/// Opcode: compare stored blocks with the host's.
pub const COMPARE: u8 = 0x05;
/// Opcode: make blocks read as zeros.
pub const WRITE_ZEROES: u8 = 0x08;
/// Opcode: dataset management; only its deallocate attribute has an effect.
pub const DATASET_MANAGEMENT: u8 = 0x09;
/// Opcode: check stored blocks.
pub const VERIFY: u8 = 0x0c;
/// Opcode: reservation register.
pub const RESERVATION_REGISTER: u8 = 0x0d;
/// Opcode: reservation report.
pub const RESERVATION_REPORT: u8 = 0x0e;
/// Opcode: reservation acquire.
pub const RESERVATION_ACQUIRE: u8 = 0x11;
/// Opcode: reservation release.
pub const RESERVATION_RELEASE: u8 = 0x15;
/// Opcode, vendor specific, secure queues only: write if the current IV is the expected one.
pub const WRITE_IF: u8 = 0x81;
/// Opcode, vendor specific, secure queues only: flush, and return the store's milestone.
pub const FLUSH_MILESTONE: u8 = 0x82;
/// Opcode, vendor specific, secure queues only: return the outcomes of the changes of a queue that
/// has ended.
pub const OUTCOMES: u8 = 0x86;
/// Opcode, vendor specific, secure queues only: return the store's openings and how far they had
/// come.
pub const OPENINGS: u8 = 0x8a;

/// Bit of CDW12: a write must be durable before it is completed.
pub const FORCE_UNIT_ACCESS: u32 = 1 << 30;
/// Bit of CDW13 of a write or deallocation on a secure queue, reserved by NVMe: a gateway sends
/// again a change that an earlier incarnation of the target acknowledged.
pub const SENT_AGAIN: u32 = 1 << 8;
/// Bits of CDW12: protection information (PRINFO).
pub const PROTECTION_INFORMATION: u32 = 0xf << 26;
/// Bit of CDW12 of a write zeroes: the blocks may be deallocated (DEAC).
pub const DEALLOCATE_BIT: u32 = 1 << 25;
/// Bit of CDW10-11 of a dataset management command: deallocate (AD, bit 2 of CDW11).
pub const DEALLOCATE_ATTRIBUTE: u64 = 1 << 34;

/// Bytes of one range of a dataset management command.
pub const RANGE_BYTES: usize = 16;

/// Flags: the data pointer is a scatter-gather list (the only kind fabrics have).
pub const FLAGS_SGL: u8 = 0x40;
/// Flags: bits of the fused operation.
pub const FUSED: u8 = 0x03;
/// Flags: first command of a fused operation.
pub const FUSED_FIRST: u8 = 0x01;
/// Flags: second command of a fused operation.
pub const FUSED_SECOND: u8 = 0x02;
/// SGL descriptor: data block at an offset in the capsule.
pub const SGL_IN_CAPSULE: u8 = 0x01;
/// SGL descriptor: data moves by the transport (R2T/H2CData or C2HData).
pub const SGL_TRANSPORT: u8 = 0x5a;

/// One SGL descriptor.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(C)]
pub struct Sgl {
    /// Offset in the capsule's data; 0 for transport data.
    pub address: U64,
    /// Bytes of data.
    pub length: U32,
    /// Must be 0.
    pub reserved: [u8; 3],
    /// Descriptor type and subtype.
    pub kind: u8,
}

/// One submission entry.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(C)]
pub struct SubmissionEntry {
    /// Opcode.
    pub opcode: u8,
    /// Fused operation and data pointer kind.
    pub flags: u8,
    /// Command id, unique among the outstanding ones.
    pub cid: U16,
    /// Namespace id.
    pub nsid: U32,
    /// Unused with protection information off; first half of the command MAC on a secure queue.
    pub cdw2_3: [u8; 8],
    /// Metadata pointer; 0.
    pub metadata: U64,
    /// Data pointer.
    pub sgl: Sgl,
    /// Command dwords 10 and 11; for ranges of blocks the first LBA.
    pub start_lba: U64,
    /// For ranges of blocks: block count minus one, then limited retry, FUA and the like.
    pub cdw12: U32,
    /// For reads and writes: dataset management hints.
    pub cdw13: U32,
    /// Unused with protection information off; second half of the command MAC on a secure queue.
    pub cdw14_15: [u8; 8],
}

/// Direction in which the data of a command move: bits 1:0 of its opcode (NVMe Base 2.0 §3.3.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transfer {
    /// None.
    None,
    /// To the controller.
    HostToController,
    /// To the host.
    ControllerToHost,
}

impl SubmissionEntry {
    /// Direction in which the data move.
    #[must_use]
    pub fn transfer_direction(&self) -> Transfer {
        match self.opcode & 3 {
            1 => Transfer::HostToController,
            2 => Transfer::ControllerToHost,
            _ => Transfer::None,
        }
    }

    /// Whether CDW10-12 are a range of blocks.
    #[must_use]
    pub fn has_block_range(&self) -> bool {
        matches!(self.opcode, READ | WRITE | COMPARE | WRITE_ZEROES | VERIFY | WRITE_IF)
    }

    /// Whether its answer has blocks.
    #[must_use]
    pub fn reads_blocks(&self) -> bool {
        matches!(self.opcode, READ | FLUSH_MILESTONE | OUTCOMES | OPENINGS)
    }

    /// Whether it changes blocks, so that its completion on a secure queue has a mark.
    #[must_use]
    pub fn changes_blocks(&self) -> bool {
        matches!(self.opcode, WRITE | WRITE_ZEROES | DATASET_MANAGEMENT | WRITE_IF)
    }

    /// Number of blocks of a command with a range.
    #[must_use]
    pub fn block_count(&self) -> u32 {
        (self.cdw12.get() & 0xffff) + 1
    }
}

/// One completion entry.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(C)]
pub struct CompletionEntry {
    /// Command-specific dwords; the completion MAC on a secure queue.
    pub result: [u8; 8],
    /// Head of the submission queue; on a secure queue bits 15:0 of a change's mark.
    pub sq_head: U16,
    /// Unused on fabrics; on a secure queue bits 31:16 of a change's mark.
    pub sq_id: U16,
    /// Command id.
    pub cid: U16,
    /// Status field, phase bit 0.
    pub status: U16,
}

const _: () = assert!(size_of::<SubmissionEntry>() == SUBMISSION_BYTES);
const _: () = assert!(size_of::<CompletionEntry>() == COMPLETION_BYTES);
