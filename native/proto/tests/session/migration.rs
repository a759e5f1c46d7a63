//! A path whose peer is suddenly at another address, and addresses that only pretend to be the
//! peer's.

use std::collections::VecDeque;

use sealane_proto::link::Nanos;
use sealane_proto::session::{
    Arrival, CloseReason, CompletionStatus, Departure, Ecn, Event, Follow, Session, SessionConfig,
    Source,
};

use crate::is_unit;
use crate::pair::{DELAY, MILLISECOND, Pair, config, end_with, path_of, receive, send};

const LENGTH: u64 = 50_000;
const PATHS: usize = 2;

/// The inside end's addresses as the outside end sees them: the NAT's port of each path.
type Port = u16;
const FIRST: Port = 100;
const SECOND: Port = 200;
const ATTACKER: Port = 666;

/// A datagram on its way.
struct Flying {
    at: Nanos,
    to_inside: bool,
    /// Outside this NAT: where it comes from, or where it goes.
    port: Port,
    /// Its mark on arrival.
    ecn: Ecn,
    bytes: Vec<u8>,
}

/// End 0 behind a NAT, end 1 outside, which remembers addresses as its sockets do.
struct Nat {
    pair: Pair,
    /// Ports by which the inside end leaves now, for the first path; the next has the next one …
    leaves_by: Port,
    /// … and by which it is reached.
    reached_by: Vec<Port>,
    peers: [Port; PATHS],
    candidates: [Option<Port>; PATHS],
    /// How often one was taken.
    considered: u32,
    flying: VecDeque<Flying>,
    /// Bytes sent to each port, and whether any was a unit.
    sent: Vec<(Port, usize, bool)>,
}

/// What an attacker does with the datagrams that it sees.
type Meddling<'a> = &'a mut dyn FnMut(&Flying) -> Vec<Flying>;

impl Nat {
    fn new(idle_timeout: Nanos) -> Self {
        let config = |index| SessionConfig { paths: PATHS as u8, idle_timeout, ..config(index) };
        let pair = Pair::of([0, 1].map(|index| end_with(index, 0, config(index))));
        let peers = [FIRST, FIRST + 1];
        let mut nat = Self {
            pair,
            leaves_by: FIRST,
            reached_by: vec![FIRST],
            peers,
            candidates: [None; PATHS],
            considered: 0,
            flying: VecDeque::new(),
            sent: Vec::new(),
        };
        nat.run(200 * MILLISECOND);
        assert!(nat.pair.ends.iter().all(Session::is_established));
        nat
    }

    /// The NAT forgets its bindings: packets leave by others, and the earlier ones are closed.
    fn rebind(&mut self, port: Port) {
        self.leaves_by = port;
        self.reached_by = vec![port];
    }

    fn pump(&mut self) {
        let Self { pair, leaves_by, peers, candidates, flying, sent, .. } = self;
        for index in 0..2 {
            let session = &mut pair.ends[index];
            session.handle_timeout(pair.now);
            let moved = session.take_moved();
            for (path, peer) in (0..).zip(peers.iter_mut()) {
                if moved.has(sealane_proto::session::PathId(path)) {
                    assert_eq!(index, 1, "the outside end's address never changes");
                    *peer = candidates[usize::from(path)].take().unwrap();
                }
            }
            let mut bytes = Vec::new();
            while session.next_transmit(&pair.memory[index], pair.now, &mut bytes) {
                let Departure { path, is_to_candidate, .. } = session.departure();
                let bytes = std::mem::take(&mut bytes);
                let port = match index {
                    0 => *leaves_by + Port::from(path.0),
                    _ if is_to_candidate => candidates[path.index()].unwrap(),
                    _ => peers[path.index()],
                };
                if index == 1 {
                    sent.push((port, bytes.len(), is_unit(&bytes)));
                }
                let at = pair.now + DELAY;
                let ecn = Ecn::Ect0;
                flying.push_back(Flying { at, to_inside: index == 1, port, ecn, bytes });
            }
            while let Some(event) = session.next_event() {
                pair.events[index].push(event);
            }
        }
    }

