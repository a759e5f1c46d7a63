//! Test 15 of the reference's list: a late host lets its socket's buffer fill. Packets dropped by
//! the kernel are sent again like lost ones, but count as drops of the host, not as losses of the
//! path.

use std::net::SocketAddr;
use std::ops::Range;

use rustix::event::PollFlags;
use sealane_proto::aead::Secret;
use sealane_proto::link::Nanos;
use sealane_proto::session::{
    Arrival, CompletionStatus, Detection, Ecn, Event, Follow, IpVersion, Memory, PACKETS_PER_KEY,
    PathId, PayloadMode, ReceiveRequest, Reliability, SendRequest, Session, SessionConfig,
    SessionKeys, Source, Steering, Version,
};

use super::lanes::Lanes;
use super::wire::Ends;
use crate::udp::Udp;

const MILLISECOND: Nanos = 1_000_000;
/// Thirty milliseconds at the rate.
pub(super) const MESSAGE_BYTES: usize = 1_200_000;
/// Packets of about three milliseconds.
const BUFFER_BYTES: usize = 128 << 10;

pub(super) struct Bytes(Vec<u8>);

impl Memory for Bytes {
    fn read(&self, offset: u64, into: &mut [u8]) {
        into.copy_from_slice(&self.0[offset as usize..offset as usize + into.len()]);
    }

    fn write(&mut self, offset: u64, from: &[u8]) {
        self.0[offset as usize..offset as usize + from.len()].copy_from_slice(from);
    }

    fn chunk_landed(&mut self, _slot: u16, _chunk: u32) {}

    fn chunks_cleared(&mut self, _slot: u16, _chunk_count: u32) {}
}

/// A session with time controlled by the test, on a real socket.
pub(super) struct End {
    pub(super) session: Session,
    lanes: Lanes,
    pub(super) memory: Bytes,
    completed: Vec<CompletionStatus>,
}

/// Two ends on loopback; the second has a small receive buffer.
pub(super) fn ends() -> [End; 2] {
    let sockets = [(); 2].map(|()| Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap());
    socket2::SockRef::from(&sockets[1]).set_recv_buffer_size(BUFFER_BYTES).unwrap();
    let [left, right] = sockets.each_ref().map(|udp| udp.local_address().unwrap());
    let [first, second] = sockets;
    [End::new(0, first, right), End::new(1, second, left)]
}

/// Posts a message from the first end to the second.
pub(super) fn post(ends: &mut [End; 2], reliability: Reliability, now: Nanos) {
    let length = MESSAGE_BYTES as u64;
    let receive = ReceiveRequest { offset: 0, length_max: length, user_data: 0 };
    ends[1].session.post_receive(receive, now).expect("room");
    let send =
        SendRequest { offset: 0, length, reliability, immediate: None, priority: 0, user_data: 0 };
    ends[0].session.post_send(send, now).expect("room");
}

/// A sender in the middle of a message, and when its next unit may leave.
pub(super) fn sending() -> ([End; 2], Nanos) {
    let mut ends = ends();
    post(&mut ends, Reliability::SelectiveRepeat, 0);
    exchange(&mut ends, 0..10);
    let due = ends[0].session.next_timeout().unwrap();
    assert!(due < 11 * MILLISECOND, "units are due: {due}");
    (ends, due)
}

/// Lets both ends read and send once in each of these milliseconds.
pub(super) fn exchange(ends: &mut [End; 2], milliseconds: Range<u64>) {
    for now in milliseconds.map(|count| count * MILLISECOND) {
        for end in ends.iter_mut() {
            end.receive(now);
            end.transmit(now);
        }
    }
}

