//! Status codes (NVMe Base 2.0 figures 94 to 102; NVM Command Set 1.0 §3.1): one table.

use core::fmt;

/// Status of a completion: status code, status code type and the "do not retry" bit, as in the
/// completion entry's status field shifted right by the phase bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(u16);

const DO_NOT_RETRY: u16 = 1 << 14;

macro_rules! statuses {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $text:literal;)*) => {
        impl Status {
            $($(#[$doc])* pub const $name: Self = Self($value);)*
        }
        /// Every status this code sends or names: (value without "do not retry", name).
        pub const NAMES: &[(u16, &str)] = &[$(($value, $text)),*];
    };
}

statuses! {
    /// Success.
    SUCCESS = 0x000, "Successful Completion";
    /// The opcode isn't supported on this queue.
    INVALID_OPCODE = 0x001, "Invalid Command Opcode";
    /// A reserved or unsupported value in a defined field.
    INVALID_FIELD = 0x002, "Invalid Field in Command";
    /// The command id is already outstanding.
    COMMAND_ID_CONFLICT = 0x003, "Command ID Conflict";
    /// Transfer error.
    DATA_TRANSFER_ERROR = 0x004, "Data Transfer Error";
    /// The controller failed internally.
    INTERNAL_ERROR = 0x006, "Internal Error";
    /// Aborted on request.
    ABORTED = 0x007, "Command Abort Requested";
    /// The other command of the fused operation failed.
    ABORTED_FAILED_FUSED = 0x009, "Command Aborted due to Failed Fused Command";
    /// The other command of the fused operation didn't arrive.
    ABORTED_MISSING_FUSED = 0x00a, "Command Aborted due to Missing Fused Command";
    /// There is no such namespace.
    INVALID_NAMESPACE = 0x00b, "Invalid Namespace or Format";
    /// Wrong order of commands.
    SEQUENCE_ERROR = 0x00c, "Command Sequence Error";
    /// The data pointer's length doesn't fit the command.
    SGL_LENGTH_INVALID = 0x00f, "Data SGL Length Invalid";
    /// The data pointer's type isn't supported.
    SGL_TYPE_INVALID = 0x011, "SGL Descriptor Type Invalid";
    /// More blocks than are written atomically.
    ATOMIC_WRITE_UNIT_EXCEEDED = 0x014, "Atomic Write Unit Exceeded";
    /// The data pointer's offset isn't allowed.
    SGL_OFFSET_INVALID = 0x016, "SGL Offset Invalid";
    /// The host's identifier has the wrong length for this command.
    HOST_IDENTIFIER_INCONSISTENT = 0x018, "Host Identifier Inconsistent Format";
    /// Preempted by another host's reservation.
    ABORTED_PREEMPTED = 0x01b, "Command Aborted due to Preempt and Abort";
    /// The namespace may only be read.
    NAMESPACE_WRITE_PROTECTED = 0x020, "Namespace is Write Protected";
    /// The command was interrupted; it may be sent again.
    COMMAND_INTERRUPTED = 0x021, "Command Interrupted";
    /// The transport damaged the data; it may be sent again.
    TRANSIENT_TRANSPORT_ERROR = 0x022, "Transient Transport Error";
    /// Blocks beyond the end of the namespace.
    LBA_OUT_OF_RANGE = 0x080, "LBA Out of Range";
    /// No space for the blocks.
    CAPACITY_EXCEEDED = 0x081, "Capacity Exceeded";
    /// Temporarily impossible: no counters are leased, so nothing may be sealed.
    NAMESPACE_NOT_READY = 0x082, "Namespace Not Ready";
    /// Another host's reservation forbids it.
    RESERVATION_CONFLICT = 0x083, "Reservation Conflict";
    /// Queue identifier in use or out of range.
    INVALID_QUEUE = 0x101, "Invalid Queue Identifier";
    /// The log page isn't offered.
    INVALID_LOG_PAGE = 0x109, "Invalid Log Page";
    /// The feature can't be saved.
    FEATURE_NOT_SAVEABLE = 0x10d, "Feature Identifier Not Saveable";
    /// The feature can't be changed.
    FEATURE_NOT_CHANGEABLE = 0x10e, "Feature Not Changeable";
    /// The feature belongs to the controller, not to a namespace.
    FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10f, "Feature Not Namespace Specific";
    /// Too many asynchronous event requests.
    EVENT_REQUESTS_EXCEEDED = 0x105, "Asynchronous Event Request Limit Exceeded";
    /// Connect succeeded, but the host must authenticate first.
    AUTHENTICATION_REQUIRED = 0x191, "Authentication Required";
    /// Connect: record format not supported.
    CONNECT_FORMAT = 0x180, "Connect Incompatible Format";
    /// Connect: no more controllers, or the controller is in use.
    CONNECT_BUSY = 0x181, "Connect Controller Busy";
    /// Connect: a parameter is wrong.
    CONNECT_PARAMETERS = 0x182, "Connect Invalid Parameters";
    /// Connect: this host may not use this subsystem.
    CONNECT_HOST = 0x184, "Connect Invalid Host";
    /// The store refused the write.
    WRITE_FAULT = 0x280, "Write Fault";
    /// The store couldn't read.
    UNRECOVERED_READ = 0x281, "Unrecovered Read Error";
    /// A tag or MAC doesn't match: the data isn't what was written.
    GUARD_CHECK = 0x282, "End-to-end Guard Check Error";
    /// The key epoch or the format isn't the volume's.
    APPLICATION_TAG_CHECK = 0x283, "End-to-end Application Tag Check Error";
    /// The sector isn't the latest one written at this LBA.
    REFERENCE_TAG_CHECK = 0x284, "End-to-end Reference Tag Check Error";
    /// The stored blocks aren't the expected ones.
    COMPARE_FAILURE = 0x285, "Compare Failure";
    /// The host may not do this.
    ACCESS_DENIED = 0x286, "Access Denied";
    /// The stored blocks were deallocated or never written.
    DEALLOCATED_BLOCK = 0x287, "Deallocated or Unwritten Logical Block";
    /// ANA: this controller will never reach the namespace again.
    ANA_PERSISTENT_LOSS = 0x301, "Asymmetric Access Persistent Loss";
    /// ANA: this controller doesn't reach the namespace.
    ANA_INACCESSIBLE = 0x302, "Asymmetric Access Inaccessible";
    /// ANA: the state is changing.
    ANA_TRANSITION = 0x303, "Asymmetric Access Transition";
    /// The back end's queue was lost; the outcome isn't known.
    INTERNAL_PATH_ERROR = 0x300, "Internal Path Error";
}

impl Status {
    /// From the status field of a completion entry (phase bit ignored).
    #[must_use]
    pub fn from_field(field: u16) -> Self {
        Self(field >> 1)
    }

    /// The status field of a completion entry, with phase bit 0, as NVMe over Fabrics requires.
    #[must_use]
    pub fn field(self) -> u16 {
        self.0 << 1
    }

    /// The same with the "do not retry" bit set.
    #[must_use]
    pub const fn final_(self) -> Self {
        Self(self.0 | DO_NOT_RETRY)
    }

    /// Status code type and code, without "do not retry" and "more".
    #[must_use]
    pub fn code(self) -> u16 {
        self.0 & 0x7ff
    }

    /// Whether the "do not retry" bit is set: the same command will not succeed.
    #[must_use]
    pub fn is_final(self) -> bool {
        self.0 & DO_NOT_RETRY != 0
    }

    /// Whether the command succeeded.
    #[must_use]
    pub fn is_success(self) -> bool {
        self.code() == 0
    }

    /// The specification's name, or `None` for a code not in the table.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        NAMES.iter().find(|(code, _)| *code == self.code()).map(|(_, name)| *name)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(formatter, "{name} ({:#05x})", self.code()),
            None => write!(formatter, "status {:#05x}", self.code()),
        }
    }
}

