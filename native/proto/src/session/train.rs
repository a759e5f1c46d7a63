//! Consecutive packets in one buffer, sealed as they are written or later, by another thread.

use std::sync::Arc;

use crate::aead::{AeadKey, NONCE_BYTES, TAG_BYTES};

/// A packet that is not sealed yet. Its nonce seals once: sealing consumes this.
#[derive(Debug)]
struct Unsealed {
    start: usize,
    payload_start: usize,
    /// End of the packet; its last bytes are room for the tag.
    end: usize,
    nonce: [u8; NONCE_BYTES],
}

impl Unsealed {
    fn seal(self, key: &AeadKey, bytes: &mut [u8]) {
        let Self { start, payload_start, end, nonce } = self;
        let (header, rest) = bytes[start..end].split_at_mut(payload_start - start);
        let (payload, tag) = rest.split_at_mut(rest.len() - TAG_BYTES);
        tag.copy_from_slice(&key.seal(nonce, header, payload));
    }
}

/// Consecutive packets. What is not sealed can't be read, so it can't be sent.
#[derive(Debug, Default)]
pub struct Train {
    bytes: Vec<u8>,
    /// Whether packets wait for [`Self::seal`].
    is_deferred: bool,
    /// The packets that are not sealed, ascending.
    unsealed: Vec<Unsealed>,
    /// Their key.
    key: Option<Arc<AeadKey>>,
}

impl Train {
    /// An empty train whose packets are sealed only by [`Self::seal`], for example in another
    /// thread. (Those of the default train are sealed as they are written.)
    #[must_use]
    pub fn deferred() -> Self {
        Self { is_deferred: true, ..Self::default() }
    }

    /// A train that continues these bytes.
    pub(super) fn continuing(bytes: Vec<u8>) -> Self {
        Self { bytes, ..Self::default() }
    }

