//! The sector format: 4096 bytes of ciphertext followed by 64 bytes of metadata, on disk and on the
//! wire (`docs/formats/secure-queue.md` §1), and the only way to seal a sector.
//!
//! A counter has one owner, [`CounterRange`], and advances in one place, [`CounterRange::take`].
//! The [`Iv`] made from it can't be copied and sealing consumes it, so code that seals twice with
//! one IV does not compile.

use crate::aead::{AeadKey, NotAuthentic, Sample, Secret, TAG_BYTES};
use crate::nvme::Reason;

/// Bytes of plaintext or ciphertext in a sector.
pub const DATA_BYTES: usize = 4096;
/// Bytes of metadata after the data.
pub const METADATA_BYTES: usize = 64;
/// Bytes of a sector with its metadata.
pub const BLOCK_BYTES: usize = DATA_BYTES + METADATA_BYTES;
/// Bytes of an IV.
pub const IV_BYTES: usize = 12;
/// Version of this format.
pub const FORMAT_VERSION: u8 = 1;
/// Flag (wire only): the sector was never written; all but version, flags and MAC is zero.
pub const FLAG_UNWRITTEN: u8 = 0x01;
/// Counters (AES blocks of 16 bytes) consumed by one sector.
pub const COUNTERS_PER_SECTOR: u64 = (DATA_BYTES / 16) as u64;

/// Offsets in the 64 bytes of metadata, as (start, end); the same on disk and on the wire.
pub mod field {
    /// AES-GCM tag.
    pub const TAG: (usize, usize) = (0, 16);
    /// IV, big endian: broker instance 16 bits, start epoch 24 bits, counter 56 bits.
    pub const IV: (usize, usize) = (16, 28);
    /// Disk: fast-path MAC, zero means "none". Wire: sector MAC.
    pub const MAC: (usize, usize) = (28, 44);
    /// Key epoch, little endian.
    pub const KEY_EPOCH: (usize, usize) = (44, 48);
    /// Disk: write sequence, zero until a log exists. Wire: zero.
    pub const SEQUENCE: (usize, usize) = (48, 54);
    /// Disk: keyed ciphertext checksum, zero until a log exists. Wire: zero.
    pub const CHECKSUM: (usize, usize) = (54, 62);
    /// Wire only, in a write-if: the IV that must be the current one; zero means "unwritten".
    pub const EXPECTED_IV: (usize, usize) = (48, 60);
    /// Format version.
    pub const VERSION: (usize, usize) = (62, 63);
    /// Flags.
    pub const FLAGS: (usize, usize) = (63, 64);
    /// All fields by name, for external checks.
    pub const ALL: [(&str, (usize, usize)); 8] = [
        ("tag", TAG),
        ("iv", IV),
        ("mac", MAC),
        ("key_epoch", KEY_EPOCH),
        ("sequence", SEQUENCE),
        ("checksum", CHECKSUM),
        ("version", VERSION),
        ("flags", FLAGS),
    ];
}

/// One block as its fields.
pub type Block = [u8; BLOCK_BYTES];

/// The bytes of one metadata field of a block.
#[must_use]
pub fn metadata(block: &Block, (start, end): (usize, usize)) -> &[u8] {
    &block[DATA_BYTES + start..DATA_BYTES + end]
}

/// The bytes of one metadata field of a block, mutable.
pub fn metadata_mut(block: &mut Block, (start, end): (usize, usize)) -> &mut [u8] {
    &mut block[DATA_BYTES + start..DATA_BYTES + end]
}

/// The IV in a block's metadata.
#[must_use]
pub fn block_iv(block: &Block) -> [u8; IV_BYTES] {
    let mut iv = [0; IV_BYTES];
    iv.copy_from_slice(metadata(block, field::IV));
    iv
}

/// The key epoch in a block's metadata.
#[must_use]
pub fn sector_key_epoch(block: &Block) -> u32 {
    let mut epoch = [0; 4];
    epoch.copy_from_slice(metadata(block, field::KEY_EPOCH));
    u32::from_le_bytes(epoch)
}

/// Writes the IV that must be the current one into the block of a write-if; zero: never written.
pub fn set_expected_iv(block: &mut Block, iv: &[u8; IV_BYTES]) {
    metadata_mut(block, field::EXPECTED_IV).copy_from_slice(iv);
}

/// Returns the IV that must be the current one from the block of a write-if, and zeroes the field,
/// as in the stored block.
pub fn take_expected_iv(block: &mut Block) -> [u8; IV_BYTES] {
    let mut iv = [0; IV_BYTES];
    let place = metadata_mut(block, field::EXPECTED_IV);
    iv.copy_from_slice(place);
    place.fill(0);
    iv
}

