//! Writes and reads blocks of a layout in worlds, the way the channels of its store do, one step at
//! a time.

use std::io;
use std::sync::{Arc, Mutex};

use rand_chacha::ChaCha8Rng;
use rand_core::Rng;
use sealane_proto::freshness::leaf::{Ivs, LeafFormat};
use sealane_proto::freshness::pending::Known;
use sealane_proto::sector::{BLOCK_BYTES, Block, DATA_BYTES, METADATA_BYTES};

use super::super::super::pages::{BlockFile, Page};
use super::super::announcements::{Announcement, Begun};
use super::super::failure::Refusal;
use super::super::geometry::Geometry;
use super::super::map::{Layout, Map, check_orphans};
use super::super::placed::{Placed, PlacedEntry};
use super::super::test_blocks::{block, version_of};
use super::beside::{self, Queues};
use super::history::{UNWRITTEN, Version};
use super::life::{Life, Write};
use super::{Violation, chance, pick};

/// Most blocks of a refresh.
const REFRESH_BLOCKS: u64 = 4;

/// A layout, as used in worlds.
pub trait Workload: Layout + Sized {
    /// The progress of a write.
    type Stage;
    /// Name of the layout.
    const NAME: &'static str;

    /// Few sets, a short log and a small table, so that all of them are reused.
    fn geometry(random: &mut ChaCha8Rng) -> Geometry;

    /// The start of a range that is written often.
    fn spot(random: &mut ChaCha8Rng) -> u64;

    /// Begins a write of blocks that aren't being written. Returns false if the store has stopped
    /// accepting changes.
    fn begin(
        life: &mut Life<Self>,
        lba: u64,
        blocks: u64,
        version: Version,
    ) -> Result<bool, Violation>;

    /// Advances a write by one step, and removes it once it is acknowledged.
    fn go_on(life: &mut Life<Self>, index: usize) -> Result<bool, Violation>;

    /// Completes everything that a scrub or a growth waits for. Returns false if the store has
    /// stopped accepting changes.
    fn quiesce(_life: &mut Life<Self>) -> Result<bool, Violation> {
        Ok(true)
    }

    /// Lets queues continue their writes concurrently with the store's thread until
    /// [`Workload::end_beside`].
    fn begin_beside(_life: &mut Life<Self>) -> Option<Arc<Mutex<Queues>>> {
        None
    }

    /// Takes the writes back from the queues.
    fn end_beside(_life: &mut Life<Self>, _queues: &Mutex<Queues>) -> Result<(), Violation> {
        Ok(())
    }

    /// Performs a step specific to this layout.
    fn other(life: &mut Life<Self>, random: &mut ChaCha8Rng) -> Result<bool, Violation>;

    /// Reads a block from the device and checks it against what is known about it. Returns its
    /// version, or `None` if it is no complete version.
    fn read(life: &Life<Self>, lba: u64, known: Known<Self::Entry>) -> io::Result<Option<Version>>;
}

/// The version of a block that was read from the device.
fn version_in(lba: u64, block: &Block) -> Option<Version> {
    let mut page = Page::ZERO;
    page.0.copy_from_slice(&block[..DATA_BYTES]);
    let metadata: &[u8; METADATA_BYTES] = block.last_chunk()?;
    version_of(lba, &page, metadata)
}

impl Workload for Placed {
    type Stage = Vec<PlacedEntry>;
    const NAME: &'static str = "placed";

    fn geometry(random: &mut ChaCha8Rng) -> Geometry {
        let pending_max = 24 + random.next_u64() % 32;
        let block_count = 80 + random.next_u64() % 120;
        Geometry {
            block_count,
            leaf_entries: Self::ENTRIES_PER_LEAF,
            // Few spare slots.
            slot_count: block_count + pending_max + pending_max / 2,
            log_pages: 5 + random.next_u64() % 8,
            pending_max,
            earlier: Vec::new(),
        }
    }

    fn spot(_random: &mut ChaCha8Rng) -> u64 {
        0
    }

