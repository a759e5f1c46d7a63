//! Going through a store's leaves and entries for a background job, whatever its layout. Leaves are
//! read from the device, also those that are in memory, and aren't kept there: a job that comes by
//! once must not push out what hosts use.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use sealane_proto::freshness::leaf::{LEAF_BYTES, LeafPage};
use sealane_proto::freshness::pending::Known;

use super::super::super::upkeep::{Finding, PIECE_BLOCKS, Report};
use super::super::pages::{PAGE_BYTES, Page};
use super::failure::{Refusal, reason_of};
use super::leaves::{Checked, Fetch};
use super::map::{Layout, Map, take_leaf};
use super::structure::Piece;

/// Leaves looked at in one go for one that isn't void.
const LOOK_LEAVES: usize = 1 << 20;

/// A job's way through a store.
pub struct Walk<F: Layout> {
    map: Arc<Map<F>>,
    /// The leaf page of the last piece.
    last: Option<(Fetch, Arc<LeafPage>)>,
    /// The leaf that was found wrong last.
    wrong: Option<u64>,
    /// What of the structure comes next; None: all of it was looked at.
    structure: Option<Piece>,
}

/// Notes that something can't be read, or isn't right; an error if the device is gone.
pub fn note(report: &mut Report, lba: Option<u64>, what: &str, error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotConnected {
        return Err(error);
    }
    let detail = format!("{what}: {error}");
    report.findings.push(Finding { reason: reason_of(&error), lba, detail, is_known: false });
    Ok(())
}

/// The same of what is known to the store, and is written again by [`Map::repair`].
pub fn note_known(
    report: &mut Report,
    lba: Option<u64>,
    what: &str,
    error: io::Error,
) -> io::Result<()> {
    note(report, lba, what, error)?;
    if let Some(found) = report.findings.last_mut() {
        found.is_known = true;
    }
    Ok(())
}

/// Reads `count` neighbours of `bytes` each; one by one if they can't be read at once.
pub fn read_each(
    count: usize,
    bytes: usize,
    mut read: impl FnMut(Range<usize>) -> io::Result<Vec<u8>>,
) -> Vec<io::Result<Vec<u8>>> {
    match read(0..count) {
        Ok(run) => run.chunks_exact(bytes).map(|each| Ok(each.to_vec())).collect(),
        Err(error) if count == 1 || error.kind() == io::ErrorKind::NotConnected => {
            Vec::from_iter([Err(error)])
        }
        Err(_) => (0..count).map(|index| read(index..index + 1)).collect(),
    }
}

impl<F: Layout> Walk<F> {
    /// From anywhere.
    pub fn new(map: Arc<Map<F>>) -> Self {
        Self { map, last: None, wrong: None, structure: Some(Piece::Checkpoint) }
    }

    /// The map.
    pub fn map(&self) -> &Map<F> {
        &self.map
    }

    /// Checks a piece of what the device has beside leaf pages and blocks; false: nothing is left.
    pub fn scrub_structure(&mut self, report: &mut Report) -> io::Result<bool> {
        let Some(piece) = self.structure else { return Ok(false) };
        self.structure = self.map.check_structure(piece, report)?;
        Ok(self.structure.is_some())
    }

    /// The set of a block.
    pub fn set_of(lba: u64) -> u64 {
        lba / F::ENTRIES_PER_LEAF
    }

    /// The next piece from `lba` on that may have something written, or a leaf to check with it.
    pub fn next_piece(&self, lba: u64) -> Option<Range<u64>> {
        let block_count = self.map.geometry().block_count;
        if lba >= block_count {
            return None;
        }
        let sets = self.map.geometry().sets();
        let (set, leaves) = (Self::set_of(lba), self.map.leaves());
        let next_held = |from: u64, to: u64| {
            // In parts: the leaves are locked meanwhile.
            let mut parts = (from..to).step_by(LOOK_LEAVES);
            parts.find_map(|part| leaves.next_held(part, to.min(part + LOOK_LEAVES as u64)))
        };
        let held = next_held(set, sets);
        let maps = self.maps_of(set).start;
        let map = next_held(sets + maps, self.map.geometry().leaves());
        let changed = self.map.next_changed(lba).map(Self::set_of);
        let next = [held, map.map(|leaf| self.set_with(leaf - sets)), changed];
        let next = next.into_iter().flatten().min()?;
        let start = lba.max(next * F::ENTRIES_PER_LEAF);
        let end = ((next + 1) * F::ENTRIES_PER_LEAF).min(block_count).min(start + PIECE_BLOCKS);
        // One run of blocks of the device, where they are in place.
        let geometry = self.map.geometry();
        let end =
            if F::IS_IN_PLACE { end.min(start + geometry.blocks_together(start)) } else { end };
        Some(start..end)
    }