impl End {
    fn new(index: u64, udp: Udp, peer: SocketAddr) -> Self {
        let config = SessionConfig {
            version: Version::V6,
            connection_id_local: 100 + index,
            connection_id_peer: 101 - index,
            unit_bytes: 1408,
            ip: IpVersion::V4,
            paths: 1,
            chunk_units: 4,
            slots: 2,
            rate_bytes_per_second: 40_000_000,
            idle_timeout: 10_000 * MILLISECOND,
            reordering: 0,
            detection: Detection::Reports,
            packets_per_key: PACKETS_PER_KEY,
            payload: PayloadMode::Real,
        };
        let secret = |direction: u64| Secret::take(&mut [direction as u8 + 1; 32]);
        let keys = SessionKeys {
            send: secret(index),
            receive: secret(1 - index),
            token_seed: [index as u8; 32],
        };
        Self {
            session: Session::new(config, Steering::default(), &keys, 0),
            lanes: Lanes::new([Ends::Udp(Box::new(udp), peer)]),
            memory: Bytes(vec![0; MESSAGE_BYTES]),
            completed: Vec::new(),
        }
    }

    pub(super) fn receive(&mut self, now: Nanos) {
        let Self { session, lanes, memory, .. } = self;
        lanes.polled(false, &[PollFlags::empty()]);
        while lanes.has_datagrams() {
            let received = lanes.receive(|(path, _), datagram, _| {
                let arrival = Arrival { path, source: Source::Path, ecn: Ecn::Ect0 };
                session.receive_packet(datagram, arrival, memory, now);
                Follow::Nowhere
            });
            received.expect("a path").expect("a socket");
        }
        if session.misses_packets(PathId(0)) {
            session.host_dropped(PathId(0), lanes.receive_drops_on(PathId(0)), now);
        }
    }

    pub(super) fn transmit(&mut self, now: Nanos) {
        let Self { session, lanes, memory, completed } = self;
        session.handle_timeout(now);
        while lanes
            .push(|bytes| session.next_packet(memory, now, bytes).then(|| session.departure()))
        {
        }
        lanes.flush(false);
        while let Some(event) = session.next_event() {
            match event {
                Event::SendCompleted { status, .. } | Event::ReceiveCompleted { status, .. } => {
                    completed.push(status);
                }
                Event::Closed { reason, .. } => panic!("closed: {reason:?}"),
                Event::Established { .. } | Event::Draining => {}
            }
        }
    }
}

/// Sends a message to an end that reads its socket every `looks_every`, until both have completed.
fn send(ends: &mut [End; 2], reliability: Reliability, looks_every: Nanos, now: &mut Nanos) {
    post(ends, reliability, *now);
    let until = *now + 2000 * MILLISECOND;
    let before = ends.each_ref().map(|end| end.completed.len());
    while ends.iter().zip(before).any(|(end, before)| end.completed.len() == before) {
        assert!(*now < until, "the session hangs: {:?}", ends[0].session.statistics());
        let [sender, receiver] = ends;
        sender.receive(*now);
        sender.transmit(*now);
        if now.is_multiple_of(looks_every) {
            receiver.receive(*now);
            receiver.transmit(*now);
        }
        *now += MILLISECOND;
    }
    assert_eq!(ends[0].memory.0, ends[1].memory.0);
}

#[test]
fn what_a_full_socket_drops_is_counted_apart_and_sent_again() {
    let coded = Reliability::ErasureCoded { k: 32, m: 8, depth: 1 };
    for reliability in [Reliability::SelectiveRepeat, coded] {
        let mut ends = ends();
        ends[0].memory.0 = (0..MESSAGE_BYTES).map(|at| ((at * 131) >> 3) as u8).collect();
        let mut now = 0;
        send(&mut ends, reliability, MILLISECOND, &mut now);
        assert_eq!(ends[1].lanes.receive_drops(), 0, "reading in time loses nothing");
        assert_eq!(ends[0].session.statistics().retransmitted_packets, 0);
        ends[1].memory.0.fill(0);
        send(&mut ends, reliability, 20 * MILLISECOND, &mut now);
        let drops = ends[1].lanes.receive_drops();
        assert!(drops > 50, "{drops}");
        let seen = ends[0].session.statistics();
        assert!(seen.retransmitted_packets > 20);
        assert!(seen.peer_drops > 50, "{}", seen.peer_drops);
        assert_eq!((seen.lost_packets, seen.lost_runs), (0, 0));
        ends[1].memory.0.fill(0);
        send(&mut ends, reliability, MILLISECOND, &mut now);
        assert_eq!(ends[1].lanes.receive_drops(), drops);
        for end in &ends {
            assert_eq!(end.completed, [CompletionStatus::Ok; 3]);
        }
    }
}