    /// Places a write and gives its data to the device.
    fn begin(
        life: &mut Life<Self>,
        lba: u64,
        blocks: u64,
        version: Version,
    ) -> Result<bool, Violation> {
        let data: Vec<_> = (lba..lba + blocks).flat_map(|lba| block(lba, version)).collect();
        let placed = life.map.place(&data);
        let entries = match life.accept("place", placed)? {
            None => return Ok(false),
            Some(Some(entries)) => entries,
            Some(None) => return life.make_room(),
        };
        life.begun(lba, blocks, version);
        for ((lba, entry), block) in (lba..).zip(&entries).zip(data.chunks_exact(BLOCK_BYTES)) {
            let mut page = Page::ZERO;
            page.0.copy_from_slice(&block[..DATA_BYTES]);
            life.history.issued(lba, version);
            let written = life.device.write(life.map.geometry().slot(entry.slot), &[page]);
            if life.accept("write", written)?.is_none() {
                return Ok(false);
            }
        }
        life.writes.push(Write { lba, blocks, version, is_durable: false, stage: entries });
        Ok(true)
    }

    fn go_on(life: &mut Life<Self>, index: usize) -> Result<bool, Violation> {
        let write = life.writes.swap_remove(index);
        let committed = life.map.commit(write.lba, &write.stage);
        match life.accept("commit", committed)? {
            Some(()) => life.ended(&write),
            None => Ok(false),
        }
    }

    fn other(_life: &mut Life<Self>, _random: &mut ChaCha8Rng) -> Result<bool, Violation> {
        Ok(true)
    }

    fn read(life: &Life<Self>, lba: u64, known: Known<PlacedEntry>) -> io::Result<Option<Version>> {
        let mut known = [known];
        life.resolve(&mut known, lba)?;
        check_orphans(&known, lba)?;
        let [Known::Entry(entry)] = known else { return Ok(Some(UNWRITTEN)) };
        let mut pages = [Page::ZERO];
        life.device.read(life.map.geometry().slot(entry.slot), &mut pages)?;
        let block = [&pages[0].0[..], &entry.metadata()].concat();
        if !life.map.is_whole(&entry, &block) {
            return Err(Refusal::Stale(lba).into());
        }
        Ok(version_of(lba, &pages[0], &entry.metadata()))
    }
}

/// The progress of a write in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InPlace {
    /// It waits to be announced.
    Intended,
    /// Its announcement, with this id, is in flight.
    InFlight(u64),
    /// It may be made.
    Announced,
    /// The device has it.
    Made,
}

impl Workload for Ivs {
    type Stage = InPlace;
    const NAME: &'static str = "in place";

    fn geometry(random: &mut ChaCha8Rng) -> Geometry {
        Geometry {
            block_count: 700 + random.next_u64() % 400,
            leaf_entries: Self::ENTRIES_PER_LEAF,
            slot_count: 0,
            log_pages: 5 + random.next_u64() % 8,
            pending_max: 24 + random.next_u64() % 32,
            earlier: Vec::new(),
        }
    }

    /// At the boundary of two sets, or at the beginning.
    fn spot(random: &mut ChaCha8Rng) -> u64 {
        [0, Self::ENTRIES_PER_LEAF - 8, 2 * Self::ENTRIES_PER_LEAF - 8][pick(random, 3)]
    }

    fn begin(
        life: &mut Life<Self>,
        lba: u64,
        blocks: u64,
        version: Version,
    ) -> Result<bool, Violation> {
        let intents_max = life.map.geometry().intents_max();
        if life.map.state().intents.doubts() as u64 + blocks > intents_max {
            // The store refuses further writes after too many failures.
            return Ok(true);
        }
        let data: Vec<_> = (lba..lba + blocks).flat_map(|lba| block(lba, version)).collect();
        let intended = life.map.intend(lba, &data);
        match life.accept("intent", intended)? {
            None => Ok(false),
            Some(None) => life.make_room(),
            Some(Some(_)) => {
                life.begun(lba, blocks, version);
                // Any flush may announce it. From then on, an adversary who has it from the network
                // may store it.
                (lba..lba + blocks).for_each(|lba| life.history.issued(lba, version));
                life.late.retain(|(late, _)| !(lba..lba + blocks).contains(late));
                let (is_durable, stage) = (false, InPlace::Intended);
                life.writes.push(Write { lba, blocks, version, is_durable, stage });
                Ok(true)
            }
        }
    }

