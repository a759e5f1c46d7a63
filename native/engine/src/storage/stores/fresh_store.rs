//! What stores of sealed blocks that keep freshness share, regardless of where the blocks lie.

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use sealane_proto::aead::Secret;
use sealane_proto::freshness::milestone::Milestone;
use sealane_proto::freshness::openings::Openings;

use super::super::events::EventLog;
use super::super::store::{BLOCK_BYTES, BlockStore, StoreChannel, StoreCounters};
use super::super::upkeep::Upkeep;
use super::fresh::anchor::Anchor;
use super::fresh::geometry::Geometry;
use super::fresh::journal::{Journal, Requests};
use super::fresh::keys::Authority;
use super::fresh::map::{Layout, Map};
use super::fresh::opening::Opening;
use super::fresh::superblock::Superblock;
use super::pages::{BlockFile, Page, random};

/// A store's secret and anchor, and further options for creating or opening it.
#[derive(Debug, Default)]
pub struct Trust<'a> {
    /// The store's secret. `None`: its keys lie on the device.
    pub secret: Option<&'a Secret>,
    /// Its anchor. `None`: a rollback of the whole device goes unnoticed.
    pub anchor: Option<Arc<dyn Anchor>>,
    /// Receives the progress of an opening.
    pub opening: Option<&'a Opening>,
    /// Whether the device reserves room for all blocks. Otherwise it reserves room only for the
    /// store's own pages, and a host's write may find the device full.
    pub reserves: bool,
}

impl Trust<'_> {
    pub(super) fn authority(&self) -> Authority<'_> {
        self.secret.map_or(Authority::Device, Authority::Secret)
    }
}

/// Where a store's own pages and its blocks lie.
pub trait Place: Debug + Send + Sync + Sized + 'static {
    /// Layout of the blocks.
    type Layout: Layout;
    /// Name of the layout in status messages.
    const LAYOUT: &'static str;
    /// The store's own pages.
    fn file(&self) -> io::Result<Arc<dyn BlockFile>>;
    /// Refuses a device that is too small for `geometry`.
    fn check_size(&self, geometry: &Geometry) -> io::Result<()>;
    /// Extends the device for `geometry`, if it can grow. Nothing else uses it meanwhile.
    fn extend(&self, geometry: &Geometry) -> io::Result<()>;
    /// Opens a channel, which requests flushes and room through `requests`.
    fn channel(
        shared: &Arc<Shared<Self>>,
        requests: &Arc<Requests>,
    ) -> io::Result<Box<dyn StoreChannel>>;
    /// Creates the upkeep of one background job.
    fn upkeep(shared: &Arc<Shared<Self>>) -> io::Result<Box<dyn Upkeep>>;
}

/// State that a store's channels share.
#[derive(Debug)]
pub struct Shared<P: Place> {
    /// Where the blocks are.
    pub place: P,
    /// What is known about the blocks.
    pub map: Arc<Map<P::Layout>>,
    /// Counters of hosts' operations.
    pub counters: StoreCounters,
}

/// A store of sealed blocks. Dropping it flushes.
#[derive(Debug)]
pub struct FreshStore<P: Place> {
    pub(super) shared: Arc<Shared<P>>,
    /// `None` after a restart of the journal failed: nothing is made durable any more.
    journal: Option<Journal>,
    /// Whether the device reserves room for all blocks.
    reserves: bool,
}

/// The pages for which a device reserves room.
fn room(geometry: &Geometry, reserves: bool) -> Range<u64> {
    let own = geometry.own_pages();
    if reserves { own.start..geometry.device_pages() } else { own }
}

impl<P: Place> FreshStore<P> {
    /// Creates an empty store; the previous contents are lost.
    pub(super) fn lay_out(
        place: P,
        uuid: [u8; 16],
        geometry: Geometry,
        trust: &Trust<'_>,
    ) -> io::Result<Self> {
        let superblock = Superblock { uuid, seed: random()?, geometry };
        place.check_size(&superblock.geometry)?;
        let file = place.file()?;
        file.reserve(room(&superblock.geometry, trust.reserves))?;
        let map = Map::create(file, &superblock, &trust.authority(), trust.anchor.clone())?;
        Self::start(place, map, trust.reserves)
    }

