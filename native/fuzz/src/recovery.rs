//! Opening a store whose device may hold anything.

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sealane_engine::storage::store::{BLOCK_BYTES, DATA_BYTES};
use sealane_engine::storage::stores::fresh::geometry::Geometry;
use sealane_engine::storage::stores::fresh::keys::{Authority, BODY_BYTES, Kind, StoreKeys};
use sealane_engine::storage::stores::fresh::map::{Layout, Map};
use sealane_engine::storage::stores::fresh::placed::Placed;
use sealane_engine::storage::stores::fresh::superblock::Superblock;
use sealane_engine::storage::stores::pages::{BlockFile, Page};
use sealane_proto::freshness::leaf::{Ivs, LeafFormat};
use sealane_proto::freshness::pending::Known;
use sealane_proto::sector::{Block, FORMAT_VERSION, METADATA_BYTES, block_iv, field};

use crate::script::Script;
use crate::store::seal;

/// Number of blocks written.
const BLOCKS: u64 = 100;

/// A device in memory; each page has its metadata.
#[derive(Debug)]
struct Device(Mutex<Vec<Block>>);

impl Device {
    fn held(&self) -> MutexGuard<'_, Vec<Block>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn block(&self, page: u64) -> io::Result<Block> {
        Ok(*self.held().get(page as usize).ok_or(io::ErrorKind::UnexpectedEof)?)
    }

    fn put(&self, page: u64, block: Block) -> io::Result<()> {
        *self.held().get_mut(page as usize).ok_or(io::ErrorKind::UnexpectedEof)? = block;
        Ok(())
    }
}

impl BlockFile for Device {
    fn read(&self, page: u64, pages: &mut [Page]) -> io::Result<()> {
        for (number, page) in (page..).zip(pages) {
            page.0.copy_from_slice(&self.block(number)?[..DATA_BYTES]);
        }
        Ok(())
    }

