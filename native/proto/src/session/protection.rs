//! Seals and opens packets; owns the packet numbers (nonces), the keys and the replay windows.

use crate::aead::TAG_BYTES;
use crate::link::Nanos;

use super::config::{PayloadMode, SessionConfig, SessionKeys};
use super::epochs::{ReceiveKeys, SendKeys};
use super::opening::{Opener, Received};
use super::packet::{Header, Kind, Version};
use super::paths::PathId;
use super::replay::ReplayWindow;
use super::train::Train;

/// One channel, that is one path, or the candidates of one: its packet numbers in both directions.
#[derive(Debug)]
struct Channel {
    /// Number of the next packet; advances only in [`Protection::begin`]. It never restarts, so one
    /// replay window serves all epochs of a channel.
    next_packet_number: u64,
    /// Number of its first packet in the current sending epoch.
    epoch_start: u64,
    replay: ReplayWindow,
}

impl Channel {
    fn new(packets: u64) -> Self {
        let replay = ReplayWindow::new(packets);
        Self { next_packet_number: 0, epoch_start: 0, replay }
    }
}

/// A packet with a number, whose payload is being appended.
#[derive(Debug)]
pub struct Unsealed {
    header: Header,
    start: usize,
    payload_start: usize,
}

/// Why a datagram was refused, in the order of the checks. Those before [`Refusal::Forged`] need no
/// AEAD operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Too short, of another version, or of an unknown kind.
    Malformed,
    /// For another connection or channel.
    Misdirected,
    /// From an address that doesn't belong to the session.
    Foreign,
    /// Its key no longer exists or can't be in use yet.
    UnknownEpoch,
    /// Its number was seen before, or is too old to know.
    Replayed,
    /// Its tag is wrong, or its key has seen too many wrong ones.
    Forged,
}

/// Protection of both directions of one session.
#[derive(Debug)]
pub struct Protection {
    /// Those of the paths, then those of their candidates.
    channels: Vec<Channel>,
    send: SendKeys,
    receive: ReceiveKeys,
    connection_id_local: u64,
    connection_id_peer: u64,
    version: Version,
    payload: PayloadMode,
}

impl Protection {
    /// Creates the state before any packet.
    #[must_use]
    pub fn new(config: &SessionConfig, keys: &SessionKeys) -> Self {
        let channels = |packets| (0..config.paths).map(move |_| Channel::new(packets));
        Self {
            channels: channels(config.replay_packets()).chain(channels(0)).collect(),
            send: SendKeys::new(&keys.send, config.packets_per_key),
            receive: ReceiveKeys::new(&keys.receive),
            connection_id_local: config.connection_id_local,
            connection_id_peer: config.connection_id_peer,
            version: config.version,
            payload: config.payload,
        }
    }

    /// The number of the next packet on a path.
    #[must_use]
    pub fn next_packet_number(&self, path: PathId) -> u64 {
        self.channels[path.index()].next_packet_number
    }

    /// Key updates so far: sending, receiving.
    #[must_use]
    pub fn key_updates(&self) -> (u64, u64) {
        (self.send.updates(), self.receive.updates())
    }

    /// Records that the peer has opened the packet with this number on a path.
    pub fn acknowledged(&mut self, path: PathId, number: u64) {
        let channel = &self.channels[path.index()];
        if (channel.epoch_start..channel.next_packet_number).contains(&number) {
            self.send.confirmed();
        }
    }

    /// Wipes the previous receiving key once its time is over.
    pub fn retire(&mut self, now: Nanos) {
        self.receive.retire(now);
    }

    /// Whether the sending key is used up except for the reserve for closing, and the peer has not
    /// confirmed it.
    #[must_use]
    pub fn is_send_exhausted(&self) -> bool {
        self.send.is_exhausted()
    }

    /// Whether a receiving key has seen too many forgeries.
    #[must_use]
    pub fn is_receive_exhausted(&self) -> bool {
        self.receive.is_exhausted()
    }