    /// Opens a store and recovers the state of its last flush or a later one. Fails with
    /// [`Refusal::RolledBack`](super::fresh::failure::Refusal) if the anchor has recorded a later
    /// state.
    pub(super) fn take_up(place: P, trust: &Trust<'_>) -> io::Result<Self> {
        let file = place.file()?;
        let (superblock, keys) = Superblock::read(&*file, &trust.authority())?;
        let (anchor, nobody) = (trust.anchor.clone(), Opening::default());
        let opening = trust.opening.unwrap_or(&nobody);
        let check = |geometry: &Geometry| place.check_size(geometry);
        let map = Map::open_watched(file, &superblock, keys, anchor, opening, check)?;
        Self::start(place, map, trust.reserves)
    }

    /// The store's map.
    #[cfg(test)]
    pub(super) fn map(&self) -> &Map<P::Layout> {
        &self.shared.map
    }

    fn start(place: P, map: Map<P::Layout>, reserves: bool) -> io::Result<Self> {
        let map = Arc::new(map);
        let journal = Some(Journal::start(Arc::clone(&map))?);
        let shared = Shared { place, map, counters: StoreCounters::default() };
        Ok(Self { shared: Arc::new(shared), journal, reserves })
    }
}

impl<P: Place> BlockStore for FreshStore<P> {
    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn block_count(&self) -> u64 {
        self.shared.map.geometry().block_count
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        let Some(journal) = &self.journal else {
            return Err(io::Error::other("the store is closed"));
        };
        P::channel(&self.shared, journal.requests())
    }

    fn layout(&self) -> &'static str {
        P::LAYOUT
    }

    fn tell_events(&self, events: &Arc<EventLog>) {
        self.shared.map.tell_events(events);
    }

    fn milestone(&self) -> Option<Milestone> {
        Some(self.shared.map.milestone())
    }

    fn contains(&self, told: &Milestone) -> bool {
        self.shared.map.contains(told)
    }

    fn mark(&self) -> u64 {
        self.shared.map.mark()
    }

    fn openings(&self) -> Option<Openings> {
        Some(self.shared.map.openings())
    }

    fn upkeep(&self) -> io::Result<Option<Box<dyn Upkeep>>> {
        P::upkeep(&self.shared).map(Some)
    }

    fn extend(&mut self, block_count: u64) -> io::Result<()> {
        let shared = Arc::get_mut(&mut self.shared).ok_or_else(in_use)?;
        if shared.map.geometry().block_count >= block_count {
            // Anchors a growth that the anchor had not acknowledged.
            return shared.map.finish();
        }
        let geometry = shared.map.grown_to(block_count)?;
        // First, so that a file without room for it stays as it is.
        shared.place.file()?.reserve(room(&geometry, self.reserves))?;
        shared.place.extend(&geometry)?;
        // Dropping the journal flushes, and leaves this thread as the only user of the map.
        self.journal = None;
        let grown = Arc::get_mut(&mut shared.map).ok_or_else(in_use)?.grow(geometry);
        self.journal = Some(Journal::start(Arc::clone(&shared.map))?);
        grown
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        let mut named = self.shared.counters.by_name();
        named.extend(self.shared.map.statistics());
        named
    }
}

/// The error for growing a store that is in use.
pub(super) fn in_use() -> io::Error {
    io::Error::new(io::ErrorKind::ResourceBusy, "the store is in use: it can't grow now")
}

/// A new random UUID (RFC 9562: version 4, variant 10).
pub(super) fn new_uuid() -> io::Result<[u8; 16]> {
    let mut uuid: [u8; 16] = random()?;
    uuid[6] = uuid[6] & 0x0F | 0x40;
    uuid[8] = uuid[8] & 0x3F | 0x80;
    Ok(uuid)
}

/// Refuses a device whose first page isn't zeros: anything else may be somebody's data.
pub(super) fn check_empty(file: &dyn BlockFile) -> io::Result<()> {
    let mut first = [Page::ZERO];
    file.read(0, &mut first)?;
    if first == [Page::ZERO] {
        return Ok(());
    }
    let detail = "the device holds something: its first 4096 bytes are not zeros";
    Err(io::Error::new(io::ErrorKind::AlreadyExists, detail))
}

/// Refuses a device that holds no store with this UUID. Needs no key.
pub(super) fn check_name(file: &dyn BlockFile, uuid: [u8; 16]) -> io::Result<()> {
    if Superblock::read_claimed(file)?.uuid == uuid {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "the device holds another store"))
}
