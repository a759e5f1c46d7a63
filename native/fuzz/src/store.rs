//! What a sealed file store finds on its device, which may hold anything.

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, Mutex};

use sealane_engine::storage::store::{BLOCK_BYTES, DATA_BYTES};
use sealane_engine::storage::stores::fresh::checkpoint::Checkpoint;
use sealane_engine::storage::stores::fresh::geometry::Geometry;
use sealane_engine::storage::stores::fresh::keys::{Authority, BODY_BYTES, Kind, StoreKeys};
use sealane_engine::storage::stores::fresh::log::LogPage;
use sealane_engine::storage::stores::fresh::map::Map;
use sealane_engine::storage::stores::fresh::nodes::NodePage;
use sealane_engine::storage::stores::fresh::placed::{Placed, PlacedEntry};
use sealane_engine::storage::stores::fresh::superblock::Superblock;
use sealane_engine::storage::stores::pages::{BlockFile, Page};
use sealane_proto::freshness::leaf::LeafFormat;
use sealane_proto::sector::{FORMAT_VERSION, field};

use crate::script::Script;

const GEOMETRY: Geometry = Geometry {
    block_count: 100,
    leaf_entries: Placed::ENTRIES_PER_LEAF,
    slot_count: 200,
    log_pages: 6,
    pending_max: 80,
};
/// Epoch, number and nonce of log pages that are parsed alone.
const LOG: (u64, u64, [u8; 16]) = (1, 2, [3; 16]);

/// A device in memory.
#[derive(Debug)]
struct Device(Mutex<Vec<Page>>);

