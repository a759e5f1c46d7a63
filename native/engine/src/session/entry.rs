//! Entries of the submission queue: encoding, and validation of entries from a job
//! (docs/formats/ring-abi.md).

use std::ops::Range;

use sealane_proto::link::Nanos;
use sealane_proto::session::{BLOCK_UNITS_MAX, MESSAGE_BYTES_MAX, PRIORITIES, Reliability};

use super::layout::ENTRY_BYTES;

pub(super) const FLAG_IMMEDIATE: u8 = 1;
const FLAG_AUTO: u8 = 2;
const FLAG_UNRELIABLE: u8 = 4;
/// Number of interleaved blocks, minus one.
const DEPTH_AT: usize = 32;
/// Priority of a message.
pub(super) const PRIORITY_AT: usize = 33;
/// Handle of the operation that a command refers to.
const TARGET_AT: usize = 40;
/// Place in the peer's buffer, or chunk number.
const PLACE_AT: usize = 48;
/// Nanoseconds that a message may take.
const DEADLINE_AT: usize = 56;
/// Bytes that must be 0 in every entry.
const RESERVED: Range<usize> = 34..40;

/// Longest message.
pub const LENGTH_MAX: u64 = MESSAGE_BYTES_MAX;

/// A job's protocol violation, which ends its session and no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingFault {
    /// An index moved backwards, or further than the ring's length.
    #[error("ring.index.jump")]
    IndexJump,
    /// Unknown operation.
    #[error("ring.entry.opcode")]
    Opcode,
    /// A flag unknown to this version, or not allowed for the operation.
    #[error("ring.entry.flags")]
    Flags,
    /// The range is not completely inside the region.
    #[error("ring.entry.range")]
    Range,
    /// The length exceeds that of the longest message.
    #[error("ring.entry.length")]
    Length,
    /// The priority is too high, or the operation has none.
    #[error("ring.entry.priority")]
    Priority,
    /// A deadline is given for an operation without one.
    #[error("ring.entry.deadline")]
    Deadline,
    /// Only one of k and m is zero, their sum is too large, interleaving is requested without a
    /// code, or a code is given for an operation without one or together with another scheme.
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

/// The operation of a submission, as a number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Opcode {
    /// Send a message.
    #[default]
    Send = 1,
    /// Receive the next message.
    Receive = 2,
    /// Start a stream: a message whose parts follow.
    Stream = 3,
    /// Send a part of a stream.
    Continue = 4,
    /// End a stream.
    End = 5,
    /// Cancel a send or a stream.
    Cancel = 6,
    /// Complete a receive with what has landed.
    Complete = 7,
    /// Return which units of a chunk have landed.
    PacketMap = 8,
}

impl Opcode {
    const ALL: [Self; 8] = [
        Self::Send,
        Self::Receive,
        Self::Stream,
        Self::Continue,
        Self::End,
        Self::Cancel,
        Self::Complete,
        Self::PacketMap,
    ];

    pub(super) fn parse(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|opcode| *opcode as u8 == code)
    }

    /// Name in the job's API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Receive => "receive",
            Self::Stream => "stream",
            Self::Continue => "continue",
            Self::End => "end",
            Self::Cancel => "cancel",
            Self::Complete => "complete",
            Self::PacketMap => "packet_map",
        }
    }
}

/// A validated private copy of one submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Submission {
    /// The operation.
    pub kind: Operation,
    /// First byte in the region; 0 if the operation has no range.
    pub offset: u64,
    /// Bytes to send, room to receive, or the range of a stream in the peer's buffer.
    pub length: u64,
    /// Returned in the completion.
    pub user_data: u64,
}

/// How a message or a stream is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// How losses are recovered.
    pub reliability: Reliability,
    /// 32 bits sent with the message.
    pub immediate: Option<u32>,
    /// Those of higher priority leave first; below [`PRIORITIES`].
    pub priority: u8,
    /// It is cancelled if it has not ended this long after the daemon took it; `None`: never.
    pub deadline: Option<Nanos>,
}

