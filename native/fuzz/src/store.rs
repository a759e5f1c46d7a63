//! What a sealed file store finds on its device, which may hold anything.

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, Mutex};

use sealane_engine::storage::store::BLOCK_BYTES;
use sealane_engine::storage::stores::layout::{
    Authority, CHECKSUM_BYTES, Checker, Checkpoint, Geometry, Kind, LogPage, Superblock, TablePage,
};
use sealane_engine::storage::stores::pages::{BlockFile, PAGE_BYTES, Page};
use sealane_engine::storage::stores::sealed_map::SealedMap;

use crate::script::Script;

const GEOMETRY: Geometry = Geometry { block_count: 100, slot_count: 132, log_pages: 4 };
const KINDS: [Kind; 3] = [Kind::Checkpoint, Kind::Log, Kind::Table];
const BODY_BYTES: usize = PAGE_BYTES - CHECKSUM_BYTES;

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

fn checker() -> Checker {
    Checker::new(&superblock(), &Authority::Device)
}

/// Gives a page the tag it should have.
fn seal(kind: Kind, page: &mut Page) {
    let checker = match kind {
        // It carries what its own key is made of, behind magic, version and padding.
        Kind::Superblock => {
            let uuid = *page.0[16..].first_chunk().expect("a page has 32 bytes");
            let seed = *page.0[32..].first_chunk().expect("a page has 64 bytes");
            let claimed = Superblock { uuid, seed, geometry: GEOMETRY };
            Checker::new(&claimed, &Authority::Device)
        }
        _ => checker(),
    };
    checker.seal(kind, page);
}

/// A page that decodes is made of the fields that it decodes to.
pub fn store_page(data: &[u8]) {
    let mut script = Script::new(data);
    let kind = [Kind::Superblock, KINDS[0], KINDS[1], KINDS[2]][usize::from(script.byte() % 4)];
    let count = script.half();
    let mut page = Page::ZERO;
    let content = script.rest();
    let length = content.len().min(BODY_BYTES - 2);
    page.0[..length].copy_from_slice(&content[..length]);
    page.0[BODY_BYTES - 2..BODY_BYTES].copy_from_slice(&count.to_le_bytes());
    seal(kind, &mut page);
    let checker = checker();
    match kind {
        Kind::Superblock => {
            if let Ok((decoded, checker)) = Superblock::decode(&page, &Authority::Device) {
                let again = Superblock::decode(&decoded.encode(&checker), &Authority::Device);
                assert_eq!(again.ok().map(|(again, _)| again), Some(decoded));
            }
        }
        Kind::Checkpoint => {
            if let Some(decoded) = Checkpoint::decode(&page, &checker) {
                let again = Checkpoint::decode(&decoded.encode(&checker), &checker);
                assert_eq!(again, Some(decoded));
            }
        }
        Kind::Log => {
            if let Some(decoded) = LogPage::decode(&page, &checker) {
                let again = LogPage::decode(&decoded.encode(&checker), &checker);
                assert_eq!(again, Some(decoded));
            }
        }
        _ => {
            if let Some((decoded, _)) = TablePage::decode(&page, &checker) {
                let (encoded, sum) = decoded.encode(&checker);
                assert_eq!(TablePage::decode(&encoded, &checker), Some((decoded, sum)));
            }
        }
    }
}

/// A store opens, or is called damaged: and if nothing was changed, it opens as it was.
pub fn store_recovery(data: &[u8]) {
    let mut script = Script::new(data);
    let pages = vec![Page::ZERO; GEOMETRY.page_count() as usize];
    let device = Arc::new(Device(Mutex::new(pages)));
    let map = SealedMap::create(device.clone(), &superblock(), &Authority::Device)
        .expect("an empty store");
    let mut is_changed = false;
    for _ in 0..script.byte() % 64 {
        turn(&mut script, &map, &device);
    }
    map.flush().expect("the device takes everything");
    let before = map.entries(0, GEOMETRY.block_count);
    while !script.is_empty() {
        is_changed |= change(&mut script, &device);
    }
    match SealedMap::open(device.clone(), GEOMETRY, checker()) {
        Ok(opened) => {
            let entries = opened.entries(0, GEOMETRY.block_count);
            assert!(is_changed || entries == before);
            let slots: Vec<_> = entries.iter().filter_map(|entry| entry.slot).collect();
            let unique: HashSet<_> = slots.iter().collect();
            assert!(unique.len() == slots.len());
            assert!(slots.iter().all(|slot| *slot < GEOMETRY.slot_count));
            assert_eq!(opened.free_slots() + slots.len() as u64, GEOMETRY.slot_count);
            drop(opened);
            // What was taken over is whole: it opens again.
            let again = SealedMap::open(device, GEOMETRY, checker()).expect("it was just written");
            assert_eq!(again.entries(0, GEOMETRY.block_count), entries);
        }
        Err(error) => assert!(is_changed, "an unchanged store doesn't open: {error}"),
    }
}

fn turn(script: &mut Script<'_>, map: &SealedMap, device: &Device) {
    let (choice, lba) = (script.byte(), u64::from(script.byte()) % GEOMETRY.block_count);
    let blocks = (u64::from(choice >> 3) + 1).min(GEOMETRY.block_count - lba).min(16);
    let outcome = match choice & 7 {
        0 => map.checkpoint(),
        1 => map.flush(),
        2 => map.deallocate(lba, blocks).map(|_| ()),
        _ => write(map, device, lba, &vec![choice; blocks as usize * BLOCK_BYTES]),
    };
    outcome.expect("the device takes everything");
}

/// Writes blocks as the store does: their data first. Nothing, if a flush must come first.
fn write(map: &SealedMap, device: &Device, lba: u64, blocks: &[u8]) -> io::Result<()> {
    let Some(entries) = map.place(blocks)? else { return Ok(()) };
    for (entry, block) in entries.iter().zip(blocks.chunks_exact(BLOCK_BYTES)) {
        let page = Page(*block.first_chunk().expect("a block is longer than a page"));
        device.write(GEOMETRY.slot(entry.slot.expect("it was placed")), &[page])?;
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
        seal(
            if number < 3 {
                KINDS[0]
            } else if number < 7 {
                KINDS[1]
            } else {
                KINDS[2]
            },
            page,
        );
    }
    true
}