    fn write(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        for (number, page) in (page..).zip(pages) {
            let mut block = [0; BLOCK_BYTES];
            block[..DATA_BYTES].copy_from_slice(&page.0);
            self.put(number, block)?;
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn read_metadata(&self, page: u64) -> io::Result<[u8; METADATA_BYTES]> {
        Ok(*self.block(page)?.last_chunk().expect("a block ends with its metadata"))
    }
}

/// A layout whose opening is fuzzed.
trait Opened: Layout + Sized {
    const GEOMETRY: Geometry;
    /// Writes blocks like the store. Writes nothing if room must be made first.
    fn write(map: &Map<Self>, device: &Device, lba: u64, blocks: &[u8]) -> io::Result<()>;
    /// Whether a block reads as its entry states.
    fn is_readable(map: &Map<Self>, device: &Device, lba: u64, entry: &Self::Entry) -> bool;
}

impl Opened for Placed {
    const GEOMETRY: Geometry = Geometry {
        block_count: BLOCKS,
        leaf_entries: Self::ENTRIES_PER_LEAF,
        slot_count: 2 * BLOCKS,
        log_pages: 6,
        pending_max: 80,
        earlier: Vec::new(),
    };

    fn write(map: &Map<Self>, device: &Device, lba: u64, blocks: &[u8]) -> io::Result<()> {
        let Some(entries) = map.place(blocks)? else { return map.make_room() };
        for (entry, block) in entries.iter().zip(blocks.as_chunks::<BLOCK_BYTES>().0) {
            let mut page = Page::ZERO;
            page.0.copy_from_slice(&block[..DATA_BYTES]);
            device.write(Self::GEOMETRY.slot(entry.slot), &[page])?;
        }
        map.commit(lba, &entries)
    }

    fn is_readable(map: &Map<Self>, device: &Device, _lba: u64, entry: &Self::Entry) -> bool {
        let Ok(mut block) = device.block(Self::GEOMETRY.slot(entry.slot)) else { return false };
        block[DATA_BYTES..].copy_from_slice(&entry.metadata());
        map.is_whole(entry, &block)
    }
}

impl Opened for Ivs {
    /// Two sets.
    const GEOMETRY: Geometry = Geometry {
        block_count: Self::ENTRIES_PER_LEAF + BLOCKS,
        leaf_entries: Self::ENTRIES_PER_LEAF,
        slot_count: 0,
        log_pages: 6,
        pending_max: 80,
        earlier: Vec::new(),
    };

    fn write(map: &Map<Self>, device: &Device, lba: u64, blocks: &[u8]) -> io::Result<()> {
        let Some(ivs) = map.intend(lba, blocks)? else { return map.make_room() };
        map.announce()?;
        for (lba, block) in (lba..).zip(blocks.as_chunks::<BLOCK_BYTES>().0) {
            device.put(Self::GEOMETRY.in_place_block(lba), *block)?;
        }
        map.arrived(lba, &ivs)
    }

    fn is_readable(map: &Map<Self>, device: &Device, lba: u64, iv: &Self::Entry) -> bool {
        let Ok(block) = device.block(Self::GEOMETRY.in_place_block(lba)) else { return false };
        let mut known = [Known::Absent];
        map.take_vouched(&mut known, lba, &[block]);
        assert!(known == [Known::Absent] || known == [Known::Entry(*iv)], "a forged MAC passed");
        let is_readable = Map::check_blocks(&[Known::Entry(*iv)], lba, &mut [block]).is_ok();
        assert_eq!(is_readable, block_iv(&block) == *iv);
        let mut vouched = block;
        let outcome = map.vouch(lba / Ivs::ENTRIES_PER_LEAF, [(lba, &mut vouched)]);
        if let Ok([Ok(Some(_))]) = outcome.as_deref() {
            assert!(is_readable, "a MAC for what isn't current");
            map.take_vouched(&mut known, lba, &[vouched]);
            assert_eq!(known, [Known::Entry(*iv)]);
        }
        is_readable
    }
}

fn superblock<F: Opened>() -> Superblock {
    Superblock { uuid: [1; 16], seed: [7; 32], geometry: F::GEOMETRY }
}

/// A store opens or is reported as damaged; if nothing was changed, it opens with the same
/// contents.
pub fn store_recovery(data: &[u8]) {
    open_again::<Placed>(data);
}

/// The same for a store in place.
pub fn store_recovery_in_place(data: &[u8]) {
    open_again::<Ivs>(data);
}

fn open_again<F: Opened>(data: &[u8]) {
    let mut script = Script::new(data);
    let pages = F::GEOMETRY.device_pages();
    let device = Arc::new(Device(Mutex::new(vec![[0; BLOCK_BYTES]; pages as usize])));
    let map = Map::<F>::create(device.clone(), &superblock::<F>(), &Authority::Device, None)
        .expect("an empty store");
    let mut is_changed = false;
    for _ in 0..script.byte() % 64 {
        turn(&mut script, &map, &device);
    }
    map.flush().expect("the device takes everything");
    let before = entries(&map).expect("nothing was changed");
    while !script.is_empty() {
        is_changed |= change::<F>(&mut script, &device);
    }
    let superblock = superblock::<F>();
    let keys = || StoreKeys::new(&superblock.uuid, &superblock.seed, &Authority::Device);
    let open = || Map::<F>::open(device.clone(), &superblock, keys(), None);
    match open() {
        Ok(opened) => {
            let Ok(found) = entries(&opened) else {
                assert!(is_changed, "an unchanged leaf page is refused");
                return;
            };
            assert!(is_changed || found == before);
            let slots: Vec<_> = found.iter().flatten().filter_map(F::slot).collect();
            let unique: HashSet<_> = slots.iter().collect();
            assert!(unique.len() == slots.len());
            assert!(slots.iter().all(|slot| *slot < F::GEOMETRY.slot_count));
            for (lba, entry) in (0..).zip(&found) {
                let is_readable =
                    entry.as_ref().is_none_or(|entry| F::is_readable(&opened, &device, lba, entry));
                assert!(is_changed || is_readable, "block {lba} is refused, and nothing changed");
            }
            drop(opened);
            // The opened state is complete: it opens again.
            let again = open().expect("it was just written");
            assert!(entries(&again).expect("as before") == found);
        }
        Err(error) => assert!(is_changed, "an unchanged store doesn't open: {error}"),
    }
}

fn entries<F: Opened>(map: &Map<F>) -> io::Result<Vec<Option<F::Entry>>> {
    let sets = (0..F::GEOMETRY.sets()).map(|set| map.set_entries(set));
    Ok(sets.collect::<io::Result<Vec<_>>>()?.concat())
}

fn turn<F: Opened>(script: &mut Script<'_>, map: &Map<F>, device: &Device) {
    let (choice, spot) = (script.byte(), u64::from(script.byte()) % BLOCKS);
    // Blocks at the end, which is in the last set.
    let lba = F::GEOMETRY.block_count - BLOCKS + spot;
    let blocks = (u64::from(choice >> 3) + 1).min(F::GEOMETRY.block_count - lba).min(16);
    let outcome = match choice & 7 {
        0 => map.merge(),
        1 => map.flush(),
        2 => map.deallocate(lba, blocks).map(|_| ()),
        3 if map.is_merging() => map.merge_step(),
        3 => map.begin_merge(),
        4 => map.write_back(),
        _ => F::write(map, device, lba, &block(choice).repeat(blocks as usize)),
    };
    outcome.expect("the device takes everything");
}

fn block(byte: u8) -> Block {
    let mut block = [byte; BLOCK_BYTES];
    block[DATA_BYTES + field::MAC.0..].fill(0);
    block[DATA_BYTES + field::IV.0] = 1;
    block[DATA_BYTES + field::VERSION.0] = FORMAT_VERSION;
    block
}

/// Changes bytes of a page, with or without updating its tag. Blocks out of place are not changed.
fn change<F: Opened>(script: &mut Script<'_>, device: &Device) -> bool {
    let metadata_pages = F::GEOMETRY.slot(0) as usize;
    let mut held = device.held();
    let page_count = if F::IS_IN_PLACE { held.len() } else { metadata_pages };
    let (spot, how) = (usize::from(script.byte()), script.byte());
    let (at, length) = (usize::from(script.half()), usize::from(how >> 2) % 17);
    // With blocks in place, half of the changes hit the written blocks.
    let is_block = F::IS_IN_PLACE && spot & 1 == 1;
    let number = if is_block { page_count - 1 - spot / 2 } else { spot % (page_count - 1) + 1 };
    let bytes = script.take(length);
    if how & 2 != 0 {
        // Replaces one page by another, for example an old one.
        held[number] = held[at % page_count];
        return true;
    }
    let at = at % if is_block { BLOCK_BYTES } else { BODY_BYTES };
    let bytes = &bytes[..bytes.len().min(BLOCK_BYTES - at)];
    held[number][at..at + bytes.len()].copy_from_slice(bytes);
    if how & 1 != 0 && number < metadata_pages {
        let is_checkpoint = number < F::GEOMETRY.log(0) as usize;
        let mut page = Page::ZERO;
        page.0.copy_from_slice(&held[number][..DATA_BYTES]);
        seal(if is_checkpoint { Kind::Checkpoint } else { Kind::Nodes }, &mut page);
        held[number][..DATA_BYTES].copy_from_slice(&page.0);
    }
    true
}