impl Terms {
    /// Terms without anything optional.
    #[must_use]
    pub fn new(reliability: Reliability) -> Self {
        Self { reliability, immediate: None, priority: 0, deadline: None }
    }
}

/// The operation of a submission. Operations refer to others by their handles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Send a message.
    Send(Terms),
    /// Receive the next message.
    Receive,
    /// Start a stream.
    Stream(Terms),
    /// Send a part of a stream.
    Continue {
        /// The stream.
        stream: u64,
        /// Offset in the peer's buffer.
        remote_offset: u64,
    },
    /// End a stream.
    End {
        /// The stream.
        stream: u64,
    },
    /// Cancel a send, a stream, or a receive that has no slot yet.
    Cancel {
        /// The operation.
        operation: u64,
    },
    /// Complete a receive with what has landed.
    Complete {
        /// The receive.
        receive: u64,
    },
    /// Return which units of a chunk have landed.
    PacketMap {
        /// The receive.
        receive: u64,
        /// Chunk number.
        chunk: u32,
    },
}

impl Operation {
    /// Its opcode.
    pub fn opcode(&self) -> Opcode {
        match self {
            Self::Send(_) => Opcode::Send,
            Self::Receive => Opcode::Receive,
            Self::Stream(_) => Opcode::Stream,
            Self::Continue { .. } => Opcode::Continue,
            Self::End { .. } => Opcode::End,
            Self::Cancel { .. } => Opcode::Cancel,
            Self::Complete { .. } => Opcode::Complete,
            Self::PacketMap { .. } => Opcode::PacketMap,
        }
    }

    /// Whether its offset and length are a range of the region.
    pub fn has_range(&self) -> bool {
        matches!(self, Self::Send(_) | Self::Receive | Self::Continue { .. })
    }

    /// Whether it completes at once, without waiting for the peer.
    pub fn is_command(&self) -> bool {
        matches!(self, Self::Cancel { .. } | Self::Complete { .. } | Self::PacketMap { .. })
    }

    /// How the message is sent, if it is one.
    pub fn terms(&self) -> Option<&Terms> {
        match self {
            Self::Send(terms) | Self::Stream(terms) => Some(terms),
            _ => None,
        }
    }

    /// The operation and place that it refers to.
    fn target(&self) -> (u64, u64) {
        match *self {
            Self::Send(_) | Self::Receive | Self::Stream(_) => (0, 0),
            Self::Continue { stream, remote_offset } => (stream, remote_offset),
            Self::End { stream: named }
            | Self::Cancel { operation: named }
            | Self::Complete { receive: named } => (named, 0),
            Self::PacketMap { receive, chunk } => (receive, chunk.into()),
        }
    }
}

