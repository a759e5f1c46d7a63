//! The paths of a session on this host: each path's socket or queue pair, its peer address, and the
//! batch being gathered for it.
//!
//! The sockets have different ports, so that a network that hashes addresses and ports routes each
//! path separately (UnoLB's subflows); they may also be bound to addresses of different interfaces.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use quinn_udp::RecvMeta;
use rustix::event::{PollFd, PollFlags};
use sealane_proto::session::{
    Departure, Follow, PathId, PathSet, Received, Session, Source, Train,
};

use super::link::Link;
use super::outbound::{Outbound, SendCounters};
use super::path_threads::PathThreads;
use super::wire::{Ends, WireAddress};
use crate::udp::{self, Udp};

/// Where a path's packets go.
#[derive(Debug)]
struct Peer {
    address: SocketAddr,
    /// Where the peer may have moved to.
    candidate: Option<SocketAddr>,
}

impl Peer {
    /// Passes on a datagram and follows its source if asked to.
    fn heard(
        &mut self,
        path: PathId,
        datagram: Received<'_>,
        meta: &RecvMeta,
        each: &mut impl FnMut((PathId, Source), Received<'_>, &RecvMeta) -> Follow,
    ) {
        let source = match meta.addr {
            from if from == self.address => Source::Path,
            from if Some(from) == self.candidate => Source::Candidate,
            _ => Source::Elsewhere,
        };
        match each((path, source), datagram, meta) {
            Follow::Nowhere => {}
            Follow::Path => self.address = meta.addr,
            Follow::Candidate => self.candidate = Some(meta.addr),
        }
    }
}

/// One path.
#[derive(Debug)]
struct Lane {
    link: Link,
    peer: Peer,
    outbound: Outbound,
    has_datagrams: bool,
}

/// All paths of a session, in order of their numbers.
#[derive(Debug)]
pub(super) struct Lanes {
    all: Vec<Lane>,
    /// The threads that serve them, unless the worker does.
    threads: Option<PathThreads>,
    /// The lane to whose batch the next datagram is written; the right one if paths are used in
    /// turn.
    next: usize,
    /// The lane read most recently.
    read: usize,
}

impl Lanes {
    /// Creates a path for each pair of ends, served by the calling thread.
    pub(super) fn new(paths: impl IntoIterator<Item = Ends>) -> Self {
        let link = |ends| match ends {
            Ends::Udp(udp, peer) => (Link::own(*udp), peer),
            Ends::Verbs(pair, peer) => {
                (Link::verbs(pair, peer), WireAddress::Verbs(peer).network_address())
            }
        };
        Self::of(paths.into_iter().map(link), None)
    }

    /// As [`Self::new`] for UDP, served by this many threads for the given session.
    pub(super) fn threaded(
        paths: Vec<(Udp, SocketAddr)>,
        threads: usize,
        session: &Session,
    ) -> io::Result<Self> {
        let (sockets, peers): (Vec<_>, Vec<_>) = paths.into_iter().unzip();
        let opener = (session.opener(), session.opener_version());
        let (threads, ports) = PathThreads::start(sockets, threads, opener)?;
        let links = ports.into_iter().map(Link::threaded);
        Ok(Self::of(links.zip(peers), Some(threads)))
    }

    fn of(links: impl Iterator<Item = (Link, SocketAddr)>, threads: Option<PathThreads>) -> Self {
        let lane = |(link, address): (Link, SocketAddr)| {
            link.set_peer(address);
            let peer = Peer { address, candidate: None };
            Lane { outbound: Outbound::new(&link), link, peer, has_datagrams: false }
        };
        Self { all: links.map(lane).collect(), threads, next: 0, read: 0 }
    }

    /// The peer address of each path.
    pub(super) fn peers(&self) -> impl Iterator<Item = SocketAddr> {
        self.all.iter().map(|lane| lane.peer.address)
    }