    /// Its bytes, all sealed.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        assert!(self.unsealed.is_empty());
        self.bytes
    }

    /// Bytes of its packets.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether it has no packet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Its packets.
    ///
    /// # Panics
    /// If one of them is not sealed.
    #[must_use]
    pub fn sealed(&self) -> &[u8] {
        assert!(self.unsealed.is_empty(), "an unsealed packet would leave");
        &self.bytes
    }

    /// Seals all packets that are not sealed yet.
    pub fn seal(&mut self) {
        if let Some(key) = self.key.take() {
            for packet in self.unsealed.drain(..) {
                packet.seal(&key, &mut self.bytes);
            }
        }
    }

    /// Appends a packet that is sealed.
    pub fn append(&mut self, packet: &[u8]) {
        self.bytes.extend_from_slice(packet);
    }

    /// Removes all packets, and keeps the buffer.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.unsealed.clear();
        self.key = None;
    }

    /// Removes the packets from byte `start` on.
    pub fn truncate(&mut self, start: usize) {
        self.bytes.truncate(start);
        self.unsealed.retain(|packet| packet.start < start);
        self.drop_unused_key();
    }

    /// Moves the packets from byte `start` on to the end of another train.
    pub fn move_to(&mut self, start: usize, other: &mut Self) {
        let first = self.unsealed.partition_point(|packet| packet.start < start);
        if let Some(key) = self.key.as_ref().filter(|_| first < self.unsealed.len()) {
            other.take_key(key);
        }
        let place = other.bytes.len();
        let moved = self.unsealed.drain(first..).map(|packet| Unsealed {
            start: packet.start - start + place,
            payload_start: packet.payload_start - start + place,
            end: packet.end - start + place,
            ..packet
        });
        other.unsealed.extend(moved);
        other.bytes.extend_from_slice(&self.bytes[start..]);
        self.bytes.truncate(start);
        self.drop_unused_key();
    }

    /// A key must not outlive its packets: nobody may touch this train for the rest of a session.
    fn drop_unused_key(&mut self) {
        if self.unsealed.is_empty() {
            self.key = None;
        }
    }

    /// The buffer, to which the next packet is appended.
    pub(super) fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Seals the packet that was appended from `start` on, or marks it as unsealed.
    pub(super) fn finish(
        &mut self,
        key: &Arc<AeadKey>,
        (start, payload_start): (usize, usize),
        nonce: [u8; NONCE_BYTES],
    ) {
        self.bytes.resize(self.bytes.len() + TAG_BYTES, 0);
        let packet = Unsealed { start, payload_start, end: self.bytes.len(), nonce };
        if self.is_deferred {
            self.take_key(key);
            self.unsealed.push(packet);
        } else {
            packet.seal(key, &mut self.bytes);
        }
    }

    /// Prepares for unsealed packets under this key: those under another one are sealed first.
    fn take_key(&mut self, key: &Arc<AeadKey>) {
        if self.key.as_ref().is_some_and(|present| !Arc::ptr_eq(present, key)) {
            self.seal();
        }
        if self.key.is_none() {
            self.key = Some(Arc::clone(key));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aead::Secret;

    fn key(byte: u8) -> Arc<AeadKey> {
        Arc::new(AeadKey::new(&Secret::take(&mut [byte; 32])))
    }

    /// Appends a packet with a header of two bytes.
    fn add(train: &mut Train, key: &Arc<AeadKey>, number: u8) {
        let start = train.len();
        train.buffer().extend_from_slice(&[0, number, number, number, number]);
        train.finish(key, (start, start + 2), [number; NONCE_BYTES]);
    }

    fn sealed(keys: &[(&Arc<AeadKey>, u8)]) -> Vec<u8> {
        let mut train = Train::default();
        for (key, number) in keys {
            add(&mut train, key, *number);
        }
        train.into_bytes()
    }

    #[test]
    fn packets_sealed_later_are_the_same_also_across_a_change_of_key() {
        let (old, new) = (key(1), key(2));
        let mut train = Train::deferred();
        for (key, number) in [(&old, 1), (&old, 2), (&new, 3), (&new, 4)] {
            add(&mut train, key, number);
        }
        train.seal();
        let expected = sealed(&[(&old, 1), (&old, 2), (&new, 3), (&new, 4)]);
        assert_eq!(train.sealed(), expected);
        train.seal();
        assert_eq!(train.sealed(), expected, "a nonce seals once");
    }

    #[test]
    fn moved_packets_are_sealed_where_they_are_moved_to() {
        let (old, new) = (key(1), key(2));
        let (mut from, mut to) = (Train::deferred(), Train::deferred());
        add(&mut to, &old, 1);
        add(&mut from, &new, 2);
        let start = from.len();
        add(&mut from, &new, 3);
        from.move_to(start, &mut to);
        to.seal();
        from.seal();
        assert_eq!(to.sealed(), sealed(&[(&old, 1), (&new, 3)]));
        assert_eq!(from.sealed(), sealed(&[(&new, 2)]));
    }

    #[test]
    #[should_panic(expected = "an unsealed packet would leave")]
    fn an_unsealed_packet_can_not_be_read() {
        let mut train = Train::deferred();
        add(&mut train, &key(1), 1);
        let _ = train.sealed();
    }

    #[test]
    fn an_emptied_train_keeps_no_key() {
        let key = key(1);
        let mut train = Train::deferred();
        add(&mut train, &key, 1);
        assert_eq!(Arc::strong_count(&key), 2);
        train.clear();
        assert_eq!(Arc::strong_count(&key), 1);
        assert!(train.is_empty() && train.sealed().is_empty());
        add(&mut train, &key, 2);
        train.move_to(0, &mut Train::deferred());
        assert_eq!(Arc::strong_count(&key), 1, "moved away");
        add(&mut train, &key, 3);
        train.truncate(0);
        assert_eq!(Arc::strong_count(&key), 1, "removed");
    }
}
