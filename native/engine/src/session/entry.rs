//! Entries of the two queues: encoding, and validation of what a job wrote (docs/ring-abi.md).

use sealane_proto::session::{BLOCK_UNITS_MAX, MESSAGE_BYTES_MAX, Reliability};

use super::layout::ENTRY_BYTES;

const OPCODE_SEND: u8 = 1;
const OPCODE_RECEIVE: u8 = 2;
const FLAG_IMMEDIATE: u8 = 1;
const FLAG_AUTO: u8 = 2;
const FLAG_UNRELIABLE: u8 = 4;
/// Where the interleaved blocks beyond the first are counted.
const DEPTH_AT: usize = 32;
const RESERVED_START: usize = 33;

/// Longest message.
pub const LENGTH_MAX: u64 = MESSAGE_BYTES_MAX;

/// What a job did wrong; its session ends for it, and no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingFault {
    /// An index moved back, or further than the ring is long.
    #[error("ring.index.jump")]
    IndexJump,
    /// No such operation.
    #[error("ring.entry.opcode")]
    Opcode,
    /// A flag that this version does not know, or that the operation does not take.
    #[error("ring.entry.flags")]
    Flags,
    /// The bytes named are not all inside the region.
    #[error("ring.entry.range")]
    Range,
    /// More bytes than a message can have.
    #[error("ring.entry.length")]
    Length,
    /// Only one of k and m is zero, both are too large together, blocks are interleaved that are
    /// not there, or a code is named by a receive or beside the plan.
    #[error("ring.entry.reliability")]
    Reliability,
    /// A reserved byte is not zero.
    #[error("ring.entry.reserved")]
    Reserved,
}

impl RingFault {
    /// Stable id for logs, statistics and the close reason.
    pub fn reason(self) -> String {
        self.to_string()
    }
}

/// One validated submission: a private copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Submission {
    /// Send or receive.
    pub kind: Operation,
    /// First byte in the region.
    pub offset: u64,
    /// Bytes to send, or room to receive.
    pub length: u64,
    /// Returned in the completion.
    pub user_data: u64,
}

/// What a submission asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Send a message.
    Send {
        /// How it survives loss.
        reliability: Reliability,
        /// 32 bits that travel with the message.
        immediate: Option<u32>,
    },
    /// Receive the next message.
    Receive,
}

impl Submission {
    /// Writes the entry as it lies in the ring.
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut entry = [0; ENTRY_BYTES];
        match self.kind {
            Operation::Send { reliability, immediate } => {
                entry[0] = OPCODE_SEND;
                entry[1] = if immediate.is_some() { FLAG_IMMEDIATE } else { 0 };
                match reliability {
                    Reliability::SelectiveRepeat => {}
                    Reliability::ErasureCoded { k, m, depth } => {
                        (entry[2], entry[3]) = (k, m);
                        entry[DEPTH_AT] = depth.wrapping_sub(1);
                    }
                    Reliability::Auto => entry[1] |= FLAG_AUTO,
                    Reliability::Unreliable => entry[1] |= FLAG_UNRELIABLE,
                }
                entry[4..8].copy_from_slice(&immediate.unwrap_or(0).to_le_bytes());
            }
            Operation::Receive => entry[0] = OPCODE_RECEIVE,
        }
        entry[8..16].copy_from_slice(&self.offset.to_le_bytes());
        entry[16..24].copy_from_slice(&self.length.to_le_bytes());
        entry[24..32].copy_from_slice(&self.user_data.to_le_bytes());
        entry
    }

    /// Validates a private copy of an entry against a region of `region_bytes`.
    pub fn parse(entry: &[u8; ENTRY_BYTES], region_bytes: u64) -> Result<Self, RingFault> {
        let [opcode, flags, k, m, ..] = *entry;
        let immediate = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
        let (offset, length) = (word(entry, 8), word(entry, 16));
        let kind = match opcode {
            OPCODE_SEND => {
                let has_immediate = flags & FLAG_IMMEDIATE != 0;
                let known = FLAG_IMMEDIATE | FLAG_AUTO | FLAG_UNRELIABLE;
                if flags & !known != 0 || (!has_immediate && immediate != 0) {
                    return Err(RingFault::Flags);
                }
                let reliability = reliability(flags, (k, m), entry[DEPTH_AT])?;
                Operation::Send { reliability, immediate: has_immediate.then_some(immediate) }
            }
            OPCODE_RECEIVE => {
                if flags != 0 || immediate != 0 {
                    return Err(RingFault::Flags);
                }
                if (k, m, entry[DEPTH_AT]) != (0, 0, 0) {
                    return Err(RingFault::Reliability);
                }
                Operation::Receive
            }
            _ => return Err(RingFault::Opcode),
        };
        if length > LENGTH_MAX {
            return Err(RingFault::Length);
        }
        if offset.checked_add(length).is_none_or(|end| end > region_bytes) {
            return Err(RingFault::Range);
        }
        if entry[RESERVED_START..].iter().any(|byte| *byte != 0) {
            return Err(RingFault::Reserved);
        }
        Ok(Self { kind, offset, length, user_data: word(entry, 24) })
    }
}

