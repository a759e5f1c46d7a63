//! The queues of a store in place, while the store's thread writes, syncs or waits for its anchor:
//! they complete and begin announcements, and make and complete writes.

use std::io;
use std::sync::{Arc, Mutex};

use rand_chacha::ChaCha8Rng;
use rand_core::{Rng, SeedableRng};
use sealane_proto::freshness::leaf::Ivs;
use sealane_proto::sector::block_iv;

use super::super::super::pages::BlockFile;
use super::super::announcements::{Announcement, Begun};
use super::super::journal::Mailbox;
use super::super::map::Map;
use super::super::test_blocks::block;
use super::life::{Life, Write};
use super::machine::Device;
use super::workload::InPlace;
use super::{Violation, chance, pick};

/// Most steps of the queues at one point.
const STEPS_MAX: usize = 3;

/// The queues, with the writes of a life that they continue.
pub struct Queues {
    map: Arc<Map<Ivs>>,
    device: Arc<Device>,
    mailbox: Arc<Mailbox>,
    random: ChaCha8Rng,
    in_flight: Vec<Announcement>,
    announcements: u64,
    writes: Vec<Write<InPlace>>,
    ended: Vec<Write<InPlace>>,
    refused: Vec<io::Error>,
    trace: Vec<String>,
}

/// Hands a life's writes to the queues until [`end`]. They run whenever the store's thread uses the
/// device.
pub fn begin(life: &mut Life<Ivs>) -> Arc<Mutex<Queues>> {
    let seed = life.trace.len() as u64 ^ life.announcements << 32;
    let queues = Arc::new(Mutex::new(Queues {
        map: Arc::clone(&life.map),
        device: Arc::clone(&life.device),
        mailbox: Arc::clone(&life.mailbox),
        random: ChaCha8Rng::seed_from_u64(seed),
        in_flight: std::mem::take(&mut life.in_flight),
        announcements: life.announcements,
        writes: std::mem::take(&mut life.writes),
        ended: Vec::new(),
        refused: Vec::new(),
        trace: Vec::new(),
    }));
    let beside = Arc::clone(&queues);
    life.device.set_beside(Some(Box::new(move || beside.lock().expect("queues").go_on())));
    // The store's thread also waits outside the device: for pages of the log that only others
    // write.
    let device = Arc::clone(&life.device);
    life.map.log_in_flight.set_others(Some(Box::new(move || device.let_others())));
    queues
}

/// Takes the writes back in their current state.
pub fn end(life: &mut Life<Ivs>, queues: &Mutex<Queues>) -> Result<(), Violation> {
    life.device.set_beside(None);
    life.map.log_in_flight.set_others(None);
    let mut queues = queues.lock().expect("queues");
    for (name, result) in life.mailbox.take() {
        queues.over(name, result);
    }
    life.beside += queues.ended.len() as u64;
    life.trace.append(&mut queues.trace);
    life.announcements = queues.announcements;
    life.in_flight = std::mem::take(&mut queues.in_flight);
    life.writes = std::mem::take(&mut queues.writes);
    let ended = std::mem::take(&mut queues.ended);
    for write in &ended {
        life.acknowledged(write);
    }
    for error in std::mem::take(&mut queues.refused) {
        life.accept::<()>("concurrent work of a queue", Err(error))?;
    }
    // The store's thread completes its work first.
    life.owes_flush |= ended.iter().any(|write| write.is_durable);
    Ok(())
}

impl Queues {
    fn go_on(&mut self) {
        // The thread may be about to wait for announcements in flight.
        self.land_all();
        if chance(&mut self.random, 50) {
            return;
        }
        for _ in 0..=pick(&mut self.random, STEPS_MAX) {
            if !self.in_flight.is_empty() && chance(&mut self.random, 50) {
                let index = pick(&mut self.random, self.in_flight.len());
                let announcement = self.in_flight.swap_remove(index);
                self.land(announcement);
            } else if chance(&mut self.random, 30) {
                self.announce();
            } else if !self.writes.is_empty() {
                let index = pick(&mut self.random, self.writes.len());
                self.step(index);
            }
        }
    }

    fn land_all(&mut self) {
        while !self.in_flight.is_empty() {
            let index = pick(&mut self.random, self.in_flight.len());
            let announcement = self.in_flight.swap_remove(index);
            self.land(announcement);
        }
    }

    fn land(&mut self, announcement: Announcement) {
        let Announcement { number, place, pages, .. } = announcement;
        let written = self.device.write_durably(place, &pages);
        for (_, name, result) in self.map.end_announcement(number, written) {
            self.over(name, result);
        }
    }

    /// Handles a completed announcement.
    fn over(&mut self, name: u64, result: io::Result<()>) {
        self.trace.push(format!("announcement {name} has completed: {result:?}"));
        let Self { writes, map, .. } = self;
        match result {
            Ok(()) => {
                let own = writes.iter_mut().filter(|write| write.stage == InPlace::InFlight(name));
                own.for_each(|write| write.stage = InPlace::Announced);
            }
            Err(error) => {
                let own = writes.extract_if(.., |write| write.stage == InPlace::InFlight(name));
                own.for_each(|write| map.give_up(write.lba));
                self.refused.push(error);
            }
        }
    }

    fn announce(&mut self) {
        let random = &mut self.random;
        let intended = self.writes.iter().filter(|write| write.stage == InPlace::Intended);
        let chosen: Vec<u64> = intended
            .map(|write| write.lba)
            .filter(|_| random.next_u32().is_multiple_of(2))
            .collect();
        if chosen.is_empty() {
            return;
        }
        self.announcements += 1;
        let name = self.announcements;
        let stage = match self.map.begin_announcement(&chosen, &self.mailbox, name) {
            Err(error) => return self.refused.push(error),
            Ok(Begun::Busy) => return,
            Ok(Begun::Nothing) => InPlace::Announced,
            Ok(Begun::Waiting) => InPlace::InFlight(name),
            Ok(Begun::InFlight(announcement)) => {
                self.in_flight.push(announcement);
                InPlace::InFlight(name)
            }
        };
        self.trace.push(format!("beside: announcement {name} of {chosen:?}: {stage:?}"));
        let own = self.writes.iter_mut().filter(|write| chosen.contains(&write.lba));
        own.for_each(|write| write.stage = stage);
    }

    /// Advances a write that is announced or made by one step.
    fn step(&mut self, index: usize) {
        let write = &mut self.writes[index];
        let blocks = write.lba..write.lba + write.blocks;
        match write.stage {
            InPlace::Intended | InPlace::InFlight(_) => {}
            InPlace::Announced => {
                write.stage = InPlace::Made;
                let version = write.version;
                self.trace.push(format!("beside: version {version} is made"));
                let make = |lba| {
                    let place = self.map.geometry().in_place_block(lba);
                    self.device.write_block(place, &block(lba, version))
                };
                if let Err(error) = blocks.clone().try_for_each(make) {
                    self.writes.swap_remove(index);
                    self.map.give_up(blocks.start);
                    self.refused.push(error);
                }
            }
            InPlace::Made => {
                let write = self.writes.swap_remove(index);
                let ivs: Vec<_> = blocks.map(|lba| block_iv(&block(lba, write.version))).collect();
                match self.map.arrived(write.lba, &ivs) {
                    Ok(()) => self.ended.push(write),
                    Err(error) => self.refused.push(error),
                }
            }
        }
    }
}
