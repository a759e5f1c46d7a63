//! Shows why generations are needed: a receiver that knows slots but not the messages in them.
//!
//! It gets the same packets as the real receiver, as if from hardware whose packets carry a slot
//! (the message number modulo the slots) and a place. It keeps a bitmap for each slot and clears it
//! when the slot is posted again. A late packet of the previous message then lands in the current
//! one, and the packet that belongs there is dropped as a duplicate (experiment E13).

use sealane_proto::session::Reliability;

use crate::Scenario;

/// One block of a message; without a code, one unit.
#[derive(Debug, Clone, Copy, Default)]
struct Block {
    arrived: u32,
    /// Data units that have arrived, regardless of their message.
    data_arrived: u32,
    is_data_foreign: bool,
    is_parity_foreign: bool,
}

#[derive(Debug, Clone, Default)]
struct Slot {
    message: u64,
    data_units: u32,
    /// By coded index.
    arrived: Vec<bool>,
    blocks: Vec<Block>,
    is_foreign: bool,
}

#[derive(Debug)]
pub(crate) struct BitmapOnly {
    unit_bytes: u64,
    /// Data and parity units of a block.
    code: (u32, u32),
    slots: Vec<Slot>,
    /// Units counted towards another message.
    pub foreign_units: u64,
    /// Messages that are wrong because of them.
    pub foreign_messages: u64,
}

impl BitmapOnly {
    pub fn new(scenario: &Scenario) -> Self {
        let code = match scenario.reliability {
            Reliability::ErasureCoded { k, m, .. } => (k.into(), m.into()),
            _ => (1, 0),
        };
        Self {
            unit_bytes: scenario.unit_bytes.into(),
            code,
            slots: vec![Slot::default(); scenario.slots.into()],
            foreign_units: 0,
            foreign_messages: 0,
        }
    }

    /// A buffer is posted for a message of known length.
    pub fn posted(&mut self, message: u64, length: u64) {
        let (k, m) = self.code;
        let data_units = length.div_ceil(self.unit_bytes).max(1) as u32;
        let blocks = data_units.div_ceil(k);
        let index = (message % self.slots.len() as u64) as usize;
        self.slots[index] = Slot {
            message,
            data_units,
            arrived: vec![false; (data_units + blocks * m) as usize],
            blocks: vec![Block::default(); blocks as usize],
            is_foreign: false,
        };
    }

    /// A unit arrives, identified by its coded index.
    pub fn arrived(&mut self, message: u64, coded: u32) {
        let (k, m) = self.code;
        let index = (message % self.slots.len() as u64) as usize;
        let slot = &mut self.slots[index];
        let Some(arrived) = slot.arrived.get_mut(coded as usize) else { return };
        let number = coded / (k + m);
        let needed = k.min(slot.data_units - number * k);
        let block = &mut slot.blocks[number as usize];
        if *arrived || block.arrived == needed {
            return;
        }
        *arrived = true;
        let is_data = coded % (k + m) < needed;
        let is_foreign = message != slot.message;
        block.arrived += 1;
        block.data_arrived += u32::from(is_data);
        block.is_data_foreign |= is_foreign && is_data;
        block.is_parity_foreign |= is_foreign && !is_data;
        self.foreign_units += u64::from(is_foreign);
        // Parity is used only where data is missing.
        let is_wrong =
            block.is_data_foreign || (block.is_parity_foreign && block.data_arrived < needed);
        if block.arrived == needed && is_wrong && !slot.is_foreign {
            slot.is_foreign = true;
            self.foreign_messages += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receiver(reliability: Reliability) -> BitmapOnly {
        BitmapOnly::new(&Scenario { reliability, slots: 2, unit_bytes: 256, ..Scenario::small(1) })
    }

    #[test]
    fn what_comes_in_its_own_time_is_not_foreign() {
        let mut receiver = receiver(Reliability::SelectiveRepeat);
        receiver.posted(0, 512);
        receiver.posted(1, 512);
        for (message, unit) in [(0, 1), (1, 0), (0, 1), (0, 0), (1, 1), (1, 1)] {
            receiver.arrived(message, unit);
        }
        assert_eq!((receiver.foreign_units, receiver.foreign_messages), (0, 0));
    }

    #[test]
    fn a_late_unit_lands_in_the_next_message_and_keeps_the_right_one_out() {
        let mut receiver = receiver(Reliability::SelectiveRepeat);
        receiver.posted(0, 512);
        receiver.posted(2, 512);
        receiver.arrived(0, 1);
        assert_eq!((receiver.foreign_units, receiver.foreign_messages), (1, 1));
        for (message, unit) in [(2, 0), (2, 1), (0, 1)] {
            receiver.arrived(message, unit);
        }
        assert_eq!((receiver.foreign_units, receiver.foreign_messages), (1, 1));
    }

    #[test]
    fn late_parity_does_harm_only_where_it_is_decoded() {
        let code = Reliability::ErasureCoded { k: 2, m: 1, depth: 1 };
        // Parity of the previous message, then all data: the block is complete before the last data
        // unit arrives.
        let mut wrong = receiver(code);
        wrong.posted(2, 512);
        for (message, unit) in [(0, 2), (2, 0), (2, 1)] {
            wrong.arrived(message, unit);
        }
        assert_eq!((wrong.foreign_units, wrong.foreign_messages), (1, 1));
        // Data first: parity is surplus, regardless of its message.
        let mut right = receiver(code);
        right.posted(2, 512);
        for (message, unit) in [(2, 0), (2, 1), (0, 2)] {
            right.arrived(message, unit);
        }
        assert_eq!((right.foreign_units, right.foreign_messages), (0, 0));
    }
}