    fn go_on(life: &mut Life<Self>, index: usize) -> Result<bool, Violation> {
        match life.writes[index].stage {
            InPlace::Intended => announce(life),
            InPlace::InFlight(_) => land(life, 0),
            InPlace::Announced => {
                let write = &mut life.writes[index];
                write.stage = InPlace::Made;
                let (lba, blocks, version) = (write.lba, write.blocks, write.version);
                let is_made = make(life, lba..lba + blocks, version)?;
                if !is_made {
                    life.writes.swap_remove(index);
                    life.map.give_up(lba);
                }
                Ok(is_made)
            }
            InPlace::Made => {
                let write = life.writes.swap_remove(index);
                let blocks = (write.lba..).take(write.blocks as usize);
                let ivs: Vec<_> = blocks
                    .map(|lba| sealane_proto::sector::block_iv(&block(lba, write.version)))
                    .collect();
                let arrived = life.map.arrived(write.lba, &ivs);
                if life.accept("end of a write", arrived)?.is_some() {
                    return life.ended(&write);
                }
                let blocks = write.lba..write.lba + write.blocks;
                blocks.for_each(|lba| life.history.failed(lba, write.version));
                Ok(false)
            }
        }
    }

    fn other(life: &mut Life<Self>, random: &mut ChaCha8Rng) -> Result<bool, Violation> {
        match pick(random, 12) {
            0 => announce(life),
            1..=3 => begin_announcement(life, random),
            4..=6 if !life.in_flight.is_empty() => {
                let index = pick(random, life.in_flight.len());
                land(life, index)
            }
            7 if !life.writes.is_empty() => {
                let index = pick(random, life.writes.len());
                fail(life, index, random)
            }
            8 | 9 if !life.late.is_empty() => {
                let (lba, version) = life.late.swap_remove(pick(random, life.late.len()));
                life.trace.push(format!("version {version} of block {lba} lands late"));
                make(life, lba..lba + 1, version)
            }
            _ => {
                let (lba, blocks) = life.range(random);
                refresh(life, lba, blocks.min(REFRESH_BLOCKS))
            }
        }
    }

    fn quiesce(life: &mut Life<Self>) -> Result<bool, Violation> {
        let mut is_going_on = true;
        while !life.in_flight.is_empty() {
            is_going_on &= land(life, 0)?;
        }
        Ok(is_going_on)
    }

    fn begin_beside(life: &mut Life<Self>) -> Option<Arc<Mutex<Queues>>> {
        Some(beside::begin(life))
    }

    fn end_beside(life: &mut Life<Self>, queues: &Mutex<Queues>) -> Result<(), Violation> {
        beside::end(life, queues)
    }

    fn read(life: &Life<Self>, lba: u64, known: Known<[u8; 12]>) -> io::Result<Option<Version>> {
        let mut blocks = [life.device.read_block(life.map.geometry().in_place_block(lba))?];
        let mut known = [known];
        life.map.look_up(&mut known, lba);
        if known == [Known::Absent] {
            life.map.take_vouched(&mut known, lba, &blocks);
            if known != [Known::Absent] {
                life.vouched.set(life.vouched.get() + 1);
            }
        }
        life.resolve(&mut known, lba)?;
        Map::check_blocks(&known, lba, &mut blocks)?;
        Ok(match known {
            [Known::Entry(_)] => version_in(lba, &blocks[0]),
            _ => (blocks[0] == [0; BLOCK_BYTES]).then_some(UNWRITTEN),
        })
    }
}

/// Announces intended writes; if that fails, they are abandoned.
fn announce(life: &mut Life<Ivs>) -> Result<bool, Violation> {
    // With no other work, the thread would wait for these forever.
    if !Ivs::quiesce(life)? {
        return Ok(false);
    }
    let is_announced = life.persist("announcement", Map::announce)?;
    for write in &mut life.writes {
        if write.stage == InPlace::Intended && is_announced {
            write.stage = InPlace::Announced;
        }
    }
    if !is_announced {
        let given_up = life.writes.extract_if(.., |write| write.stage == InPlace::Intended);
        given_up.for_each(|write| life.map.give_up(write.lba));
    }
    Ok(is_announced)
}