/// The status of the answer for a refused or failed sector.
impl From<super::Reason> for Status {
    fn from(reason: super::Reason) -> Self {
        use super::Reason as R;
        match reason {
            R::SectorTag | R::SectorMac | R::CompletionMac | R::CommandMac => {
                Self::GUARD_CHECK.final_()
            }
            R::SectorStale => Self::REFERENCE_TAG_CHECK.final_(),
            R::SectorKeyEpoch | R::SectorFormat | R::SectorUnwritten => {
                Self::APPLICATION_TAG_CHECK.final_()
            }
            R::StoreFailed => Self::UNRECOVERED_READ,
            R::StoreRolledBack | R::StoreDamaged => Self::UNRECOVERED_READ.final_(),
            // Without "do not retry": nothing is lost, and a retry may succeed.
            R::LeaseExhausted | R::AnchorUnreachable => Self::NAMESPACE_NOT_READY,
            R::PduMalformed | R::QueueClosed => Self::INTERNAL_PATH_ERROR,
            R::BackEndStatus => Self::INTERNAL_ERROR,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_and_status_are_inverse_and_named() {
        for (code, name) in NAMES {
            let status = Status::from_field(code << 1);
            assert_eq!(status.code(), *code);
            assert_eq!(status.name(), Some(*name));
            assert_eq!(Status::from_field(status.final_().field()).code(), *code);
            assert!(!status.is_final() && Status::from_field(status.final_().field()).is_final());
        }
        assert!(Status::SUCCESS.is_success());
        assert_eq!(Status::INVALID_OPCODE.final_().field(), 0x8002);
    }
}
