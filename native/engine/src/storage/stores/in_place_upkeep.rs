//! Background jobs of a store of sealed blocks in place: each written block's IV against its
//! authentic entry; and the fast-path MACs, which only jobs issue.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use sealane_proto::freshness::fast_path::Included;
use sealane_proto::freshness::leaf::{Iv, Ivs, Leaf, LeafFormat};
use sealane_proto::freshness::pending::Known;
use sealane_proto::sector::{
    BLOCK_BYTES, Block, block_iv, check_written, field, metadata, metadata_mut,
};

use super::super::store::{StoreChannel, StoreRequest};
use super::super::upkeep::{Finding, Report, Upkeep};
use super::fresh::failure::Refusal;
use super::fresh::upkeep::{Walk, note, read_each};
use super::in_place_store::Shared;
use super::raw_pages::execute;

/// One job's.
pub(super) struct InPlaceUpkeep {
    shared: Arc<Shared>,
    walk: Walk<Ivs>,
    raw: Box<dyn StoreChannel>,
}

/// A block that is what its entry says.
struct Checked {
    lba: u64,
    block: Box<Block>,
}

/// Whether a block that came from the device is the one that its entry tells of.
fn check(lba: u64, block: &Block, iv: &Iv, report: &mut Report) -> io::Result<bool> {
    if block_iv(block) != *iv {
        note(report, Some(lba), "sector", Refusal::Stale(lba).into())?;
        return Ok(false);
    }
    if let Err(reason) = check_written(block) {
        report.findings.push(Finding { reason, lba: Some(lba), detail: "stored sector".into() });
        return Ok(false);
    }
    Ok(true)
}

impl InPlaceUpkeep {
    pub fn new(shared: Arc<Shared>) -> io::Result<Self> {
        let raw = shared.raw.store().open()?;
        Ok(Self { walk: Walk::new(Arc::clone(&shared.map)), shared, raw })
    }

    /// Reads the blocks of a piece that have entries, and returns those that are right.
    fn read(
        &mut self,
        start: u64,
        entries: &[Known<Iv>],
        report: &mut Report,
    ) -> io::Result<Vec<Checked>> {
        let mut right = Vec::new();
        let is_written = |known: &Known<Iv>| matches!(known, Known::Entry(_));
        let mut next = 0;
        for run in entries.chunk_by(|left, right| is_written(left) == is_written(right)) {
            let first = start + next;
            next += run.len() as u64;
            if !is_written(&run[0]) {
                continue;
            }
            let place = self.shared.map.geometry().in_place_block(first);
            let blocks = read_each(run.len(), BLOCK_BYTES, |part| {
                let buffer = vec![0; part.len() * BLOCK_BYTES];
                let lba = place + part.start as u64;
                execute(&mut *self.raw, StoreRequest::Read { lba, buffer })
            });
            for ((lba, known), block) in (first..).zip(run).zip(blocks) {
                let Known::Entry(iv) = known else { continue };
                report.checked += 1;
                report.bytes += BLOCK_BYTES as u64;
                match block {
                    Ok(block) => {
                        let mut sector = Box::new([0; BLOCK_BYTES]);
                        sector.copy_from_slice(&block);
                        if check(lba, &sector, iv, report)? {
                            right.push(Checked { lba, block: sector });
                        }
                    }
                    Err(error) => note(report, Some(lba), "sector", error)?,
                }
            }
        }
        Ok(right)
    }

    /// Gives blocks that were checked MACs over their leaf.
    fn issue(&mut self, right: Vec<Checked>, leaf: &Leaf, report: &mut Report) -> io::Result<()> {
        let first = leaf.index() * Ivs::ENTRIES_PER_LEAF;
        let mut changed: Vec<Checked> = Vec::new();
        for mut checked in right {
            let Some(included) = Included::of(leaf, (checked.lba - first) as usize) else {
                continue;
            };
            let mac = self.shared.fast_path.issue(&included);
            report.refreshed += 1;
            if metadata(&checked.block, field::MAC) != mac {
                metadata_mut(&mut checked.block, field::MAC).copy_from_slice(&mac);
                changed.push(checked);
            }
        }
        for run in changed.chunk_by(|left, right| left.lba + 1 == right.lba) {
            let buffer = run.iter().flat_map(|checked| checked.block.iter().copied()).collect();
            let lba = self.shared.map.geometry().in_place_block(run[0].lba);
            let write = StoreRequest::Write { lba, buffer, durable: false };
            report.bytes += (run.len() * BLOCK_BYTES) as u64;
            if let Err(error) = execute(&mut *self.raw, write) {
                report.refreshed -= run.len() as u64;
                note(report, Some(run[0].lba), "writing sectors again", error)?;
            }
        }
        Ok(())
    }
}

impl Upkeep for InPlaceUpkeep {
    fn next_piece(&mut self, lba: u64) -> Option<Range<u64>> {
        self.walk.next_piece(lba)
    }

    fn scrub(&mut self, piece: Range<u64>, report: &mut Report) -> io::Result<()> {
        let entries = self.walk.entries(&piece, report)?;
        self.read(piece.start, &entries, report).map(drop)
    }

    fn has_fast_path(&self) -> bool {
        true
    }

    fn refresh(&mut self, piece: Range<u64>, report: &mut Report) -> io::Result<()> {
        let map = Arc::clone(&self.shared.map);
        let waiting = map.current(piece.start, piece.end - piece.start);
        let set = Walk::<Ivs>::set_of(piece.start);
        // A page that was merged since has a node that the next refresh is for.
        let page = self.walk.leaf(set, report)?;
        let leaf = page.and_then(|page| map.leaves().with_node(set, &page));
        let Some(leaf) = leaf else { return Ok(()) };
        let start = set * Ivs::ENTRIES_PER_LEAF;
        let entry = |(lba, known): (u64, &Known<Iv>)| match known {
            Known::Absent => {
                leaf.entry::<Ivs>((lba - start) as usize).map_or(Known::Void, Known::Entry)
            }
            Known::Entry(_) | Known::Void => Known::Void,
        };
        let entries: Vec<_> = (piece.start..).zip(&waiting).map(entry).collect();
        let right = self.read(piece.start, &entries, report)?;
        self.issue(right, &leaf, report)
    }
}