/// Whether the block marks the sector as never written.
#[must_use]
pub fn is_unwritten(block: &Block) -> bool {
    metadata(block, field::FLAGS) == [FLAG_UNWRITTEN]
}

/// Marks the block as never written: all zero except version and flag.
pub fn set_unwritten(block: &mut Block) {
    block.fill(0);
    metadata_mut(block, field::VERSION).fill(FORMAT_VERSION);
    metadata_mut(block, field::FLAGS).fill(FLAG_UNWRITTEN);
}

/// Checks that a block is well formed as a *written* sector: known version, no flags, a nonzero IV,
/// and zeros in undefined fields.
pub fn check_written(block: &Block) -> Result<(), Reason> {
    let rest = (field::SEQUENCE.0, field::CHECKSUM.1);
    let well_formed = has_written_form(block) && is_zero(block, rest);
    if well_formed { Ok(()) } else { Err(Reason::SectorFormat) }
}

fn is_zero(block: &Block, place: (usize, usize)) -> bool {
    metadata(block, place).iter().all(|byte| *byte == 0)
}

/// Checks what all written sectors share: known version, no flags, an IV, and a zero MAC field, as
/// after verification.
fn has_written_form(block: &Block) -> bool {
    metadata(block, field::VERSION) == [FORMAT_VERSION]
        && metadata(block, field::FLAGS) == [0]
        && block_iv(block) != [0; IV_BYTES]
        && is_zero(block, field::MAC)
}

/// The same check for the block of a write-if, which has the expected IV in the bytes of sequence
/// and checksum.
pub fn check_conditional(block: &Block) -> Result<(), Reason> {
    let rest = (field::EXPECTED_IV.1, field::CHECKSUM.1);
    let well_formed = has_written_form(block) && is_zero(block, rest);
    if well_formed { Ok(()) } else { Err(Reason::SectorFormat) }
}

/// No counters are left; nothing can be sealed until a new range is leased.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the leased counters are used up")]
pub struct Exhausted;

/// The range is not one that a broker may grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "counter range must be non-empty, start above 0 and end at or below 2^56; epoch below 2^24"
)]
pub struct BadRange;

/// An IV that was never used. It can only be moved, and sealing consumes it.
#[derive(Debug, PartialEq, Eq)]
pub struct Iv([u8; IV_BYTES]);

/// Counters that belong to this holder alone: a lease or a part of one. Deliberately not `Clone`.
#[derive(Debug, PartialEq, Eq)]
pub struct CounterRange {
    broker_instance: u16,
    start_epoch: u32,
    next: u64,
    end: u64,
}

impl CounterRange {
    /// Creates the range `start..end` of a lease. Counter 0 is never valid.
    pub fn new(
        broker_instance: u16,
        start_epoch: u32,
        start: u64,
        end: u64,
    ) -> Result<Self, BadRange> {
        if start == 0 || end <= start || end > 1 << 56 || start_epoch >= 1 << 24 {
            return Err(BadRange);
        }
        Ok(Self { broker_instance, start_epoch, next: start, end })
    }

    /// The range's parts: broker instance, start epoch, first counter left, end (exclusive).
    #[must_use]
    pub fn into_parts(self) -> (u16, u32, u64, u64) {
        (self.broker_instance, self.start_epoch, self.next, self.end)
    }

    /// Counters left.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.end - self.next
    }

    /// Takes the next IV. A counter advances only here.
    pub fn take(&mut self) -> Result<Iv, Exhausted> {
        if self.remaining() < COUNTERS_PER_SECTOR {
            return Err(Exhausted);
        }
        let counter = self.next;
        self.next += COUNTERS_PER_SECTOR;
        let mut iv = [0; IV_BYTES];
        iv[..2].copy_from_slice(&self.broker_instance.to_be_bytes());
        iv[2..5].copy_from_slice(&self.start_epoch.to_be_bytes()[1..]);
        iv[5..].copy_from_slice(&counter.to_be_bytes()[1..]);
        Ok(Iv(iv))
    }

    /// Splits off at most `counters` from the front, for another thread; this range no longer
    /// contains them.
    #[must_use]
    pub fn split(&mut self, counters: u64) -> Option<Self> {
        let taken = counters.min(self.remaining());
        if taken < COUNTERS_PER_SECTOR {
            return None;
        }
        let start = self.next;
        self.next += taken;
        Some(Self { next: start, end: start + taken, ..*self })
    }
}

