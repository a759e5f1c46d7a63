//! A device that loses power: it knows which writes were made durable, and makes images in which
//! any of the others are lost or torn.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rand_chacha::ChaCha8Rng;
use rand_core::Rng;

use super::pages::{BlockFile, PAGE_BYTES, Page};

/// Bytes that a device writes whole or not at all.
const SECTOR_BYTES: usize = 512;

#[derive(Debug, Default, Clone)]
struct Contents {
    durable: BTreeMap<u64, Arc<Page>>,
    volatile: Vec<(u64, Arc<Page>)>,
    syncs: u64,
    /// The next sync makes nothing durable, and says that it did.
    is_lying: bool,
    /// Writes that may still be made before the device refuses them.
    writes_left: Option<u64>,
}

/// What to call before a write or sync, and after a sync.
pub type Observer = Box<dyn Fn(&TornDisk) + Send + Sync>;

/// The device.
#[derive(Default)]
pub struct TornDisk {
    contents: Mutex<Contents>,
    observer: Option<Observer>,
}

impl std::fmt::Debug for TornDisk {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("TornDisk")
    }
}

impl TornDisk {
    /// Has `observer` see every instant at which power may fail.
    pub fn observed(mut self, observer: Observer) -> Self {
        self.observer = Some(observer);
        self
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn observe(&self) {
        if let Some(observer) = &self.observer {
            observer(self);
        }
    }

    /// Syncs so far.
    pub fn syncs(&self) -> u64 {
        self.contents().syncs
    }

    /// Writes that are not durable yet.
    pub fn volatile(&self) -> usize {
        self.contents().volatile.len()
    }

    /// Refuses writes after so many more.
    pub fn fail_after(&self, writes: u64) {
        self.contents().writes_left = Some(writes);
    }

    /// Has the next sync make nothing durable, and say that it did.
    pub fn lie_once(&self) {
        self.contents().is_lying = true;
    }

    /// Changes bytes of a page on the medium.
    pub fn damage(&self, page: u64) {
        let mut contents = self.contents();
        let page = contents.durable.get_mut(&page).expect("a page that was written");
        Arc::make_mut(page).0[100] ^= 1;
    }

    /// The device after a power cut now in which of the writes not yet durable none was lost.
    pub fn whole(&self) -> Self {
        self.image(|_, _| true)
    }

    /// The same, with all of them lost.
    pub fn lost(&self) -> Self {
        self.image(|_, _| false)
    }

    /// The same, with `is_kept` saying which were kept: number of the write among those not
    /// durable, and number of the sector in it.
    pub fn image(&self, mut is_kept: impl FnMut(usize, usize) -> bool) -> Self {
        let contents = self.contents();
        let mut durable = contents.durable.clone();
        for (number, (page, written)) in contents.volatile.iter().enumerate() {
            let kept: [bool; PAGE_BYTES / SECTOR_BYTES] =
                std::array::from_fn(|sector| is_kept(number, sector));
            if kept == [true; PAGE_BYTES / SECTOR_BYTES] {
                durable.insert(*page, Arc::clone(written));
            } else if kept.contains(&true) {
                let stored = durable.entry(*page).or_insert_with(|| Arc::new(Page::ZERO));
                let stored = Arc::make_mut(stored);
                for (sector, _) in kept.iter().enumerate().filter(|(_, kept)| **kept) {
                    let bytes = sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
                    stored.0[bytes.clone()].copy_from_slice(&written.0[bytes]);
                }
            }
        }
        let contents = Contents { durable, ..Contents::default() };
        Self { contents: Mutex::new(contents), observer: None }
    }

    /// The same, at random: how likely writes are kept, and whether whole or by sector, differs
    /// from image to image.
    pub fn random_image(&self, random: &mut ChaCha8Rng) -> Self {
        let likely = [5, 25, 50, 75, 95][(random.next_u32() % 5) as usize];
        let is_torn = random.next_u32().is_multiple_of(2);
        let mut is_whole = false;
        self.image(|_, sector| {
            if is_torn || sector == 0 {
                is_whole = random.next_u32() % 100 < likely;
            }
            is_whole
        })
    }
}

impl BlockFile for TornDisk {
    fn read(&self, page: u64, pages: &mut [Page]) -> io::Result<()> {
        let contents = self.contents();
        for (number, page) in (page..).zip(pages) {
            let volatile = contents.volatile.iter().rev().find(|(written, _)| *written == number);
            let stored = volatile.map(|(_, page)| page).or_else(|| contents.durable.get(&number));
            *page = stored.map_or(Page::ZERO, |stored| **stored);
        }
        Ok(())
    }

    fn write(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        self.observe();
        let mut contents = self.contents();
        if contents.writes_left == Some(0) {
            return Err(io::Error::other("device refuses to write"));
        }
        contents.writes_left = contents.writes_left.map(|left| left - 1);
        contents.volatile.extend((page..).zip(pages.iter().map(|page| Arc::new(*page))));
        Ok(())
    }

    /// Durable when it ends; before, as torn as any other write.
    fn write_durably(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        self.write(page, pages)?;
        self.observe();
        let mut contents = self.contents();
        let written = page..page + pages.len() as u64;
        contents.volatile.retain(|(page, _)| !written.contains(page));
        contents.durable.extend((page..).zip(pages.iter().map(|page| Arc::new(*page))));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.observe();
        {
            let mut contents = self.contents();
            if !std::mem::take(&mut contents.is_lying) {
                let volatile = std::mem::take(&mut contents.volatile);
                contents.durable.extend(volatile);
            }
            contents.syncs += 1;
        }
        self.observe();
        Ok(())
    }
}
