//! The ECN field of packets (RFC 3168), and a receiver's counts of it.

use super::packet::Malformed;

/// The ECN field of an IP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ecn {
    /// Not ECN-capable.
    #[default]
    NotEct,
    /// ECN-capable; never sent here.
    Ect1,
    /// ECN-capable.
    Ect0,
    /// Congestion experienced.
    Ce,
}

impl Ecn {
    /// Decodes the low two bits of the traffic class.
    #[must_use]
    pub fn from_bits(bits: u8) -> Self {
        match bits & 3 {
            1 => Self::Ect1,
            2 => Self::Ect0,
            3 => Self::Ce,
            _ => Self::NotEct,
        }
    }
}

/// Authentic packets that arrived on a path since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PathCounts {
    /// All of them.
    pub received: u64,
    /// With ECT(0).
    pub ect0: u64,
    /// With ECT(1).
    pub ect1: u64,
    /// With CE.
    pub ce: u64,
}

impl PathCounts {
    /// Counts a packet.
    pub fn add(&mut self, ecn: Ecn) {
        self.received += 1;
        match ecn {
            Ecn::NotEct => {}
            Ecn::Ect1 => self.ect1 += 1,
            Ecn::Ect0 => self.ect0 += 1,
            Ecn::Ce => self.ce += 1,
        }
    }

    /// Packets that arrived as ECN-capable.
    #[must_use]
    pub fn marked(&self) -> u64 {
        self.ect0 + self.ect1 + self.ce
    }

    /// Rejects impossible counts.
    pub(super) fn checked(self) -> Result<Self, Malformed> {
        if self.marked() > self.received { Err(Malformed) } else { Ok(self) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_counted_by_mark() {
        let mut found = PathCounts::default();
        for bits in [0, 1, 2, 2, 3, 0xff] {
            found.add(Ecn::from_bits(bits));
        }
        assert_eq!(found, PathCounts { received: 6, ect0: 2, ect1: 1, ce: 2 });
        assert_eq!(found.checked(), Ok(found));
        assert_eq!(PathCounts { received: 6, ect0: 3, ect1: 2, ce: 2 }.checked(), Err(Malformed));
    }
}
