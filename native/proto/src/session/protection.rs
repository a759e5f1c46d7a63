//! Sealing and opening of packets: owner of the packet numbers (nonces), the replay window and the
//! limits of a key.

use crate::aead::{AeadKey, TAG_BYTES};

use super::packet::{Header, Kind};
use super::replay::ReplayWindow;
use super::types::{PayloadMode, SessionConfig, SessionKeys};

/// Packets that one key may protect (NIST SP 800-38D keeps far below 2^32 of them).
pub const PACKETS_PER_KEY_MAX: u64 = 1 << 28;
/// Packets of those kept back, so that a session at its limit can still say so.
const PACKETS_RESERVED: u64 = 16;
/// Packets that may fail authentication under one key. Far below what forging one takes, far above
/// what line noise makes (RFC 9001 §6.6 allows 2^52).
pub const FORGERIES_PER_KEY_MAX: u64 = 1 << 36;
/// The only key epoch, until rekeying is built.
const EPOCH: u8 = 0;
/// The only channel: a session has one sending thread.
const CHANNEL: u32 = 0;

/// A packet whose number has been taken and whose payload is being appended.
#[derive(Debug)]
pub struct Unsealed {
    header: Header,
    start: usize,
    payload_start: usize,
}

/// Why a datagram was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It is not for this session, or not of this version.
    Malformed,
    /// Its number was seen, or is too old to tell.
    Replayed,
    /// Its tag is wrong.
    Forged,
}

/// Both directions of one session.
#[derive(Debug)]
pub struct Protection {
    /// Number of the next packet: taken in [`Self::begin`] and nowhere else.
    next_packet_number: u64,
    send: AeadKey,
    receive: AeadKey,
    replay: ReplayWindow,
    forgeries_left: u64,
    connection_id_local: u64,
    connection_id_peer: u64,
    payload: PayloadMode,
}

impl Protection {
    /// Nothing sent, nothing received.
    #[must_use]
    pub fn new(config: &SessionConfig, keys: &SessionKeys) -> Self {
        let label = "sealane session packet";
        Self {
            next_packet_number: 0,
            send: AeadKey::new(&keys.send.derive(label, &[EPOCH])),
            receive: AeadKey::new(&keys.receive.derive(label, &[EPOCH])),
            replay: ReplayWindow::default(),
            forgeries_left: FORGERIES_PER_KEY_MAX,
            connection_id_local: config.connection_id_local,
            connection_id_peer: config.connection_id_peer,
            payload: config.payload,
        }
    }

    /// The number that the next packet will have.
    #[must_use]
    pub fn next_packet_number(&self) -> u64 {
        self.next_packet_number
    }

    /// Whether only what is kept back for closing is left of the sending key.
    #[must_use]
    pub fn is_send_exhausted(&self) -> bool {
        self.next_packet_number >= PACKETS_PER_KEY_MAX - PACKETS_RESERVED
    }

    /// Whether the receiving key has met too many forgeries.
    #[must_use]
    pub fn is_receive_exhausted(&self) -> bool {
        self.forgeries_left == 0
    }

    /// Takes a packet number and appends the header; the payload is appended next.
    /// `None` once the key may protect no more.
    pub fn begin(&mut self, kind: Kind, out: &mut Vec<u8>) -> Option<Unsealed> {
        if self.next_packet_number >= PACKETS_PER_KEY_MAX {
            return None;
        }
        let header = Header {
            connection_id: self.connection_id_peer,
            epoch: EPOCH,
            channel: CHANNEL,
            packet_number: self.next_packet_number,
            kind,
        };
        self.next_packet_number += 1;
        let start = out.len();
        header.encode(out);
        Some(Unsealed { header, start, payload_start: out.len() })
    }

    /// Seals what was appended since [`Self::begin`] and appends the tag.
    #[expect(clippy::needless_pass_by_value, reason = "a packet number is sealed under once")]
    pub fn finish(&self, packet: Unsealed, out: &mut Vec<u8>) {
        let Unsealed { header, start, payload_start } = packet;
        if self.payload == PayloadMode::LengthsOnly {
            return;
        }
        let (before, payload) = out.split_at_mut(payload_start);
        let tag = self.send.seal(header.nonce(), &before[start..], payload);
        out.extend_from_slice(&tag);
    }