impl Submission {
    /// Encodes the entry as stored in the ring.
    pub fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut entry = [0; ENTRY_BYTES];
        entry[0] = self.kind.opcode() as u8;
        let mut deadline = 0;
        if let Some(terms) = self.kind.terms() {
            let Terms { reliability, immediate, priority, .. } = *terms;
            deadline = terms.deadline.unwrap_or(0);
            entry[PRIORITY_AT] = priority;
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
        let (target, place) = self.kind.target();
        for (at, value) in [
            (8, self.offset),
            (16, self.length),
            (24, self.user_data),
            (TARGET_AT, target),
            (PLACE_AT, place),
            (DEADLINE_AT, deadline),
        ] {
            entry[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        entry
    }

    /// Validates a private copy of an entry against a region of `region_bytes`.
    ///
    /// Does not check that an operation referred to exists.
    pub fn parse(entry: &[u8; ENTRY_BYTES], region_bytes: u64) -> Result<Self, RingFault> {
        let opcode = Opcode::parse(entry[0]).ok_or(RingFault::Opcode)?;
        let kind = operation(opcode, entry)?;
        let (offset, length) = (word(entry, 8), word(entry, 16));
        if length > LENGTH_MAX {
            return Err(RingFault::Length);
        }
        let range_end = match opcode {
            Opcode::Stream => 0,
            _ if kind.has_range() => region_bytes,
            _ if length > 0 => return Err(RingFault::Length),
            _ => 0,
        };
        let bytes = if opcode == Opcode::Stream { 0 } else { length };
        if offset.checked_add(bytes).is_none_or(|end| end > range_end) {
            return Err(RingFault::Range);
        }
        let (target, place) = kind.target();
        let is_clean = entry[RESERVED].iter().all(|byte| *byte == 0);
        if !is_clean || (target, place) != (word(entry, TARGET_AT), word(entry, PLACE_AT)) {
            return Err(RingFault::Reserved);
        }
        Ok(Self { kind, offset, length, user_data: word(entry, 24) })
    }
}

/// The operation of an entry, with its specific fields.
fn operation(opcode: Opcode, entry: &[u8; ENTRY_BYTES]) -> Result<Operation, RingFault> {
    let [_, flags, k, m, ..] = *entry;
    let immediate = u32::from_le_bytes([entry[4], entry[5], entry[6], entry[7]]);
    let has_immediate = flags & FLAG_IMMEDIATE != 0;
    let known = match opcode {
        Opcode::Send => FLAG_IMMEDIATE | FLAG_AUTO | FLAG_UNRELIABLE,
        Opcode::Stream => FLAG_IMMEDIATE | FLAG_UNRELIABLE,
        _ => 0,
    };
    if flags & !known != 0 || (!has_immediate && immediate != 0) {
        return Err(RingFault::Flags);
    }
    if opcode != Opcode::Send && (k, m, entry[DEPTH_AT]) != (0, 0, 0) {
        return Err(RingFault::Reliability);
    }
    let (priority, deadline) = (entry[PRIORITY_AT], word(entry, DEADLINE_AT));
    let is_message = matches!(opcode, Opcode::Send | Opcode::Stream);
    if priority >= if is_message { PRIORITIES } else { 1 } {
        return Err(RingFault::Priority);
    }
    if deadline != 0 && !is_message {
        return Err(RingFault::Deadline);
    }
    let terms = Terms {
        reliability: reliability(flags, (k, m), entry[DEPTH_AT])?,
        immediate: has_immediate.then_some(immediate),
        priority,
        deadline: (deadline != 0).then_some(deadline),
    };
    let target = word(entry, TARGET_AT);
    let place = word(entry, PLACE_AT);
    Ok(match opcode {
        Opcode::Send => Operation::Send(terms),
        Opcode::Receive => Operation::Receive,
        Opcode::Stream => Operation::Stream(terms),
        Opcode::Continue => Operation::Continue { stream: target, remote_offset: place },
        Opcode::End => Operation::End { stream: target },
        Opcode::Cancel => Operation::Cancel { operation: target },
        Opcode::Complete => Operation::Complete { receive: target },
        Opcode::PacketMap => Operation::PacketMap {
            receive: target,
            chunk: u32::try_from(place).map_err(|_| RingFault::Range)?,
        },
    })
}

/// The scheme of a send. The session checks later whether it accepts it.
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

pub(super) fn word(entry: &[u8; ENTRY_BYTES], at: usize) -> u64 {
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
        let kind = Operation::Send(Terms::new(Reliability::SelectiveRepeat));
        Submission { kind, offset: 0, length: 10, user_data }
    }

    #[test]
    fn each_operation_names_what_it_needs_and_no_more() {
        let entry =
            |kind, offset, length| Submission { kind, offset, length, user_data: 3 }.encode();
        let parse = |entry| Submission::parse(&entry, REGION_BYTES);
        let with = |kind, at: usize, value| {
            let mut entry = entry(kind, 0, 0);
            entry[at] = value;
            parse(entry)
        };
        let stream =
            Operation::Stream(Terms { immediate: Some(1), ..Terms::new(Reliability::Unreliable) });
        assert!(parse(entry(stream, 0, 2 * REGION_BYTES)).is_ok(), "the peer's buffer, not ours");
        assert_eq!(parse(entry(stream, 1, 0)), Err(RingFault::Range));
        assert_eq!(parse(entry(stream, 0, LENGTH_MAX + 1)), Err(RingFault::Length));
        assert_eq!(with(stream, 1, FLAG_AUTO), Err(RingFault::Flags));
        assert_eq!(with(stream, 2, 4), Err(RingFault::Reliability));
        assert_eq!(with(stream, TARGET_AT, 1), Err(RingFault::Reserved));
        let part = Operation::Continue { stream: 7, remote_offset: u64::MAX };
        assert!(parse(entry(part, REGION_BYTES, 0)).is_ok());
        assert_eq!(parse(entry(part, REGION_BYTES, 1)), Err(RingFault::Range));
        let others = [
            Operation::End { stream: 7 },
            Operation::Cancel { operation: 7 },
            Operation::Complete { receive: 7 },
            Operation::PacketMap { receive: 7, chunk: 1 },
        ];
        for kind in others {
            assert_eq!(parse(entry(kind, 0, 0)).map(|taken| taken.kind), Ok(kind));
            assert_eq!(parse(entry(kind, 1, 0)), Err(RingFault::Range));
            assert_eq!(parse(entry(kind, 0, 1)), Err(RingFault::Length));
            assert_eq!(with(kind, 1, FLAG_IMMEDIATE), Err(RingFault::Flags));
            assert_eq!(with(kind, 4, 1), Err(RingFault::Flags));
            assert_eq!(with(kind, 2, 1), Err(RingFault::Reliability));
            assert_eq!(with(kind, DEPTH_AT, 1), Err(RingFault::Reliability));
            assert_eq!(with(kind, 33, 1), Err(RingFault::Priority));
            assert_eq!(with(kind, 34, 1), Err(RingFault::Reserved));
            assert_eq!(with(kind, 63, 1), Err(RingFault::Deadline));
        }
        assert_eq!(with(others[0], PLACE_AT, 1), Err(RingFault::Reserved));
        assert_eq!(with(others[3], PLACE_AT + 4, 1), Err(RingFault::Range));
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
        assert_eq!(with(&[(0, 9)]), Err(RingFault::Opcode));
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
        assert!(with(&[(33, PRIORITIES - 1), (57, 1)]).is_ok());
        assert_eq!(with(&[(33, PRIORITIES)]), Err(RingFault::Priority));
        for at in 34..DEADLINE_AT {
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
            which in 0_u8..8, target: u64, place: u32, priority in 0..PRIORITIES,
            deadline in proptest::option::of(1_u64..),
        ) {
            let terms = Terms { reliability, immediate, priority, deadline };
            let kind = match which {
                0 => Operation::Receive,
                1 => Operation::Continue { stream: target, remote_offset: place.into() },
                2 => Operation::End { stream: target },
                3 => Operation::Cancel { operation: target },
                4 => Operation::Complete { receive: target },
                5 => Operation::PacketMap { receive: target, chunk: place },
                6 => Operation::Stream(Terms { reliability: Reliability::Unreliable, ..terms }),
                _ => Operation::Send(terms),
            };
            let (offset, length) = match which {
                2..=5 => (0, 0),
                6 => (0, length),
                _ => (offset, length),
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
                entry[DEPTH_AT..].fill(0);
                entry[0] = 1 + (entry[0] & 3);
                entry[1..8].fill(0);
            }
            if let Ok(submission) = Submission::parse(&entry, 5000) {
                let is_stream = submission.kind.opcode() == Opcode::Stream;
                prop_assert!(submission.offset <= 5000);
                prop_assert!(is_stream || submission.offset + submission.length <= 5000);
            }
        }
    }
}
