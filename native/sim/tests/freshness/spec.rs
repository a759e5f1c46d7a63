//! The versions that a client may read through a life of the store.

use super::device::{SECTORS, Version};

/// A set of versions.
pub type Versions = u16;

pub fn one(version: Version) -> Versions {
    1 << version
}

/// Sectors as seen through one life of the store.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct View {
    /// Possible versions of a sector that wasn't written in this life. A read leaves one of them.
    base: [Versions; SECTORS],
    /// Versions given to the device in this life that no flush covers.
    since: [Versions; SECTORS],
    /// The last version acknowledged in this life.
    latest: [Option<Version>; SECTORS],
    /// The version covered by the last acknowledged flush.
    flushed: [Option<Version>; SECTORS],
}

impl View {
    /// A life that begins with the versions that another may have left.
    pub fn after(left: [Versions; SECTORS]) -> Self {
        Self { base: left, ..Self::default() }
    }

    /// As [`View::after`], for a gateway that keeps running: the versions acknowledged to it are
    /// still the latest.
    pub fn continued(left: [Versions; SECTORS], latest: [Option<Version>; SECTORS]) -> Self {
        Self { latest, ..Self::after(left) }
    }

    pub fn issued(&mut self, sector: usize, version: Version) {
        self.since[sector] |= one(version);
    }

    pub fn acknowledged(&mut self, sector: usize, version: Version) {
        self.latest[sector] = Some(version);
    }

    pub fn latest(&self) -> [Option<Version>; SECTORS] {
        self.latest
    }

    /// A flush was acknowledged; `latest` were the latest versions when it was requested.
    pub fn flushed(&mut self, latest: [Option<Version>; SECTORS]) {
        for (flushed, latest) in self.flushed.iter_mut().zip(latest) {
            *flushed = latest.or(*flushed);
        }
    }

    /// From now on, nothing older than the flushed versions may be read.
    pub fn settle(&mut self) {
        for sector in 0..SECTORS {
            if let Some(flushed) = self.flushed[sector] {
                self.base[sector] = one(flushed);
                self.since[sector] &= !(one(flushed + 1) - 1);
            }
        }
    }

    /// A read returned a version.
    pub fn returned(&mut self, sector: usize, version: Version) -> Result<(), String> {
        let allowed = self.latest[sector].map_or(self.base[sector], one);
        if allowed & one(version) == 0 {
            let allowed: Vec<_> = (0..16).filter(|version| allowed & one(*version) != 0).collect();
            return Err(format!(
                "VIOLATION: sector {sector} reads as version {version}, allowed is {allowed:?}"
            ));
        }
        if self.latest[sector].is_none() {
            self.base[sector] = one(version);
        }
        Ok(())
    }

    /// The versions that this life may leave if it ends now.
    pub fn left(&self) -> [Versions; SECTORS] {
        std::array::from_fn(|sector| self.base[sector] | self.since[sector])
    }
}
