//! What the owner of a device does to it: he has everything that was ever on it, and all that is
//! public.

use std::sync::Arc;

use rand_chacha::ChaCha8Rng;
use rand_core::Rng;

use super::super::super::pages::{PAGE_BYTES, Page};
use super::super::geometry::Geometry;
use super::super::keys::{Authority, Kind, StoreKeys};
use super::machine::{Device, Image};
use super::{SUPERBLOCK_SEED, SUPERBLOCK_UUID, chance, pick};

/// Kinds of attack, for the statistics.
pub const ATTACKS: [&str; 8] = [
    "the whole device put back",
    "areas put back",
    "pages put back",
    "pages exchanged",
    "bits flipped",
    "pages forged with public data",
    "writes dropped",
    "all further writes dropped",
];
/// Pages that one attack touches at most.
const PAGES_MAX: u64 = 6;
/// Snapshots kept.
const SNAPSHOTS_MAX: usize = 12;

/// The owner.
pub struct Adversary {
    geometry: Geometry,
    snapshots: Vec<Image>,
    /// How often he did what.
    pub made: [u64; ATTACKS.len()],
}

impl Adversary {
    pub fn new(geometry: Geometry) -> Self {
        Self { geometry, snapshots: Vec::new(), made: [0; ATTACKS.len()] }
    }

    /// Keeps what the device has now.
    pub fn snapshot(&mut self, device: &Device, random: &mut ChaCha8Rng) {
        if self.snapshots.len() == SNAPSHOTS_MAX {
            self.snapshots.swap_remove(pick(random, SNAPSHOTS_MAX));
        }
        self.snapshots.push(device.image());
    }

    /// Checkpoints, log, node pages, leaf pages, slots.
    fn areas(&self) -> [std::ops::Range<u64>; 5] {
        let geometry = &self.geometry;
        let [log, nodes, leaves, slots] =
            [geometry.log(0), geometry.nodes(0, 0), geometry.leaf(0, 0), geometry.slot(0)];
        [1..log, log..nodes, nodes..leaves, leaves..slots, slots..geometry.page_count()]
    }

    /// A page that was written, metadata more often than blocks.
    fn page(&self, random: &mut ChaCha8Rng) -> u64 {
        let area = self.areas()[pick(random, 5)].clone();
        area.start + random.next_u64() % (area.end - area.start)
    }

    pub fn attack(&mut self, device: &Device, random: &mut ChaCha8Rng) {
        let kind = pick(random, ATTACKS.len());
        let is_lasting = chance(random, 30);
        let count = 1 + random.next_u64() % PAGES_MAX;
        match kind {
            0 | 1 if self.snapshots.is_empty() => return,
            0 | 1 => {
                let snapshot = &self.snapshots[pick(random, self.snapshots.len())];
                for area in self.areas() {
                    if kind == 0 || chance(random, 50) {
                        for page in area {
                            device.lie(page, snapshot[page as usize].clone(), is_lasting);
                        }
                    }
                }
            }
            2 => (0..count).for_each(|_| {
                let page = self.page(random);
                let past = device.past(page);
                if !past.is_empty() {
                    device.lie(page, Some(Arc::clone(&past[pick(random, past.len())])), is_lasting);
                }
            }),
            3 => {
                let area = self.areas()[pick(random, 5)].clone();
                let mut any = || area.start + random.next_u64() % (area.end - area.start);
                let (left, right) = (any(), any());
                let (at_left, at_right) = (device.answer(left), device.answer(right));
                device.lie(left, at_right, is_lasting);
                device.lie(right, at_left, is_lasting);
            }
            4 => (0..count).for_each(|_| self.change(device, random, is_lasting, flip)),
            5 => (0..count).for_each(|_| self.change(device, random, is_lasting, forge)),
            6 => (0..count).for_each(|_| {
                let page = self.page(random);
                device.lie(page, device.answer(page), true);
            }),
            _ => (0..self.geometry.page_count()).for_each(|page| {
                device.lie(page, device.answer(page), true);
            }),
        }
        self.made[kind] += 1;
    }

    fn change(
        &self,
        device: &Device,
        random: &mut ChaCha8Rng,
        is_lasting: bool,
        change: impl Fn(&mut Page, &mut ChaCha8Rng),
    ) {
        let number = self.page(random);
        if let Some(page) = device.answer(number) {
            let mut page = *page;
            change(&mut page, random);
            device.lie(number, Some(Arc::new(page)), is_lasting);
        }
    }
}

fn flip(page: &mut Page, random: &mut ChaCha8Rng) {
    page.0[pick(random, PAGE_BYTES)] ^= 1 << pick(random, 8);
}

/// Changes a number in a page and seals it with all that its owner can read.
fn forge(page: &mut Page, random: &mut ChaCha8Rng) {
    let keys = StoreKeys::new(&SUPERBLOCK_UUID, &SUPERBLOCK_SEED, &Authority::Device);
    let at = 8 * pick(random, 40);
    let field = &mut page.0[at..at + 8];
    let number = u64::from_le_bytes(field.try_into().unwrap_or_default());
    let number =
        [number.wrapping_add(1), number.wrapping_sub(1), random.next_u64()][pick(random, 3)];
    field.copy_from_slice(&number.to_le_bytes());
    match pick(random, 3) {
        0 => drop(keys.pages().seal(Kind::Checkpoint, page)),
        1 => drop(keys.pages().seal(Kind::Nodes, page)),
        _ => drop(keys.log(number, &[0; 16]).seal(Kind::Log, page)),
    }
}
