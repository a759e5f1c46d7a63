//! The receiving end of a flow: what has arrived, and which blocks are asked for again.

use std::collections::BTreeMap;

use sealane_proto::link::Nanos;

/// A block with a code of which too few packets have arrived.
#[derive(Debug, Default)]
struct Open {
    arrived: u64,
    /// When to ask for it.
    deadline: Option<Nanos>,
}

/// The blocks of a flow with a code.
#[derive(Debug)]
pub(super) struct Landing {
    data: u32,
    open: BTreeMap<u32, Open>,
    complete: Vec<bool>,
}

impl Landing {
    pub fn new(blocks: u32, data: u8) -> Self {
        Self { data: data.into(), open: BTreeMap::new(), complete: vec![false; blocks as usize] }
    }

    /// A packet of a block has arrived. Returns whether the block is complete, and if not, when to
    /// look at it again if that is a new time.
    pub fn packet(
        &mut self,
        (block, index): (u32, u32),
        wait: Nanos,
        now: Nanos,
    ) -> (bool, Option<Nanos>) {
        if self.complete[block as usize] {
            return (true, None);
        }
        let open = self.open.entry(block).or_default();
        open.arrived |= 1 << index;
        if open.arrived.count_ones() >= self.data {
            self.open.remove(&block);
            self.complete[block as usize] = true;
            return (true, None);
        }
        if open.deadline.is_some() {
            return (false, None);
        }
        open.deadline = Some(now + wait);
        (false, open.deadline)
    }

    /// Whether to ask for a block now.
    pub fn is_due(&mut self, block: u32, now: Nanos) -> bool {
        let open = self.open.get_mut(&block).filter(|open| open.deadline == Some(now));
        open.is_some_and(|open| open.deadline.take().is_some())
    }
}

/// The packets of a flow without a code.
#[derive(Debug)]
pub(super) struct Arrived {
    packets: Vec<bool>,
    /// All packets below this one have arrived.
    end: u32,
}

impl Arrived {
    pub fn new(packets: u32) -> Self {
        Self { packets: vec![false; packets as usize], end: 0 }
    }

    /// A packet has arrived. Returns the end of those that have arrived without a gap.
    pub fn packet(&mut self, number: u32) -> u32 {
        self.packets[number as usize] = true;
        while self.packets.get(self.end as usize) == Some(&true) {
            self.end += 1;
        }
        self.end
    }
}
