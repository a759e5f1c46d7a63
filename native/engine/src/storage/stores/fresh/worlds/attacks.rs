//! Tests 14 to 18, 20, 28, 29 and 32 of the reference's list: one attack each, by the owner of the
//! device, who has everything that was ever stored on it. The worlds themselves cover 27 and the
//! rest of 16 and 28. At the end, regression tests for defects that worlds have found.

use std::io;

use super::super::anchor::AnchorPolicy;
use super::super::failure::Refusal;
use super::super::map::Map;
use super::super::placed::Placed;
use super::history::{History, UNWRITTEN, Version};
use super::life::Life;
use super::machine::{Crash, Image};
use super::workload::Workload;
use super::{Kind, World};

/// A block of the second set.
const LBA: u64 = 76;

/// A store with an anchor, on a hostile device.
struct Store {
    world: World<Placed>,
    life: Life<Placed>,
}

impl Store {
    fn new() -> Self {
        Self::of(Kind { is_honest: false, policy: Some(AnchorPolicy::EveryCommit) })
    }

    fn of(kind: Kind) -> Self {
        let mut world = World::of(1, kind);
        let life = world.create().expect("store");
        Self { world, life }
    }

    /// Writes a block until the write is acknowledged, without a flush.
    fn write(&mut self, lba: u64, version: Version) {
        assert!(Placed::begin(&mut self.life, lba, 1, version).expect("write"));
        self.life.end_all().expect("commit");
    }

    fn flush(&mut self) {
        assert!(self.life.flush().expect("flush"));
    }

    /// Writes a block and merges it; its leaf page isn't cached afterwards.
    fn merged(&mut self, lba: u64, version: Version) {
        self.write(lba, version);
        self.life.map.merge().expect("merge");
        self.life.map.leaves().forget_pages();
    }

    fn read(&self) -> Result<Option<Version>, Refusal> {
        self.life.look(LBA).map_err(|error| Refusal::of(&error).expect("a refusal").clone())
    }

    /// Makes the device return the image's contents for the selected pages.
    fn roll_back(&self, image: &Image, is_selected: impl Fn(u64) -> bool) {
        for (page, answer) in (0..).zip(image).filter(|(page, _)| is_selected(*page)) {
            self.world.device.lie(page, answer.clone(), true);
        }
    }

    fn is_leaf(&self, page: u64) -> bool {
        let geometry = self.life.map.geometry();
        (geometry.leaf(0, 0)..geometry.slot(0)).contains(&page)
    }

    fn log_used(&self) -> u64 {
        let log = self.life.map.log();
        log.next - log.kept
    }

    fn is_slot(&self, page: u64) -> bool {
        page >= self.life.map.geometry().slot(0)
    }

    fn reopen(&self) -> Result<Map<Placed>, io::Error> {
        self.world.map()
    }

    fn assert_rolled_back(&self) {
        let error = self.reopen().expect_err("rolled back");
        assert!(matches!(Refusal::of(&error), Some(Refusal::RolledBack(_))), "{error}");
    }
}

#[test]
fn test_14_a_rolled_back_sector_is_stale() {
    for is_cached in [true, false] {
        let mut store = Store::new();
        store.merged(LBA, 1);
        let before = store.world.device.image();
        // Its slot is reused only later, so the entire slot area is rolled back.
        for version in 2..40 {
            store.merged(LBA, version);
        }
        assert_eq!(store.read(), Ok(Some(39)));
        if !is_cached {
            store.life.map.leaves().forget_pages();
        }
        store.roll_back(&before, |page| store.is_slot(page));
        assert_eq!(store.read(), Err(Refusal::Stale(LBA)));
    }
}

#[test]
fn test_15_a_rolled_back_sector_and_leaf_page_are_stale() {
    let mut store = Store::new();
    store.merged(LBA, 1);
    let before = store.world.device.image();
    store.merged(LBA, 2);
    store.merged(LBA, 3);
    store.roll_back(&before, |page| store.is_slot(page) || store.is_leaf(page));
    assert_eq!(store.read(), Err(Refusal::StaleLeaf(1)));
}

#[test]
fn test_16_a_device_rolled_back_while_closed_is_refused() {
    let mut store = Store::new();
    store.write(LBA, 1);
    store.flush();
    let flushed = store.world.device.image();
    store.write(LBA, 2);
    store.flush();
    let log = store.life.map.geometry().log(0)..store.life.map.geometry().nodes(0, 0);
    // First everything, then only the log.
    store.roll_back(&flushed, |_| true);
    store.assert_rolled_back();
    store.world.device.repent();
    store.roll_back(&flushed, |page| log.contains(&page));
    store.assert_rolled_back();
    // An older checkpoint with the log of that time.
    store.world.device.repent();
    store.life.map.merge().expect("merge");
    store.roll_back(&flushed, |_| true);
    store.assert_rolled_back();
    store.world.device.repent();
    let map = store.reopen().expect("nothing was lost");
    let history = History::default();
    assert_eq!(store.world.life(map, history).look(LBA).expect("block"), Some(2));
}