    /// Receives once on the next path that has data; `None` if none has. `each` gets the datagram,
    /// its path, source and metadata, and returns whether the path follows it.
    pub(super) fn receive(
        &mut self,
        mut each: impl FnMut((PathId, Source), Received<'_>, &RecvMeta) -> Follow,
    ) -> Option<io::Result<udp::Received>> {
        if self.threads.is_some() {
            return self.take_arrived(&mut each).map(Ok);
        }
        let count = self.all.len();
        let mut behind = (1..=count).map(|step| (self.read + step) % count);
        let index = behind.find(|index| self.all[*index].has_datagrams)?;
        self.read = index;
        let Lane { link, peer, has_datagrams, .. } = &mut self.all[index];
        let path = PathId(index as u8);
        let received = match link {
            Link::Own { udp, .. } => udp.receive(|datagram, meta| {
                peer.heard(path, Received::sealed(datagram), meta, &mut each);
            }),
            Link::Verbs { pair, .. } => {
                // Neither where it came from nor its marks are known.
                let meta = RecvMeta::default();
                let received = pair.receive(|datagram| {
                    each((path, Source::Unnamed), Received::sealed(datagram), &meta);
                });
                let sealane_verbs::Received { datagrams, bytes, is_all } = received;
                Ok(udp::Received { datagrams, bytes, is_all })
            }
            Link::Threaded(_) => return None,
        };
        if received.as_ref().is_ok_and(|received| received.is_all) {
            *has_datagrams = false;
        }
        Some(received)
    }

    /// Takes a list that a path thread has received.
    fn take_arrived(
        &mut self,
        each: &mut impl FnMut((PathId, Source), Received<'_>, &RecvMeta) -> Follow,
    ) -> Option<udp::Received> {
        let threads = self.threads.as_mut()?;
        let mut arrived = threads.next_arrived()?;
        let (path, meta, bytes) = (arrived.path, arrived.meta, arrived.arrivals.len());
        let Lane { link, peer, .. } = &mut self.all[path];
        let before = peer.address;
        let mut datagrams = 0;
        for datagram in arrived.arrivals.datagrams() {
            peer.heard(PathId(path as u8), datagram, &meta, each);
            datagrams += 1;
        }
        if peer.address != before {
            link.set_peer(peer.address);
        }
        threads.return_buffer(arrived);
        Some(udp::Received { datagrams, bytes, is_all: false })
    }

    /// Adds one datagram, which `fill` appends to the given train, to its path's batch. False if
    /// there was none. Must not be called while blocked.
    pub(super) fn push(&mut self, fill: impl FnOnce(&mut Train) -> Option<Departure>) -> bool {
        let written = self.all[self.next].outbound.train();
        let mut start = written.len();
        let Some(Departure { path, is_to_candidate, ecn }) = fill(written) else { return false };
        let index = path.index();
        if let Ok([at, chosen]) = self.all.get_disjoint_mut([self.next, index]) {
            // It is for another path: move the datagram to that path's batch.
            let (from, to) = (at.outbound.train(), chosen.outbound.train());
            let place = to.len();
            from.move_to(start, to);
            start = place;
        }
        let Lane { link, peer, outbound, .. } = &mut self.all[index];
        match peer.candidate {
            Some(to) if is_to_candidate => outbound.send_apart(link, to, start, ecn),
            None if is_to_candidate => outbound.train().truncate(start),
            _ => {
                outbound.add(link, peer.address, start, ecn);
                self.next = (index + 1) % self.all.len();
            }
        }
        true
    }

    /// Sends the packets of these paths to their candidates from now on.
    pub(super) fn moved(&mut self, paths: PathSet) {
        for (path, lane) in (0..).map(PathId).zip(&mut self.all) {
            if paths.has(path)
                && let Some(candidate) = lane.peer.candidate.take()
            {
                lane.peer.address = candidate;
                lane.link.set_peer(candidate);
            }
        }
    }

    /// Gives the path threads the session's present keys.
    pub(super) fn update(&mut self, session: &Session) {
        if let Some(threads) = &mut self.threads {
            threads.update(session.opener_version(), || session.opener());
        }
    }

    /// Whether a path thread has ended although it should not.
    pub(super) fn has_failed(&self) -> bool {
        self.threads.as_ref().is_some_and(PathThreads::has_failed)
    }

    /// Whether a batch was not accepted.
    pub(super) fn is_blocked(&self) -> bool {
        self.all.iter().any(|lane| lane.outbound.is_blocked())
    }

    /// Sends the gathered batches, or with `only_blocked` only those that were not accepted last
    /// time.
    pub(super) fn flush(&mut self, only_blocked: bool) {
        for Lane { link, peer, outbound, .. } in &mut self.all {
            if outbound.is_blocked() || !only_blocked {
                outbound.flush(link, peer.address);
            }
        }
    }

    /// Counters of everything sent so far.
    pub(super) fn counters(&self) -> SendCounters {
        self.all.iter().map(|lane| lane.link.counters()).sum()
    }

    /// Number of receive calls that returned data.
    pub(super) fn receive_calls(&self) -> u64 {
        self.all.iter().map(|lane| lane.link.receive_calls()).sum()
    }

    /// How often each path's device failed.
    pub(super) fn failures(&self) -> impl Iterator<Item = u64> {
        self.all.iter().map(|lane| lane.link.failures())
    }

    /// Datagrams that the kernel dropped so far because a socket's buffer was full.
    pub(super) fn receive_drops(&self) -> u64 {
        self.all.iter().map(|lane| lane.link.receive_drops()).sum()
    }

    /// As [`Self::receive_drops`], of one path's socket.
    pub(super) fn receive_drops_on(&self, path: PathId) -> u64 {
        self.all[path.index()].link.receive_drops()
    }

    /// The paths.
    pub(super) fn paths(&self) -> impl Iterator<Item = PathId> + use<> {
        (0..self.all.len() as u8).map(PathId)
    }

    /// Whether there may be something to receive.
    pub(super) fn has_datagrams(&self) -> bool {
        self.threads.as_ref().is_some_and(PathThreads::has_arrived)
            || self.all.iter().any(|lane| lane.has_datagrams)
    }

    /// Announces that the thread will sleep on [`Self::poll_fds`]; false if there is something to
    /// do at once.
    pub(super) fn fall_asleep(&mut self, wants_datagrams: bool) -> bool {
        let Some(threads) = &self.threads else {
            let mut is_quiet = true;
            for Lane { link, outbound, has_datagrams, .. } in &mut self.all {
                let sleeps = link.fall_asleep(wants_datagrams, outbound.is_blocked());
                *has_datagrams |= !sleeps;
                is_quiet &= sleeps;
            }
            return is_quiet;
        };
        threads.fall_asleep(wants_datagrams, self.is_blocked());
        let has_room = |lane: &Lane| lane.outbound.is_blocked() && lane.link.has_room();
        !(wants_datagrams && threads.has_arrived() || self.all.iter().any(has_room))
    }

    /// Time until a path needs attention although nothing arrives, if any does.
    pub(super) fn due_in(&self) -> Option<Duration> {
        self.all.iter().filter_map(|lane| lane.link.due_in()).min()
    }

    /// The descriptors to wait for.
    pub(super) fn poll_fds(&self, wants_datagrams: bool) -> impl Iterator<Item = PollFd<'_>> {
        let event = self.threads.as_ref().map(PathThreads::event);
        let event = event.map(|event| PollFd::from_borrowed_fd(event, PollFlags::IN));
        let fds = self
            .all
            .iter()
            .filter_map(move |lane| lane.link.poll_fd(wants_datagrams, lane.outbound.is_blocked()));
        event.into_iter().chain(fds)
    }

    /// Processes what `poll` has found about [`Self::poll_fds`], in the same order. Without
    /// `wants_datagrams` there may be some at any of them.
    pub(super) fn polled(&mut self, wants_datagrams: bool, found: &[PollFlags]) {
        if let Some(threads) = &self.threads {
            return threads.woke_up(found.iter().any(|found| !found.is_empty()));
        }
        for (lane, found) in self.all.iter_mut().zip(found) {
            lane.link.woken(*found);
            let arrived = PollFlags::IN | PollFlags::ERR;
            lane.has_datagrams |= !wants_datagrams || found.intersects(arrived);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use sealane_proto::session::Ecn;

    use super::*;

    fn loopback() -> Udp {
        Udp::bind("127.0.0.1:0".parse().unwrap()).unwrap()
    }

    #[test]
    fn every_datagram_leaves_by_its_path_whatever_was_expected() {
        let receivers = [0, 1, 2].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
        let to = |path: usize| receivers[path].local_addr().unwrap();
        let mut lanes = Lanes::new((0..3).map(|path| Ends::Udp(Box::new(loopback()), to(path))));
        let order = [0, 1, 2, 0, 0, 2, 2, 1, 0, 2, 1];
        for (number, path) in order.iter().enumerate() {
            let departure =
                Departure { path: PathId(*path), is_to_candidate: false, ecn: Ecn::Ect0 };
            assert!(lanes.push(|bytes| {
                bytes.append(&[*path, number as u8].repeat(50));
                Some(departure)
            }));
        }
        assert!(!lanes.push(|_| None));
        lanes.flush(false);
        assert_eq!(lanes.counters().calls, 3, "a batch a path");
        let mut bytes = [0; 200];
        for (path, receiver) in receivers.iter().enumerate() {
            receiver.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            let mine = order.iter().enumerate().filter(|(_, chosen)| usize::from(**chosen) == path);
            for (number, _) in mine {
                assert_eq!(receiver.recv(&mut bytes).unwrap(), 100);
                assert_eq!(bytes[..100], [path as u8, number as u8].repeat(50));
            }
        }
    }

    #[test]
    fn paths_are_read_in_turn_and_only_those_that_have_something() {
        let sockets = [0, 1, 2].map(|_| loopback());
        let addresses: Vec<_> = sockets.iter().map(|udp| udp.local_address().unwrap()).collect();
        let nobody = "127.0.0.1:9".parse().unwrap();
        let mut lanes = Lanes::new(sockets.map(|udp| Ends::Udp(Box::new(udp), nobody)));
        assert!(lanes.receive(|_, _, _| unreachable!("nothing was sent")).is_none());
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        for path in [0, 2] {
            sender.send_to(&[path as u8; 10], addresses[path]).unwrap();
        }
        lanes.polled(true, &[PollFlags::IN, PollFlags::empty(), PollFlags::IN]);
        let mut seen = Vec::new();
        while lanes.has_datagrams() {
            let received = lanes.receive(|(path, source), datagram, _| {
                assert_eq!((source, datagram.bytes()[0]), (Source::Elsewhere, path.0));
                seen.push(path.0);
                if path.0 == 2 { Follow::Path } else { Follow::Nowhere }
            });
            received.unwrap().unwrap();
        }
        assert_eq!(seen, [2, 0], "the one after the last read comes first");
        let from = sender.local_addr().unwrap();
        assert_eq!(lanes.peers().collect::<Vec<_>>(), [nobody, nobody, from]);
    }

    #[test]
    fn only_packets_for_a_candidate_go_there_until_the_path_moves() {
        let [before, after] = [0, 1].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
        let udp = loopback();
        let here = udp.local_address().unwrap();
        let mut lanes = Lanes::new([Ends::Udp(Box::new(udp), before.local_addr().unwrap())]);
        let path = [PathId(0)].into_iter().fold(PathSet::default(), PathSet::with);
        let receive = |lanes: &mut Lanes, from: &UdpSocket, follow| {
            from.send_to(&[1; 10], here).unwrap();
            let mut seen = Vec::new();
            while seen.is_empty() {
                lanes.polled(false, &[PollFlags::empty()]);
                let received = lanes.receive(|(_, source), _, _| {
                    seen.push(source);
                    follow
                });
                received.unwrap().unwrap();
            }
            seen
        };
        assert_eq!(receive(&mut lanes, &after, Follow::Candidate), [Source::Elsewhere]);
        assert_eq!(receive(&mut lanes, &after, Follow::Nowhere), [Source::Candidate]);
        assert_eq!(receive(&mut lanes, &before, Follow::Nowhere), [Source::Path]);
        let send = |lanes: &mut Lanes, byte: u8, is_to_candidate| {
            let departure = Departure { path: PathId(0), is_to_candidate, ecn: Ecn::Ect0 };
            assert!(lanes.push(|bytes| {
                bytes.append(&[byte; 50]);
                Some(departure)
            }));
        };
        send(&mut lanes, 1, false);
        send(&mut lanes, 2, true);
        send(&mut lanes, 3, false);
        lanes.flush(false);
        lanes.moved(path);
        send(&mut lanes, 4, false);
        lanes.flush(false);
        let read = |socket: &UdpSocket| {
            socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            let mut bytes = [0; 200];
            [0, 1].map(|_| (socket.recv(&mut bytes).unwrap(), bytes[0]))
        };
        assert_eq!(read(&before), [(50, 1), (50, 3)]);
        assert_eq!(read(&after), [(50, 2), (50, 4)]);
        assert_eq!(receive(&mut lanes, &after, Follow::Nowhere), [Source::Path]);
    }
}