/// The scheme of a send. Whether the session has room for it is the session's to say.
fn reliability(flags: u8, (k, m): (u8, u8), more: u8) -> Result<Reliability, RingFault> {
    let choice = flags & (FLAG_AUTO | FLAG_UNRELIABLE);
    match (k, m) {
        (0, 0) if more != 0 => Err(RingFault::Reliability),
        (0, 0) => match choice {
            0 => Ok(Reliability::SelectiveRepeat),
            FLAG_AUTO => Ok(Reliability::Auto),
            FLAG_UNRELIABLE => Ok(Reliability::Unreliable),
            _ => Err(RingFault::Reliability),
        },
        (0, _) | (_, 0) => Err(RingFault::Reliability),
        _ if choice != 0 || u16::from(k) + u16::from(m) > BLOCK_UNITS_MAX => {
            Err(RingFault::Reliability)
        }
        _ => {
            let depth = more.checked_add(1).ok_or(RingFault::Reliability)?;
            Ok(Reliability::ErasureCoded { k, m, depth })
        }
    }
}

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Everything was delivered and acknowledged.
    Ok,
    /// The session ended before the answer came.
    OutcomeUnknown,
    /// The peer or the session gave the message up.
    Aborted,
    /// The message was longer than the receive that it met.
    TooLong,
    /// The session could not take the operation.
    Refused,
    /// The sender gave the message up.
    Cancelled,
    /// The receiver wanted no more of the message than had landed.
    Partial,
}

impl Status {
    const ALL: [Self; 7] = [
        Self::Ok,
        Self::OutcomeUnknown,
        Self::Aborted,
        Self::TooLong,
        Self::Refused,
        Self::Cancelled,
        Self::Partial,
    ];

    /// Name as the job's language shows it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::OutcomeUnknown => "outcome_unknown",
            Self::Aborted => "aborted",
            Self::TooLong => "too_long",
            Self::Refused => "refused",
            Self::Cancelled => "cancelled",
            Self::Partial => "partial",
        }
    }

    fn code(self) -> u8 {
        self as u8
    }
}

/// One finished operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// True for a send, false for a receive.
    pub is_send: bool,
    /// How it ended.
    pub status: Status,
    /// The number that the submission carried.
    pub user_data: u64,
    /// Message number in the session.
    pub message: u64,
    /// Bytes of the message.
    pub length: u64,
    /// The sender's immediate, at the receiver.
    pub immediate: Option<u32>,
    /// Sends: nanoseconds from the first transmission to the acknowledgement of the last byte.
    pub duration_nanos: u64,
}

impl Completion {
    /// Writes the entry as it lies in the ring.
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut entry = [0; ENTRY_BYTES];
        entry[0] = if self.is_send { OPCODE_SEND } else { OPCODE_RECEIVE };
        entry[1] = if self.immediate.is_some() { FLAG_IMMEDIATE } else { 0 };
        entry[2] = self.status.code();
        entry[4..8].copy_from_slice(&self.immediate.unwrap_or(0).to_le_bytes());
        for (at, value) in
            [(8, self.message), (16, self.length), (24, self.user_data), (32, self.duration_nanos)]
        {
            entry[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        entry
    }

    /// Reads an entry on the job's side. `None` if this version never writes such a one.
    pub fn parse(entry: &[u8; ENTRY_BYTES]) -> Option<Self> {
        let immediate = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
        Some(Self {
            is_send: match entry[0] {
                OPCODE_SEND => true,
                OPCODE_RECEIVE => false,
                _ => return None,
            },
            status: *Status::ALL.get(usize::from(entry[2]))?,
            immediate: (entry[1] & FLAG_IMMEDIATE != 0).then_some(immediate),
            message: word(entry, 8),
            length: word(entry, 16),
            user_data: word(entry, 24),
            duration_nanos: word(entry, 32),
        })
    }
}

fn word(entry: &[u8; ENTRY_BYTES], at: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&entry[at..at + 8]);
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const REGION_BYTES: u64 = 1 << 20;

