//! Background jobs of a store of sealed blocks in place: check each written block's IV against its
//! authenticated entry, and issue fast-path MACs, which only jobs do.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use sealane_proto::freshness::leaf::{Iv, Ivs};
use sealane_proto::freshness::pending::Known;
use sealane_proto::sector::{BLOCK_BYTES, Block, block_iv, check_written};

use super::super::store::{StoreChannel, StoreRequest};
use super::super::upkeep::{Finding, Report, Upkeep};
use super::fresh::failure::Refusal;
use super::fresh::upkeep::{Walk, note, read_each};
use super::fresh_store::Shared;
use super::in_place_store::InPlace;
use super::raw_pages::execute;

/// The upkeep of one job.
pub(super) struct InPlaceUpkeep {
    shared: Arc<Shared<InPlace>>,
    walk: Walk<Ivs>,
    raw: Box<dyn StoreChannel>,
}

/// A block as read from the device.
struct Found {
    lba: u64,
    block: Box<Block>,
}

/// Checks a block from the device against its entry.
fn check(found: &Found, iv: &Iv, report: &mut Report) -> io::Result<()> {
    let Found { lba, block } = found;
    if block_iv(block) != *iv {
        note(report, Some(*lba), "sector", Refusal::Stale(*lba).into())?;
    } else if let Err(reason) = check_written(block) {
        let detail = "stored sector".into();
        report.findings.push(Finding { reason, lba: Some(*lba), detail, is_known: false });
    }
    Ok(())
}

impl InPlaceUpkeep {
    pub fn new(shared: Arc<Shared<InPlace>>) -> io::Result<Self> {
        let raw = shared.place.raw.open()?;
        Ok(Self { walk: Walk::new(Arc::clone(&shared.map)), shared, raw })
    }

    /// Reads the blocks of a piece that have entries.
    fn read(
        &mut self,
        start: u64,
        entries: &[Known<Iv>],
        report: &mut Report,
    ) -> io::Result<Vec<Found>> {
        let mut found = Vec::new();
        let is_written = |known: &Known<Iv>| matches!(known, Known::Entry(_));
        let mut next = start;
        for run in entries.chunk_by(|left, right| is_written(left) == is_written(right)) {
            let first = next;
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
            for (lba, block) in (first..).zip(blocks) {
                report.checked += 1;
                report.bytes += BLOCK_BYTES as u64;
                match block {
                    Ok(bytes) => {
                        let mut block = Box::new([0; BLOCK_BYTES]);
                        block.copy_from_slice(&bytes);
                        found.push(Found { lba, block });
                    }
                    Err(error) => note(report, Some(lba), "sector", error)?,
                }
            }
        }
        Ok(found)
    }

    /// Writes blocks whose fast-path MAC has changed.
    fn write(&mut self, changed: &[Found], report: &mut Report) -> io::Result<()> {
        for run in changed.chunk_by(|left, right| left.lba + 1 == right.lba) {
            let buffer = run.iter().flat_map(|found| found.block.iter().copied()).collect();
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

    fn scrub_structure(&mut self, report: &mut Report) -> io::Result<bool> {
        self.walk.scrub_structure(report)
    }

    fn scrub(&mut self, piece: Range<u64>, report: &mut Report) -> io::Result<()> {
        let entries = self.walk.entries(&piece, report)?;
        for found in self.read(piece.start, &entries, report)? {
            if let Known::Entry(iv) = &entries[(found.lba - piece.start) as usize] {
                check(&found, iv, report)?;
            }
        }
        Ok(())
    }

    fn repair(&mut self) -> io::Result<()> {
        self.walk.map().repair()
    }

    fn has_fast_path(&self) -> bool {
        true
    }

    fn refresh(&mut self, piece: Range<u64>, report: &mut Report) -> io::Result<()> {
        let mut entries = self.walk.entries(&piece, report)?;
        let waiting = self.shared.map.current(piece.start, piece.end - piece.start);
        for (entry, waiting) in entries.iter_mut().zip(&waiting) {
            if *waiting != Known::Absent {
                *entry = Known::Void;
            }
        }
        let mut found = self.read(piece.start, &entries, report)?;
        let blocks = found.iter_mut().map(|found| (found.lba, &mut *found.block));
        let vouched = match self.shared.map.vouch(Walk::<Ivs>::set_of(piece.start), blocks) {
            Ok(vouched) => vouched,
            Err(error) => return note(report, Some(piece.start), "leaf page", error),
        };
        let mut changed = Vec::new();
        for (found, vouched) in found.into_iter().zip(vouched) {
            match vouched {
                Ok(None) => {}
                Ok(Some(is_new)) => {
                    report.refreshed += 1;
                    if is_new {
                        changed.push(found);
                    }
                }
                Err(error) => note(report, Some(found.lba), "sector", error)?,
            }
        }
        self.write(&changed, report)
    }
}
