//! Control frames (`docs/formats/session-wire.md`, "Frames").
//!
//! Every frame states an absolute, cumulative fact, so losing, repeating or reordering frames does
//! no harm. They are only sent inside sealed packets.

use super::ecn::PathCounts;
use super::gaps::LossCounts;
use super::packet::{Malformed, Version, be};
use super::paths::PathId;

const PADDING: u8 = 0;
const ACK: u8 = 1;
const SLICE: u8 = 2;
const CREDIT: u8 = 3;
const ABORT_SEND: u8 = 4;
const ABORT_RECEIVE: u8 = 5;
const PATH_CHALLENGE: u8 = 6;
const PATH_RESPONSE: u8 = 7;
const CLOSE: u8 = 8;
const STREAM_END: u8 = 9;
const PING: u8 = 10;
const LOSSES: u8 = 11;
const LOSS_COUNTS: u8 = 12;
const DRAINING: u8 = 13;
const PATH_COUNTS: u8 = 16;
const UNIT: u8 = 17;
const ACK_CADENCE: u8 = 18;

/// Bytes of a SLICE frame without its bitmap.
pub const SLICE_HEADER_BYTES: usize = 17;
/// Bytes of a CREDIT frame without its lengths.
pub const CREDIT_HEADER_BYTES: usize = 9;
/// Bytes of a length in a CREDIT frame.
pub const CREDIT_LENGTH_BYTES: usize = 5;
/// Bytes of a STREAM_END frame with an immediate.
pub const STREAM_END_BYTES_MAX: usize = 21;
/// Bytes of a PATH_CHALLENGE or PATH_RESPONSE frame.
pub const PATH_BYTES: usize = 9;
/// Bytes of a PATH_COUNTS frame.
pub const PATH_COUNTS_BYTES: usize = 38;
/// Bytes of a PING frame.
pub const PING_BYTES: usize = 1;
/// Bytes of a LOSSES frame without its runs.
pub const LOSSES_HEADER_BYTES: usize = 4;
/// Bytes of a run in a LOSSES frame.
pub const LOST_RUN_BYTES: usize = 12;
/// Bytes of a LOSS_COUNTS frame.
pub const LOSS_COUNTS_BYTES: usize = 32;
/// Bytes of a DRAINING frame.
pub const DRAINING_BYTES: usize = 2;
/// Bytes of a CLOSE frame.
pub const CLOSE_BYTES: usize = 2;

/// The cumulative count of a message that has ended, regardless of its length.
pub const ENDED: u32 = u32::MAX;

/// Why one end aborts a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AbortReason {
    /// The message is longer than its receive.
    TooLong,
    /// The sender cancelled it.
    Cancelled,
    /// The receiver wants no more of it than has arrived.
    Completed,
}

impl AbortReason {
    fn code(self) -> u8 {
        match self {
            Self::TooLong => 0,
            Self::Cancelled => 1,
            Self::Completed => 2,
        }
    }

    fn from_code(code: u64) -> Result<Self, Malformed> {
        match code {
            0 => Ok(Self::TooLong),
            1 => Ok(Self::Cancelled),
            2 => Ok(Self::Completed),
            _ => Err(Malformed),
        }
    }
}

