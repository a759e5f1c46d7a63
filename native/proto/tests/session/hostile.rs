//! A peer that has the keys and sends anything in any order, and the invariants that must hold
//! regardless. Also the fuzz target `session_peer`.

use std::collections::BTreeMap;

use sealane_proto::aead::{AeadKey, Secret};
use sealane_proto::link::Nanos;
use sealane_proto::session::frame::{AbortReason, ENDED, Frame, Frames, push_credit_length};
use sealane_proto::session::packet::{Header, Kind};
use sealane_proto::session::{
    Arrival, CloseReason, Detection, Ecn, Event, IpVersion, LossCounts, Memory, PATHS_MAX,
    PathCounts, PathId, PayloadMode, ReceiveRequest, Reliability, SendRequest, Session,
    SessionConfig, SessionKeys, SessionStatistics, Source, Steering, StreamPart, StreamRequest,
    Version,
};

const UNIT: u64 = 256;
const MEMORY_BYTES: usize = 1 << 16;
const STRIDE: u64 = 4096;
const CONNECTION: u64 = 7;
/// Paths of the session; only the first is validated.
const PATHS: u8 = 2;
/// The machine's burst, a challenge, an acknowledgement round and CLOSE: far below a harmful
/// number.
const DATAGRAMS_PER_INSTANT_MAX: usize = 200;
/// Nanoseconds of virtual time per step of the script.
const STEP: Nanos = 200_000;

/// The script's bytes as numbers; zero once they are used up.
struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    /// Mostly small numbers, which are the meaningful ones, and some at the limits.
    fn number(&mut self, end: u64) -> u64 {
        match self.byte() {
            0xff => end - 1,
            0xfe => end / 2,
            small => u64::from(small % 8) % end,
        }
    }
}

/// Memory in which only posted, incomplete receives may be written.
struct Guarded {
    bytes: Vec<u8>,
    /// Receives in progress: end of each range by its start.
    open: BTreeMap<u64, u64>,
}

impl Memory for Guarded {
    fn read(&self, offset: u64, into: &mut [u8]) {
        let start = offset as usize;
        into.copy_from_slice(&self.bytes[start..start + into.len()]);
    }

    fn write(&mut self, offset: u64, from: &[u8]) {
        let end = offset + from.len() as u64;
        let within = self.open.range(..=offset).next_back().is_some_and(|(_, last)| end <= *last);
        assert!(within, "{offset}..{end} is written, posted: {:?}", self.open);
        self.bytes[offset as usize..end as usize].copy_from_slice(from);
    }

    fn chunk_landed(&mut self, slot: u16, _chunk: u32) {
        assert!(slot < 4);
    }

    fn chunks_cleared(&mut self, slot: u16, _chunk_count: u32) {
        assert!(slot < 4);
    }
}

struct World {
    session: Session,
    memory: Guarded,
    now: Nanos,
    keys: [AeadKey; 2],
    /// The path of the peer's packets.
    path: PathId,
    /// And where they come from.
    source: Source,
    version: Version,
    /// By path, then by path for candidates.
    next_packet_numbers: [u64; 2 * PATHS as usize],
    /// The peer sends on the channel of the path's candidates.
    is_to_candidate: bool,
    /// Requests without a completion, by user data; true for receives.
    waiting: BTreeMap<u64, bool>,
    next_user_data: u64,
    is_closed: bool,
    /// What protects the session's own packets in the first epoch, and the first token in them.
    own_key: AeadKey,
    token: Option<u64>,
    /// Bytes that have left.
    sent_bytes: usize,
}

/// Plays a script and returns the final counters.
pub fn run(script: &[u8]) -> SessionStatistics {
    let mut script = Script(script);
    let mut world = World::established();
    while !script.0.is_empty() && !world.is_closed {
        world.step(&mut script);
        world.pump();
    }
    world.session.close(CloseReason::Requested, world.now);
    world.pump();
    assert!(world.is_closed && world.waiting.is_empty(), "{:?}", world.waiting);
    world.session.statistics()
}