    /// Opens a datagram into `plaintext`, a buffer that nobody else sees.
    /// The cheap checks come first; the number counts as seen only if the tag is right.
    pub fn open(&mut self, datagram: &[u8], plaintext: &mut Vec<u8>) -> Result<Header, Refusal> {
        let (header, end) = Header::decode(datagram).map_err(|_| Refusal::Malformed)?;
        let is_ours = header.connection_id == self.connection_id_local
            && header.epoch == EPOCH
            && header.channel == CHANNEL;
        if !is_ours {
            return Err(Refusal::Malformed);
        }
        if !self.replay.is_fresh(header.packet_number) {
            return Err(Refusal::Replayed);
        }
        if self.forgeries_left == 0 {
            return Err(Refusal::Forged);
        }
        let (aad, sealed) = datagram.split_at(end);
        plaintext.clear();
        if self.payload == PayloadMode::LengthsOnly {
            plaintext.extend_from_slice(sealed);
        } else {
            let (ciphertext, tag) =
                sealed.split_last_chunk::<TAG_BYTES>().ok_or(Refusal::Malformed)?;
            plaintext.resize(ciphertext.len(), 0);
            if self.receive.open(header.nonce(), aad, ciphertext, tag, plaintext).is_err() {
                plaintext.clear();
                self.forgeries_left -= 1;
                return Err(Refusal::Forged);
            }
        }
        if !self.replay.accept(header.packet_number) {
            return Err(Refusal::Replayed);
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aead::Secret;

    fn pair() -> (Protection, Protection) {
        let config = |connection_id_local, connection_id_peer| SessionConfig {
            connection_id_local,
            connection_id_peer,
            unit_bytes: 1408,
            chunk_units: 1,
            slots: 4,
            rate_bytes_per_second: 1,
            idle_timeout: 1,
            payload: PayloadMode::Real,
        };
        let secret = |byte| Secret::take(&mut [byte; 32]);
        let keys = |a, b| SessionKeys { send: secret(a), receive: secret(b) };
        let a = Protection::new(&config(1, 2), &keys(1, 2));
        (a, Protection::new(&config(2, 1), &keys(2, 1)))
    }

    fn sealed(from: &mut Protection) -> Vec<u8> {
        let kind = Kind::Unit { message: 5, unit: 6, length: 7, k: 0, m: 0, immediate: Some(9) };
        let mut out = b"a datagram before it in the same buffer".to_vec();
        let start = out.len();
        let packet = from.begin(kind, &mut out).unwrap();
        out.extend_from_slice(b"payload");
        from.finish(packet, &mut out);
        out.split_off(start)
    }

    #[test]
    fn sealed_packets_open_once_at_the_peer_only() {
        let (mut a, mut b) = pair();
        let datagram = sealed(&mut a);
        let mut plaintext = Vec::new();
        assert_eq!(a.open(&datagram, &mut plaintext), Err(Refusal::Malformed), "reflected");
        assert_eq!(b.open(&datagram, &mut plaintext).map(|header| header.packet_number), Ok(0));
        assert_eq!(plaintext, b"payload");
        assert_eq!(b.open(&datagram, &mut plaintext), Err(Refusal::Replayed));
        assert!(!datagram.windows(7).any(|window| window == b"payload"));
    }

    #[test]
    fn every_flip_and_every_truncation_is_refused_and_spoils_nothing() {
        let (mut a, mut b) = pair();
        let datagram = sealed(&mut a);
        let mut plaintext = Vec::new();
        for at in 0..datagram.len() {
            for bit in 0..8 {
                let mut flipped = datagram.clone();
                flipped[at] ^= 1 << bit;
                assert!(b.open(&flipped, &mut plaintext).is_err(), "byte {at} bit {bit}");
                assert!(plaintext.is_empty());
            }
            assert!(b.open(&datagram[..at], &mut plaintext).is_err());
        }
        assert!(b.open(&datagram, &mut plaintext).is_ok(), "a forgery must not mark its number");
    }

    #[test]
    fn a_replay_is_refused_even_with_a_good_tag() {
        let (mut a, mut b) = pair();
        let mut plaintext = Vec::new();
        let old = sealed(&mut a);
        a.next_packet_number = 100_000;
        let new = sealed(&mut a);
        assert!(b.open(&new, &mut plaintext).is_ok());
        assert_eq!(b.open(&old, &mut plaintext), Err(Refusal::Replayed), "behind the window");
    }

    #[test]
    fn no_number_beyond_the_limit_of_a_key_is_ever_used() {
        let (mut a, _) = pair();
        a.next_packet_number = PACKETS_PER_KEY_MAX - PACKETS_RESERVED;
        assert!(a.is_send_exhausted());
        let taken = (0..100).filter(|_| a.begin(Kind::Control, &mut Vec::new()).is_some()).count();
        assert_eq!(taken as u64, PACKETS_RESERVED);
    }

    #[test]
    fn a_spent_forgery_budget_refuses_everything() {
        let (mut a, mut b) = pair();
        b.forgeries_left = 1;
        let mut forged = sealed(&mut a);
        *forged.last_mut().unwrap() ^= 1;
        assert_eq!(b.open(&forged, &mut Vec::new()), Err(Refusal::Forged));
        assert!(b.is_receive_exhausted());
        let good = sealed(&mut a);
        assert_eq!(b.open(&good, &mut Vec::new()), Err(Refusal::Forged));
    }
}
