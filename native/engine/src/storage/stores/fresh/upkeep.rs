//! Iterates over a store's leaves and entries for a background job, in any layout. Leaves are read
//! from the device even if they are cached, and aren't cached afterwards: a job that reads each
//! leaf once must not evict leaves that hosts use.

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

/// Leaves searched at a time for one that isn't void.
const LOOK_LEAVES: usize = 1 << 20;

/// The progress of a job through a store.
pub struct Walk<F: Layout> {
    map: Arc<Map<F>>,
    /// The leaf page of the last piece.
    last: Option<(Fetch, Arc<LeafPage>)>,
    /// The leaf that was last found wrong.
    wrong: Option<u64>,
    /// The next piece of the structure; `None` if all are checked.
    structure: Option<Piece>,
}

/// Adds a finding for something that is wrong or can't be read. Fails if the device is lost.
pub fn note(report: &mut Report, lba: Option<u64>, what: &str, error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotConnected {
        return Err(error);
    }
    let detail = format!("{what}: {error}");
    report.findings.push(Finding { reason: reason_of(&error), lba, detail, is_known: false });
    Ok(())
}

/// Adds a finding for something that the store knows and [`Map::repair`] rewrites.
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

/// Reads `count` neighbours of `bytes` each; one by one if they can't be read together.
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
    /// Starts a job.
    pub fn new(map: Arc<Map<F>>) -> Self {
        Self { map, last: None, wrong: None, structure: Some(Piece::Checkpoint) }
    }

    /// The map of the store.
    pub fn map(&self) -> &Map<F> {
        &self.map
    }

    /// Checks a piece of the device's contents other than leaf pages and blocks. Returns false if
    /// none is left.
    pub fn scrub_structure(&mut self, report: &mut Report) -> io::Result<bool> {
        let Some(piece) = self.structure else { return Ok(false) };
        self.structure = self.map.check_structure(piece, report)?;
        Ok(self.structure.is_some())
    }

    /// The set of a block.
    pub fn set_of(lba: u64) -> u64 {
        lba / F::ENTRIES_PER_LEAF
    }

    /// The next piece from `lba` on that may have written blocks, or slot-map pages to check with
    /// it.
    pub fn next_piece(&self, lba: u64) -> Option<Range<u64>> {
        let block_count = self.map.geometry().block_count;
        if lba >= block_count {
            return None;
        }
        let sets = self.map.geometry().sets();
        let (set, leaves) = (Self::set_of(lba), self.map.leaves());
        let next_held = |from: u64, to: u64| {
            // In parts, because the leaves are locked during a search.
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
        // In place: one run of consecutive blocks on the device.
        let geometry = self.map.geometry();
        let end =
            if F::IS_IN_PLACE { end.min(start + geometry.blocks_together(start)) } else { end };
        Some(start..end)
    }

    /// The slot-map pages that are checked with a set; they are distributed over all sets.
    fn maps_of(&self, set: u64) -> Range<u64> {
        let geometry = self.map.geometry();
        let share = |set: u64| {
            u128::from(set) * u128::from(geometry.slot_maps()) / u128::from(geometry.sets())
        };
        share(set) as u64..share(set + 1) as u64
    }

    /// The set with which a slot-map page is checked.
    fn set_with(&self, map: u64) -> u64 {
        let (sets, maps) = (self.map.geometry().sets(), self.map.geometry().slot_maps());
        let set = (u128::from(map + 1) * u128::from(sets)).div_ceil(u128::from(maps));
        (set - 1) as u64
    }

    /// The current entries of a piece. Blocks are `Absent` if their leaf page is wrong and they
    /// have no pending change.
    pub fn entries(
        &mut self,
        piece: &Range<u64>,
        report: &mut Report,
    ) -> io::Result<Vec<Known<F::Entry>>> {
        let set = Self::set_of(piece.start);
        if piece.start == set * F::ENTRIES_PER_LEAF {
            self.begin_set(set, report)?;
        }
        // Must come first: changes merged afterwards are in the leaf page.
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

    /// Reads the leaf pages that are checked with a set from the device.
    fn begin_set(&mut self, set: u64, report: &mut Report) -> io::Result<()> {
        let sets = self.map.geometry().sets();
        for map in self.maps_of(set) {
            self.leaf(sets + map, report)?;
        }
        self.last = None;
        self.leaf(set, report)?;
        Ok(())
    }

    /// A leaf as it is now; `None` if it is void, or wrong on the device and unknown. A wrong leaf
    /// is reported once.
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

    /// The contents of a leaf that is wrong on the device, if they are known otherwise.
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