/// The volume to which a sector's seal is bound, besides the LBA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeIdentity {
    /// Volume UUID.
    pub volume_id: [u8; 16],
    /// Generation of the volume: a re-created volume never opens sectors of an older one.
    pub generation: u32,
}

/// A sector that somebody else is sealing. It holds the IV, which is used up whether or not the
/// sector gets sealed: a ticket is never given twice, and can't be copied.
#[derive(Debug)]
pub struct Ticket {
    iv: [u8; IV_BYTES],
    lba: u64,
    epoch: u32,
}

impl Ticket {
    /// The nonce.
    #[must_use]
    pub fn nonce(&self) -> [u8; IV_BYTES] {
        self.iv
    }

    /// Epoch of the key that must seal it.
    #[must_use]
    pub fn key_epoch(&self) -> u32 {
        self.epoch
    }
}

/// The key of one volume for one key epoch.
#[derive(Debug)]
pub struct SealKey {
    key: AeadKey,
    secret: Secret,
    identity: VolumeIdentity,
    epoch: u32,
}

/// Bytes of a sector's additional data.
pub const AAD_BYTES: usize = 1 + 16 + 4 + 8 + 4;

impl SealKey {
    /// Creates the volume's key for `epoch`.
    #[must_use]
    pub fn new(secret: &Secret, identity: VolumeIdentity, epoch: u32) -> Self {
        Self { key: AeadKey::new(secret), secret: secret.clone(), identity, epoch }
    }

    /// The additional data of sector `lba`.
    #[must_use]
    pub fn aad(&self, lba: u64) -> [u8; AAD_BYTES] {
        let mut aad = [0; AAD_BYTES];
        aad[0] = FORMAT_VERSION;
        aad[1..17].copy_from_slice(&self.identity.volume_id);
        aad[17..21].copy_from_slice(&self.identity.generation.to_le_bytes());
        aad[21..29].copy_from_slice(&lba.to_le_bytes());
        aad[29..33].copy_from_slice(&self.epoch.to_le_bytes());
        aad
    }

    /// Seals `plain` into `block` as sector `lba` and writes all its metadata (with a zero MAC).
    /// Consumes the IV.
    #[allow(clippy::needless_pass_by_value)] // taking the IV by value is the point
    pub fn seal(&self, iv: Iv, lba: u64, plain: &[u8; DATA_BYTES], block: &mut Block) {
        let tag = self.key.seal_into(iv.0, &self.aad(lba), plain, &mut block[..DATA_BYTES]);
        self.describe(&iv.0, &tag, block);
    }

    /// Writes the metadata of a sealed sector.
    fn describe(&self, iv: &[u8; IV_BYTES], tag: &[u8; TAG_BYTES], block: &mut Block) {
        let meta = &mut block[DATA_BYTES..];
        meta.fill(0);
        meta[field::TAG.0..field::TAG.1].copy_from_slice(tag);
        meta[field::IV.0..field::IV.1].copy_from_slice(iv);
        meta[field::KEY_EPOCH.0..field::KEY_EPOCH.1].copy_from_slice(&self.epoch.to_le_bytes());
        meta[field::VERSION.0] = FORMAT_VERSION;
    }

    /// The key itself, for an accelerator that may hold it. (The expanded key reveals as much.)
    #[must_use]
    pub fn secret(&self) -> &Secret {
        &self.secret
    }

    /// Lets somebody else who has this key seal sector `lba`. Consumes the IV.
    #[must_use]
    #[allow(clippy::needless_pass_by_value)] // as in `seal`
    pub fn begin(&self, iv: Iv, lba: u64) -> Ticket {
        Ticket { iv: iv.0, lba, epoch: self.epoch }
    }

    /// Takes the ciphertext in `block` and its tag as the sealed sector of `ticket`, and completes
    /// the block; `Reason::SectorTag` if they aren't (see [`AeadKey::check_sealed`]). Then the block
    /// must not be used, and `plain` must be sealed with another IV.
    #[allow(clippy::needless_pass_by_value)] // a ticket is good for one attempt
    pub fn finish(
        &self,
        ticket: Ticket,
        plain: &[u8; DATA_BYTES],
        tag: &[u8; TAG_BYTES],
        block: &mut Block,
        sample: Sample,
    ) -> Result<(), Reason> {
        if ticket.epoch != self.epoch {
            return Err(Reason::SectorKeyEpoch);
        }
        let aad = self.aad(ticket.lba);
        self.key
            .check_sealed(ticket.iv, &aad, (plain, &block[..DATA_BYTES]), tag, sample)
            .map_err(|NotAuthentic| Reason::SectorTag)?;
        self.describe(&ticket.iv, tag, block);
        Ok(())
    }

