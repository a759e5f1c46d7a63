//! Ring ABI version 4: the layout of the shared memories (docs/formats/ring-abi.md).
//!
//! All numbers are little-endian. The job writes the submission memory; only the daemon writes the
//! completion memory. The description of the layout lies in the latter, so a job can't change it.

use crate::shared_memory::SharedMemory;

#[cfg(target_endian = "big")]
compile_error!("the ring ABI is little-endian and read in place");

/// First eight bytes of the completion memory.
pub const MAGIC: u64 = u64::from_le_bytes(*b"SEALRING");
/// Version of this layout.
pub const VERSION: u64 = 4;
/// Bytes of one submission or completion entry.
pub const ENTRY_BYTES: usize = 64;
/// Most entries of a ring: 256 KiB of shared memory per queue.
pub const ENTRIES_MAX: u32 = 4096;

/// Entries that a job reserves for commands, so that waiting operations can be cancelled.
pub const COMMAND_ENTRIES: u32 = 1;

/// Submission memory: index of the next entry that the job will write.
pub const SUBMISSION_PRODUCER: u64 = 0;
/// Submission memory: index of the next completion that the job will read.
pub const COMPLETION_CONSUMER: u64 = 64;
/// Submission memory: nonzero while the job wants the doorbell also for landed chunks.
pub const CHUNK_WAKE: u64 = 72;
/// Submission memory: nonzero while the job doesn't want the doorbell for successful sends.
pub const QUIET_SENDS: u64 = 80;
/// Submission memory: first entry.
pub const SUBMISSION_ENTRIES: u64 = 128;

const HEADER_MAGIC: u64 = 0;
const HEADER_VERSION: u64 = 8;
const HEADER_ENTRIES: u64 = 16;
const HEADER_REGION_BYTES: u64 = 24;
const HEADER_SLOTS: u64 = 32;
const HEADER_CHUNKS_PER_SLOT: u64 = 40;
const HEADER_CHUNK_BYTES: u64 = 48;
/// Completion memory: state of the session (`STATE_*`).
pub const STATE: u64 = 56;
/// Completion memory: index of the next submission that the daemon will read.
pub const SUBMISSION_CONSUMER: u64 = 64;
/// Completion memory: why the session ended, a reason id padded with zeros; set once it is closed.
pub const REASON: u64 = 80;
/// Bytes of the reason.
pub const REASON_BYTES: usize = 48;
/// Completion memory: index of the next completion that the daemon will write.
pub const COMPLETION_PRODUCER: u64 = 128;
/// Completion memory: the statistics, `STATISTICS_COUNT` numbers.
pub const STATISTICS: u64 = 192;
/// Numbers in the statistics area.
pub const STATISTICS_COUNT: usize = 128;
/// Completion memory: first entry.
pub const COMPLETION_ENTRIES: u64 = STATISTICS + 8 * STATISTICS_COUNT as u64;

/// The session is not yet established.
pub const STATE_ESTABLISHING: u64 = 0;
/// Messages may be posted.
pub const STATE_ESTABLISHED: u64 = 1;
/// Nothing will complete any more.
pub const STATE_CLOSED: u64 = 2;

/// The sizes of a session's memories.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Entries of each queue, a power of two.
    pub entries: u32,
    /// Bytes of the region.
    pub region_bytes: u64,
    /// Messages in flight, a power of two.
    pub slots: u16,
    /// Bytes of one bitmap chunk.
    pub chunk_bytes: u32,
}

impl Layout {
    /// Bitmap bytes of one slot: one per chunk of the longest message that fits the region.
    pub fn chunks_per_slot(&self) -> u64 {
        self.region_bytes.div_ceil(u64::from(self.chunk_bytes.max(1)))
    }

    /// Whether this version can describe the sizes.
    pub fn is_valid(&self) -> bool {
        self.entries.is_power_of_two()
            && (COMMAND_ENTRIES + 1..=ENTRIES_MAX).contains(&self.entries)
            && self.region_bytes > 0
            && self.slots.is_power_of_two()
            && self.chunk_bytes > 0
    }

    /// Bytes of the submission memory.
    pub fn submission_bytes(&self) -> usize {
        SUBMISSION_ENTRIES as usize + self.entries as usize * ENTRY_BYTES
    }

    /// Offset of the slot table in the completion memory: for each slot, the handle plus one of the
    /// receive that its bitmap belongs to; 0 if none.
    pub fn slot_table(&self) -> u64 {
        COMPLETION_ENTRIES + u64::from(self.entries) * ENTRY_BYTES as u64
    }

    /// Offset of the bitmap bytes in the completion memory.
    pub fn bitmap(&self) -> u64 {
        self.slot_table() + 8 * u64::from(self.slots)
    }

    /// Bytes of the completion memory.
    pub fn completion_bytes(&self) -> usize {
        (self.bitmap() + u64::from(self.slots) * self.chunks_per_slot()) as usize
    }

    /// Writes the header of a new completion memory.
    pub fn describe(&self, completion: &SharedMemory) {
        let fields = [
            (HEADER_VERSION, VERSION),
            (HEADER_ENTRIES, u64::from(self.entries)),
            (HEADER_REGION_BYTES, self.region_bytes),
            (HEADER_SLOTS, u64::from(self.slots)),
            (HEADER_CHUNKS_PER_SLOT, self.chunks_per_slot()),
            (HEADER_CHUNK_BYTES, u64::from(self.chunk_bytes)),
            (HEADER_MAGIC, MAGIC),
        ];
        for (offset, value) in fields {
            completion.copy_in(offset, &value.to_le_bytes());
        }
    }

    /// Reads the header on the job's side. `None` if it is of another version.
    pub fn read(completion: &SharedMemory) -> Option<Self> {
        let field = |offset| {
            let mut bytes = [0; 8];
            completion.copy_out(offset, &mut bytes);
            u64::from_le_bytes(bytes)
        };
        if !completion.contains(0, COMPLETION_ENTRIES)
            || field(HEADER_MAGIC) != MAGIC
            || field(HEADER_VERSION) != VERSION
        {
            return None;
        }
        let layout = Self {
            entries: field(HEADER_ENTRIES).try_into().ok()?,
            region_bytes: field(HEADER_REGION_BYTES),
            slots: field(HEADER_SLOTS).try_into().ok()?,
            chunk_bytes: field(HEADER_CHUNK_BYTES).try_into().ok()?,
        };
        (layout.is_valid() && layout.completion_bytes() == completion.len()).then_some(layout)
    }
}