    fn arrive(&mut self, Flying { to_inside, port, ecn, mut bytes, .. }: Flying) {
        let Self { pair, reached_by, peers, candidates, considered, .. } = self;
        let path = path_of(&bytes);
        let index = usize::from(!to_inside);
        let mut source = Source::Path;
        if to_inside {
            let is_open = reached_by.iter().any(|open| open + Port::from(path.0) == port);
            if !is_open {
                return;
            }
        } else if port != peers[path.index()] {
            let is_candidate = candidates[path.index()] == Some(port);
            source = if is_candidate { Source::Candidate } else { Source::Elsewhere };
        }
        let arrival = Arrival { path, source, ecn };
        let session = &mut pair.ends[index];
        match session.receive(&mut bytes, arrival, &mut pair.memory[index], pair.now) {
            None | Some(Follow::Nowhere) => {}
            Some(Follow::Path) => peers[path.index()] = port,
            Some(Follow::Candidate) => {
                candidates[path.index()] = Some(port);
                *considered += 1;
            }
        }
    }

    fn run_with(&mut self, time: Nanos, meddles: Meddling<'_>) {
        let until = self.pair.now + time;
        loop {
            self.pump();
            let timers = self.pair.ends.iter().filter_map(Session::next_timeout);
            let next = timers.chain(self.flying.front().map(|flying| flying.at)).min();
            let next = next.unwrap_or(u64::MAX);
            if next > until {
                self.pair.now = until;
                return;
            }
            self.pair.now = next;
            while self.flying.front().is_some_and(|flying| flying.at <= next) {
                let flying = self.flying.pop_front().unwrap();
                for arriving in meddles(&flying) {
                    self.arrive(arriving);
                }
            }
        }
    }

    fn run(&mut self, time: Nanos) {
        self.run_with(time, &mut pass);
    }

    /// Posts a message from an end to the other one, unless the window is full.
    fn try_post(&mut self, from: usize) -> bool {
        let now = self.pair.now;
        let is_posted = self.pair.ends[from].post_send(send(0, LENGTH), now).is_ok();
        if is_posted {
            self.pair.ends[1 - from].post_receive(receive(0, LENGTH), now).unwrap();
        }
        is_posted
    }

    fn post(&mut self, from: usize) {
        assert!(self.try_post(from));
    }

    fn completed(&self, from: usize) -> usize {
        let sends = self.pair.events[from].iter().filter(|event| {
            matches!(event, Event::SendCompleted { status: CompletionStatus::Ok, .. })
        });
        sends.count()
    }

    fn moves(&self) -> u64 {
        self.pair.ends[1].statistics().path_moves
    }

    /// Bytes sent to a port and the one behind it, and whether units were among them.
    fn sent_to(&self, port: Port) -> (usize, bool) {
        let there = self.sent.iter().filter(|(to, ..)| (port..port + 2).contains(to));
        there.fold((0, false), |(bytes, any), (_, more, unit)| (bytes + more, any | unit))
    }
}

fn copy(flying: &Flying) -> Flying {
    Flying { bytes: flying.bytes.clone(), ..*flying }
}

fn pass(flying: &Flying) -> Vec<Flying> {
    vec![copy(flying)]
}

#[test]
fn a_message_goes_on_when_the_nat_of_its_sender_is_rebound() {
    let mut nat = Nat::new(10_000 * MILLISECOND);
    nat.post(0);
    nat.run(DELAY + 2 * MILLISECOND);
    assert!(nat.flying.iter().any(|flying| is_unit(&flying.bytes)), "in the midst of it");
    nat.rebind(SECOND);
    nat.run(1_000 * MILLISECOND);
    assert_eq!((nat.completed(0), nat.moves()), (1, 2));
    assert_eq!(nat.peers, [SECOND, SECOND + 1]);
    nat.post(0);
    nat.run(DELAY + 2 * MILLISECOND);
    nat.rebind(FIRST);
    nat.run(2_000 * MILLISECOND);
    assert_eq!((nat.completed(0), nat.moves()), (2, 4), "as often as it has to");
}

#[test]
fn a_message_to_a_receiver_whose_nat_is_rebound_goes_on_after_a_second() {
    let mut nat = Nat::new(60_000 * MILLISECOND);
    nat.post(1);
    nat.run(2 * DELAY + 2 * MILLISECOND);
    let landed = nat.pair.ends[0].statistics().units_received;
    assert!(landed > 0 && nat.completed(1) == 0, "in the midst of it");
    nat.rebind(SECOND);
    // What it happens to send at first is lost, and then it has nothing to say.
    nat.run_with(500 * MILLISECOND, &mut |flying| {
        flying.to_inside.then(|| copy(flying)).into_iter().collect()
    });
    nat.run(1_000 * MILLISECOND);
    assert_eq!((nat.completed(1), nat.moves()), (1, 2));
}