    fn send(user_data: u64) -> Submission {
        let kind = Operation::Send { reliability: Reliability::SelectiveRepeat, immediate: None };
        Submission { kind, offset: 0, length: 10, user_data }
    }

    #[test]
    fn bad_entries_are_named() {
        let good = send(1).encode();
        let with = |changes: &[(usize, u8)]| {
            let mut entry = good;
            for (at, value) in changes {
                entry[*at] = *value;
            }
            Submission::parse(&entry, REGION_BYTES)
        };
        assert!(with(&[]).is_ok());
        assert_eq!(with(&[(0, 0)]), Err(RingFault::Opcode));
        assert_eq!(with(&[(0, 3)]), Err(RingFault::Opcode));
        assert_eq!(with(&[(1, 8)]), Err(RingFault::Flags));
        assert!(with(&[(1, 2)]).is_ok());
        assert!(with(&[(1, 4)]).is_ok());
        assert_eq!(with(&[(1, 6)]), Err(RingFault::Reliability), "both choices at once");
        assert_eq!(with(&[(1, 4), (2, 4), (3, 2)]), Err(RingFault::Reliability));
        assert_eq!(with(&[(1, 2), (2, 4), (3, 2)]), Err(RingFault::Reliability));
        assert_eq!(with(&[(1, 2), (4, 1)]), Err(RingFault::Flags), "auto is no immediate");
        assert_eq!(with(&[(32, 1)]), Err(RingFault::Reliability), "nothing to interleave");
        assert_eq!(with(&[(2, 4), (3, 2), (32, 255)]), Err(RingFault::Reliability));
        assert_eq!(with(&[(0, 2), (32, 1)]), Err(RingFault::Reliability));
        assert_eq!(with(&[(3, 2)]), Err(RingFault::Reliability));
        assert_eq!(with(&[(4, 1)]), Err(RingFault::Flags), "an immediate without its flag");
        assert_eq!(with(&[(2, 4)]), Err(RingFault::Reliability));
        assert_eq!(with(&[(0, 2), (2, 4), (3, 2)]), Err(RingFault::Reliability));
        assert_eq!(with(&[(0, 2), (1, 1)]), Err(RingFault::Flags));
        assert_eq!(with(&[(2, 200), (3, 56)]), Err(RingFault::Reliability));
        assert_eq!(with(&[(21, 1)]), Err(RingFault::Length));
        assert_eq!(with(&[(10, 0x10)]), Err(RingFault::Range));
        assert_eq!(with(&[(18, 0x10)]), Err(RingFault::Range));
        for at in RESERVED_START..ENTRY_BYTES {
            assert_eq!(with(&[(at, 1)]), Err(RingFault::Reserved));
        }
        let mut overflowing = send(1);
        overflowing.offset = u64::MAX - 4;
        assert_eq!(Submission::parse(&overflowing.encode(), REGION_BYTES), Err(RingFault::Range));
    }

    proptest! {
        #[test]
        fn entries_round_trip(
            offset in 0_u64..1000, length in 0_u64..1000, user_data: u64, immediate: Option<u32>,
            reliability in prop_oneof![
                Just(Reliability::SelectiveRepeat),
                Just(Reliability::Auto),
                Just(Reliability::Unreliable),
                (1_u8..200, 1_u8..55, 1_u8..)
                    .prop_map(|(k, m, depth)| Reliability::ErasureCoded { k, m, depth }),
            ],
            receive: bool,
        ) {
            let kind = if receive {
                Operation::Receive
            } else {
                Operation::Send { reliability, immediate }
            };
            let submission = Submission { kind, offset, length, user_data };
            prop_assert_eq!(Submission::parse(&submission.encode(), 2000), Ok(submission));
        }

        /// Any 64 bytes give a fault or a submission that lies inside the region.
        #[test]
        fn no_entry_reaches_outside(bytes in prop::collection::vec(any::<u8>(), 64), small: bool) {
            let mut entry: [u8; ENTRY_BYTES] = bytes.try_into().unwrap();
            if small {
                entry[10..16].fill(0);
                entry[18..24].fill(0);
                entry[RESERVED_START..].fill(0);
                entry[0] = 1 + (entry[0] & 1);
                entry[1..8].fill(0);
            }
            if let Ok(submission) = Submission::parse(&entry, 5000) {
                prop_assert!(submission.offset + submission.length <= 5000);
            }
        }
    }
}
