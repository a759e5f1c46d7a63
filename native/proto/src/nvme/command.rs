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

/// Bit of CDW12: a write must be durable before it is completed.
pub const FORCE_UNIT_ACCESS: u32 = 1 << 30;

/// Flags: the data pointer is a scatter-gather list (the only kind fabrics have).
pub const FLAGS_SGL: u8 = 0x40;
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
    /// Command-specific dwords; for reads and writes the first LBA.
    pub start_lba: U64,
    /// For reads and writes: block count minus one, then limited retry, FUA and the like.
    pub cdw12: U32,
    /// For reads and writes: dataset management hints.
    pub cdw13: U32,
    /// Unused with protection information off; second half of the command MAC on a secure queue.
    pub cdw14_15: [u8; 8],
}

impl SubmissionEntry {
    /// A read or write of `blocks` (1 to 65536) from `lba`, moving `bytes`.
    #[must_use]
    pub fn transfer(opcode: u8, cid: u16, nsid: u32, lba: u64, blocks: u32, sgl: Sgl) -> Self {
        Self {
            opcode,
            flags: FLAGS_SGL,
            cid: cid.into(),
            nsid: nsid.into(),
            sgl,
            start_lba: lba.into(),
            cdw12: (blocks.wrapping_sub(1) & 0xffff).into(),
            ..Self::default()
        }
    }

    /// Blocks of a read or write.
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
    /// Head of the submission queue.
    pub sq_head: U16,
    /// Unused on fabrics.
    pub sq_id: U16,
    /// Command id.
    pub cid: U16,
    /// Status field, phase bit 0.
    pub status: U16,
}

const _: () = assert!(size_of::<SubmissionEntry>() == SUBMISSION_BYTES);
const _: () = assert!(size_of::<CompletionEntry>() == COMPLETION_BYTES);