#[test]
fn test_16_rolled_back_nodes_do_not_match_the_root() {
    let mut store = Store::new();
    store.merged(LBA, 1);
    let before = store.world.device.image();
    store.merged(LBA, 2);
    let nodes = store.life.map.geometry().nodes(0, 0)..store.life.map.geometry().leaf(0, 0);
    store.roll_back(&before, |page| nodes.contains(&page));
    let error = store.reopen().expect_err("rolled back");
    assert!(error.to_string().contains("tree"), "{error}");
}

#[test]
fn test_18_reads_see_a_change_that_is_not_merged() {
    let mut store = Store::new();
    store.merged(LBA, 1);
    let before = store.world.device.image();
    // Nothing is merged from now on: the tree still has version 1.
    store.write(LBA, 2);
    store.roll_back(&before, |_| true);
    store.life.map.leaves().forget_pages();
    assert_eq!(store.read(), Err(Refusal::Stale(LBA)));
    store.world.device.repent();
    assert_eq!(store.read(), Ok(Some(2)));
    // Likewise during a merge.
    store.life.map.begin_merge().expect("merge");
    store.roll_back(&before, |_| true);
    assert_eq!(store.read(), Err(Refusal::Stale(LBA)));
}

#[test]
fn test_16_an_interrupted_opening_continues_no_other_one() {
    let mut store = Store::new();
    store.merged(LBA, 1);
    store.write(LBA, 2);
    store.world.device.fail_after(Some(1));
    assert!(store.life.map.flush().is_err(), "its record is written but not durable");
    store.world.device.crash(Crash::Kill, &mut store.world.random);
    let before = store.world.device.image();
    // The first opening finds version 2 complete and logs it again; then it is interrupted.
    store.world.device.fail_after(Some(1));
    assert!(store.reopen().is_err());
    store.world.device.crash(Crash::Kill, &mut store.world.random);
    let cut_off = store.world.device.image();
    // The second doesn't find it, and serves version 1.
    let slots = store.life.map.geometry().slot(0);
    let newest = (slots..).zip(&before[slots as usize..]).filter(|(_, page)| page.is_some());
    let newest = newest.map(|(page, _)| page).last().expect("the slot of version 2");
    store.world.device.lie(newest, None, true);
    let map = store.reopen().expect("an honest crash");
    assert_eq!(store.world.life(map, History::default()).look(LBA).expect("block"), Some(1));
    // The pages logged by the first are where the second one's log continues.
    store.world.device.repent();
    let log = store.life.map.geometry().log(0)..store.life.map.geometry().nodes(0, 0);
    store.roll_back(&cut_off, |page| log.contains(&page));
    let map = store.reopen().expect("nothing is missing");
    assert_eq!(store.world.life(map, History::default()).look(LBA).expect("block"), Some(1));
}

#[test]
fn test_20_a_changed_or_rolled_back_leaf_page_is_refused_when_fetched() {
    let mut store = Store::new();
    store.merged(LBA, 1);
    let before = store.world.device.image();
    for version in 2..4 {
        store.merged(LBA, version);
    }
    assert_eq!(store.read(), Ok(Some(3)));
    store.roll_back(&before, |page| store.is_leaf(page));
    // The cached page is right; afterwards it is fetched.
    assert_eq!(store.read(), Ok(Some(3)));
    store.life.map.leaves().forget_pages();
    assert_eq!(store.read(), Err(Refusal::StaleLeaf(1)));
    // A merge must not use the wrong page: blocks without a pending change become orphaned.
    store.write(LBA, 4);
    store.life.map.merge().expect("the store survives");
    assert_eq!(store.read(), Ok(Some(4)));
    let beside = LBA + 1;
    let look = |life: &Life<Placed>| life.look(beside).map_err(|it| Refusal::of(&it).cloned());
    assert_eq!(look(&store.life), Err(Some(Refusal::Orphaned(beside))));
    // Even if the right page is shown again, in this life or the next.
    store.world.device.repent();
    store.life.map.leaves().forget_pages();
    assert_eq!(look(&store.life), Err(Some(Refusal::Orphaned(beside))));
    let map = store.reopen().expect("it opens");
    let life = store.world.life(map, History::default());
    assert_eq!(life.look(LBA).expect("block"), Some(4));
    assert_eq!(look(&life), Err(Some(Refusal::Orphaned(beside))));
}

#[test]
fn test_20_a_leaf_page_with_a_bit_changed_is_refused() {
    let mut store = Store::new();
    store.merged(LBA, 1);
    for page in 0..store.life.map.geometry().device_pages() {
        if store.is_leaf(page)
            && let Some(mut changed) = store.world.device.answer(page).map(|block| *block)
        {
            changed[300] ^= 1;
            store.world.device.lie(page, Some(changed.into()), true);
        }
    }
    assert_eq!(store.read(), Err(Refusal::StaleLeaf(1)));
}

