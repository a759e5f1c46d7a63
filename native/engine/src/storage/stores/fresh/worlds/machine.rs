//! A device and an anchor that lose power together, at a chosen write, sync or advance. The
//! device's owner may choose its answers.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rand_chacha::ChaCha8Rng;
use sealane_proto::sector::{BLOCK_BYTES, Block, DATA_BYTES, METADATA_BYTES};

use super::super::super::pages::{BlockFile, Page};
use super::super::anchor::{Anchor, AnchorError, AnchorPolicy, Anchored, MemoryAnchor};
use super::{chance, pick};

/// Bytes that a device without metadata writes entirely or not at all.
const SECTOR_BYTES: usize = 512;
const ZEROS: Block = [0; BLOCK_BYTES];

/// Contents of a device by page, with metadata; `None` means zeros.
pub type Image = Vec<Option<Arc<Block>>>;

/// How a life ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Crash {
    /// The process ends; the device continues.
    Kill,
    /// Any part of what wasn't synced may be lost, and writes may be torn.
    PowerCut,
}

#[derive(Debug)]
struct Contents {
    durable: Image,
    /// Written since the last sync.
    cached: Vec<(u64, Arc<Block>)>,
    /// The answers of an honest device.
    now: Image,
    /// Everything ever written, by page; kept only for hostile devices.
    past: Option<BTreeMap<u64, Vec<Arc<Block>>>>,
    /// Dishonest answers, and whether they stay after a write.
    lies: BTreeMap<u64, (Option<Arc<Block>>, bool)>,
    /// Number of writes, syncs and advances before power fails.
    points_left: Option<u64>,
    is_off: bool,
}

/// What other threads do whenever the store's thread uses the device or its anchor.
pub type Beside = Box<dyn FnMut() + Send>;

pub struct Device {
    contents: Mutex<Contents>,
    beside: Mutex<Option<Beside>>,
    /// Whether blocks can be torn. Drives with metadata write each block as a whole.
    tears: bool,
}

impl Device {
    /// An empty device.
    pub fn new(pages: u64, tears: bool, is_hostile: bool) -> Self {
        let image: Image = vec![None; pages as usize];
        let contents = Contents {
            durable: image.clone(),
            cached: Vec::new(),
            now: image,
            past: is_hostile.then(BTreeMap::new),
            lies: BTreeMap::new(),
            points_left: None,
            is_off: false,
        };
        Self { contents: Mutex::new(contents), beside: Mutex::default(), tears }
    }

    /// Sets what other threads do from now on.
    pub fn set_beside(&self, beside: Option<Beside>) {
        *self.beside.lock().unwrap_or_else(PoisonError::into_inner) = beside;
    }

    /// Runs the other threads' work. Their own use of the device doesn't run it again.
    pub fn let_others(&self) {
        let taken = || self.beside.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut beside) = taken() {
            beside();
            self.set_beside(Some(beside));
        }
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes power fail after `points` writes, syncs and advances; `None`: never.
    pub fn fail_after(&self, points: Option<u64>) {
        self.contents().points_left = points;
    }

    /// Whether power has failed.
    pub fn is_off(&self) -> bool {
        self.contents().is_off
    }

    /// Marks an instant at which power may fail.
    fn point(&self) -> io::Result<()> {
        self.contents().point()
    }

    /// Crashes the device, and restores power.
    pub fn crash(&self, crash: Crash, random: &mut ChaCha8Rng) {
        let mut contents = self.contents();
        let Contents { durable, cached, now, .. } = &mut *contents;
        if crash == Crash::PowerCut {
            let likely = [5, 25, 50, 75, 95][pick(random, 5)];
            let is_torn = self.tears && chance(random, 50);
            for (page, written) in std::mem::take(cached) {
                let place = &mut durable[page as usize];
                if !is_torn {
                    if chance(random, likely) {
                        *place = Some(written);
                    }
                    continue;
                }
                let mut torn = place.as_deref().copied().unwrap_or(ZEROS);
                for sector in (0..DATA_BYTES).step_by(SECTOR_BYTES) {
                    if chance(random, likely) {
                        let bytes = sector..sector + SECTOR_BYTES;
                        torn[bytes.clone()].copy_from_slice(&written[bytes]);
                    }
                }
                *place = Some(Arc::new(torn));
            }
            *now = durable.clone();
        }
        contents.points_left = None;
        contents.is_off = false;
    }

    // Attacks.

    /// The contents of the device if it were honest.
    pub fn image(&self) -> Image {
        self.contents().now.clone()
    }

    /// Everything ever written to a page.
    pub fn past(&self, page: u64) -> Vec<Arc<Block>> {
        let contents = self.contents();
        contents.past.as_ref().and_then(|past| past.get(&page)).cloned().unwrap_or_default()
    }

    /// The pages of an area that were ever written.
    pub fn written(&self, area: std::ops::Range<u64>) -> Vec<u64> {
        let contents = self.contents();
        let past = contents.past.iter().flat_map(|past| past.range(area.clone()));
        past.map(|(page, _)| *page).collect()
    }