impl World {
    fn established() -> Self {
        let mut world = Self::new();
        let token = world.token.expect("a challenge leaves at once");
        world.control(&[Frame::PathResponse { token }]);
        assert!(world.session.is_established());
        world
    }

    fn new() -> Self {
        Self::with_unit(UNIT as u16)
    }

    fn with_unit(unit_bytes: u16) -> Self {
        Self::with(Steering::default(), |config| SessionConfig { unit_bytes, ..config })
    }

    fn with(steering: Steering, change: impl Fn(SessionConfig) -> SessionConfig) -> Self {
        let config = change(SessionConfig {
            version: Version::V6,
            connection_id_local: CONNECTION,
            connection_id_peer: 8,
            unit_bytes: UNIT as u16,
            ip: IpVersion::V4,
            paths: PATHS,
            chunk_units: 2,
            slots: 4,
            rate_bytes_per_second: 12_500_000,
            idle_timeout: 10_000_000_000,
            reordering: 0,
            detection: Detection::Reports,
            packets_per_key: 16,
            payload: PayloadMode::Real,
        });
        let secret = |byte| Secret::take(&mut [byte; 32]);
        let first = secret(2);
        let key = |secret: &Secret, epoch: u64| {
            AeadKey::new(&secret.derive("sealane session packet", &epoch.to_be_bytes()))
        };
        let second = first.derive("sealane session next epoch", &1_u64.to_be_bytes());
        let mut world = Self {
            session: Session::new(
                config,
                steering,
                &SessionKeys { send: secret(1), receive: secret(2), token_seed: [3; 32] },
                0,
            ),
            memory: Guarded { bytes: vec![0x5a; MEMORY_BYTES], open: BTreeMap::new() },
            now: 0,
            keys: [key(&first, 0), key(&second, 1)],
            path: PathId(0),
            source: Source::Path,
            version: Version::V6,
            next_packet_numbers: [0; 2 * PATHS as usize],
            is_to_candidate: false,
            waiting: BTreeMap::new(),
            next_user_data: 0,
            is_closed: false,
            own_key: key(&secret(1), 0),
            token: None,
            sent_bytes: 0,
        };
        world.pump();
        world
    }

    fn step(&mut self, script: &mut Script<'_>) {
        match script.byte() % 13 {
            0 => {
                let count = usize::from(script.byte());
                let mut datagram = script.take(count).to_vec();
                self.deliver(&mut datagram);
            }
            1 => {
                let count = usize::from(script.byte());
                let plaintext = script.take(count);
                self.packet(Kind::Control, plaintext, 0);
            }
            2 | 3 => self.frame(script),
            4 | 5 => self.unit(script),
            6 => self.now += u64::from(script.byte()) * STEP,
            7 => self.now += u64::from(script.byte()) * STEP * 500,
            8 => self.post_send(script),
            9 => self.post_receive(),
            10 => self.stream(script),
            12 => {
                self.path = PathId(script.byte() % PATHS);
                let sources = [Source::Path, Source::Candidate, Source::Elsewhere, Source::Unnamed];
                let choice = usize::from(script.byte());
                self.source = sources[choice % sources.len()];
                self.is_to_candidate = choice / sources.len() % 2 == 1;
            }
            _ => {
                let message = script.number(8);
                let _ = self.session.cancel_send(message, self.now);
                let _ = self.session.complete_receive(script.number(8), self.now);
            }
        }
    }