#[test]
fn a_quiet_session_is_reached_at_its_new_address_after_a_quarter_of_the_idle_timeout() {
    let mut nat = Nat::new(2_000 * MILLISECOND);
    nat.rebind(SECOND);
    nat.run(5_000 * MILLISECOND);
    assert_eq!((nat.peers, nat.moves()), ([SECOND, SECOND + 1], 2));
    nat.post(1);
    nat.run(200 * MILLISECOND);
    assert_eq!(nat.completed(1), 1);
}

#[test]
fn a_path_that_rests_while_others_are_busy_follows_too() {
    let mut nat = Nat::new(2_000 * MILLISECOND);
    // Only the second path's binding is forgotten, and the inside end sends nothing on it by itself.
    let mut posted = 0;
    for round in 0..200 {
        posted += usize::from(nat.try_post(1));
        nat.run_with(10 * MILLISECOND, &mut |flying| {
            let mut arriving = copy(flying);
            if path_of(&flying.bytes).0 == 1 {
                match flying.to_inside {
                    true if flying.port == FIRST + 1 => return Vec::new(),
                    true => {}
                    false if round < 20 => return Vec::new(),
                    false => arriving.port = SECOND + 1,
                }
            }
            vec![arriving]
        });
        nat.reached_by = vec![FIRST, SECOND];
    }
    assert_eq!((nat.peers, nat.moves()), ([FIRST, SECOND + 1], 1));
    nat.run(100 * MILLISECOND);
    assert_eq!(nat.completed(1), posted);
}

#[test]
fn a_path_does_not_follow_copies_of_packets_whose_sender_has_not_moved() {
    let mut nat = Nat::new(10_000 * MILLISECOND);
    nat.reached_by.push(ATTACKER);
    let mut count = 0;
    for _ in 0..10 {
        nat.post(0);
        // The attacker is faster than every second packet, and relays what comes back.
        nat.run_with(500 * MILLISECOND, &mut |flying| {
            count += 1;
            let mut first = copy(flying);
            if flying.to_inside || count % 2 == 0 {
                return vec![first];
            }
            first.port = ATTACKER + Port::from(path_of(&flying.bytes).0);
            vec![first, copy(flying)]
        });
    }
    assert_eq!((nat.completed(0), nat.moves()), (10, 0));
    let (bytes, units) = nat.sent_to(ATTACKER);
    assert!(bytes > 0 && !units, "only challenges went there");
}

#[test]
fn a_path_does_not_move_while_packets_come_from_where_they_did() {
    let mut nat = Nat::new(10_000 * MILLISECOND);
    nat.reached_by.push(ATTACKER);
    nat.post(0);
    nat.run(DELAY + 2 * MILLISECOND);
    let mut count = 0;
    // The other direction works only by the attacker, who is faster than every second packet.
    nat.run_with(300 * MILLISECOND, &mut |flying| {
        count += 1;
        let path = Port::from(path_of(&flying.bytes).0);
        match flying.to_inside {
            true if flying.port < ATTACKER => Vec::new(),
            false if count % 2 == 0 => vec![Flying { port: ATTACKER + path, ..copy(flying) }],
            _ => pass(flying),
        }
    });
    assert!(nat.considered > 0);
    assert_eq!((nat.moves(), nat.peers), (0, [FIRST, FIRST + 1]));
}

#[test]
fn a_path_does_not_consider_one_address_after_another() {
    let mut nat = Nat::new(10_000 * MILLISECOND);
    let mut port = ATTACKER;
    for _ in 0..50 {
        nat.post(0);
        nat.run_with(100 * MILLISECOND, &mut |flying| {
            port += u16::from(!flying.to_inside);
            let from_elsewhere = Flying { port, ..copy(flying) };
            if flying.to_inside { pass(flying) } else { vec![from_elsewhere, copy(flying)] }
        });
        // Now and then the original is first, which refuses the candidate.
        nat.post(0);
        nat.run(50 * MILLISECOND);
    }
    let most = PATHS as u32 * 8;
    assert!((1..=most).contains(&nat.considered), "{} in 7.5 s", nat.considered);
    let seen = nat.pair.ends[1].statistics();
    assert_eq!(seen.lost_packets, 0, "what candidates don't answer is no loss of the path");
    assert!(nat.sent_to(ATTACKER + 100).0 == 0 && nat.moves() == 0);
}