    /// Sets the answer for a page, until the page is written or, if lasting, beyond that.
    pub fn lie(&self, page: u64, answer: Option<Arc<Block>>, is_lasting: bool) {
        self.contents().lies.insert(page, (answer, is_lasting));
    }

    /// The current answer for a page.
    pub fn answer(&self, page: u64) -> Option<Arc<Block>> {
        self.contents().answer(page)
    }

    /// Ends all lies.
    pub fn repent(&self) {
        self.contents().lies.clear();
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Device").field("tears", &self.tears).finish_non_exhaustive()
    }
}

impl Contents {
    fn point(&mut self) -> io::Result<()> {
        if self.points_left == Some(0) {
            self.is_off = true;
        }
        self.check()?;
        self.points_left = self.points_left.map(|left| left - 1);
        Ok(())
    }

    fn check(&self) -> io::Result<()> {
        if self.is_off { Err(io::Error::other("no power")) } else { Ok(()) }
    }

    fn answer(&self, page: u64) -> Option<Arc<Block>> {
        match self.lies.get(&page) {
            Some((answer, _)) => answer.clone(),
            None => self.now[page as usize].clone(),
        }
    }
}

impl Device {
    /// Reads a block with its metadata.
    pub fn read_block(&self, page: u64) -> io::Result<Block> {
        let contents = self.contents();
        contents.check()?;
        Ok(contents.answer(page).map_or(ZEROS, |block| *block))
    }

    /// Writes a block with its metadata.
    pub fn write_block(&self, page: u64, block: &Block) -> io::Result<()> {
        let mut contents = self.contents();
        contents.point()?;
        let block = Arc::new(*block);
        if let Some(past) = &mut contents.past {
            past.entry(page).or_default().push(Arc::clone(&block));
        }
        if contents.lies.get(&page).is_some_and(|(_, is_lasting)| !is_lasting) {
            contents.lies.remove(&page);
        }
        contents.now[page as usize] = Some(Arc::clone(&block));
        contents.cached.push((page, block));
        Ok(())
    }
}

impl BlockFile for Device {
    fn read(&self, page: u64, pages: &mut [Page]) -> io::Result<()> {
        for (number, page) in (page..).zip(pages) {
            page.0.copy_from_slice(&self.read_block(number)?[..DATA_BYTES]);
        }
        Ok(())
    }

    fn write(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        self.let_others();
        for (number, page) in (page..).zip(pages) {
            let mut block = ZEROS;
            block[..DATA_BYTES].copy_from_slice(&page.0);
            self.write_block(number, &block)?;
        }
        Ok(())
    }

    fn write_durably(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        self.write(page, pages)?;
        let mut contents = self.contents();
        contents.point()?;
        let written = page..page + pages.len() as u64;
        contents.cached.retain(|(page, _)| !written.contains(page));
        for number in written {
            contents.durable[number as usize] = contents.now[number as usize].clone();
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.let_others();
        self.point()?;
        let mut contents = self.contents();
        for (page, written) in std::mem::take(&mut contents.cached) {
            contents.durable[page as usize] = Some(written);
        }
        Ok(())
    }

    fn read_metadata(&self, page: u64) -> io::Result<[u8; METADATA_BYTES]> {
        let block = self.read_block(page)?;
        Ok(*block.last_chunk().expect("a block ends with its metadata"))
    }
}

/// The anchor of a store, which answers only while the device's machine has power.
#[derive(Debug)]
pub struct PoweredAnchor {
    device: Arc<Device>,
    memory: MemoryAnchor,
    advances: Mutex<u64>,
}

impl PoweredAnchor {
    /// An anchor that was never advanced.
    pub fn new(device: &Arc<Device>, policy: AnchorPolicy) -> Self {
        let memory = MemoryAnchor::new(policy);
        Self { device: Arc::clone(device), memory, advances: Mutex::default() }
    }

    /// Number of acknowledged advances.
    pub fn advances(&self) -> u64 {
        *self.advances.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves the next advance unanswered; `is_made` says whether it takes effect.
    pub fn lose_an_answer(&self, is_made: bool) {
        self.memory.fail_next(is_made);
    }

    /// Answers again.
    pub fn recover(&self) {
        self.memory.recover();
    }
}

impl Anchor for PoweredAnchor {
    fn latest(&self) -> io::Result<Option<Anchored>> {
        self.device.contents().check()?;
        self.memory.latest()
    }

    fn advance(&self, to: &Anchored) -> Result<(), AnchorError> {
        self.device.let_others();
        let unreachable = |error: io::Error| AnchorError::Unreachable(error.to_string());
        self.device.point().map_err(unreachable)?;
        self.memory.advance(to)?;
        self.device.let_others();
        self.device.point().map_err(unreachable)?;
        *self.advances.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Ok(())
    }

    fn policy(&self) -> AnchorPolicy {
        self.memory.policy()
    }
}
