//! Key epochs: which key seals outgoing packets, which keys open incoming ones, and when each key
//! is wiped (`docs/formats/session-wire.md` "Key epochs").
//!
//! Each direction is a chain of secrets: the secret of the next epoch is derived from the current
//! one, which is then wiped, so the secrets in memory reveal nothing about earlier epochs. The
//! sender of a direction advances on its own; its receiver follows when the first packet under the
//! next key is authentic. Packet numbers continue across epochs, so a number is used once in the
//! life of a session.

use std::sync::Arc;

use crate::aead::{AeadKey, Secret};
use crate::link::Nanos;

/// Most packets that one key may protect (NIST SP 800-38D; far below its 2^32).
pub const PACKETS_PER_KEY_MAX: u64 = 1 << 28;
/// Packets after which a key is replaced by default. The rest up to [`PACKETS_PER_KEY_MAX`] is for
/// a peer that is slow to confirm.
pub const PACKETS_PER_KEY: u64 = 1 << 27;
/// Packets of a key reserved so that a session at its limit can still announce its end.
const PACKETS_RESERVED: u64 = 16;
/// Most packets that may fail authentication under one key: far fewer than forging one takes, far
/// more than line noise causes (RFC 9001 §6.6 allows 2^52).
pub const FORGERIES_PER_KEY_MAX: u64 = 1 << 36;
/// How long the previous key still opens late packets: longer than packets live on a path.
const PREVIOUS_KEY_NANOS: Nanos = 5_000_000_000;

/// The secret of an epoch, from which its key and the next secret are derived.
#[derive(Debug)]
struct Chain {
    secret: Secret,
    epoch: u64,
}

impl Chain {
    fn key(&self) -> Arc<AeadKey> {
        let secret = self.secret.derive("sealane session packet", &self.epoch.to_be_bytes());
        Arc::new(AeadKey::new(&secret))
    }

    fn advance(&mut self) {
        self.epoch += 1;
        self.secret = self.secret.derive("sealane session next epoch", &self.epoch.to_be_bytes());
    }
}

/// The epoch as sent in headers, its low eight bits, which differ for any three neighbours.
fn on_wire(epoch: u64) -> u8 {
    epoch as u8
}

/// The sending keys: one at a time.
#[derive(Debug)]
pub struct SendKeys {
    chain: Chain,
    key: Arc<AeadKey>,
    /// Packets of this epoch on all channels.
    packets: u64,
    packets_per_key: u64,
    /// Whether the peer has opened a packet of this epoch. Until then it may not have the next key.
    is_confirmed: bool,
}

impl SendKeys {
    /// Starts at epoch 0; there is a new key after every `packets_per_key` packets.
    #[must_use]
    pub fn new(secret: &Secret, packets_per_key: u64) -> Self {
        let chain = Chain { secret: secret.clone(), epoch: 0 };
        let key = chain.key();
        Self { chain, key, packets: 0, packets_per_key, is_confirmed: false }
    }

    /// Key updates so far.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.chain.epoch
    }

    /// Records that the peer has opened a packet of this epoch.
    pub fn confirmed(&mut self) {
        self.is_confirmed = true;
    }

    /// Counts one more packet, advancing the key if due, and returns its epoch as sent in the
    /// header. `None` once the key may protect no more packets and the peer has not confirmed it.
    pub fn begin(&mut self) -> Option<u8> {
        if self.packets >= self.packets_per_key && self.is_confirmed {
            self.chain.advance();
            self.key = self.chain.key();
            self.packets = 0;
            self.is_confirmed = false;
        }
        if self.packets >= PACKETS_PER_KEY_MAX {
            return None;
        }
        self.packets += 1;
        Some(on_wire(self.chain.epoch))
    }

    /// The key of the packet begun last.
    #[must_use]
    pub fn key(&self) -> &Arc<AeadKey> {
        &self.key
    }

    /// Whether only the reserve for closing is left.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        !self.is_confirmed && self.packets >= PACKETS_PER_KEY_MAX - PACKETS_RESERVED
    }
}