/// One frame. Message numbers are below 2^48.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frame<'a> {
    /// Progress of both directions.
    Ack {
        /// All messages to this end with lower numbers have ended here.
        completed_end: u64,
        /// All credit from the peer for lower message numbers is known here.
        credit_end: u64,
    },
    /// The units of one message that have arrived.
    Slice {
        /// Its number.
        message: u64,
        /// All lower units have arrived; [`ENDED`] means that the message has ended.
        cumulative: u32,
        /// First unit of the bitmap, a multiple of 8.
        start: u32,
        /// Bit i (least significant first) of byte j: unit `start + 8j + i` has arrived or is not
        /// needed.
        bitmap: &'a [u8],
    },
    /// Receives posted, by message number.
    Credit {
        /// Message number of the first length.
        start: u64,
        /// Buffer lengths, 40 bits each, big-endian.
        lengths: &'a [u8],
    },
    /// The sender has aborted this message.
    AbortSend {
        /// Its number.
        message: u64,
        /// Why.
        reason: AbortReason,
    },
    /// The receiver has aborted this message.
    AbortReceive {
        /// Its number.
        message: u64,
        /// Why.
        reason: AbortReason,
    },
    /// The stream has no more units than those announced.
    StreamEnd {
        /// Its number.
        message: u64,
        /// Number of announced units, each counted once.
        units: u32,
        /// The stream's range, as in the descriptor of its units.
        length: u64,
        /// The immediate.
        immediate: Option<u32>,
    },
    /// Requests an immediate acknowledgement.
    Ping,
    /// Packets that did not arrive.
    Losses {
        /// The path.
        path: PathId,
        /// Runs of packet numbers, to be read with [`lost_runs`]: ascending, not empty, not
        /// adjacent.
        runs: &'a [u8],
    },
    /// Total losses since the start.
    LossCounts {
        /// The path.
        path: PathId,
        /// The counts.
        counts: LossCounts,
    },
    /// To be answered with the same token on the same path.
    PathChallenge {
        /// Any value.
        token: u64,
    },
    /// Answer to a challenge.
    PathResponse {
        /// The challenge's value.
        token: u64,
    },
    /// What has arrived on a path; sent only if something has.
    PathCounts {
        /// The path.
        path: PathId,
        /// Largest packet number received on it …
        newest: u64,
        /// … and how long ago that was, in nanoseconds (saturated).
        age_nanos: u32,
        /// All below 2^48; the marked ones add up to no more than the total.
        counts: PathCounts,
    },
    /// The session's unit, from the end that decides it, or the other end's confirmation.
    Unit {
        /// In bytes.
        unit_bytes: u16,
    },
    /// Shortest delay of acknowledgements. Not in version 5.
    AckCadence {
        /// The receiver says what it agrees to; otherwise the sender asks.
        is_answer: bool,
        /// In nanoseconds.
        delay_nanos: u32,
    },
    /// The sender starts nothing new, and the session ends once everything in progress has.
    Draining {
        /// Whether all sends of this end have ended.
        is_done: bool,
    },
    /// The session is over.
    Close {
        /// Why.
        code: u8,
    },
}

impl Frame<'_> {
    /// Appends the frame.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Self::Ack { completed_end, credit_end } => {
                out.push(ACK);
                push_u48(out, completed_end);
                push_u48(out, credit_end);
            }
            Self::Slice { message, cumulative, start, bitmap } => {
                out.push(SLICE);
                push_u48(out, message);
                out.extend_from_slice(&cumulative.to_be_bytes());
                out.extend_from_slice(&start.to_be_bytes());
                out.extend_from_slice(&(bitmap.len() as u16).to_be_bytes());
                out.extend_from_slice(bitmap);
            }
            Self::Credit { start, lengths } => {
                out.push(CREDIT);
                push_u48(out, start);
                let count = lengths.len() / CREDIT_LENGTH_BYTES;
                out.extend_from_slice(&(count as u16).to_be_bytes());
                out.extend_from_slice(lengths);
            }
            Self::AbortSend { message, reason } => {
                out.push(ABORT_SEND);
                push_u48(out, message);
                out.push(reason.code());
            }
            Self::AbortReceive { message, reason } => {
                out.push(ABORT_RECEIVE);
                push_u48(out, message);
                out.push(reason.code());
            }
            Self::StreamEnd { message, units, length, immediate } => {
                out.push(STREAM_END);
                push_u48(out, message);
                out.extend_from_slice(&units.to_be_bytes());
                push_credit_length(out, length);
                out.push(immediate.is_some().into());
                if let Some(immediate) = immediate {
                    out.extend_from_slice(&immediate.to_be_bytes());
                }
            }
            Self::Ping => out.push(PING),
            Self::Losses { path, runs } => {
                out.extend_from_slice(&[LOSSES, path.0]);
                out.extend_from_slice(&((runs.len() / LOST_RUN_BYTES) as u16).to_be_bytes());
                out.extend_from_slice(runs);
            }
            Self::LossCounts { path, counts } => {
                out.extend_from_slice(&[LOSS_COUNTS, path.0]);
                let LossCounts { lost, runs, found, duplicates, dropped } = counts;
                for count in [lost, runs, found, duplicates, dropped] {
                    push_u48(out, count);
                }
            }
            Self::PathChallenge { token } => {
                out.push(PATH_CHALLENGE);
                out.extend_from_slice(&token.to_be_bytes());
            }
            Self::PathResponse { token } => {
                out.push(PATH_RESPONSE);
                out.extend_from_slice(&token.to_be_bytes());
            }
            Self::PathCounts { path, newest, age_nanos, counts } => {
                let PathCounts { received, ect0, ect1, ce } = counts;
                out.extend_from_slice(&[PATH_COUNTS, path.0]);
                out.extend_from_slice(&newest.to_be_bytes());
                out.extend_from_slice(&age_nanos.to_be_bytes());
                for count in [received, ect0, ect1, ce] {
                    push_u48(out, count);
                }
            }
            Self::Unit { unit_bytes } => {
                out.push(UNIT);
                out.extend_from_slice(&unit_bytes.to_be_bytes());
            }
            Self::AckCadence { is_answer, delay_nanos } => {
                out.extend_from_slice(&[ACK_CADENCE, is_answer.into()]);
                out.extend_from_slice(&delay_nanos.to_be_bytes());
            }
            Self::Draining { is_done } => out.extend_from_slice(&[DRAINING, is_done.into()]),
            Self::Close { code } => out.extend_from_slice(&[CLOSE, code]),
        }
    }
}

