//! What whoever reads and writes through a life of the store may see.

use super::device::{SECTORS, Version};

/// A set of versions.
pub type Versions = u16;

pub fn one(version: Version) -> Versions {
    1 << version
}

/// Sectors as seen through one life of the store.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct View {
    /// What a sector not written in this life may be. A read leaves one of them.
    base: [Versions; SECTORS],
    /// Versions given to the device in this life that no flush vouches for.
    since: [Versions; SECTORS],
    /// The version acknowledged last in this life.
    latest: [Option<Version>; SECTORS],
    /// The version that the last acknowledged flush vouches for.
    flushed: [Option<Version>; SECTORS],
}

impl View {
    /// A life that begins with what another may have left.
    pub fn after(left: [Versions; SECTORS]) -> Self {
        Self { base: left, ..Self::default() }
    }

    /// The same for a gateway that lives, and was told of these versions: they are the latest still.
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

    /// A flush was acknowledged that was asked for when these were the latest versions.
    pub fn flushed(&mut self, latest: [Option<Version>; SECTORS]) {
        for (flushed, latest) in self.flushed.iter_mut().zip(latest) {
            *flushed = latest.or(*flushed);
        }
    }

    /// From now on nothing older than what was flushed may come back.
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

    /// What this life may leave if it ends now.
    pub fn left(&self) -> [Versions; SECTORS] {
        std::array::from_fn(|sector| self.base[sector] | self.since[sector])
    }
}