#[test]
fn test_28_of_writes_in_flight_any_may_be_there_and_none_that_was_flushed_is_lost() {
    for is_rolled_back in [true, false] {
        let mut store = Store::new();
        store.write(LBA, 1);
        store.flush();
        let before = store.world.device.image();
        // One write is acknowledged but not flushed, the other isn't even acknowledged.
        store.write(LBA, 2);
        assert!(Placed::begin(&mut store.life, LBA + 1, 1, 3).expect("write"));
        store.world.device.crash(Crash::Kill, &mut store.world.random);
        if is_rolled_back {
            store.roll_back(&before, |page| store.is_slot(page));
        }
        let map = store.reopen().expect("nothing that was flushed is missing");
        let life = store.world.life(map, History::default());
        assert_eq!(life.look(LBA).expect("block"), Some(1));
        assert_eq!(life.look(LBA + 1).expect("block"), Some(UNWRITTEN));
    }
}

/// Selects the pages to roll back, given whether a page had contents before.
type Selection = fn(&Store, u64, bool) -> bool;

#[test]
fn test_16_a_flush_undone_behind_a_rare_anchor_is_no_part_of_what_an_opening_contains() {
    let log: Selection = |store, page, _| {
        let geometry = store.life.map.geometry();
        (geometry.log(0)..geometry.nodes(0, 0)).contains(&page)
    };
    let undone: [(Selection, bool); 4] = [
        (|_, _, _| false, true),
        (|_, _, _| true, false),
        (log, false),
        // Only the data of the last record.
        (|store, page, was_there| store.is_slot(page) && !was_there, false),
    ];
    for policy in [Some(AnchorPolicy::Checkpoints), None] {
        for (is_selected, contains) in undone {
            let mut store = Store::of(Kind { is_honest: false, policy });
            let created = store.life.map.milestone();
            store.write(LBA, 1);
            store.flush();
            let (before, earlier) = (store.world.device.image(), store.life.map.milestone());
            store.write(LBA, 2);
            store.flush();
            let told = store.life.map.milestone();
            store.world.device.crash(Crash::Kill, &mut store.world.random);
            store.roll_back(&before, |page| {
                is_selected(&store, page, before[page as usize].is_some())
            });
            let map = store.reopen().expect("nothing that the anchor's record needs is missing");
            assert!(map.contains(&created) && map.contains(&earlier));
            assert_eq!(map.contains(&told), contains);
        }
    }
}

#[test]
fn test_29_a_torn_write_is_the_old_version_or_the_new() {
    let mut store = Store::new();
    store.write(LBA, 1);
    store.flush();
    store.write(LBA, 2);
    let geometry = store.life.map.geometry().clone();
    let mut slots = geometry.slot(0)..geometry.device_pages();
    // Half of the page in the newest slot.
    let newest = slots.rfind(|page| store.world.device.answer(*page).is_some()).expect("a slot");
    let mut torn = *store.world.device.answer(newest).expect("its page");
    torn[2048..].fill(0);
    // Its record is in the log, but is neither anchored nor known to be flushed.
    store.world.device.fail_after(Some(1));
    assert!(store.life.map.flush().is_err());
    store.world.device.crash(Crash::Kill, &mut store.world.random);
    store.world.device.lie(newest, Some(torn.into()), false);
    let map = store.reopen().expect("an honest power cut");
    assert_eq!(store.world.life(map, History::default()).look(LBA).expect("block"), Some(1));
}

#[test]
fn test_32_the_log_never_grows_beyond_its_room() {
    let mut store = Store::new();
    let usable = store.life.map.log_usable();
    for version in 1..200 {
        store.write(LBA, version);
        store.flush();
        let used = store.log_used();
        assert!(used <= usable, "{used} pages of {usable}");
    }
    let map = store.reopen().expect("store");
    assert_eq!(store.world.life(map, History::default()).look(LBA).expect("block"), Some(199));
}

#[test]
fn a_flush_of_what_only_a_checkpoint_has_waits_for_its_anchor() {
    let kind = Kind { is_honest: true, policy: Some(AnchorPolicy::Checkpoints) };
    let mut store = Store::of(kind);
    let mut version = 1;
    while store.log_used() + 1 < store.life.map.log_usable() {
        store.write(LBA, version);
        store.flush();
        version += 1;
    }
    // The log is full, so the change goes to a checkpoint, which isn't anchored.
    store.write(LBA, version);
    let anchor = store.world.anchor.clone().expect("anchor");
    anchor.lose_an_answer(false);
    assert!(store.life.map.merge().is_err());
    anchor.recover();
    store.flush();
    store.world.device.crash(Crash::Kill, &mut store.world.random);
    let map = store.reopen().expect("store");
    assert_eq!(store.world.life(map, History::default()).look(LBA).expect("block"), Some(version));
}

#[test]
fn a_missing_log_that_was_flushed_is_noticed_without_an_anchor() {
    let mut store = Store::of(Kind { is_honest: false, policy: None });
    let empty = store.world.device.image();
    store.write(LBA, 1);
    store.flush();
    // The opening logs pending changes again; nothing follows.
    drop(store.reopen().expect("store"));
    let log = store.life.map.geometry().log(0)..store.life.map.geometry().nodes(0, 0);
    store.roll_back(&empty, |page| log.contains(&page));
    let error = store.reopen().expect_err("its log is gone");
    assert!(error.to_string().contains("log are missing"), "{error}");
}