/// Selects one of the receiver's keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Age {
    /// The key before the current one.
    Previous,
    /// The newest epoch from which an authentic packet came.
    Current,
    /// The epoch to which the peer may advance next.
    Next,
}

#[derive(Debug)]
struct EpochKey {
    epoch: u64,
    key: Arc<AeadKey>,
    forgeries_left: u64,
}

impl EpochKey {
    fn new(chain: &Chain) -> Self {
        Self { epoch: chain.epoch, key: chain.key(), forgeries_left: FORGERIES_PER_KEY_MAX }
    }
}

/// The receiving keys: previous, current and next, all derived in advance, so that a forged packet
/// costs no derivation.
#[derive(Debug)]
pub struct ReceiveKeys {
    previous: Option<EpochKey>,
    previous_until: Nanos,
    current: EpochKey,
    next: EpochKey,
    /// Chain of the next epoch.
    chain: Chain,
    version: u64,
}

impl ReceiveKeys {
    /// Starts with epoch 0 and the next one.
    #[must_use]
    pub fn new(secret: &Secret) -> Self {
        let mut chain = Chain { secret: secret.clone(), epoch: 0 };
        let current = EpochKey::new(&chain);
        chain.advance();
        let next = EpochKey::new(&chain);
        Self { previous: None, previous_until: 0, current, next, chain, version: 0 }
    }