#[test]
fn a_path_waits_for_its_present_address_before_it_moves() {
    let mut nat = Nat::new(4_000 * MILLISECOND);
    nat.reached_by.push(ATTACKER);
    // The attacker sends a packet on, relays the challenges, is the first with the large answers,
    // and holds back all others for a while.
    let (mut is_begun, mut held) = (false, Vec::new());
    let until = nat.pair.now + 4_000 * MILLISECOND;
    while nat.considered == 0 && nat.pair.now < until {
        nat.run_with(MILLISECOND, &mut |flying| {
            let from_elsewhere = Flying { port: ATTACKER, ..copy(flying) };
            let is_first = !flying.to_inside && path_of(&flying.bytes).0 == 0;
            is_begun |= is_first;
            if is_first { vec![from_elsewhere, copy(flying)] } else { pass(flying) }
        });
    }
    nat.run_with(2 * DELAY + 5 * MILLISECOND, &mut |flying| {
        if flying.to_inside || path_of(&flying.bytes).0 != 0 {
            return pass(flying);
        }
        if flying.bytes.len() > 200 {
            return vec![Flying { port: ATTACKER, ..copy(flying) }];
        }
        held.push(copy(flying));
        Vec::new()
    });
    assert!(is_begun && !held.is_empty() && nat.considered == 1, "{}", held.len());
    for late in held {
        nat.arrive(late);
    }
    nat.run(1_000 * MILLISECOND);
    assert_eq!((nat.moves(), nat.peers), (0, [FIRST, FIRST + 1]));
}

#[test]
fn a_candidate_that_answers_nothing_gets_little_and_no_path() {
    let mut nat = Nat::new(100_000 * MILLISECOND);
    nat.post(0);
    // Nothing reaches the inside end. What it sends comes from where nobody answers, and of that
    // only one packet a second and path arrives.
    let mut came = 0;
    for _ in 0..60 {
        let mut has_come = [false; PATHS];
        nat.run_with(1_000 * MILLISECOND, &mut |flying| {
            let path = path_of(&flying.bytes);
            if flying.to_inside || std::mem::replace(&mut has_come[path.index()], true) {
                return Vec::new();
            }
            came += flying.bytes.len();
            vec![Flying { port: ATTACKER + Port::from(path.0), ..copy(flying) }]
        });
    }
    assert_eq!((nat.moves(), nat.peers), (0, [FIRST, FIRST + 1]));
    let (bytes, units) = nat.sent_to(ATTACKER);
    // Ten and one for each path, one a second for each path, and thrice what came.
    let allowed = (10 + 61 * PATHS) * 330 + 3 * came;
    assert!(bytes > 0 && bytes < allowed && !units, "{bytes} of {allowed}");
}

#[test]
fn a_path_does_not_move_to_where_its_units_do_not_pass() {
    let mut nat = Nat::new(2_000 * MILLISECOND);
    nat.rebind(SECOND);
    nat.run_with(6_000 * MILLISECOND, &mut |flying| {
        let passes = !flying.to_inside || flying.bytes.len() < 200;
        passes.then(|| copy(flying)).into_iter().collect()
    });
    assert_eq!(nat.moves(), 0);
    assert!(nat.sent_to(SECOND).0 > 0, "it was tried");
}

#[test]
fn an_old_packet_makes_no_candidate() {
    let mut nat = Nat::new(10_000 * MILLISECOND);
    let mut kept = Vec::new();
    nat.post(0);
    nat.run_with(500 * MILLISECOND, &mut |flying| {
        if flying.to_inside {
            return pass(flying);
        }
        // One packet is held back; it is authentic and arrives late, from elsewhere.
        if kept.is_empty() && is_unit(&flying.bytes) {
            kept.push(copy(flying));
            return Vec::new();
        }
        pass(flying)
    });
    let late = kept.pop().unwrap();
    let before = nat.pair.ends[1].statistics().packets_received;
    nat.arrive(Flying { port: ATTACKER, ..late });
    assert_eq!(nat.pair.ends[1].statistics().packets_received, before + 1);
    assert_eq!(nat.candidates, [None, None]);
}

#[test]
fn a_path_stays_where_its_challenges_arrive_although_its_peer_leaves_by_another() {
    let mut nat = Nat::new(10_000 * MILLISECOND);
    nat.leaves_by = SECOND;
    nat.reached_by = vec![FIRST, SECOND];
    for from in [0, 1] {
        nat.post(from);
        nat.run(500 * MILLISECOND);
        assert_eq!(nat.completed(from), 1);
    }
    assert_eq!((nat.moves(), nat.peers), (0, [FIRST, FIRST + 1]));
}

