//! What a sealed file store has on its device, byte by byte (`docs/stores.md` §2). Everything is
//! little endian; every structure is one page, with a tag of 8 bytes at its end.

use std::io;

use sealane_proto::aead::{HmacKey, MacKey, NONCE_BYTES, Secret};
use sealane_proto::digest::are_equal;

use super::super::store::METADATA_BYTES;
use super::pages::{PAGE_BYTES, Page};

/// First bytes of the superblock.
const MAGIC: [u8; 8] = *b"SEALSTOR";
/// Version of this layout.
const VERSION: u32 = 2;
/// Bytes of a page before its checksum.
const BODY_BYTES: usize = PAGE_BYTES - CHECKSUM_BYTES;
/// Bytes of a checksum.
pub const CHECKSUM_BYTES: usize = 8;
/// Bytes in front of entries and records in their pages.
const PAGE_HEADER_BYTES: usize = 40;
/// Bytes of an entry in a table page.
const ENTRY_BYTES: usize = 88;
/// Bytes of a record in a log page.
const RECORD_BYTES: usize = 16 + ENTRY_BYTES;
/// Entries of a table page.
pub const ENTRIES_PER_PAGE: u64 = ((BODY_BYTES - PAGE_HEADER_BYTES) / ENTRY_BYTES) as u64;
/// Records of a log page.
pub const RECORDS_PER_PAGE: usize = (BODY_BYTES - PAGE_HEADER_BYTES) / RECORD_BYTES;

/// Pages of the superblock and the two checkpoints, before the log.
const LOG_START: u64 = 3;
/// Most spare slots: with these the device needs to be made durable once per 256 MiB at least.
const SPARE_SLOTS_MAX: u64 = 65_536;
/// Fewest spare slots: several of the largest writes at once.
const SPARE_SLOTS_MIN: u64 = 1024;
/// Pages of the log: 16 MiB, so that recovery reads data of 160 thousand records at most.
const LOG_PAGES: u64 = 4096;

/// Sizes of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Blocks that the store offers.
    pub block_count: u64,
    /// Slots for their data; the spare ones take new versions.
    pub slot_count: u64,
    /// Pages of the log.
    pub log_pages: u64,
}

impl Geometry {
    /// The sizes for so many blocks.
    #[must_use]
    pub fn new(block_count: u64) -> Self {
        let spare = (block_count / 16).clamp(SPARE_SLOTS_MIN, SPARE_SLOTS_MAX);
        Self { block_count, slot_count: block_count + spare, log_pages: LOG_PAGES }
    }

    /// Pages of one copy of the table.
    #[must_use]
    pub fn table_pages(&self) -> u64 {
        self.block_count.div_ceil(ENTRIES_PER_PAGE)
    }

    /// Where a checkpoint goes, by its number.
    #[must_use]
    pub fn checkpoint(&self, number: u64) -> u64 {
        1 + number % 2
    }

    /// Where a log page goes, by its number.
    #[must_use]
    pub fn log(&self, number: u64) -> u64 {
        LOG_START + number % self.log_pages
    }

    /// Where one of the two copies of a table page is.
    #[must_use]
    pub fn table(&self, index: u64, copy: u8) -> u64 {
        LOG_START + self.log_pages + 2 * index + u64::from(copy)
    }

    /// Where a slot is.
    #[must_use]
    pub fn slot(&self, slot: u64) -> u64 {
        LOG_START + self.log_pages + 2 * self.table_pages() + slot
    }

    /// Pages of the whole store.
    #[must_use]
    pub fn page_count(&self) -> u64 {
        self.slot(self.slot_count)
    }

    fn is_sound(&self) -> bool {
        // Far above any device, and far from overflow in the sums above.
        const COUNT_MAX: u64 = 1 << 48;
        (1..COUNT_MAX).contains(&self.block_count)
            && (self.block_count..COUNT_MAX).contains(&self.slot_count)
            && (2..COUNT_MAX).contains(&self.log_pages)
    }
}

/// What a tag is over; part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The superblock.
    Superblock = 0,
    /// A checkpoint.
    Checkpoint = 1,
    /// A page of the log.
    Log = 2,
    /// A page of the table.
    Table = 3,
    /// The sum over the table, in a checkpoint.
    TableSum = 4,
    /// A label.
    Label = 5,
}

/// Who can make the pages of a store.
#[derive(Debug)]
pub enum Authority<'a> {
    /// Whoever reads its superblock, where the key lies: tags tell whole from torn only.
    Device,
    /// Who has this secret: what others made, or changed, is refused.
    Secret(&'a Secret),
}

