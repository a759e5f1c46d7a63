//! Background jobs of a store of sealed blocks out of place: check each written block's data
//! against the checksum in its authenticated entry.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use sealane_proto::freshness::pending::Known;
use zerocopy::IntoBytes;

use super::super::store::{BLOCK_BYTES, DATA_BYTES};
use super::super::upkeep::{Report, Upkeep};
use super::fresh::failure::Refusal;
use super::fresh::placed::Placed;
use super::fresh::upkeep::{Walk, note, read_each};
use super::fresh_store::Shared;
use super::pages::{PAGE_BYTES, Page};
use super::sealed_channel::runs;
use super::sealed_file::Slots;

/// The upkeep of one job.
pub(super) struct SealedUpkeep {
    shared: Arc<Shared<Slots>>,
    walk: Walk<Placed>,
}

impl SealedUpkeep {
    pub fn new(shared: Arc<Shared<Slots>>) -> Self {
        let walk = Walk::new(Arc::clone(&shared.map));
        Self { shared, walk }
    }
}

impl Upkeep for SealedUpkeep {
    fn next_piece(&mut self, lba: u64) -> Option<Range<u64>> {
        self.walk.next_piece(lba)
    }

    fn scrub_structure(&mut self, report: &mut Report) -> io::Result<bool> {
        self.walk.scrub_structure(report)
    }

    fn scrub(&mut self, piece: Range<u64>, report: &mut Report) -> io::Result<()> {
        let entries = self.walk.entries(&piece, report)?;
        for (first, count, place) in runs(&entries, self.shared.map.geometry()) {
            let pages = read_each(count, PAGE_BYTES, |run| {
                let mut pages = vec![Page::ZERO; run.len()];
                self.shared.place.device.read(place + run.start as u64, &mut pages)?;
                Ok(pages.as_bytes().to_vec())
            });
            for (index, page) in (first..).zip(pages) {
                let Known::Entry(entry) = &entries[index] else { continue };
                let lba = piece.start + index as u64;
                report.checked += 1;
                report.bytes += PAGE_BYTES as u64;
                let checked = page.and_then(|page| {
                    let mut block = [0; BLOCK_BYTES];
                    block[..DATA_BYTES].copy_from_slice(&page);
                    block[DATA_BYTES..].copy_from_slice(&entry.metadata());
                    let is_whole = self.shared.map.is_whole(entry, &block);
                    if is_whole { Ok(()) } else { Err(Refusal::Stale(lba).into()) }
                });
                if let Err(error) = checked {
                    note(report, Some(lba), "sector", error)?;
                }
            }
        }
        Ok(())
    }

    fn repair(&mut self) -> io::Result<()> {
        self.walk.map().repair()
    }

    fn has_fast_path(&self) -> bool {
        false
    }

    fn refresh(&mut self, _piece: Range<u64>, _report: &mut Report) -> io::Result<()> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "blocks out of place have no fast-path MACs",
        ))
    }
}