    /// Opens `block` as sector `lba` into `plaintext`. Zeroes `plaintext` on an error.
    pub fn open(
        &self,
        lba: u64,
        block: &Block,
        plaintext: &mut [u8; DATA_BYTES],
    ) -> Result<(), Reason> {
        let outcome = self.open_checked(lba, block, plaintext);
        if outcome.is_err() {
            plaintext.fill(0);
        }
        outcome
    }

    fn open_checked(
        &self,
        lba: u64,
        block: &Block,
        plaintext: &mut [u8; DATA_BYTES],
    ) -> Result<(), Reason> {
        check_written(block)?;
        if sector_key_epoch(block) != self.epoch {
            return Err(Reason::SectorKeyEpoch);
        }
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(metadata(block, field::TAG));
        self.key
            .open(block_iv(block), &self.aad(lba), &block[..DATA_BYTES], &tag, plaintext)
            .map_err(|NotAuthentic| Reason::SectorTag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(volume: u8, generation: u32, epoch: u32) -> SealKey {
        let identity = VolumeIdentity { volume_id: [volume; 16], generation };
        SealKey::new(&Secret::take(&mut [3; 32]), identity, epoch)
    }

    fn range() -> CounterRange {
        CounterRange::new(2, 5, 1, 1 << 20).unwrap()
    }

    fn sealed(lba: u64) -> (Box<Block>, Box<[u8; DATA_BYTES]>) {
        let plain: Box<[u8; DATA_BYTES]> =
            Box::new(core::array::from_fn(|index| (index * 7 + 1) as u8));
        let mut block = Box::new([0; BLOCK_BYTES]);
        key(1, 1, 1).seal(range().take().unwrap(), lba, &plain, &mut block);
        (block, plain)
    }

    #[test]
    fn metadata_table_covers_64_bytes_without_gap_or_overlap() {
        let mut end = 0;
        for (name, (start, stop)) in field::ALL {
            assert_eq!(start, end, "{name}");
            end = stop;
        }
        assert_eq!(end, METADATA_BYTES);
    }

    #[test]
    fn sealed_sector_opens_only_where_it_belongs() {
        let (block, plain) = sealed(42);
        assert_ne!(block[..DATA_BYTES], plain[..]);
        let mut out = [0; DATA_BYTES];
        key(1, 1, 1).open(42, &block, &mut out).unwrap();
        assert_eq!(out, *plain);
        assert_eq!(key(1, 1, 1).open(43, &block, &mut out), Err(Reason::SectorTag));
        assert_eq!(out, [0; DATA_BYTES]);
        assert_eq!(key(2, 1, 1).open(42, &block, &mut out), Err(Reason::SectorTag));
        assert_eq!(key(1, 2, 1).open(42, &block, &mut out), Err(Reason::SectorTag));
        assert_eq!(key(1, 1, 2).open(42, &block, &mut out), Err(Reason::SectorKeyEpoch));
        let mut renamed = block.clone();
        metadata_mut(&mut renamed, field::KEY_EPOCH).copy_from_slice(&2u32.to_le_bytes());
        assert_eq!(key(1, 1, 2).open(42, &renamed, &mut out), Err(Reason::SectorTag));
    }

    /// What an accelerator with the key seals for sector 42.
    fn sealed_elsewhere(nonce: [u8; IV_BYTES], plain: &[u8; DATA_BYTES]) -> ([u8; 16], Box<Block>) {
        let mut block = Box::new([0; BLOCK_BYTES]);
        block[..DATA_BYTES].copy_from_slice(plain);
        let aead = AeadKey::new(&Secret::take(&mut [3; 32]));
        let tag = aead.seal(nonce, &key(1, 1, 1).aad(42), &mut block[..DATA_BYTES]);
        (tag, block)
    }

    /// The tag that whoever has the key can make for any ciphertext.
    fn forged_tag(nonce: [u8; IV_BYTES], ciphertext: &Block) -> [u8; 16] {
        let aead = AeadKey::new(&Secret::take(&mut [3; 32]));
        let mut opened = [0; DATA_BYTES];
        let _ = aead.seal(nonce, &[], &mut opened);
        opened.iter_mut().zip(ciphertext).for_each(|(to, from)| *to ^= from);
        aead.seal(nonce, &key(1, 1, 1).aad(42), &mut opened)
    }

    const SAMPLES: [Sample; 2] = [Sample::Block(7), Sample::Whole];

    fn ticket() -> Ticket {
        key(1, 1, 1).begin(range().take().unwrap(), 42)
    }

    #[test]
    fn a_sector_sealed_elsewhere_is_the_one_sealed_here() {
        let (expected, plain) = sealed(42);
        for sample in SAMPLES {
            let ticket = ticket();
            let (tag, mut block) = sealed_elsewhere(ticket.nonce(), &plain);
            key(1, 1, 1).finish(ticket, &plain, &tag, &mut block, sample).unwrap();
            assert_eq!(block, expected);
        }
    }

    #[test]
    fn what_another_sealed_wrongly_is_refused() {
        let (_, plain) = sealed(42);
        let nonce = ticket().nonce();
        let (tag, block) = sealed_elsewhere(nonce, &plain);
        let with = |change: &dyn Fn(&mut Block)| {
            let mut changed = block.clone();
            change(&mut changed);
            changed
        };
        let mut other_tag = tag;
        other_tag[15] ^= 1;
        let (old_tag, old) = sealed_elsewhere([9; IV_BYTES], &plain);
        let changed = with(&|block| block[16 * 7] ^= 1);
        let cases = [
            ("another tag", other_tag, block.clone()),
            ("a changed ciphertext", tag, with(&|block| block[4095] ^= 1)),
            ("another nonce", old_tag, old.clone()),
            // Only the sample finds these.
            ("another nonce with a tag for this one", forged_tag(nonce, &old), old),
            ("another plaintext with its tag", forged_tag(nonce, &changed), changed),
        ];
        for (name, tag, block) in cases {
            for sample in SAMPLES {
                let mut block = block.clone();
                let refused = key(1, 1, 1).finish(ticket(), &plain, &tag, &mut block, sample);
                assert_eq!(refused, Err(Reason::SectorTag), "{name}, {sample:?}");
            }
        }
        let finish =
            |own: SealKey, sample| own.finish(ticket(), &plain, &tag, &mut block.clone(), sample);
        assert_eq!(finish(key(1, 1, 2), Sample::Whole), Err(Reason::SectorKeyEpoch));
        assert_eq!(
            finish(key(1, 1, 1), Sample::Block(256)),
            Err(Reason::SectorTag),
            "no such block"
        );
    }

    #[test]
    fn every_flip_is_refused() {
        let (block, _) = sealed(42);
        let mut out = [0; DATA_BYTES];
        for bit in (0..DATA_BYTES * 8).step_by(97).chain(DATA_BYTES * 8..BLOCK_BYTES * 8) {
            let mut flipped = block.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(key(1, 1, 1).open(42, &flipped, &mut out).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn ranges_that_hold_zero_or_wrap_are_refused() {
        for (epoch, start, end) in
            [(5, 0, 10), (5, 9, 9), (5, 10, 9), (5, 1, (1 << 56) + 1), (1 << 24, 1, 10)]
        {
            assert_eq!(CounterRange::new(1, epoch, start, end), Err(BadRange));
        }
        let mut last =
            CounterRange::new(u16::MAX, (1 << 24) - 1, (1 << 56) - 256, 1 << 56).unwrap();
        assert_eq!(
            last.take().unwrap().0,
            [255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0]
        );
        assert_eq!(last.take(), Err(Exhausted));
        assert_eq!(last.split(1), None);
    }

    proptest! {
        #[test]
        fn no_counter_is_used_twice_however_ranges_are_split(
            steps in proptest::collection::vec((any::<bool>(), 1u64..5000), 1..60),
        ) {
            let mut whole = CounterRange::new(1, 1, 1, 100_000).unwrap();
            let mut parts: Vec<CounterRange> = Vec::new();
            let mut used = std::collections::HashSet::new();
            for (split, size) in steps {
                if split {
                    parts.extend(whole.split(size));
                }
                let count = parts.len() as u64 + 1;
                let chosen = (size % count) as usize;
                let part = parts.get_mut(chosen).unwrap_or(&mut whole);
                if let Ok(iv) = part.take() {
                    let counter = u64::from_be_bytes(iv.0[4..].try_into().unwrap()) & ((1 << 56) - 1);
                    for block in counter..counter + COUNTERS_PER_SECTOR {
                        prop_assert!(block > 0 && block < 100_000 && used.insert(block));
                    }
                }
            }
        }
    }
}