/// Appends one length of a CREDIT frame.
pub fn push_credit_length(out: &mut Vec<u8>, length: u64) {
    out.extend_from_slice(&length.to_be_bytes()[3..]);
}

/// Iterates over the lengths of a CREDIT frame.
pub fn credit_lengths(lengths: &[u8]) -> impl Iterator<Item = u64> + '_ {
    lengths.chunks_exact(CREDIT_LENGTH_BYTES).map(be)
}

/// Appends one run of a LOSSES frame: its first packet number and its length.
pub fn push_lost_run(out: &mut Vec<u8>, (start, length): (u64, u32)) {
    out.extend_from_slice(&start.to_be_bytes());
    out.extend_from_slice(&length.to_be_bytes());
}

/// Iterates over the runs of a LOSSES frame: first packet number, and end (exclusive).
pub fn lost_runs(runs: &[u8]) -> impl Iterator<Item = (u64, u64)> + '_ {
    runs.chunks_exact(LOST_RUN_BYTES).map(|run| {
        let start = be(&run[..8]);
        (start, start.saturating_add(be(&run[8..])))
    })
}

/// Whether runs are ascending, so that each packet number is looked up once.
fn are_ascending(runs: &[u8]) -> bool {
    let mut before = None;
    lost_runs(runs).all(|(start, end)| {
        let is_next = start < end && before.is_none_or(|before| before < start);
        before = Some(end);
        is_next
    })
}

fn push_u48(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_be_bytes()[2..]);
}

/// Iterator over the frames of a control packet, without padding. It ends after the first malformed
/// one.
#[derive(Debug, Clone)]
pub struct Frames<'a> {
    rest: &'a [u8],
    /// Number of paths that frames may name.
    paths: u8,
    version: Version,
}

impl<'a> Frames<'a> {
    /// Reads the plaintext of a control packet of a session of this version with this many paths.
    #[must_use]
    pub fn new(plaintext: &'a [u8], version: Version, paths: u8) -> Self {
        Self { rest: plaintext, paths, version }
    }

    /// Checks all frames, so that a packet is applied completely or not at all.
    pub fn validate(&self) -> Result<(), Malformed> {
        self.clone().try_for_each(|frame| frame.map(drop))
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(Malformed)?;
        self.rest = rest;
        Ok(taken)
    }

    fn number(&mut self, count: usize) -> Result<u64, Malformed> {
        self.take(count).map(be)
    }