/// Tags of a store's pages and checksums of its blocks, under two keys derived from the store's.
///
/// A page's tag is HMAC-SHA256: whoever answers for the device can have a stamp used twice, by
/// putting an older state back. A block's checksum is GMAC with its stamp as nonce. It tells torn
/// from whole, also for bytes that a tenant chose; that it is authentic, its seal says.
#[derive(Debug)]
pub struct Checker {
    pages: HmacKey,
    blocks: MacKey,
}

impl Checker {
    /// The keys of one store.
    #[must_use]
    pub fn new(superblock: &Superblock, authority: &Authority<'_>) -> Self {
        Self::of(&superblock.uuid, &superblock.seed, authority)
    }

    /// The keys of the store of that name and seed.
    #[must_use]
    pub fn of(uuid: &[u8; 16], seed: &[u8; 32], authority: &Authority<'_>) -> Self {
        let mut seed = *seed;
        let root = match authority {
            Authority::Device => Secret::take(&mut seed),
            // A fresh seed for each layout: no two have a key in common.
            Authority::Secret(secret) => secret.derive("sealane store v2 root", &seed),
        };
        let pages = root.derive("sealane store v2 pages", uuid);
        let blocks = root.derive("sealane store v2 blocks", uuid);
        Self { pages: HmacKey::new(&pages), blocks: MacKey::new(&blocks) }
    }

    /// Checksum of a block: data, then metadata.
    #[must_use]
    pub fn block(&self, stamp: u64, block: &[u8]) -> [u8; CHECKSUM_BYTES] {
        let mut nonce = [0; NONCE_BYTES];
        nonce[..8].copy_from_slice(&stamp.to_le_bytes());
        truncated(&self.blocks.mac(nonce, block))
    }

    /// The tag of a page's body, and a number that only who has the key knows: what the page adds
    /// to the sum over the table.
    fn page(&self, kind: Kind, body: &[u8]) -> ([u8; CHECKSUM_BYTES], u64) {
        let mac = self.pages.mac(kind as u8, body);
        let (shown, hidden) = mac.split_at(CHECKSUM_BYTES);
        (truncated(shown), u64::from_le_bytes(truncated(hidden)))
    }

    /// Ends a page with the tag of its body; returns what the page adds to the sum over the table.
    pub fn seal(&self, kind: Kind, page: &mut Page) -> u64 {
        let (body, end) = page.0.split_at_mut(BODY_BYTES);
        let (tag, hidden) = self.page(kind, body);
        end.copy_from_slice(&tag);
        hidden
    }

    pub(super) fn check(&self, kind: Kind, page: &Page) -> Option<u64> {
        let (body, end) = page.0.split_at(BODY_BYTES);
        let (tag, hidden) = self.page(kind, body);
        are_equal(&tag, end).then_some(hidden)
    }

    /// What a checkpoint says of the sum over the table: whether it is this one, and nothing else.
    #[must_use]
    pub fn table_proof(&self, stamp: u64, sum: u64) -> [u8; CHECKSUM_BYTES] {
        let mut body = [0; 16];
        body[..8].copy_from_slice(&stamp.to_le_bytes());
        body[8..].copy_from_slice(&sum.to_le_bytes());
        self.page(Kind::TableSum, &body).0
    }
}

/// The first bytes of a MAC.
fn truncated(mac: &[u8]) -> [u8; CHECKSUM_BYTES] {
    *mac.first_chunk().expect("a MAC is longer than what is kept of it")
}

/// Reads or writes fields one behind the other.
struct Cursor<'a> {
    rest: &'a mut [u8],
}

impl<'a> Cursor<'a> {
    fn new(page: &'a mut Page) -> Self {
        Self { rest: &mut page.0 }
    }

    fn put(&mut self, bytes: &[u8]) {
        let (front, rest) = std::mem::take(&mut self.rest).split_at_mut(bytes.len());
        front.copy_from_slice(bytes);
        self.rest = rest;
    }

    fn put_u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }
}

fn get<const BYTES: usize>(rest: &mut &[u8]) -> [u8; BYTES] {
    let (front, back) = rest.split_first_chunk().expect("pages have room for their fields");
    *rest = back;
    *front
}

fn get_u64(rest: &mut &[u8]) -> u64 {
    u64::from_le_bytes(get(rest))
}

/// First page of a store: written once, when the store is created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Identifies the store.
    pub uuid: [u8; 16],
    /// The key of its tags, or what makes that of a secret this layout's own.
    pub seed: [u8; 32],
    /// Its sizes.
    pub geometry: Geometry,
}

