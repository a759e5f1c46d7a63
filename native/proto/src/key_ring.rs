//! A volume's keys by key epoch: the newest one seals; every known one opens.

use crate::aead::{Sample, Secret, TAG_BYTES};
use crate::nvme::Reason;
use crate::sector::{
    AAD_BYTES, Block, DATA_BYTES, Iv, SealKey, Ticket, VolumeIdentity, sector_key_epoch,
};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

/// Key epochs of one volume that can be open at the same time.
pub const KEY_EPOCHS_MAX: u32 = 256;

/// The epoch is below the oldest one, too far above it, or already has a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the key epoch is outside the volume's {KEY_EPOCHS_MAX} epochs or already has a key")]
pub struct BadEpoch;

/// Keys are only added while the volume is attached, never removed, so readers take no lock.
#[derive(Debug)]
pub struct KeyRing {
    identity: VolumeIdentity,
    oldest: u32,
    first: (u32, SealKey),
    others: Box<[OnceLock<SealKey>]>,
    newest: AtomicU32,
}

impl KeyRing {
    /// Creates a ring with the key of `epoch`, which seals. Sectors of epochs before `oldest` never
    /// open.
    pub fn new(
        identity: VolumeIdentity,
        oldest: u32,
        epoch: u32,
        secret: &Secret,
    ) -> Result<Self, BadEpoch> {
        if !(oldest..oldest.saturating_add(KEY_EPOCHS_MAX)).contains(&epoch) {
            return Err(BadEpoch);
        }
        let first = (epoch, SealKey::new(secret, identity, epoch));
        let others = (0..KEY_EPOCHS_MAX).map(|_| OnceLock::new()).collect();
        Ok(Self { identity, oldest, first, others, newest: epoch.into() })
    }

    /// Adds the key of `epoch`. If it is the newest, it seals from now on.
    pub fn add(&self, epoch: u32, secret: &Secret) -> Result<(), BadEpoch> {
        let slot = self.slot(epoch).filter(|_| epoch != self.first.0).ok_or(BadEpoch)?;
        slot.set(SealKey::new(secret, self.identity, epoch)).map_err(|_| BadEpoch)?;
        self.newest.fetch_max(epoch, Ordering::Release);
        Ok(())
    }

    /// Seals `plain` into `block` as sector `lba` under the newest key and returns that key's epoch.
    /// Consumes the IV.
    pub fn seal(&self, iv: Iv, lba: u64, plain: &[u8; DATA_BYTES], block: &mut Block) -> u32 {
        let (epoch, key) = self.newest();
        key.seal(iv, lba, plain, block);
        epoch
    }

    /// Lets an accelerator seal sector `lba` under the key of `epoch`; also returns its additional
    /// data. Consumes the IV, unless there is no such key.
    pub fn begin(&self, epoch: u32, iv: Iv, lba: u64) -> Result<(Ticket, [u8; AAD_BYTES]), Iv> {
        match self.key(epoch) {
            Some(key) => Ok((key.begin(iv, lba), key.aad(lba))),
            None => Err(iv),
        }
    }

    /// Takes what an accelerator sealed (see [`SealKey::finish`]).
    pub fn finish(
        &self,
        ticket: Ticket,
        plain: &[u8; DATA_BYTES],
        tag: &[u8; TAG_BYTES],
        block: &mut Block,
        sample: Sample,
    ) -> Result<(), Reason> {
        let key = self.key(ticket.key_epoch()).ok_or(Reason::SectorKeyEpoch)?;
        key.finish(ticket, plain, tag, block, sample)
    }

    fn newest(&self) -> (u32, &SealKey) {
        let newest = self.newest.load(Ordering::Acquire);
        // `newest` advances only after its key is set; until then the first key is the newest.
        self.key(newest).map_or((self.first.0, &self.first.1), |key| (newest, key))
    }

    /// Epoch of the key that seals.
    pub fn newest_epoch(&self) -> u32 {
        self.newest().0
    }

    /// The secret of the key that seals, for an accelerator.
    pub fn newest_secret(&self) -> (u32, &Secret) {
        let (epoch, key) = self.newest();
        (epoch, key.secret())
    }