    fn path(&mut self) -> Result<PathId, Malformed> {
        let number = self.number(1)?;
        if number < self.paths.into() { Ok(PathId(number as u8)) } else { Err(Malformed) }
    }

    fn frame(&mut self, kind: u8) -> Result<Frame<'a>, Malformed> {
        Ok(match kind {
            ACK => Frame::Ack { completed_end: self.number(6)?, credit_end: self.number(6)? },
            SLICE => {
                let message = self.number(6)?;
                let cumulative = self.number(4)? as u32;
                let start = self.number(4)? as u32;
                let length = self.number(2)? as usize;
                let bitmap = self.take(length)?;
                if !start.is_multiple_of(8) {
                    return Err(Malformed);
                }
                Frame::Slice { message, cumulative, start, bitmap }
            }
            CREDIT => {
                let start = self.number(6)?;
                let count = self.number(2)? as usize;
                Frame::Credit { start, lengths: self.take(count * CREDIT_LENGTH_BYTES)? }
            }
            ABORT_SEND => {
                let message = self.number(6)?;
                Frame::AbortSend { message, reason: AbortReason::from_code(self.number(1)?)? }
            }
            ABORT_RECEIVE => {
                let message = self.number(6)?;
                Frame::AbortReceive { message, reason: AbortReason::from_code(self.number(1)?)? }
            }
            STREAM_END => {
                let message = self.number(6)?;
                let units = self.number(4)? as u32;
                let length = self.number(5)?;
                let immediate = match self.number(1)? {
                    0 => None,
                    1 => Some(self.number(4)? as u32),
                    _ => return Err(Malformed),
                };
                Frame::StreamEnd { message, units, length, immediate }
            }
            PING => Frame::Ping,
            LOSSES => {
                let path = self.path()?;
                let count = self.number(2)? as usize;
                let runs = self.take(count * LOST_RUN_BYTES)?;
                if !are_ascending(runs) {
                    return Err(Malformed);
                }
                Frame::Losses { path, runs }
            }
            LOSS_COUNTS => {
                let path = self.path()?;
                let counts = LossCounts {
                    lost: self.number(6)?,
                    runs: self.number(6)?,
                    found: self.number(6)?,
                    duplicates: self.number(6)?,
                    dropped: self.number(6)?,
                };
                Frame::LossCounts { path, counts }
            }
            PATH_CHALLENGE => Frame::PathChallenge { token: self.number(8)? },
            PATH_RESPONSE => Frame::PathResponse { token: self.number(8)? },
            PATH_COUNTS => {
                let path = self.path()?;
                let newest = self.number(8)?;
                let age_nanos = self.number(4)? as u32;
                let counts = PathCounts {
                    received: self.number(6)?,
                    ect0: self.number(6)?,
                    ect1: self.number(6)?,
                    ce: self.number(6)?,
                };
                Frame::PathCounts { path, newest, age_nanos, counts: counts.checked()? }
            }
            UNIT => Frame::Unit { unit_bytes: self.number(2)? as u16 },
            ACK_CADENCE if self.version >= Version::V6 => {
                let is_answer = match self.number(1)? {
                    0 => false,
                    1 => true,
                    _ => return Err(Malformed),
                };
                Frame::AckCadence { is_answer, delay_nanos: self.number(4)? as u32 }
            }
            DRAINING => match self.number(1)? {
                0 => Frame::Draining { is_done: false },
                1 => Frame::Draining { is_done: true },
                _ => return Err(Malformed),
            },
            CLOSE => Frame::Close { code: self.number(1)? as u8 },
            _ => return Err(Malformed),
        })
    }
}

impl<'a> Iterator for Frames<'a> {
    type Item = Result<Frame<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        let skip = self.rest.iter().position(|byte| *byte != PADDING).unwrap_or(self.rest.len());
        self.rest = &self.rest[skip..];
        let (kind, rest) = self.rest.split_first()?;
        self.rest = rest;
        let frame = self.frame(*kind);
        if frame.is_err() {
            self.rest = &[];
        }
        Some(frame)
    }
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