    /// Pages of the slot map that are checked with a set: they are spread over all sets.
    fn maps_of(&self, set: u64) -> Range<u64> {
        let geometry = self.map.geometry();
        let share = |set: u64| {
            u128::from(set) * u128::from(geometry.slot_maps()) / u128::from(geometry.sets())
        };
        share(set) as u64..share(set + 1) as u64
    }

    /// The set that a page of the slot map is checked with.
    fn set_with(&self, map: u64) -> u64 {
        let (sets, maps) = (self.map.geometry().sets(), self.map.geometry().slot_maps());
        let set = (u128::from(map + 1) * u128::from(sets)).div_ceil(u128::from(maps));
        (set - 1) as u64
    }

    /// What is current of the blocks of a piece. Absent: their leaf page is wrong, and what waits in
    /// memory doesn't tell either.
    pub fn entries(
        &mut self,
        piece: &Range<u64>,
        report: &mut Report,
    ) -> io::Result<Vec<Known<F::Entry>>> {
        let set = Self::set_of(piece.start);
        if piece.start == set * F::ENTRIES_PER_LEAF {
            self.begin_set(set, report)?;
        }
        // In this order: what was merged since is in the leaf page.
        let mut known = self.map.current(piece.start, piece.end - piece.start);
        if known.contains(&Known::Absent) {
            match self.leaf(set, report)? {
                Some(page) => take_leaf::<F>(&mut known, piece.start, set, &page),
                None if self.wrong == Some(set) => {
                    let absent = known.iter().filter(|known| **known == Known::Absent);
                    report.unchecked += absent.count() as u64;
                }
                None => take_leaf::<F>(&mut known, piece.start, set, &[0; LEAF_BYTES]),
            }
        }
        for (lba, known) in (piece.start..).zip(&known) {
            if *known == Known::Orphaned {
                note(report, Some(lba), "sector", Refusal::Orphaned(lba).into())?;
            }
        }
        Ok(known)
    }

    /// Reads the leaf pages that go with a set from the device.
    fn begin_set(&mut self, set: u64, report: &mut Report) -> io::Result<()> {
        let sets = self.map.geometry().sets();
        for map in self.maps_of(set) {
            self.leaf(sets + map, report)?;
        }
        self.last = None;
        self.leaf(set, report)?;
        Ok(())
    }

    /// A leaf as it is now; None: void, or wrong on the device and not in memory. A wrong one is
    /// told once.
    pub fn leaf(&mut self, leaf: u64, report: &mut Report) -> io::Result<Option<Arc<LeafPage>>> {
        loop {
            let Some(fetch) = self.map.leaves().fetch(leaf) else {
                self.wrong = self.wrong.filter(|wrong| *wrong != leaf);
                return Ok(None);
            };
            if let Some((last, page)) = &self.last
                && *last == fetch
            {
                return Ok(Some(Arc::clone(page)));
            }
            let mut page = [Page::ZERO];
            let read = self.map.file.read(fetch.place, &mut page);
            report.bytes += PAGE_BYTES as u64;
            let checked = read.and_then(|()| {
                self.map.count_leaf_reads(1);
                Ok(self.map.leaves().check_only(&fetch, &page[0].0)?)
            });
            match checked {
                Ok(Checked::Changed) => {}
                Ok(Checked::Right(page)) => {
                    self.wrong = self.wrong.filter(|wrong| *wrong != leaf);
                    self.last = Some((fetch, Arc::clone(&page)));
                    return Ok(Some(page));
                }
                Err(error) => return self.leaf_that_is_wrong(fetch, error, report),
            }
        }
    }

    /// What a leaf is that is wrong on the device, if anything else tells.
    fn leaf_that_is_wrong(
        &mut self,
        fetch: Fetch,
        error: io::Error,
        report: &mut Report,
    ) -> io::Result<Option<Arc<LeafPage>>> {
        let leaf = fetch.leaf;
        if error.kind() == io::ErrorKind::NotConnected {
            return Err(error);
        }
        if self.wrong == Some(leaf) {
            return Ok(None);
        }
        let lba = (leaf < self.map.geometry().sets()).then(|| leaf * F::ENTRIES_PER_LEAF);
        let Some(page) = self.map.recover_leaf(&fetch)? else {
            self.wrong = Some(leaf);
            note(report, lba, "leaf page", error)?;
            return Ok(None);
        };
        note_known(report, lba, "leaf page", error)?;
        self.last = Some((fetch, Arc::clone(&page)));
        Ok(Some(page))
    }
}