    /// Takes a packet number on a path and appends the header; the caller appends the payload next.
    /// `None` once the key may protect no more packets.
    pub fn begin(&mut self, path: PathId, kind: Kind, out: &mut Train) -> Option<Unsealed> {
        self.begin_on(path.0.into(), kind, out)
    }

    /// As [`Self::begin`], for a control packet to the path's candidate, which has a channel of its
    /// own: whether it arrives says nothing about the path.
    pub fn begin_to_candidate(&mut self, path: PathId, out: &mut Train) -> Option<Unsealed> {
        self.begin_on(path.candidates_channel(), Kind::Control, out)
    }

    fn begin_on(&mut self, channel: u32, kind: Kind, out: &mut Train) -> Option<Unsealed> {
        let updates = self.send.updates();
        let epoch = self.send.begin()?;
        if self.send.updates() != updates {
            for channel in &mut self.channels {
                channel.epoch_start = channel.next_packet_number;
            }
        }
        let index = self.index(channel)?;
        let number = &mut self.channels[index].next_packet_number;
        let packet_number = *number;
        *number += 1;
        let connection_id = self.connection_id_peer;
        let version = self.version;
        let header = Header { version, connection_id, epoch, channel, packet_number, kind };
        let start = out.len();
        header.encode(out.buffer());
        Some(Unsealed { header, start, payload_start: out.len() })
    }

    /// The place of a channel.
    fn index(&self, channel: u32) -> Option<usize> {
        let paths = self.channels.len() / 2;
        let (path, is_of_candidates) = PathId::of_channel(channel, paths as u8)?;
        Some(path.index() + if is_of_candidates { paths } else { 0 })
    }

