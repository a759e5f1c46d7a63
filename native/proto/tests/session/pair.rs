//! Two sessions and the datagrams between them, controlled by a test.

use sealane_proto::aead::Secret;
use sealane_proto::link::Nanos;
use sealane_proto::session::packet::Header;
use sealane_proto::session::{
    Arrival, Detection, Ecn, Event, IpVersion, Memory, PACKETS_PER_KEY, PATHS_MAX, PathId,
    PayloadMode, ReceiveRequest, Reliability, SendRequest, Session, SessionConfig, SessionKeys,
    Source, Steering, Version,
};

pub const MILLISECOND: Nanos = 1_000_000;
/// One-way delay.
pub const DELAY: Nanos = 5 * MILLISECOND;
pub const UNIT: u64 = 256;

/// From the peer's address, with the mark it was sent with.
pub const ON_PATH: Arrival = Arrival { path: PathId(0), source: Source::Path, ecn: Ecn::Ect0 };
/// From another address.
pub const ELSEWHERE: Arrival =
    Arrival { path: PathId(0), source: Source::Elsewhere, ecn: Ecn::Ect0 };

/// Plain bytes, and the published chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bytes {
    pub bytes: Vec<u8>,
    pub chunks: Vec<(u16, u32)>,
}

impl Memory for Bytes {
    fn read(&self, offset: u64, into: &mut [u8]) {
        let start = offset as usize;
        into.copy_from_slice(&self.bytes[start..start + into.len()]);
    }

    fn write(&mut self, offset: u64, from: &[u8]) {
        let start = offset as usize;
        self.bytes[start..start + from.len()].copy_from_slice(from);
    }

    fn chunk_landed(&mut self, slot: u16, chunk: u32) {
        self.chunks.push((slot, chunk));
    }

    fn chunks_cleared(&mut self, slot: u16, _chunk_count: u32) {
        self.chunks.retain(|(landed, _)| *landed != slot);
    }
}

/// End 0 and end 1. `under_way[i]` holds the datagrams in flight to end i.
pub struct Pair {
    pub now: Nanos,
    pub ends: [Session; 2],
    pub memory: [Bytes; 2],
    pub under_way: [Vec<Vec<u8>>; 2],
    pub events: [Vec<Event>; 2],
}

pub fn end(index: u64, slots: u16, now: Nanos) -> Session {
    end_with(index, now, SessionConfig { slots, ..config(index) })
}

pub fn config(index: u64) -> SessionConfig {
    SessionConfig {
        version: Version::V6,
        connection_id_local: 100 + index,
        connection_id_peer: 101 - index,
        unit_bytes: UNIT as u16,
        ip: IpVersion::V4,
        paths: 1,
        chunk_units: 2,
        slots: 4,
        rate_bytes_per_second: 12_500_000,
        idle_timeout: 10_000 * MILLISECOND,
        reordering: 0,
        detection: Detection::Reports,
        packets_per_key: PACKETS_PER_KEY,
        payload: PayloadMode::Real,
    }
}

pub fn end_with(index: u64, now: Nanos, config: SessionConfig) -> Session {
    let secret = |direction: u64| Secret::take(&mut [direction as u8 + 1; 32]);
    Session::new(
        config,
        Steering::default(),
        &SessionKeys {
            send: secret(index),
            receive: secret(1 - index),
            token_seed: [index as u8; 32],
        },
        now,
    )
}

pub fn send(offset: u64, length: u64) -> SendRequest {
    SendRequest {
        offset,
        length,
        reliability: Reliability::SelectiveRepeat,
        immediate: None,
        priority: 0,
        user_data: offset,
    }
}

pub fn receive(offset: u64, length_max: u64) -> ReceiveRequest {
    ReceiveRequest { offset, length_max, user_data: offset }
}

/// The path that a datagram names; the first if it names none.
pub fn path_of(datagram: &[u8]) -> PathId {
    let channel = Header::decode(datagram).map_or(0, |(header, _)| header.channel as u8);
    PathId(channel % PATHS_MAX)
}

impl Pair {
    pub fn new(slots: u16) -> Self {
        Self::of([end(0, slots, 0), end(1, slots, 0)])
    }

    pub fn of(ends: [Session; 2]) -> Self {
        let pattern = |at: usize| ((at * 131) >> 3) as u8 ^ at as u8;
        let source = Bytes { bytes: (0..1 << 16).map(pattern).collect(), chunks: Vec::new() };
        let sink = Bytes { bytes: vec![0xa5; 1 << 16], chunks: Vec::new() };
        Self {
            now: 0,
            ends,
            memory: [source, sink],
            under_way: [Vec::new(), Vec::new()],
            events: [Vec::new(), Vec::new()],
        }
    }

    /// Creates a pair that has validated its path; the first events are already taken.
    pub fn established(slots: u16) -> Self {
        Self::new(slots).establish()
    }

    pub fn establish(self) -> Self {
        let mut pair = self;
        pair.run(100 * MILLISECOND);
        assert!(pair.ends.iter().all(Session::is_established));
        for events in &mut pair.events {
            assert!(matches!(events[..], [Event::Established { rtt }] if rtt == 2 * DELAY));
            events.clear();
        }
        pair
    }

    /// Lets both ends send what they may, and collects their events.
    pub fn pump(&mut self) {
        for index in 0..2 {
            self.ends[index].handle_timeout(self.now);
            let mut datagram = Vec::new();
            while self.ends[index].next_transmit(&self.memory[index], self.now, &mut datagram) {
                self.under_way[1 - index].push(std::mem::take(&mut datagram));
            }
            assert!(datagram.is_empty());
            while let Some(event) = self.ends[index].next_event() {
                self.events[index].push(event);
            }
        }
    }

    /// Delivers one datagram in flight to an end, on the path that it names.
    pub fn deliver(&mut self, index: usize, mut datagram: Vec<u8>) {
        let arrival = Arrival { path: path_of(&datagram), ..ON_PATH };
        self.ends[index].receive(&mut datagram, arrival, &mut self.memory[index], self.now);
    }

    /// Runs for a time. Datagrams arrive after [`DELAY`] unless `keeps` drops them.
    pub fn run_filtered(&mut self, time: Nanos, mut keeps: impl FnMut(usize, &[u8]) -> bool) {
        let until = self.now + time;
        loop {
            self.pump();
            if self.under_way.iter().all(Vec::is_empty) {
                let timers = self.ends.iter().filter_map(Session::next_timeout);
                let next = timers.min().unwrap_or(u64::MAX);
                assert!(next > self.now, "nothing to send, and yet a timer that is due");
                self.now = next.min(until);
                if next > until {
                    return;
                }
                continue;
            }
            if self.now + DELAY > until {
                self.now = until;
                return;
            }
            self.now += DELAY;
            for index in 0..2 {
                for datagram in std::mem::take(&mut self.under_way[index]) {
                    if keeps(index, &datagram) {
                        self.deliver(index, datagram);
                    }
                }
            }
        }
    }

    pub fn run(&mut self, time: Nanos) {
        self.run_filtered(time, |_, _| true);
    }
}
