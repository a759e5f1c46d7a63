//! Operations of a controller and the capabilities of its namespaces: typed forms of the commands
//! of the NVM Command Set 1.0 and of the reservation commands of NVMe Base 2.0.

use super::status::Status;

/// Maximum ranges of one Dataset Management command (NVM Command Set 1.0 §3.2.3).
pub const RANGES_MAX: usize = 256;
/// Maximum blocks of one fused Compare and Write: the identify field ACWU plus one.
pub const FUSED_BLOCKS_MAX: u32 = 1;

/// Optional commands that a namespace executes: a bit set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CommandSet(u16);

impl CommandSet {
    /// Only read, write and flush.
    pub const NONE: Self = Self(0);
    /// Compare.
    pub const COMPARE: Self = Self(1 << 0);
    /// Write Zeroes, with its deallocate bit.
    pub const WRITE_ZEROES: Self = Self(1 << 1);
    /// Dataset Management, deallocate.
    pub const DEALLOCATE: Self = Self(1 << 2);
    /// Verify.
    pub const VERIFY: Self = Self(1 << 3);
    /// Fused Compare and Write.
    pub const FUSED: Self = Self(1 << 4);
    /// Reservation Register, Acquire, Release and Report; never on a secure queue.
    pub const RESERVATIONS: Self = Self(1 << 5);
    /// Write-if-current-IV-equals; only on a secure queue.
    pub const WRITE_IF: Self = Self(1 << 6);

    /// The commands of both sets.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all commands of `other` are in this set.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// A host's current access to a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Everything.
    Full,
    /// Commands that change blocks end with Namespace is Write Protected.
    ReadOnly,
    /// Every command ends with this status, for example that of an inaccessible ANA state.
    Refused(Status),
}

/// A namespace as an I/O queue sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceFormat {
    /// The namespace's id.
    pub nsid: u32,
    /// Bytes of a block on the wire: 4096, or 4160 on a secure queue.
    pub block_bytes: usize,
    /// Number of blocks of the namespace.
    pub block_count: u64,
    /// Optional commands that are executed; the others end with Invalid Command Opcode.
    pub commands: CommandSet,
    /// The host's access.
    pub access: Access,
}

/// A command whose bytes have all arrived and, on a secure queue, are authentic.
#[derive(Debug, PartialEq, Eq)]
pub struct Command {
    /// Handle to complete it with.
    pub slot: u16,
    /// Its namespace; `u32::MAX` for a flush of all.
    pub nsid: u32,
    /// The operation.
    pub operation: Operation,
    /// First LBA; 0 for commands without a range of their own.
    pub lba: u64,
    /// Number of blocks; 0 for commands without a range of their own.
    pub blocks: u32,
    /// Force unit access: the write must be durable before it is completed.
    pub is_forced: bool,
    /// Whether it is a write or deallocation that an earlier incarnation of the target
    /// acknowledged: it must not replace anything changed in the current one. Meaningless on a
    /// plain queue.
    pub is_sent_again: bool,
    /// Its number on the connection.
    pub number: u64,
    /// Its id, which the host doesn't reuse before it has the completion.
    pub cid: u16,
}

/// A range of blocks inside the namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LbaRange {
    /// First LBA.
    pub lba: u64,
    /// Number of blocks; may be 0.
    pub blocks: u32,
}