impl Superblock {
    /// The page.
    #[must_use]
    pub fn encode(&self, checker: &Checker) -> Page {
        let mut page = Page::ZERO;
        let mut cursor = Cursor::new(&mut page);
        cursor.put(&MAGIC);
        cursor.put(&VERSION.to_le_bytes());
        cursor.put(&[0; 4]);
        cursor.put(&self.uuid);
        cursor.put(&self.seed);
        cursor.put_u64(self.geometry.block_count);
        cursor.put_u64(self.geometry.slot_count);
        cursor.put_u64(self.geometry.log_pages);
        checker.seal(Kind::Superblock, &mut page);
        page
    }

    /// Parses the page without checking it: what it claims to be. The error says what it is instead.
    pub fn claimed(page: &Page) -> io::Result<Self> {
        let refuse = |detail: &str| Err(io::Error::new(io::ErrorKind::InvalidData, detail));
        let rest = &mut &page.0[..];
        if get(rest) != MAGIC {
            return refuse("not a Sealane store");
        }
        if u32::from_le_bytes(get(rest)) != VERSION {
            return refuse("a Sealane store of another version");
        }
        let _: [u8; 4] = get(rest);
        let (uuid, seed) = (get(rest), get(rest));
        let (block_count, slot_count) = (get_u64(rest), get_u64(rest));
        let geometry = Geometry { block_count, slot_count, log_pages: get_u64(rest) };
        Ok(Self { uuid, seed, geometry })
    }

    /// Parses and checks the page; also the keys of the rest.
    pub fn decode(page: &Page, authority: &Authority<'_>) -> io::Result<(Self, Checker)> {
        let claimed = Self::claimed(page)?;
        let checker = Checker::new(&claimed, authority);
        if checker.check(Kind::Superblock, page).is_none() || !claimed.geometry.is_sound() {
            let detail = match authority {
                Authority::Device => "superblock of a Sealane store is damaged",
                Authority::Secret(_) => "superblock of a Sealane store is damaged or forged",
            };
            return Err(io::Error::new(io::ErrorKind::InvalidData, detail));
        }
        Ok((claimed, checker))
    }
}

/// Where the table and the log stand: two pages, written in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checkpoint {
    /// Counts checkpoints.
    pub number: u64,
    /// Table pages with a later stamp belong to a checkpoint that was never completed.
    pub stamp: u64,
    /// Drawn at random at each opening: log pages of another one are stale.
    pub generation: u64,
    /// Number of the first log page with records that the table lacks.
    pub log_start: u64,
    /// Of the sum over the table's pages, so that none can be lost or put back unnoticed.
    pub table_proof: [u8; CHECKSUM_BYTES],
}

const CHECKPOINT_MAGIC: [u8; 8] = *b"SEALCHKP";
const LOG_MAGIC: [u8; 8] = *b"SEALLOGP";
const TABLE_MAGIC: [u8; 8] = *b"SEALTABL";

impl Checkpoint {
    /// The page.
    #[must_use]
    pub fn encode(&self, checker: &Checker) -> Page {
        let mut page = Page::ZERO;
        let mut cursor = Cursor::new(&mut page);
        cursor.put(&CHECKPOINT_MAGIC);
        for field in [self.stamp, self.number, self.generation, self.log_start] {
            cursor.put_u64(field);
        }
        cursor.put(&self.table_proof);
        checker.seal(Kind::Checkpoint, &mut page);
        page
    }

    /// Parses and checks the page.
    #[must_use]
    pub fn decode(page: &Page, checker: &Checker) -> Option<Self> {
        let rest = &mut &page.0[..];
        let magic: [u8; 8] = get(rest);
        let [stamp, number, generation, log_start] = [(); 4].map(|()| get_u64(rest));
        let table_proof = get(rest);
        let is_whole = checker.check(Kind::Checkpoint, page).is_some();
        (magic == CHECKPOINT_MAGIC && is_whole).then_some(Self {
            number,
            stamp,
            generation,
            log_start,
            table_proof,
        })
    }
}

/// What is known of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Slot of its data; None if it was deallocated.
    pub slot: Option<u64>,
    /// Orders the changes of one block, and is the nonce of its checksum. Zero: never written.
    pub stamp: u64,
    /// Checksum over data and metadata.
    pub checksum: [u8; CHECKSUM_BYTES],
    /// Its metadata.
    pub metadata: [u8; METADATA_BYTES],
}

impl Entry {
    /// A block never written.
    pub const UNWRITTEN: Self = Self::deallocated(0);