    /// Ends the packet with everything appended since [`Self::begin`]: it is sealed, now or by
    /// [`Train::seal`].
    #[expect(
        clippy::needless_pass_by_value,
        reason = "consuming the packet makes a number seal only once"
    )]
    pub fn finish(&self, packet: Unsealed, out: &mut Train) {
        let Unsealed { header, start, payload_start } = packet;
        if self.payload == PayloadMode::Real {
            out.finish(self.send.key(), (start, payload_start), header.nonce());
        }
    }

    /// The keys that may open packets now, for another thread.
    #[must_use]
    pub fn opener(&self) -> Opener {
        Opener {
            version: self.version,
            connection_id: self.connection_id_local,
            keys: self.receive.all(),
        }
    }

    /// Changes of [`Self::opener`] so far.
    #[must_use]
    pub fn opener_version(&self) -> u64 {
        self.receive.version()
    }

    /// Opens a datagram in place, in a buffer that nobody else can access, unless an [`Opener`] did;
    /// returns its header and plaintext. `is_foreign`: it came from an address that doesn't belong
    /// to the session. Cheap checks come first; the number counts as seen only if the tag is right.
    pub fn open<'a>(
        &mut self,
        datagram: Received<'a>,
        is_foreign: bool,
        now: Nanos,
    ) -> Result<(Header, &'a [u8]), Refusal> {
        let Received { bytes: datagram, verdict } = datagram;
        let (header, end) = Header::decode(datagram).map_err(|_| Refusal::Malformed)?;
        if header.version != self.version {
            return Err(Refusal::Malformed);
        }
        if header.connection_id != self.connection_id_local {
            return Err(Refusal::Misdirected);
        }
        let index = self.index(header.channel).ok_or(Refusal::Misdirected)?;
        let channel = &mut self.channels[index];
        if is_foreign {
            return Err(Refusal::Foreign);
        }
        let age = self.receive.find(header.epoch).ok_or(Refusal::UnknownEpoch)?;
        if !channel.replay.is_fresh(header.packet_number) {
            return Err(Refusal::Replayed);
        }
        let (aad, sealed) = datagram.split_at_mut(end);
        let plaintext = if self.payload == PayloadMode::LengthsOnly {
            sealed
        } else {
            if sealed.len() < TAG_BYTES {
                return Err(Refusal::Malformed);
            }
            let (key, epoch) = self.receive.key(age).ok_or(Refusal::Forged)?;
            let is_authentic = match verdict {
                // By a key that has been wiped since.
                Some(verdict) if verdict.epoch != epoch => return Err(Refusal::UnknownEpoch),
                Some(verdict) => verdict.is_authentic,
                None => key.open_in_place(header.nonce(), aad, sealed).is_ok(),
            };
            if !is_authentic {
                self.receive.forged(age);
                return Err(Refusal::Forged);
            }
            &sealed[..sealed.len() - TAG_BYTES]
        };
        if !channel.replay.accept(header.packet_number) {
            return Err(Refusal::Replayed);
        }
        self.receive.opened(age, now);
        Ok((header, plaintext))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::aead::Secret;
    use crate::session::epochs::{FORGERIES_PER_KEY_MAX, PACKETS_PER_KEY};
    use crate::session::opening::Arrivals;
    use crate::session::{Detection, IpVersion};

    fn pair_with(packets_per_key: u64) -> (Protection, Protection) {
        pair_of(packets_per_key, 3)
    }

    fn pair_of_paths(paths: u8) -> (Protection, Protection) {
        pair_of(PACKETS_PER_KEY, paths)
    }

    fn pair_of(packets_per_key: u64, paths: u8) -> (Protection, Protection) {
        pair_like(SessionConfig { paths, packets_per_key, ..CONFIG })
    }

    const CONFIG: SessionConfig = SessionConfig {
        version: Version::V6,
        connection_id_local: 1,
        connection_id_peer: 2,
        unit_bytes: 1408,
        ip: IpVersion::V4,
        paths: 1,
        chunk_units: 1,
        slots: 4,
        rate_bytes_per_second: 1,
        idle_timeout: 1,
        reordering: 0,
        detection: Detection::Reports,
        packets_per_key: PACKETS_PER_KEY,
        payload: PayloadMode::Real,
    };

    fn pair_like(config: SessionConfig) -> (Protection, Protection) {
        let secret = |byte| Secret::take(&mut [byte; 32]);
        let keys = |a, b| SessionKeys { send: secret(a), receive: secret(b), token_seed: [0; 32] };
        let other = SessionConfig { connection_id_local: 2, connection_id_peer: 1, ..config };
        (Protection::new(&config, &keys(1, 2)), Protection::new(&other, &keys(2, 1)))
    }

    #[test]
    fn packets_of_another_version_than_the_sessions_are_malformed() {
        let at = |version| pair_like(SessionConfig { version, ..CONFIG });
        for (mine, other) in [(Version::V5, Version::V6), (Version::V6, Version::V5)] {
            let (mut a, mut b) = at(mine);
            let (mut c, _) = at(other);
            assert_eq!(open(&mut b, &sealed(&mut c)), Err(Refusal::Malformed));
            assert!(open(&mut b, &sealed(&mut a)).is_ok());
        }
    }

    fn pair() -> (Protection, Protection) {
        pair_with(PACKETS_PER_KEY)
    }

    fn sealed(from: &mut Protection) -> Vec<u8> {
        sealed_on(from, PathId(0))
    }

    fn sealed_on(from: &mut Protection, path: PathId) -> Vec<u8> {
        let immediate = Some(9);
        let kind =
            Kind::Unit { message: 5, unit: 6, length: 7, k: 0, m: 0, is_stream: false, immediate };
        let mut out = Train::continuing(b"a datagram before it in the same buffer".to_vec());
        let start = out.len();
        let packet = from.begin(path, kind, &mut out).unwrap();
        out.buffer().extend_from_slice(b"payload");
        from.finish(packet, &mut out);
        out.into_bytes().split_off(start)
    }

    fn open(at: &mut Protection, datagram: &[u8]) -> Result<u64, Refusal> {
        let mut datagram = datagram.to_vec();
        let (header, plaintext) = at.open(Received::sealed(&mut datagram), false, 0)?;
        assert_eq!(plaintext, b"payload");
        Ok(header.packet_number)
    }

    #[test]
    fn sealed_packets_open_once_at_the_peer_only() {
        let (mut a, mut b) = pair();
        let datagram = sealed(&mut a);
        assert_eq!(open(&mut a, &datagram), Err(Refusal::Misdirected), "reflected");
        assert_eq!(b.open(Received::sealed(&mut datagram.clone()), true, 0), Err(Refusal::Foreign));
        assert_eq!(open(&mut b, &datagram), Ok(0));
        assert_eq!(open(&mut b, &datagram), Err(Refusal::Replayed));
        assert!(!datagram.windows(7).any(|window| window == b"payload"));
    }

    /// Opens datagrams of one length by this opener first.
    fn open_by(at: &mut Protection, by: &Opener, datagrams: &[&[u8]]) -> Vec<Result<u64, Refusal>> {
        let bytes = datagrams.concat();
        let sizes = (bytes.len(), datagrams[0].len());
        let mut arrivals = Arrivals::new(bytes, sizes, Some(by));
        let opened = arrivals.datagrams().map(|datagram| {
            let (header, plaintext) = at.open(datagram, false, 0)?;
            assert_eq!(plaintext, b"payload");
            Ok(header.packet_number)
        });
        opened.collect()
    }

    #[test]
    fn packets_of_another_version_are_not_even_tried_elsewhere() {
        let (mut a, _) = pair_like(SessionConfig { version: Version::V5, ..CONFIG });
        let (_, b) = pair_like(CONFIG);
        let datagram = sealed(&mut a);
        let sizes = (datagram.len(), datagram.len());
        let mut arrivals = Arrivals::new(datagram, sizes, Some(&b.opener()));
        assert!(arrivals.datagrams().all(|datagram| !datagram.is_tried()));
    }

    #[test]
    fn packets_opened_elsewhere_are_accepted_once_and_forged_ones_counted() {
        let (mut a, mut b) = pair();
        let datagrams = [0, 1, 2].map(|_| sealed(&mut a));
        let mut forged = datagrams[1].clone();
        *forged.last_mut().unwrap() ^= 1;
        let mut misdirected = datagrams[2].clone();
        misdirected[8] ^= 1;
        let by = b.opener();
        let found = open_by(
            &mut b,
            &by,
            &[&datagrams[0], &forged, &misdirected, &datagrams[0], &datagrams[1]],
        );
        let refused = [Refusal::Forged, Refusal::Misdirected, Refusal::Replayed].map(Err);
        assert_eq!(found, [Ok(0), refused[0], refused[1], refused[2], Ok(1)]);
        assert_eq!(open(&mut b, &datagrams[1]), Err(Refusal::Replayed));
        assert_eq!(open(&mut b, &datagrams[2]), Ok(2));
    }

    #[test]
    fn what_was_opened_by_a_key_that_is_wiped_since_is_refused() {
        let (mut a, mut b) = pair_with(2);
        let opener = b.opener();
        let late = sealed(&mut a);
        while b.key_updates().1 < 256 {
            let number = a.next_packet_number(PathId(0));
            let by = b.opener();
            assert_eq!(open_by(&mut b, &by, &[&sealed(&mut a)]), [Ok(number)]);
            a.acknowledged(PathId(0), number);
        }
        assert_eq!((opener.keys.len(), b.opener().keys.len()), (2, 3));
        // Epochs 0 and 256 are the same in headers.
        assert_eq!(open_by(&mut b, &opener, &[&late]), [Err(Refusal::UnknownEpoch)]);
        let version = b.opener_version();
        b.retire(Nanos::MAX);
        assert_eq!((b.opener_version(), b.opener().keys.len()), (version + 1, 2));
    }

    #[test]
    fn every_flip_and_every_truncation_is_refused_and_spoils_nothing() {
        let (mut a, mut b) = pair();
        let datagram = sealed(&mut a);
        for at in 0..datagram.len() {
            for bit in 0..8 {
                let mut flipped = datagram.clone();
                flipped[at] ^= 1 << bit;
                assert!(open(&mut b, &flipped).is_err(), "byte {at} bit {bit}");
            }
            assert!(open(&mut b, &datagram[..at]).is_err());
        }
        assert_eq!(b.key_updates(), (0, 0), "a forgery must not move the epoch on");
        assert!(open(&mut b, &datagram).is_ok(), "a forgery must not mark its number");
    }

    #[test]
    fn what_is_wrong_is_looked_at_in_the_order_of_its_cost() {
        let (mut a, mut b) = pair();
        let good = sealed(&mut a);
        assert!(open(&mut b, &good).is_ok());
        // Everything is wrong with it; each step fixes the first fault.
        let mut datagram = good.clone();
        datagram[0] ^= 0xf0;
        datagram[8] ^= 1;
        datagram[9] = 2;
        *datagram.last_mut().unwrap() ^= 1;
        let mut refused = |datagram: &[u8], is_foreign| {
            b.open(Received::sealed(&mut datagram.to_vec()), is_foreign, 0).map(|_| ()).unwrap_err()
        };
        assert_eq!(refused(&datagram, true), Refusal::Malformed);
        datagram[0] ^= 0xf0;
        assert_eq!(refused(&datagram, true), Refusal::Misdirected);
        datagram[8] ^= 1;
        assert_eq!(refused(&datagram, true), Refusal::Foreign);
        assert_eq!(refused(&datagram, false), Refusal::UnknownEpoch);
        datagram[9] = 0;
        assert_eq!(refused(&datagram, false), Refusal::Replayed);
        datagram[21] = 1;
        assert_eq!(refused(&datagram, false), Refusal::Forged);
    }

    #[test]
    fn a_fast_session_opens_what_was_overtaken_by_as_much_as_it_may() {
        let rate_bytes_per_second = 12_500_000_000;
        let fast = SessionConfig { rate_bytes_per_second, reordering: 20_000_000, ..CONFIG };
        let late = fast.replay_packets();
        assert_eq!(late, rate_bytes_per_second / 1000 * 60 / 1408);
        let (mut a, mut b) = pair_like(fast);
        let old = sealed(&mut a);
        a.channels[0].next_packet_number = late;
        let new = sealed(&mut a);
        assert!(open(&mut b, &new).is_ok());
        assert!(open(&mut b, &old).is_ok());
        assert_eq!(open(&mut b, &old), Err(Refusal::Replayed));
    }

    #[test]
    fn a_replay_is_refused_even_with_a_good_tag() {
        let (mut a, mut b) = pair();
        let old = sealed(&mut a);
        a.channels[0].next_packet_number = 100_000;
        let new = sealed(&mut a);
        assert!(open(&mut b, &new).is_ok());
        assert_eq!(open(&mut b, &old), Err(Refusal::Replayed), "behind the window");
    }

    #[test]
    fn no_number_and_no_key_is_used_twice_over_many_epochs() {
        let (mut a, mut b) = pair_with(3);
        let mut ledger = BTreeSet::new();
        let mut stragglers = Vec::new();
        for index in 0..900_u64 {
            let path = PathId((index / 5 % 3) as u8);
            let number = a.next_packet_number(path);
            let datagram = sealed_on(&mut a, path);
            // The tag of an empty message under an unused nonce distinguishes a key from all
            // others.
            let key = a.send.key().seal([0xff; 12], b"", &mut []);
            let nonce = Header::decode(&datagram).unwrap().0.nonce();
            assert!(ledger.insert((key, nonce)), "packet {index}");
            if index % 3 == 1 {
                stragglers.push(datagram);
                continue;
            }
            assert_eq!(open(&mut b, &datagram), Ok(number));
            a.acknowledged(path, number);
            for datagram in stragglers.drain(..) {
                assert!(open(&mut b, &datagram).is_ok(), "of this epoch or the one before it");
            }
        }
        let keys: BTreeSet<_> = ledger.iter().map(|(key, _)| key).collect();
        assert_eq!((keys.len(), a.key_updates().0, b.key_updates().1), (300, 299, 299));
    }

    #[test]
    fn a_confirmation_of_what_was_never_sent_moves_nothing() {
        let (mut a, _) = pair_with(2);
        let _ = (sealed(&mut a), sealed(&mut a));
        a.acknowledged(PathId(0), 2);
        a.acknowledged(PathId(0), u64::MAX - 1);
        a.acknowledged(PathId(1), 1);
        let _ = sealed(&mut a);
        assert_eq!(a.key_updates().0, 0);
        a.acknowledged(PathId(0), 2);
        let _ = sealed(&mut a);
        assert_eq!(a.key_updates().0, 1);
    }

    #[test]
    fn what_was_sent_under_the_key_before_confirms_nothing_on_any_path() {
        let (mut a, _) = pair_with(4);
        let (first, second) = (PathId(0), PathId(1));
        let sent = [first, first, second, second].map(|path| sealed_on(&mut a, path));
        a.acknowledged(second, 0);
        let more = [second, second, second, second].map(|path| sealed_on(&mut a, path));
        assert_eq!((sent.len(), more.len(), a.key_updates().0), (4, 4, 1));
        for (path, number) in [(first, 1), (second, 1), (first, 2)] {
            a.acknowledged(path, number);
            let _ = sealed_on(&mut a, second);
            assert_eq!(a.key_updates().0, 1, "{path:?} {number}");
        }
        a.acknowledged(second, 2);
        let _ = sealed_on(&mut a, first);
        assert_eq!(a.key_updates().0, 2);
    }

    #[test]
    fn each_path_has_numbers_and_a_replay_window_of_its_own() {
        let (mut a, mut b) = pair();
        let paths = [PathId(0), PathId(2)];
        let datagrams = paths.map(|path| sealed_on(&mut a, path));
        for datagram in &datagrams {
            assert_eq!(open(&mut b, datagram), Ok(0));
            assert_eq!(open(&mut b, datagram), Err(Refusal::Replayed));
        }
        // The number is the same, so the channel must make the nonces differ.
        let nonces = datagrams.map(|datagram| Header::decode(&datagram).unwrap().0.nonce());
        assert_ne!(nonces[0], nonces[1]);
        let unknown = sealed_on(&mut pair_of_paths(4).0, PathId(3));
        assert_eq!(open(&mut b, &unknown), Err(Refusal::Misdirected));
    }

    #[test]
    fn a_packet_two_epochs_behind_or_ahead_is_not_opened() {
        let (mut a, mut b) = pair_with(1);
        let mut datagrams = Vec::new();
        for number in 0..5 {
            datagrams.push(sealed(&mut a));
            a.acknowledged(PathId(0), number);
        }
        assert_eq!(open(&mut b, &datagrams[2]), Err(Refusal::UnknownEpoch), "two ahead");
        for datagram in &datagrams[1..4] {
            assert!(open(&mut b, datagram).is_ok());
        }
        assert_eq!(open(&mut b, &datagrams[0]), Err(Refusal::UnknownEpoch), "three behind");
    }

    #[test]
    fn a_spent_forgery_budget_refuses_everything() {
        let (mut a, mut b) = pair();
        let good = sealed(&mut a);
        let mut forged = sealed(&mut a);
        *forged.last_mut().unwrap() ^= 1;
        b.receive.spend(FORGERIES_PER_KEY_MAX - 1);
        assert!(!b.is_receive_exhausted());
        assert_eq!(open(&mut b, &forged), Err(Refusal::Forged));
        assert!(b.is_receive_exhausted());
        assert_eq!(open(&mut b, &good), Err(Refusal::Forged));
    }
}