    /// Opens `block` as sector `lba` under the key of its epoch. Zeroes `plaintext` on an error.
    pub fn open(
        &self,
        lba: u64,
        block: &Block,
        plaintext: &mut [u8; DATA_BYTES],
    ) -> Result<(), Reason> {
        // If the sector names an epoch without a key here, opening with any key reports the reason.
        let key = self.key(sector_key_epoch(block)).unwrap_or(&self.first.1);
        key.open(lba, block, plaintext)
    }

    fn key(&self, epoch: u32) -> Option<&SealKey> {
        if epoch == self.first.0 {
            return Some(&self.first.1);
        }
        self.slot(epoch)?.get()
    }

    fn slot(&self, epoch: u32) -> Option<&OnceLock<SealKey>> {
        self.others.get(epoch.checked_sub(self.oldest)? as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sector::{BLOCK_BYTES, CounterRange, field};

    const IDENTITY: VolumeIdentity = VolumeIdentity { volume_id: [1; 16], generation: 1 };

    fn secret(epoch: u32) -> Secret {
        Secret::take(&mut [u8::try_from(epoch).unwrap(); 32])
    }

    fn ring(oldest: u32, epoch: u32) -> KeyRing {
        KeyRing::new(IDENTITY, oldest, epoch, &secret(epoch)).unwrap()
    }

    fn seal(ring: &KeyRing, counters: &mut CounterRange) -> Box<Block> {
        let mut block = Box::new([0; BLOCK_BYTES]);
        ring.seal(counters.take().unwrap(), 3, &[7; DATA_BYTES], &mut block);
        block
    }

    fn open(ring: &KeyRing, block: &Block) -> Result<(), Reason> {
        let mut plain = [1; DATA_BYTES];
        let outcome = ring.open(3, block, &mut plain);
        assert!(plain.iter().all(|byte| *byte == if outcome.is_ok() { 7 } else { 0 }));
        outcome
    }

    #[test]
    fn the_newest_key_seals_and_every_known_one_opens() {
        let mut counters = CounterRange::new(1, 1, 256, 1 << 20).unwrap();
        let before = ring(1, 1);
        let old = seal(&before, &mut counters);
        before.add(2, &secret(2)).unwrap();
        let new = seal(&before, &mut counters);
        assert_eq!((sector_key_epoch(&old), sector_key_epoch(&new)), (1, 2));
        assert_eq!((open(&before, &old), open(&before, &new)), (Ok(()), Ok(())));
        // An older key that is added later opens but does not seal.
        let after = ring(1, 2);
        assert_eq!(open(&after, &old), Err(Reason::SectorKeyEpoch));
        after.add(1, &secret(1)).unwrap();
        assert_eq!(open(&after, &old), Ok(()));
        assert_eq!(sector_key_epoch(&seal(&after, &mut counters)), 2);
    }

    #[test]
    fn epochs_that_are_not_the_volumes_are_refused() {
        let mut counters = CounterRange::new(1, 1, 256, 1 << 20).unwrap();
        let own = ring(5, 6);
        for epoch in [0, 4, 6, 5 + KEY_EPOCHS_MAX, u32::MAX] {
            assert_eq!(own.add(epoch, &secret(1)), Err(BadEpoch), "{epoch}");
        }
        let mut block = seal(&own, &mut counters);
        for epoch in [0u32, 4, 5, 7, 5 + KEY_EPOCHS_MAX, u32::MAX] {
            let at = DATA_BYTES + field::KEY_EPOCH.0;
            block[at..at + 4].copy_from_slice(&epoch.to_le_bytes());
            assert_eq!(open(&own, &block), Err(Reason::SectorKeyEpoch), "{epoch}");
        }
    }

    #[test]
    fn a_sector_opens_under_the_key_of_its_own_epoch_only() {
        let mut counters = CounterRange::new(1, 1, 256, 1 << 20).unwrap();
        let own = ring(1, 1);
        let mut block = seal(&own, &mut counters);
        own.add(2, &secret(2)).unwrap();
        let at = DATA_BYTES + field::KEY_EPOCH.0;
        block[at..at + 4].copy_from_slice(&2u32.to_le_bytes());
        assert_eq!(open(&own, &block), Err(Reason::SectorTag));
    }
}
