//! How a message is divided into units, and into blocks of an erasure code.
//!
//! Coded index: with selective repeat, the unit's own index. With a code, block by block: first the
//! k data units, then the m parity units. The last block may have fewer data units.

use super::requests::{BLOCK_UNITS_MAX, MESSAGE_BYTES_MAX};

/// The kind of unit at a coded index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A data unit, by its index in the message.
    Data(u32),
    /// A parity unit.
    Parity {
        /// The block.
        block: u32,
        /// Its index among the block's parity units.
        index: u8,
    },
}

/// A block: its position among data units and among coded indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// First data unit.
    pub data_start: u32,
    /// Number of data units; below k only in the last block.
    pub data_count: u32,
    /// First coded index; data units come first.
    pub coded_start: u32,
    /// End of its coded indices.
    pub coded_end: u32,
    /// Bytes of the symbols that the code works on.
    pub symbol_bytes: usize,
}

/// The division of one message. Both ends compute it from the contents of each packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    length: u64,
    unit_bytes: u16,
    k: u8,
    m: u8,
    data_units: u32,
    coded_units: u32,
}

impl Layout {
    /// Computes the layout; `None` for an impossible message: too long, too many units, or an
    /// invalid code. k = m = 0 is selective repeat.
    #[must_use]
    pub fn new(length: u64, unit_bytes: u16, k: u8, m: u8) -> Option<Self> {
        if length > MESSAGE_BYTES_MAX || unit_bytes == 0 {
            return None;
        }
        // An empty message has one empty unit, so that something is sent and counted.
        let data_units = length.div_ceil(u64::from(unit_bytes)).max(1);
        let coded_units = match (k, m) {
            (0, 0) => data_units,
            (0, _) | (_, 0) => return None,
            _ if u16::from(k) + u16::from(m) > BLOCK_UNITS_MAX => return None,
            _ => data_units + data_units.div_ceil(u64::from(k)) * u64::from(m),
        };
        let data_units = u32::try_from(data_units).ok()?;
        let coded_units = u32::try_from(coded_units).ok()?;
        Some(Self { length, unit_bytes, k, m, data_units, coded_units })
    }

    /// Bytes of the message.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Bytes of a full unit.
    #[must_use]
    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes.into()
    }

    /// Most data units of a block; 0 without a code.
    #[must_use]
    pub fn k(&self) -> u8 {
        self.k
    }

    /// Parity units of each block; 0 without a code.
    #[must_use]
    pub fn m(&self) -> u8 {
        self.m
    }

    /// Whether the message has parity units.
    #[must_use]
    pub fn is_coded(&self) -> bool {
        self.k != 0
    }

    /// Number of data units.
    #[must_use]
    pub fn data_units(&self) -> u32 {
        self.data_units
    }

    /// Number of data and parity units.
    #[must_use]
    pub fn coded_units(&self) -> u32 {
        self.coded_units
    }

    /// The unit at a coded index, which must be below [`Self::coded_units`].
    #[must_use]
    pub fn place(&self, coded: u32) -> Place {
        if !self.is_coded() {
            return Place::Data(coded);
        }
        let block = self.block_of(coded);
        let within = coded - block.coded_start;
        if within < block.data_count {
            return Place::Data(block.data_start + within);
        }
        let index = (within - block.data_count) as u8;
        Place::Parity { block: block.data_start / u32::from(self.k), index }
    }

    /// The coded index of a data unit.
    #[must_use]
    pub fn coded_of(&self, unit: u32) -> u32 {
        match unit.checked_div(self.k.into()) {
            None => unit,
            Some(block) => unit + block * u32::from(self.m),
        }
    }

    /// The block that a coded index belongs to. Only for coded messages.
    #[must_use]
    pub fn block_of(&self, coded: u32) -> Block {
        self.block(coded / (u32::from(self.k) + u32::from(self.m)))
    }

    /// A block by number. Only for coded messages.
    #[must_use]
    pub fn block(&self, number: u32) -> Block {
        let k = u32::from(self.k);
        let data_start = number * k;
        let data_count = k.min(self.data_units - data_start);
        let coded_start = number * (k + u32::from(self.m));
        // A single unit is coded at its own size; in a larger block it is padded with zeros to a
        // full unit.
        let symbol_bytes = if data_count == 1 {
            self.unit_length(data_start).max(1)
        } else {
            usize::from(self.unit_bytes)
        };
        Block {
            data_start,
            data_count,
            coded_start,
            coded_end: coded_start + data_count + u32::from(self.m),
            symbol_bytes,
        }
    }

    /// Number of blocks. Only for coded messages.
    #[must_use]
    pub fn block_count(&self) -> u32 {
        self.data_units.div_ceil(u32::from(self.k))
    }

    /// Bytes of a data unit; only the last may be short.
    #[must_use]
    pub fn unit_length(&self, unit: u32) -> usize {
        let start = self.unit_offset(unit);
        self.length.saturating_sub(start).min(u64::from(self.unit_bytes)) as usize
    }

    /// Offset of a data unit in the message.
    #[must_use]
    pub fn unit_offset(&self, unit: u32) -> u64 {
        u64::from(unit) * u64::from(self.unit_bytes)
    }

    /// Payload bytes of the packet for a coded index.
    #[must_use]
    pub fn payload_length(&self, coded: u32) -> usize {
        match self.place(coded) {
            Place::Data(unit) => self.unit_length(unit),
            Place::Parity { block, .. } => self.block(block).symbol_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_byte_is_in_one_unit_and_every_index_in_one_block(
            length in 0_u64..200_000, k in 0_u8..40, m in 1_u8..10,
        ) {
            let m = if k == 0 { 0 } else { m };
            let layout = Layout::new(length, 1408, k, m).unwrap();
            let mut bytes = 0;
            let mut next_data = 0;
            let mut parity = 0;
            for coded in 0..layout.coded_units() {
                match layout.place(coded) {
                    Place::Data(unit) => {
                        prop_assert_eq!(unit, next_data);
                        next_data += 1;
                        prop_assert_eq!(layout.unit_offset(unit), bytes);
                        bytes += layout.payload_length(coded) as u64;
                    }
                    Place::Parity { block, index } => {
                        let block = layout.block(block);
                        prop_assert!(index < m);
                        prop_assert_eq!(block, layout.block_of(coded));
                        prop_assert_eq!(block.coded_start + block.data_count + u32::from(index), coded);
                        for unit in block.data_start..block.data_start + block.data_count {
                            prop_assert!(layout.unit_length(unit) <= block.symbol_bytes);
                        }
                        parity += 1;
                    }
                }
            }
            prop_assert_eq!(bytes, length);
            prop_assert_eq!(next_data, layout.data_units());
            prop_assert_eq!(parity + next_data, layout.coded_units());
        }
    }

    #[test]
    fn impossible_messages_have_no_layout() {
        assert_eq!(Layout::new(MESSAGE_BYTES_MAX + 1, 1408, 0, 0), None);
        assert_eq!(Layout::new(10, 1408, 0, 1), None);
        assert_eq!(Layout::new(10, 1408, 1, 0), None);
        assert_eq!(Layout::new(10, 1408, 200, 56), None);
        assert!(Layout::new(10, 1408, 200, 55).is_some());
    }
}