    /// A block deallocated by the change of that stamp.
    #[must_use]
    pub const fn deallocated(stamp: u64) -> Self {
        let (checksum, metadata) = ([0; CHECKSUM_BYTES], [0; METADATA_BYTES]);
        Self { slot: None, stamp, checksum, metadata }
    }

    fn put(&self, cursor: &mut Cursor<'_>) {
        cursor.put_u64(self.slot.map_or(0, |slot| slot + 1));
        cursor.put_u64(self.stamp);
        cursor.put(&self.checksum);
        cursor.put(&self.metadata);
    }

    fn get(rest: &mut &[u8]) -> Self {
        let slot = get_u64(rest).checked_sub(1);
        Self { slot, stamp: get_u64(rest), checksum: get(rest), metadata: get(rest) }
    }
}

/// One change of the table, as the log has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// First block.
    pub lba: u64,
    /// How many blocks: one, unless they are deallocated.
    pub blocks: u64,
    /// What they become.
    pub entry: Entry,
}

/// One page of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogPage {
    /// Orders it among the pages of its place.
    pub stamp: u64,
    /// Generation of the store that wrote it.
    pub generation: u64,
    /// Counts log pages.
    pub number: u64,
    /// Records of log pages before this one were durable, with their data, when it was written.
    pub durable: u64,
    /// Its records, [`RECORDS_PER_PAGE`] at most.
    pub records: Vec<Record>,
}

impl LogPage {
    /// The page. The count of records shares a field with nothing: it is the last two bytes
    /// before the checksum.
    ///
    /// # Panics
    /// If it has more records than a page holds.
    #[must_use]
    pub fn encode(&self, checker: &Checker) -> Page {
        assert!(self.records.len() <= RECORDS_PER_PAGE, "more records than a log page holds");
        let mut page = Page::ZERO;
        page.0[BODY_BYTES - 2..BODY_BYTES]
            .copy_from_slice(&(self.records.len() as u16).to_le_bytes());
        let mut cursor = Cursor::new(&mut page);
        cursor.put(&LOG_MAGIC);
        for field in [self.stamp, self.generation, self.number, self.durable] {
            cursor.put_u64(field);
        }
        for record in &self.records {
            cursor.put_u64(record.lba);
            cursor.put_u64(record.blocks);
            record.entry.put(&mut cursor);
        }
        checker.seal(Kind::Log, &mut page);
        page
    }

    /// Parses and checks the page.
    #[must_use]
    pub fn decode(page: &Page, checker: &Checker) -> Option<Self> {
        let count = u16::from_le_bytes([page.0[BODY_BYTES - 2], page.0[BODY_BYTES - 1]]);
        let rest = &mut &page.0[..];
        let magic: [u8; 8] = get(rest);
        let [stamp, generation, number, durable] = [(); 4].map(|()| get_u64(rest));
        let is_whole = checker.check(Kind::Log, page).is_some();
        if magic != LOG_MAGIC || !is_whole || usize::from(count) > RECORDS_PER_PAGE {
            return None;
        }
        let records = (0..count).map(|_| {
            let (lba, blocks) = (get_u64(rest), get_u64(rest));
            Record { lba, blocks, entry: Entry::get(rest) }
        });
        let records = records.collect();
        Some(Self { stamp, generation, number, durable, records })
    }
}

/// One page of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TablePage {
    /// Orders it among the pages of its place.
    pub stamp: u64,
    /// Its place in the table.
    pub index: u64,
    /// Entries of its blocks.
    pub entries: [Entry; ENTRIES_PER_PAGE as usize],
}

impl TablePage {
    /// The page, and its part in the table's sum.
    #[must_use]
    pub fn encode(&self, checker: &Checker) -> (Page, u64) {
        let mut page = Page::ZERO;
        let mut cursor = Cursor::new(&mut page);
        cursor.put(&TABLE_MAGIC);
        for field in [self.stamp, self.index, 0, 0] {
            cursor.put_u64(field);
        }
        for entry in &self.entries {
            entry.put(&mut cursor);
        }
        let sum = checker.seal(Kind::Table, &mut page);
        (page, sum)
    }

    /// Parses and checks the page; also its part in the table's sum.
    #[must_use]
    pub fn decode(page: &Page, checker: &Checker) -> Option<(Self, u64)> {
        let rest = &mut &page.0[..];
        let magic: [u8; 8] = get(rest);
        let [stamp, index, _, _] = [(); 4].map(|()| get_u64(rest));
        if magic != TABLE_MAGIC {
            return None;
        }
        let sum = checker.check(Kind::Table, page)?;
        let entries = [(); ENTRIES_PER_PAGE as usize].map(|()| Entry::get(rest));
        Some((Self { stamp, index, entries }, sum))
    }
}