/// Begins to announce some intended writes, the way a queue writes to the log by itself.
fn begin_announcement(life: &mut Life<Ivs>, random: &mut ChaCha8Rng) -> Result<bool, Violation> {
    let intended = life.writes.iter().filter(|write| write.stage == InPlace::Intended);
    let chosen: Vec<u64> = intended.map(|write| write.lba).filter(|_| chance(random, 60)).collect();
    life.announcements += 1;
    let name = life.announcements;
    let begun = life.map.begin_announcement(&chosen, &life.mailbox, name);
    let stage = match life.accept("beginning of an announcement", begun)? {
        None => return Ok(false),
        Some(Begun::Busy) => return announce(life),
        Some(Begun::Nothing) => InPlace::Announced,
        Some(Begun::Waiting) => InPlace::InFlight(name),
        Some(Begun::InFlight(announcement)) => {
            life.trace.push(format!("announcement {name} is in flight"));
            life.in_flight.push(announcement);
            InPlace::InFlight(name)
        }
    };
    let chosen_ones = life.writes.iter_mut().filter(|write| chosen.contains(&write.lba));
    chosen_ones.for_each(|write| write.stage = stage);
    Ok(true)
}

/// Writes the pages of an announcement to the device, in any order relative to earlier ones.
fn land(life: &mut Life<Ivs>, index: usize) -> Result<bool, Violation> {
    let Announcement { number, place, pages, .. } = life.in_flight.remove(index);
    let written = life.device.write_durably(place, &pages);
    let is_written = written.is_ok();
    for (_, name, result) in life.map.end_announcement(number, written) {
        life.trace.push(format!("announcement {name} has completed"));
        let is_announced = life.accept("announcement", result)?.is_some();
        for write in &mut life.writes {
            if write.stage == InPlace::InFlight(name) && is_announced {
                write.stage = InPlace::Announced;
            }
        }
        let given_up = life.writes.extract_if(.., |write| write.stage == InPlace::InFlight(name));
        given_up.for_each(|write| life.map.give_up(write.lba));
    }
    Ok(is_written)
}

/// Gives blocks of a version to the device.
fn make(
    life: &mut Life<Ivs>,
    blocks: std::ops::Range<u64>,
    version: Version,
) -> Result<bool, Violation> {
    for lba in blocks {
        let place = life.map.geometry().in_place_block(lba);
        let written = life.device.write_block(place, &block(lba, version));
        if life.accept("write", written)?.is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Makes a write fail: each of its blocks arrives now, later, or never.
fn fail(life: &mut Life<Ivs>, index: usize, random: &mut ChaCha8Rng) -> Result<bool, Violation> {
    if matches!(life.writes[index].stage, InPlace::InFlight(_)) {
        return Ok(true);
    }
    let write = life.writes.swap_remove(index);
    life.trace.push(format!("version {} fails", write.version));
    if write.stage == InPlace::Announced {
        for lba in write.lba..write.lba + write.blocks {
            match pick(random, 3) {
                0 => drop(make(life, lba..lba + 1, write.version)?),
                1 => life.late.push((lba, write.version)),
                _ => {}
            }
        }
    }
    if write.stage != InPlace::Intended {
        life.doubtful.extend(write.lba..write.lba + write.blocks);
    }
    life.map.give_up(write.lba);
    Ok(true)
}

/// Issues fast-path MACs for blocks.
pub fn refresh(life: &mut Life<Ivs>, lba: u64, blocks: u64) -> Result<bool, Violation> {
    for lba in (lba..lba + blocks).filter(|lba| !life.is_busy(*lba, 1)).collect::<Vec<_>>() {
        let place = life.map.geometry().in_place_block(lba);
        let read = life.device.read_block(place);
        let Some(mut found) = life.accept("refresh", read)? else { return Ok(false) };
        let vouched = life.map.vouch(lba / Ivs::ENTRIES_PER_LEAF, [(lba, &mut found)]);
        let vouched = vouched.and_then(|mut vouched| vouched.remove(0));
        let vouched = life.accept_of(lba, &format!("refresh of block {lba}"), vouched)?;
        if vouched == Some(Some(true)) {
            life.trace.push(format!("block {lba} has a fast-path MAC"));
            let written = life.device.write_block(place, &found);
            if life.accept("refresh", written)?.is_none() {
                return Ok(false);
            }
        }
    }
    Ok(true)
}