/// The operation of a command.
#[derive(Debug, PartialEq, Eq)]
pub enum Operation {
    /// Read into a buffer of the queue, and pass it to the queue's `complete_read`.
    Read,
    /// Write these blocks; MAC fields are zero.
    Write(Vec<u8>),
    /// Make completed writes durable.
    Flush,
    /// Secure queues only: flush, and pass a block that begins with the store's milestone, or
    /// zeros, to the queue's `complete_read`.
    FlushMilestone,
    /// Secure queues only: pass a block that lists the outcomes of the changes of another queue of
    /// the same gateway ([`super::outcomes`]) to the queue's `complete_read`.
    Outcomes {
        /// That queue's name.
        queue: u64,
        /// Its association epoch.
        epoch: u64,
    },
    /// Secure queues only: pass a block that begins with the store's openings
    /// ([`crate::freshness::openings`]), or zeros, to the queue's `complete_read`.
    Openings,
    /// Make the blocks read as zeros.
    WriteZeroes {
        /// Whether the blocks may be deallocated.
        deallocate: bool,
    },
    /// Deallocate these ranges, at most [`RANGES_MAX`], each inside the namespace.
    Deallocate(Vec<LbaRange>),
    /// Compare the stored blocks with these: Compare Failure if they differ.
    Compare(Vec<u8>),
    /// Check the stored blocks without moving them.
    Verify,
    /// Fused: write `data` if the stored blocks equal `expected`. It is completed once; the queue
    /// answers both entries of the host.
    CompareAndWrite {
        /// The blocks that must be stored now.
        expected: Vec<u8>,
        /// The blocks to store then.
        data: Vec<u8>,
    },
    /// Secure queues only: write each block if the stored IV is the one that it expects
    /// (`sector::take_expected_iv`). If one isn't, nothing is stored and the status is Compare
    /// Failure.
    WriteIf(Vec<u8>),
    /// Register, unregister or replace this host's reservation key.
    ReservationRegister {
        /// The action.
        action: RegisterAction,
        /// Whether the current key isn't checked.
        ignore_existing_key: bool,
        /// Change of "persist through power loss".
        persistence: Persistence,
        /// The host's current key.
        current_key: u64,
        /// The host's new key.
        new_key: u64,
    },
    /// Acquire or preempt a reservation.
    ReservationAcquire {
        /// The action.
        action: AcquireAction,
        /// Type of reservation.
        kind: ReservationType,
        /// The host's key.
        current_key: u64,
        /// Key of the registrants to preempt.
        preempt_key: u64,
    },
    /// Release a reservation, or clear it with all registrants.
    ReservationRelease {
        /// Type of the reservation to release; `None` clears everything.
        kind: Option<ReservationType>,
        /// The host's key.
        current_key: u64,
    },
    /// Report registrants and holder; answer with `complete_data`.
    ReservationReport {
        /// Whether to return the extended data structure (128-bit host identifiers).
        extended: bool,
        /// Requested bytes; a longer answer is truncated, a shorter one padded with zeros.
        bytes: usize,
    },
}

/// Reservation Register Action (RREGA).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegisterAction {
    /// Register the new key.
    Register,
    /// Remove the registration.
    Unregister,
    /// Replace the current key by the new one.
    Replace,
}

/// Change Persist Through Power Loss State (CPTPL).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Persistence {
    /// No change.
    Unchanged,
    /// Reservations and registrations are released at power on.
    Clear,
    /// They persist.
    Set,
}

/// Reservation Acquire Action (RACQA).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AcquireAction {
    /// Acquire.
    Acquire,
    /// Preempt.
    Preempt,
    /// Preempt, and abort the preempted hosts' commands.
    PreemptAndAbort,
}

/// Reservation Type (RTYPE), values 1 to 6.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ReservationType {
    /// Write Exclusive.
    WriteExclusive = 1,
    /// Exclusive Access.
    ExclusiveAccess = 2,
    /// Write Exclusive, Registrants Only.
    WriteExclusiveRegistrants = 3,
    /// Exclusive Access, Registrants Only.
    ExclusiveAccessRegistrants = 4,
    /// Write Exclusive, All Registrants.
    WriteExclusiveAllRegistrants = 5,
    /// Exclusive Access, All Registrants.
    ExclusiveAccessAllRegistrants = 6,
}

impl ReservationType {
    /// From the field's value.
    #[must_use]
    pub fn from_value(value: u8) -> Option<Self> {
        Some(match value {
            1 => Self::WriteExclusive,
            2 => Self::ExclusiveAccess,
            3 => Self::WriteExclusiveRegistrants,
            4 => Self::ExclusiveAccessRegistrants,
            5 => Self::WriteExclusiveAllRegistrants,
            6 => Self::ExclusiveAccessAllRegistrants,
            _ => return None,
        })
    }
}