    fn packet(&mut self, kind: Kind, plaintext: &[u8], epoch: u8) -> usize {
        let of_candidate = if self.is_to_candidate { (PATHS_MAX, PATHS) } else { (0, 0) };
        let channel = u32::from(self.path.0 + of_candidate.0);
        let next = &mut self.next_packet_numbers[usize::from(self.path.0 + of_candidate.1)];
        let packet_number = *next;
        *next += 1;
        let version = self.version;
        let connection_id = CONNECTION;
        let header = Header { version, connection_id, epoch, channel, packet_number, kind };
        let mut datagram = Vec::new();
        header.encode(&mut datagram);
        let start = datagram.len();
        datagram.extend_from_slice(plaintext);
        let (aad, payload) = datagram.split_at_mut(start);
        let tag = self.keys[usize::from(epoch)].seal(header.nonce(), aad, payload);
        datagram.extend_from_slice(&tag);
        self.deliver(&mut datagram);
        datagram.len()
    }

    fn deliver(&mut self, datagram: &mut [u8]) {
        let arrival = Arrival { path: self.path, source: self.source, ecn: Ecn::Ect0 };
        self.session.receive(datagram, arrival, &mut self.memory, self.now);
    }

    /// Sends these to the session; the bytes that it takes.
    fn control(&mut self, frames: &[Frame<'_>]) -> usize {
        let mut plaintext = Vec::new();
        for frame in frames {
            frame.encode(&mut plaintext);
        }
        self.packet(Kind::Control, &plaintext, 0)
    }

    /// A well-formed frame with arbitrary contents.
    fn frame(&mut self, script: &mut Script<'_>) {
        let kind = script.byte();
        let message = script.number(1 << 48);
        let reason = match script.byte() % 3 {
            0 => AbortReason::TooLong,
            1 => AbortReason::Cancelled,
            _ => AbortReason::Completed,
        };
        let path = PathId(script.byte() % (PATHS + 1));
        let mut lengths = Vec::new();
        let count = usize::from(script.byte() % 8);
        let bitmap = script.take(count);
        let frame = match kind % 16 {
            0 => Frame::Ack { completed_end: message, credit_end: script.number(1 << 48) },
            1 => Frame::Slice {
                message,
                cumulative: script.number(u64::from(ENDED) + 1) as u32,
                start: script.number(1 << 29) as u32 * 8,
                bitmap,
            },
            2 => {
                for _ in 0..count {
                    push_credit_length(&mut lengths, script.number(1 << 40));
                }
                Frame::Credit { start: message, lengths: &lengths }
            }
            3 => Frame::AbortSend { message, reason },
            4 => Frame::AbortReceive { message, reason },
            5 => Frame::StreamEnd {
                message,
                units: script.number(1 << 32) as u32,
                length: script.number(1 << 40),
                immediate: script.byte().is_multiple_of(2).then_some(1),
            },
            6 => Frame::Ping,
            7 => Frame::PathChallenge { token: message },
            8 => Frame::PathResponse { token: message },
            9 => {
                let ce = script.number(1 << 40);
                let received = ce + script.number(1 << 40);
                let counts = PathCounts { received, ect0: received - ce, ect1: 0, ce };
                let (newest, age_nanos) = (script.number(u64::MAX), script.number(1 << 32) as u32);
                Frame::PathCounts { path, newest, age_nanos, counts }
            }
            10 => {
                let first = script.number(u64::MAX);
                lengths.extend_from_slice(&first.to_be_bytes());
                lengths.extend_from_slice(&(script.number(1 << 32) as u32).to_be_bytes());
                Frame::Losses { path, runs: &lengths }
            }
            11 => {
                let [lost, runs, found, duplicates, dropped] =
                    [(); 5].map(|()| script.number(1 << 48));
                let counts = LossCounts { lost, runs, found, duplicates, dropped };
                Frame::LossCounts { path, counts }
            }
            12 => Frame::Draining { is_done: script.byte().is_multiple_of(2) },
            13 => Frame::Unit { unit_bytes: script.number(1 << 16) as u16 },
            14 => {
                let is_answer = script.byte().is_multiple_of(2);
                Frame::AckCadence { is_answer, delay_nanos: script.number(1 << 32) as u32 }
            }
            _ => Frame::Close { code: script.byte() },
        };
        self.control(&[frame]);
    }

    fn unit(&mut self, script: &mut Script<'_>) {
        let units = 1 + u64::from(script.byte() % 4);
        let length = units * UNIT - u64::from(script.byte() % 2) * 10;
        let unit = script.number(1 << 32) as u32;
        let kind = Kind::Unit {
            message: script.number(1 << 48),
            unit,
            length: if script.byte() == 9 { script.number(1 << 40) } else { length },
            k: script.byte().saturating_sub(250),
            m: script.byte().saturating_sub(250),
            is_stream: script.byte() > 200,
            immediate: script.byte().is_multiple_of(2).then_some(1),
        };
        let count = match script.byte() {
            0..200 => length.saturating_sub(u64::from(unit) * UNIT).min(UNIT),
            count => u64::from(count),
        };
        let payload = vec![0xc3; count as usize];
        let epoch = u8::from(script.byte() == 1);
        self.packet(kind, &payload, epoch);
    }

    fn asked(&mut self, is_receive: bool) -> u64 {
        self.waiting.insert(self.next_user_data, is_receive);
        self.next_user_data += 1;
        self.next_user_data - 1
    }

    fn post_send(&mut self, script: &mut Script<'_>) {
        let reliability = match script.byte() % 3 {
            0 => Reliability::SelectiveRepeat,
            1 => Reliability::ErasureCoded { k: 4, m: 2, depth: 2 },
            _ => Reliability::Unreliable,
        };
        let user_data = self.asked(false);
        let length = script.number(5000);
        let request =
            SendRequest { offset: 0, length, reliability, immediate: None, priority: 0, user_data };
        if self.session.post_send(request, self.now).is_err() {
            self.waiting.remove(&user_data);
        }
    }

    fn post_receive(&mut self) {
        let user_data = self.asked(true);
        let offset = user_data % 8 * STRIDE + MEMORY_BYTES as u64 / 2;
        let is_free = !self.memory.open.contains_key(&offset);
        let request = ReceiveRequest { offset, length_max: STRIDE, user_data };
        if is_free && self.session.post_receive(request, self.now).is_ok() {
            self.memory.open.insert(offset, offset + STRIDE);
        } else {
            self.waiting.remove(&user_data);
        }
    }

    fn stream(&mut self, script: &mut Script<'_>) {
        let user_data = self.asked(false);
        let request = StreamRequest {
            length: 4 * UNIT,
            reliability: Reliability::SelectiveRepeat,
            immediate: None,
            priority: 0,
            user_data,
        };
        match self.session.post_stream(request, self.now) {
            Ok(message) => {
                let remote_offset = u64::from(script.byte() % 4) * UNIT;
                let part = StreamPart { offset: 0, remote_offset, length: UNIT };
                let _ = self.session.continue_stream(message, part, self.now);
                if script.byte().is_multiple_of(2) {
                    let _ = self.session.end_stream(message, self.now);
                }
            }
            Err(_) => drop(self.waiting.remove(&user_data)),
        }
    }

    /// The token of the challenge in a packet of the session, if it has one.
    fn token_in(&self, datagram: &mut [u8]) -> Option<u64> {
        let (header, start) = Header::decode(datagram).ok()?;
        let (aad, sealed) = datagram.split_at_mut(start);
        let plaintext = self.own_key.open_in_place(header.nonce(), aad, sealed).ok()?;
        Frames::new(plaintext, self.version, PATHS).flatten().find_map(|frame| match frame {
            Frame::PathChallenge { token } => Some(token),
            _ => None,
        })
    }

    /// Pulls all outputs, whose number at any one time is bounded.
    fn pump(&mut self) {
        self.session.handle_timeout(self.now);
        let mut out = Vec::new();
        let mut count = 0;
        while self.session.next_transmit(&self.memory, self.now, &mut out) {
            self.sent_bytes += out.len();
            if self.token.is_none() {
                self.token = self.token_in(&mut out);
            }
            out.clear();
            count += 1;
            assert!(count <= DATAGRAMS_PER_INSTANT_MAX, "no end of packets");
        }
        while let Some(event) = self.session.next_event() {
            let done = match event {
                Event::SendCompleted { user_data, .. } => (user_data, false),
                Event::ReceiveCompleted { user_data, .. } => {
                    let offset = user_data % 8 * STRIDE + MEMORY_BYTES as u64 / 2;
                    self.memory.open.remove(&offset);
                    (user_data, true)
                }
                Event::Closed { .. } => {
                    self.is_closed = true;
                    continue;
                }
                Event::Established { .. } | Event::Draining => continue,
            };
            assert_eq!(self.waiting.remove(&done.0), Some(done.1), "completed once");
        }
        assert!(self.memory.bytes[..MEMORY_BYTES / 2].iter().all(|byte| *byte == 0x5a));
    }
}

#[test]
fn who_does_not_receive_challenges_establishes_nothing() {
    let mut world = World::new();
    let mut tokens: Vec<u64> = (0..64).collect();
    tokens.push(!world.token.unwrap());
    for token in tokens {
        world.control(&[Frame::PathResponse { token }]);
        world.pump();
    }
    assert!(!world.session.is_established());
    // Nor does the right answer, on another path.
    let token = world.token.unwrap();
    world.path = PathId(1);
    world.control(&[Frame::PathResponse { token }]);
    assert!(!world.session.is_established());
    world.path = PathId(0);
    world.control(&[Frame::PathResponse { token }]);
    assert!(world.session.is_established());
}

#[test]
fn an_address_that_answers_nothing_gets_little() {
    let mut world = World::new();
    // What came from where the peer was before counts for nothing.
    for _ in 0..200 {
        world.packet(Kind::Control, &[0; 256], 0);
    }
    world.source = Source::Elsewhere;
    world.control(&[Frame::Ping]);
    world.source = Source::Path;
    world.sent_bytes = 0;
    // The peer lives on a little, so that the session does: 40 bytes a second.
    for _ in 0..600 {
        world.now += 100_000_000;
        world.pump();
        if world.now.is_multiple_of(1_000_000_000) {
            world.control(&[Frame::Ping]);
        }
    }
    assert!(!world.is_closed && !world.session.is_established());
    let datagram = usize::from(UNIT as u16) + 100;
    // Ten and one for each path, one a second for each path, and thrice what came.
    let allowed = (10 + 61 * usize::from(PATHS)) * datagram + 3 * 60 * 60;
    assert!(world.sent_bytes < allowed, "{} of {allowed}", world.sent_bytes);
    assert!(world.sent_bytes > allowed / 3, "challenges go on: {}", world.sent_bytes);
}

#[test]
fn an_address_that_only_sends_gets_no_more_than_three_times_as_much() {
    let mut world = World::with_unit(8896);
    world.sent_bytes = 0;
    let mut came = 0;
    // Small packets, each to be acknowledged at once, and nine of ten numbers between them missing.
    for _ in 0..600 {
        world.now += 50_000_000;
        came += world.control(&[Frame::Ping]);
        world.next_packet_numbers[0] += 9;
        world.pump();
    }
    assert!(!world.is_closed && !world.session.is_established());
    let allowed = (10 + 31 * usize::from(PATHS)) * (8896 + 100) + 3 * came;
    assert!(world.sent_bytes < allowed, "{} of {allowed}", world.sent_bytes);
}

#[test]
fn packets_that_may_come_from_anywhere_let_nothing_more_go_to_an_unproven_address() {
    let mut world = World::with_unit(8896);
    world.sent_bytes = 0;
    world.source = Source::Unnamed;
    for _ in 0..50_000 {
        world.now += 100_000;
        world.control(&[Frame::Ping]);
        world.next_packet_numbers[0] += 9;
        world.pump();
    }
    assert!(!world.is_closed && !world.session.is_established());
    let allowed = (10 + 6 * usize::from(PATHS)) * (8896 + 100);
    assert!(world.sent_bytes < allowed, "{} of {allowed}", world.sent_bytes);
}

/// Acknowledgements, and their bytes, that a peer gets in 10 ms for a unit each 2 µs, with such a
/// request before each.
#[cfg(test)]
fn acknowledgements(
    version: Version,
    near_rtt: Option<Nanos>,
    mut ask: impl FnMut() -> Option<u32>,
) -> (u64, usize) {
    let steering = Steering { near_rtt, ..Steering::default() };
    let mut world = World::with(steering, |config| SessionConfig {
        version,
        rate_bytes_per_second: 1_250_000_000,
        packets_per_key: 1 << 20,
        ..config
    });
    world.version = version;
    let token = world.token.unwrap();
    world.control(&[Frame::PathResponse { token }]);
    assert!(world.session.is_established());
    world.post_receive();
    world.pump();
    world.sent_bytes = 0;
    let before = world.session.statistics().control_packets_sent;
    let kind = Kind::Unit {
        message: 0,
        unit: 0,
        length: 2 * UNIT,
        k: 0,
        m: 0,
        is_stream: false,
        immediate: None,
    };
    for _ in 0..5000 {
        world.now += 2000;
        if let Some(delay_nanos) = ask() {
            world.control(&[Frame::AckCadence { is_answer: false, delay_nanos }]);
        }
        world.packet(kind, &[7; UNIT as usize], 0);
        world.pump();
    }
    assert!(!world.is_closed);
    (world.session.statistics().control_packets_sent - before, world.sent_bytes)
}

#[test]
fn no_request_brings_more_acknowledgements_than_the_receivers_own_network_needs() {
    let (usual, usual_bytes) = acknowledgements(Version::V6, None, || None);
    assert!((95..=110).contains(&usual), "one each 100 µs: {usual}");
    let mut state = 1_u32;
    let mut any = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        Some(state >> (state % 32))
    };
    for asked in [Some(0), Some(1), Some(3500), Some(u32::MAX)] {
        let (found, bytes) = acknowledgements(Version::V6, None, || asked);
        assert_eq!(found, usual, "{asked:?}");
        assert!(bytes <= usual_bytes + 6 * found as usize, "{asked:?}: {bytes}, {usual_bytes}");
    }
    assert_eq!(acknowledgements(Version::V6, None, &mut any).0, usual);
    // Where the data centre's round trip is 40 µs, one each 10 µs.
    let near = Some(40_000);
    for asked in [0, 1, 3500, 10_000] {
        let (found, bytes) = acknowledgements(Version::V6, near, || Some(asked));
        assert!((900..=1010).contains(&found), "{asked}: {found}");
        // Each a little longer: by the answer, and by counts that are not zero any more.
        let each = usual_bytes as u64 / usual + 6 + 2;
        assert!(bytes as u64 <= each * found, "{bytes} for {found}; {usual_bytes} for {usual}");
    }
    for asked in [None, Some(100_000), Some(u32::MAX)] {
        assert_eq!(acknowledgements(Version::V6, near, || asked).0, usual, "{asked:?}");
    }
    let (found, _) = acknowledgements(Version::V6, near, &mut any);
    assert!((usual..=1010).contains(&found), "{found}");
    // Version 5 doesn't have the frame: its packets are malformed.
    assert_eq!(acknowledgements(Version::V5, near, || Some(1)).0, usual);
}

#[test]
fn a_unit_on_the_channel_of_candidates_is_malformed() {
    let mut world = World::established();
    world.post_receive();
    let kind = Kind::Unit {
        message: 0,
        unit: 0,
        length: UNIT,
        k: 0,
        m: 0,
        is_stream: false,
        immediate: None,
    };
    world.is_to_candidate = true;
    world.packet(kind, &[7; UNIT as usize], 0);
    let seen = world.session.statistics();
    assert_eq!((seen.malformed, seen.units_received), (1, 0));
    world.is_to_candidate = false;
    world.packet(kind, &[7; UNIT as usize], 0);
    assert_eq!(world.session.statistics().units_received, 1);
}
