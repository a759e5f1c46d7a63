//! A simulated disk that loses power. It knows which writes are durable, and makes images in which
//! any of the others are lost or torn.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rand_chacha::ChaCha8Rng;
use rand_core::Rng;

use super::pages::{BlockFile, PAGE_BYTES, Page};

/// Bytes that the disk writes entirely or not at all.
const SECTOR_BYTES: usize = 512;

#[derive(Debug, Default, Clone)]
struct Contents {
    durable: BTreeMap<u64, Arc<Page>>,
    volatile: Vec<(u64, Arc<Page>)>,
    syncs: u64,
    /// The next sync reports success but makes nothing durable.
    is_lying: bool,
    /// Number of writes until the disk refuses them.
    writes_left: Option<u64>,
}

/// Called before each write or sync, and after each sync.
pub type Observer = Box<dyn Fn(&TornDisk) + Send + Sync>;

/// The disk.
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
    /// Calls `observer` at every instant at which power may fail.
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

    /// Number of syncs so far.
    pub fn syncs(&self) -> u64 {
        self.contents().syncs
    }

    /// Number of writes that are not durable yet.
    pub fn volatile(&self) -> usize {
        self.contents().volatile.len()
    }

    /// Refuses all writes after `writes` more.
    pub fn fail_after(&self, writes: u64) {
        self.contents().writes_left = Some(writes);
    }

    /// Makes the next sync report success without making anything durable.
    pub fn lie_once(&self) {
        self.contents().is_lying = true;
    }

    /// Flips a bit of a durable page.
    pub fn damage(&self, page: u64) {
        let mut contents = self.contents();
        let page = contents.durable.get_mut(&page).expect("a page that was written");
        Arc::make_mut(page).0[100] ^= 1;
    }

    /// The disk after a power cut at this point, with all volatile writes kept.
    pub fn whole(&self) -> Self {
        self.image(|_, _| true)
    }

    /// The disk after a power cut at this point, with all volatile writes lost.
    pub fn lost(&self) -> Self {
        self.image(|_, _| false)
    }

    /// The disk after a power cut at this point. `is_kept` selects what is kept, by the index of
    /// the volatile write and the index of the sector in it.
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

    /// An image with a random selection of writes. The probability of keeping one, and whether
    /// writes are kept as a whole or by sector, differ between images.
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

    /// Durable once it returns; until then it can be torn like any other write.
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
