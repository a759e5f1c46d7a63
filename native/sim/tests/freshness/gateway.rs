//! A gateway that keeps running while the target restarts: its state, and how it continues.
//!
//! It keeps the newest milestone that it received, and its changes since the last flush that was
//! answered. It connects only to a life that contains the milestone, sends the changes again and
//! then goes on reading. So it always reads the latest acknowledged versions, whatever the anchor.
//! The search tests this promise.

use super::device::{SECTORS, Version};
use super::life::{Journal, Life};
use super::milestone::Milestone;
use super::model::{Next, World};
use super::rules::Setting;
use super::spec::View;

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Gateway {
    /// The newest milestone; None if it has never been connected.
    told: Option<Milestone>,
    /// The last acknowledged version of each sector.
    latest: [Option<Version>; SECTORS],
    /// Changes since the last answered flush, oldest first; the last one may not have been
    /// answered.
    journal: [Vec<Version>; SECTORS],
    /// How many of these, counted from the end, remain to be sent to this life of the store.
    to_send: [usize; SECTORS],
}

impl Gateway {
    /// The next change of a sector to send again.
    pub fn next_again(&self, sector: usize) -> Option<Version> {
        let journal = &self.journal[sector];
        journal.get(journal.len() - self.to_send[sector]).copied()
    }

    pub fn is_sending_again(&self) -> bool {
        self.to_send != [0; SECTORS]
    }

    /// A change of the sector was answered.
    pub fn hears(&mut self, sector: usize) {
        self.to_send[sector] = self.to_send[sector].saturating_sub(1);
    }

    pub fn sends(&mut self, sector: usize, version: Version) {
        self.journal[sector].push(version);
    }

    /// A flush was answered; `latest` were the latest versions when it began.
    pub fn flushed(&mut self, told: Milestone, latest: [Option<Version>; SECTORS]) {
        self.told = Some(told);
        for (journal, latest) in self.journal.iter_mut().zip(latest) {
            let covered = journal.iter().rposition(|version| Some(*version) == latest);
            journal.drain(..covered.map_or(0, |last| last + 1));
        }
    }

    /// The life of the store ends.
    pub fn loses(&mut self, life: &Life) {
        self.latest = life.view.latest();
    }
}

impl Next<'_> {
    /// The gateway connects to an open life, or refuses it for good.
    pub fn connect(&mut self, number: usize) {
        let rules = &self.setting.rules;
        let life = &self.world.lives[number];
        let Some(gateway) = &self.world.gateway else { return };
        let contains = |told| life.checkpoint.passage.contains(life.reached, told, rules);
        let is_contained = gateway.told.is_none_or(contains);
        if is_contained || !rules.gateway_names_its_milestone {
            let is_again = rules.gateway_sends_its_changes_again;
            self.step(number, "the gateway connects", |life, world| {
                let left = world.left;
                let Some(gateway) = &mut world.gateway else { return };
                gateway.told = Some(life.told());
                for (to_send, journal) in gateway.to_send.iter_mut().zip(&mut gateway.journal) {
                    if !is_again {
                        journal.clear();
                    }
                    *to_send = journal.len();
                }
                life.view = View::continued(left, gateway.latest);
                life.is_connected = true;
            });
        } else if self.world.device.is_honest() {
            let detail = "VIOLATION: the gateway refuses an honest device".into();
            self.add("the gateway asks for its milestone".into(), Err(detail));
        }
        // Otherwise its volume has failed; other searches, without this gateway, cover what other
        // gateways may see.
    }

    /// Sends a change whose outcome is unknown, or that may be lost, to this life, too.
    pub fn send_again(&mut self, number: usize, sector: usize) {
        let life = &self.world.lives[number];
        let version = self.world.gateway.as_ref().and_then(|all| all.next_again(sector));
        let slot = life.free_slot(self.setting, sector);
        if let (Some(version), Some(slot)) = (version, slot) {
            let setting = self.setting;
            let what = format!("version {version} of sector {sector} is sent again");
            self.step(number, &what, |life, _| life.begin(setting, sector, version, slot));
        }
    }

    /// Whether all changes that the gateway sends again have ended: nothing else is sent before.
    pub fn is_ready(&self) -> bool {
        !self.world.gateway.as_ref().is_some_and(Gateway::is_sending_again)
    }
}

impl World {
    /// Passes the answer of a flush to the gateway.
    pub fn tell(&mut self, setting: &Setting, life: &Life, latest: [Option<Version>; SECTORS]) {
        let Some(gateway) = &mut self.gateway else { return };
        let is_kept = setting.rules.journal_keeps_what_ended_during_the_flush;
        gateway.flushed(life.told(), if is_kept { latest } else { life.view.latest() });
    }

    /// Passes the answer of a flush whose log pages aren't durable yet to the gateway.
    pub fn tell_early(&mut self, life: &mut Life) {
        if let (Some(gateway), Journal::Log { flushed, .. }) = (&mut self.gateway, &life.journal) {
            life.pass_milestone(*flushed);
            gateway.told = Some(life.told());
        }
    }
}