#[test]
fn copies_without_marks_do_not_end_marking() {
    let mut nat = Nat::new(10_000 * MILLISECOND);
    for _ in 0..5 {
        nat.post(0);
        nat.run_with(200 * MILLISECOND, &mut |flying| {
            let erased = Flying { port: ATTACKER, ecn: Ecn::NotEct, ..copy(flying) };
            if flying.to_inside { pass(flying) } else { vec![erased, copy(flying)] }
        });
    }
    let inside = nat.pair.ends[0].statistics();
    assert_eq!((nat.completed(0), inside.is_ecn_capable, inside.marking_failures), (5, 1, 0));
}

#[test]
fn an_end_with_part_of_a_message_probes_although_another_path_is_down() {
    let mut nat = Nat::new(60_000 * MILLISECOND);
    let alive = |flying: &Flying| path_of(&flying.bytes).0 == 0;
    let only_first =
        &mut |flying: &Flying| alive(flying).then(|| copy(flying)).into_iter().collect::<Vec<_>>();
    for from in [0, 1, 0, 1] {
        nat.post(from);
        nat.run_with(200 * MILLISECOND, only_first);
    }
    assert_eq!([0, 1].map(|from| nat.completed(from)), [2, 2]);
    nat.post(1);
    nat.run_with(2 * DELAY + 2 * MILLISECOND, only_first);
    nat.rebind(SECOND);
    nat.run_with(500 * MILLISECOND, &mut |flying| {
        (flying.to_inside && alive(flying)).then(|| copy(flying)).into_iter().collect()
    });
    nat.run_with(1_000 * MILLISECOND, only_first);
    assert_eq!((nat.completed(1), nat.moves()), (3, 1));
}

#[test]
fn forgeries_from_elsewhere_are_soon_not_opened() {
    let mut nat = Nat::new(10_000 * MILLISECOND);
    nat.post(0);
    nat.run(DELAY + MILLISECOND);
    let flying = nat.flying.iter().find(|flying| is_unit(&flying.bytes) && !flying.to_inside);
    let mut genuine = flying.map_or_else(|| unreachable!("a unit leaves"), copy);
    genuine.port = ATTACKER;
    let mut forged = copy(&genuine);
    *forged.bytes.last_mut().unwrap() ^= 1;
    for _ in 0..1000 {
        nat.arrive(copy(&forged));
    }
    let seen = nat.pair.ends[1].statistics();
    assert_eq!((seen.forged, seen.foreign_packets), (64, 1000 - 64));
    nat.arrive(copy(&genuine));
    assert_eq!(nat.considered, 0, "nor is anything else from elsewhere");
    nat.arrive(Flying { port: FIRST, ..copy(&forged) });
    assert_eq!(nat.pair.ends[1].statistics().forged, 65, "the path's own address is not held up");
    nat.pair.now += 10 * MILLISECOND;
    nat.arrive(genuine);
    assert_eq!(nat.considered, 1);
}

#[test]
fn an_address_that_does_not_answer_holds_up_a_move_for_a_moment_only() {
    let mut nat = Nat::new(10_000 * MILLISECOND);
    nat.post(0);
    nat.run(DELAY + 2 * MILLISECOND);
    nat.rebind(SECOND);
    let mut is_copied = [false; PATHS];
    nat.run_with(400 * MILLISECOND, &mut |flying| {
        let path = path_of(&flying.bytes);
        let is_after = !flying.to_inside && flying.port >= SECOND;
        if !is_after || std::mem::replace(&mut is_copied[path.index()], true) {
            return pass(flying);
        }
        vec![Flying { port: ATTACKER, ..copy(flying) }, copy(flying)]
    });
    assert_eq!((is_copied, nat.moves(), nat.completed(0)), ([true; PATHS], 2, 1));
}

#[test]
fn a_session_that_closes_challenges_nobody() {
    let mut nat = Nat::new(10_000 * MILLISECOND);
    nat.post(0);
    nat.run_with(2 * DELAY + 2 * MILLISECOND, &mut |flying| {
        vec![Flying { port: if flying.to_inside { flying.port } else { ATTACKER }, ..copy(flying) }]
    });
    assert!(nat.considered > 0 && nat.sent_to(ATTACKER).0 > 0);
    // Nobody answers, until the next challenge is about to leave.
    nat.run_with(95 * MILLISECOND, &mut |_| Vec::new());
    let now = nat.pair.now;
    nat.pair.ends[1].close(CloseReason::Requested, now);
    nat.sent.clear();
    nat.run(2_000 * MILLISECOND);
    assert_eq!(nat.sent_to(ATTACKER).0, 0);
    assert!(nat.pair.ends[1].is_closed());
}