    /// Key updates of the peer so far.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.current.epoch
    }

    /// Finds the key for an epoch in a header; `None` if that key is wiped, or the peer can't have
    /// it yet.
    #[must_use]
    pub fn find(&self, epoch: u8) -> Option<Age> {
        let is = |key: &EpochKey| on_wire(key.epoch) == epoch;
        if is(&self.current) {
            Some(Age::Current)
        } else if is(&self.next) {
            Some(Age::Next)
        } else {
            self.previous.as_ref().filter(|previous| is(previous)).map(|_| Age::Previous)
        }
    }

    /// The key and its epoch, unless it has seen too many forgeries.
    #[must_use]
    pub fn key(&self, age: Age) -> Option<(&AeadKey, u64)> {
        let found = match age {
            Age::Previous => self.previous.as_ref()?,
            Age::Current => &self.current,
            Age::Next => &self.next,
        };
        (found.forgeries_left > 0).then_some((&*found.key, found.epoch))
    }

    /// All keys that may open packets now: epoch in headers, epoch, key.
    #[must_use]
    pub fn all(&self) -> Vec<(u8, u64, Arc<AeadKey>)> {
        let keys = [Some(&self.current), self.previous.as_ref(), Some(&self.next)];
        let usable = keys.into_iter().flatten().filter(|key| key.forgeries_left > 0);
        usable.map(|key| (on_wire(key.epoch), key.epoch, Arc::clone(&key.key))).collect()
    }

    /// Changes of the set of keys so far.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Records that a packet under this key was not authentic.
    pub fn forged(&mut self, age: Age) {
        let found = match age {
            Age::Previous => self.previous.as_mut(),
            Age::Current => Some(&mut self.current),
            Age::Next => Some(&mut self.next),
        };
        if let Some(key) = found {
            key.forgeries_left = key.forgeries_left.saturating_sub(1);
        }
    }

    /// Whether a key has seen so many forgeries that the session must end.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.current.forgeries_left == 0 || self.next.forgeries_left == 0
    }

    /// Records that a packet under this key was authentic; the first one under the next key makes
    /// that key current.
    pub fn opened(&mut self, age: Age, now: Nanos) {
        if age == Age::Next {
            self.chain.advance();
            let next = EpochKey::new(&self.chain);
            let current = std::mem::replace(&mut self.next, next);
            self.previous = Some(std::mem::replace(&mut self.current, current));
            self.previous_until = now.saturating_add(PREVIOUS_KEY_NANOS);
            self.version += 1;
        }
    }

    /// Spends part of the current key's budget.
    #[cfg(test)]
    pub fn spend(&mut self, forgeries: u64) {
        self.current.forgeries_left -= forgeries;
    }

    /// Wipes the previous key once no packet under it can still be in flight.
    pub fn retire(&mut self, now: Nanos) {
        if now >= self.previous_until && self.previous.take().is_some() {
            self.version += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret() -> Secret {
        Secret::take(&mut [7; 32])
    }

    /// The tag of an empty message under a fixed nonce: equal only for equal keys.
    fn fingerprint(key: &AeadKey) -> [u8; 16] {
        key.seal([0xff; 12], b"", &mut [])
    }

    fn matching(send: &SendKeys, receive: &ReceiveKeys, age: Age) -> bool {
        receive.key(age).map(|(key, _)| fingerprint(key)) == Some(fingerprint(send.key()))
    }

    #[test]
    fn both_ends_walk_the_same_chain_and_no_key_comes_back() {
        let (mut send, mut receive) = (SendKeys::new(&secret(), 4), ReceiveKeys::new(&secret()));
        let mut seen = std::collections::BTreeSet::new();
        for number in 0..4 * 600 {
            let epoch = send.begin().unwrap();
            assert_eq!(epoch, (number / 4) as u8);
            let age = receive.find(epoch).unwrap();
            assert!(matching(&send, &receive, age));
            seen.insert(fingerprint(send.key()));
            receive.opened(age, number);
            send.confirmed();
        }
        assert_eq!((seen.len(), send.updates(), receive.updates()), (600, 599, 599));
    }

    #[test]
    fn a_sender_is_never_more_than_one_unconfirmed_epoch_ahead() {
        let mut send = SendKeys::new(&secret(), 4);
        (0..100).for_each(|_| assert_eq!(send.begin(), Some(0)));
        send.confirmed();
        (0..100).for_each(|_| assert_eq!(send.begin(), Some(1)));
        send.confirmed();
        assert_eq!(send.begin(), Some(2));
    }

    #[test]
    fn no_packet_beyond_the_limit_of_an_unconfirmed_key() {
        let mut send = SendKeys::new(&secret(), 4);
        send.packets = PACKETS_PER_KEY_MAX - PACKETS_RESERVED - 1;
        assert!(!send.is_exhausted());
        assert_eq!(send.begin(), Some(0));
        assert!(send.is_exhausted());
        (1..=PACKETS_RESERVED).for_each(|_| assert_eq!(send.begin(), Some(0)));
        assert_eq!(send.begin(), None);
        send.confirmed();
        assert!(!send.is_exhausted());
        assert_eq!(send.begin(), Some(1));
    }

    #[test]
    fn the_previous_key_opens_stragglers_for_a_while_and_older_ones_nothing() {
        let mut receive = ReceiveKeys::new(&secret());
        assert_eq!(receive.find(2), None);
        receive.opened(Age::Next, 10);
        receive.opened(Age::Current, 11);
        assert_eq!(receive.updates(), 1);
        let ages: Vec<_> = (0..4).map(|epoch| receive.find(epoch)).collect();
        assert_eq!(ages, [Some(Age::Previous), Some(Age::Current), Some(Age::Next), None]);
        receive.retire(10 + PREVIOUS_KEY_NANOS - 1);
        assert_eq!(receive.find(0), Some(Age::Previous));
        receive.retire(10 + PREVIOUS_KEY_NANOS);
        assert_eq!(receive.find(0), None);
        assert!(receive.key(Age::Previous).is_none());
        receive.opened(Age::Next, 20);
        receive.opened(Age::Next, 21);
        assert_eq!(receive.find(1), None, "two epochs behind");
    }

    #[test]
    fn forgeries_are_counted_by_key() {
        let mut receive = ReceiveKeys::new(&secret());
        receive.next.forgeries_left = 1;
        receive.forged(Age::Current);
        assert!(!receive.is_exhausted());
        receive.forged(Age::Next);
        assert!(receive.is_exhausted());
        assert!(receive.key(Age::Next).is_none());
        assert_eq!(receive.current.forgeries_left, FORGERIES_PER_KEY_MAX - 1);
    }
}