impl BlockFile for Device {
    fn read(&self, page: u64, pages: &mut [Page]) -> io::Result<()> {
        let held = self.0.lock().expect("nobody panicked");
        let found = held.get(page as usize..page as usize + pages.len());
        pages.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        let mut held = self.0.lock().expect("nobody panicked");
        let found = held.get_mut(page as usize..page as usize + pages.len());
        found.ok_or(io::ErrorKind::UnexpectedEof)?.copy_from_slice(pages);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

fn superblock() -> Superblock {
    Superblock { uuid: [1; 16], seed: [7; 32], geometry: GEOMETRY }
}

fn keys() -> StoreKeys {
    StoreKeys::new(&superblock().uuid, &superblock().seed, &Authority::Device)
}

/// Gives a page the tag it should have.
fn seal(kind: Kind, page: &mut Page) {
    match kind {
        // It carries what its own key is made of, behind magic, version and padding.
        Kind::Superblock => {
            let uuid = *page.0[16..].first_chunk().expect("a page has 32 bytes");
            let seed = *page.0[32..].first_chunk().expect("a page has 64 bytes");
            StoreKeys::new(&uuid, &seed, &Authority::Device).pages().seal(kind, page)
        }
        Kind::Log => keys().log(LOG.0, &LOG.2).seal(kind, page),
        _ => keys().pages().seal(kind, page),
    };
}

/// A page that decodes is made of the fields that it decodes to.
pub fn store_page(data: &[u8]) {
    let mut script = Script::new(data);
    let kinds = [Kind::Superblock, Kind::Checkpoint, Kind::Log, Kind::Nodes];
    let kind = kinds[usize::from(script.byte() % 4)];
    let mut page = Page::ZERO;
    let content = script.rest();
    let length = content.len().min(BODY_BYTES);
    page.0[..length].copy_from_slice(&content[..length]);
    seal(kind, &mut page);
    let keys = keys();
    match kind {
        Kind::Superblock => {
            if let Ok((decoded, keys)) = Superblock::decode(&page, &Authority::Device) {
                let again = Superblock::decode(&decoded.encode(&keys), &Authority::Device);
                assert_eq!(again.ok().map(|(again, _)| again), Some(decoded));
            }
        }
        Kind::Checkpoint => {
            if let Some((decoded, _)) = Checkpoint::decode(&page, &keys) {
                let (encoded, tag) = decoded.encode(&keys);
                assert_eq!(Checkpoint::decode(&encoded, &keys), Some((decoded, tag)));
            }
        }
        Kind::Log => {
            let (key, id) = (keys.log(LOG.0, &LOG.2), (LOG.0, LOG.1));
            if let Some((decoded, _)) = LogPage::decode::<Placed>(&page, id, &key) {
                let (encoded, tag) = decoded.encode::<Placed>(&key);
                assert_eq!(LogPage::decode::<Placed>(&encoded, id, &key), Some((decoded, tag)));
            }
        }
        _ => {
            if let Some(decoded) = NodePage::decode(&page, &keys) {
                assert_eq!(NodePage::decode(&decoded.encode(&keys), &keys), Some(decoded));
            }
        }
    }
}

/// A store opens, or is called damaged: and if nothing was changed, it opens as it was.
pub fn store_recovery(data: &[u8]) {
    let mut script = Script::new(data);
    let pages = vec![Page::ZERO; GEOMETRY.page_count() as usize];
    let device = Arc::new(Device(Mutex::new(pages)));
    let map = Map::<Placed>::create(device.clone(), &superblock(), &Authority::Device, None)
        .expect("an empty store");
    let mut is_changed = false;
    for _ in 0..script.byte() % 64 {
        turn(&mut script, &map, &device);
    }
    map.flush().expect("the device takes everything");
    let before = entries(&map).expect("nothing was changed");
    while !script.is_empty() {
        is_changed |= change(&mut script, &device);
    }
    let open = || Map::<Placed>::open(device.clone(), &superblock(), keys(), None);
    match open() {
        Ok(opened) => {
            let Ok(found) = entries(&opened) else {
                assert!(is_changed, "a leaf page that nobody changed");
                return;
            };
            assert!(is_changed || found == before);
            let slots: Vec<_> = found.iter().flatten().map(|entry| entry.slot).collect();
            let unique: HashSet<_> = slots.iter().collect();
            assert!(unique.len() == slots.len());
            assert!(slots.iter().all(|slot| *slot < GEOMETRY.slot_count));
            drop(opened);
            // What was taken over is whole: it opens again.
            let again = open().expect("it was just written");
            assert_eq!(entries(&again).expect("as before"), found);
        }
        Err(error) => assert!(is_changed, "an unchanged store doesn't open: {error}"),
    }
}

fn entries(map: &Map<Placed>) -> io::Result<Vec<Option<PlacedEntry>>> {
    let sets = (0..GEOMETRY.sets()).map(|set| map.set_entries(set));
    Ok(sets.collect::<io::Result<Vec<_>>>()?.concat())
}

fn turn(script: &mut Script<'_>, map: &Map<Placed>, device: &Device) {
    let (choice, lba) = (script.byte(), u64::from(script.byte()) % GEOMETRY.block_count);
    let blocks = (u64::from(choice >> 3) + 1).min(GEOMETRY.block_count - lba).min(16);
    let outcome = match choice & 7 {
        0 => map.merge(),
        1 => map.flush(),
        2 => map.deallocate(lba, blocks).map(|_| ()),
        3 if map.is_merging() => map.merge_step(),
        3 => map.begin_merge(),
        _ => write(map, device, lba, blocks, choice),
    };
    outcome.expect("the device takes everything");
}

/// Writes blocks as the store does: their data first. Nothing, if room must be made first.
fn write(
    map: &Map<Placed>,
    device: &Device,
    lba: u64,
    blocks: u64,
    byte: u8,
) -> io::Result<()> {
    let mut block = [byte; BLOCK_BYTES];
    block[DATA_BYTES + field::MAC.0..].fill(0);
    block[DATA_BYTES + field::IV.0] = 1;
    block[DATA_BYTES + field::VERSION.0] = FORMAT_VERSION;
    let Some(entries) = map.place(&block.repeat(blocks as usize))? else {
        return map.make_room();
    };
    for entry in &entries {
        let page = Page(*block.first_chunk().expect("a block is longer than a page"));
        device.write(GEOMETRY.slot(entry.slot), &[page])?;
    }
    map.commit(lba, &entries)
}

/// Changes bytes of a page that isn't data, with the right tag or without.
fn change(script: &mut Script<'_>, device: &Device) -> bool {
    let page_count = GEOMETRY.slot(0) as usize;
    let (number, how) = (usize::from(script.byte()) % (page_count - 1) + 1, script.byte());
    let (at, length) = (usize::from(script.half()) % BODY_BYTES, usize::from(how >> 2) % 17);
    let bytes = script.take(length);
    let mut pages = device.0.lock().expect("nobody panicked");
    if how & 2 != 0 {
        // One page in place of another: an old one, say.
        pages[number] = pages[at % page_count];
        return true;
    }
    let page = &mut pages[number];
    let bytes = &bytes[..bytes.len().min(BODY_BYTES - at)];
    page.0[at..at + bytes.len()].copy_from_slice(bytes);
    if how & 1 != 0 {
        let is_checkpoint = number < GEOMETRY.log(0) as usize;
        seal(if is_checkpoint { Kind::Checkpoint } else { Kind::Nodes }, page);
    }
    true
}
