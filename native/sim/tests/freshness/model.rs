//! The world of the model: a device, an anchor, the lives of the store, and every step they take.

use super::device::{Address, Checkpoint, Device, Entry, Page, SECTORS, Version, tag};
use super::gateway::Gateway;
use super::life::{Anchor, InFlight, Journal, Life, Progress, Stage, node};
use super::milestone::Passage;
use super::opening::open;
use super::rules::{Bounds, Layout, Policy, Setting};
use super::search::Step;
use super::spec::{Versions, View};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World {
    pub device: Device,
    anchor: Anchor,
    pub lives: Vec<Life>,
    /// Whether the first of `lives` owns the store: it anchored last.
    has_owner: bool,
    /// Versions that the last owner may have left.
    pub left: [Versions; SECTORS],
    pub spent: Bounds,
    /// The last version used.
    version: Version,
    pub gateway: Option<Gateway>,
}

impl World {
    /// A store that was just created and is closed.
    pub fn created(is_honest: bool, bounds: &Bounds) -> Self {
        let mut device = if is_honest { Device::honest() } else { Device::hostile() };
        let empty = [Entry::default(); SECTORS];
        let chain = tag(("chain", 0, 0));
        let checkpoint = Checkpoint {
            number: 0,
            epoch: 0,
            nonce: 0,
            copy: 0,
            node: node(empty),
            log_start: 0,
            chain,
            log_flushed: 0,
            passage: Passage::default(),
        };
        device.write(Address::Leaf(0), Page::Leaf(empty));
        device.write(Address::Checkpoint(0), Page::Checkpoint(checkpoint.clone()));
        device.sync();
        let anchor = Anchor {
            number: 0,
            epoch: 0,
            checkpoint: tag(&checkpoint),
            checkpoint_number: 0,
            log_end: 0,
            head: chain,
            flushed: 0,
        };
        let spent = Bounds {
            writes: 0,
            flushes: 0,
            merges: 0,
            checkpoints: 0,
            refreshes: 0,
            openings: 0,
            lost_answers: 0,
            lives: 0,
            gateways: 0,
            log_pages: 0,
        };
        let left = [super::spec::one(0); SECTORS];
        let gateway = (bounds.gateways > 0).then(Gateway::default);
        let lives = Vec::new();
        Self { device, anchor, lives, has_owner: false, left, spent, version: 0, gateway }
    }

    /// All possible next steps.
    pub fn steps(&self, setting: &Setting) -> Vec<Step<Self>> {
        let mut steps = Next { setting, world: self, steps: Vec::new() };
        steps.world();
        for number in 0..self.lives.len() {
            steps.life(number);
        }
        steps.steps
    }
}

pub struct Next<'a> {
    pub setting: &'a Setting,
    pub world: &'a World,
    steps: Vec<Step<World>>,
}

impl Next<'_> {
    pub fn add(&mut self, what: String, outcome: Result<World, String>) {
        self.steps.push(Step { what, outcome });
    }

    /// A step of one life.
    pub fn step(&mut self, number: usize, what: &str, act: impl FnOnce(&mut Life, &mut World)) {
        let mut world = self.world.clone();
        let mut life = world.lives.remove(number);
        act(&mut life, &mut world);
        world.lives.insert(number, life);
        let epoch = self.world.lives[number].checkpoint.epoch;
        self.add(format!("epoch {epoch}: {what}"), Ok(world));
    }

    fn world(&mut self) {
        let (world, bounds) = (self.world, &self.setting.bounds);
        if world.spent.openings < bounds.openings && world.lives.len() < bounds.lives {
            self.opening();
        }
        if let Device::Honest { late, .. } = &world.device {
            for number in 0..late.len() {
                for lands in [true, false] {
                    let mut world = world.clone();
                    if let Device::Honest { late, cached, .. } = &mut world.device {
                        let write = late.remove(number);
                        cached.extend(lands.then_some(write));
                    }
                    let fate = if lands { "lands" } else { "is dropped" };
                    self.add(format!("a late write of the killed process {fate}"), Ok(world));
                }
            }
        }
    }

    fn opening(&mut self) {
        let (world, setting) = (self.world, self.setting);
        if let Device::Honest { late, .. } = &world.device
            && setting.rules.opening_waits_for_late_writes
            && !late.is_empty()
        {
            return;
        }
        let lives = open(setting, &world.device, &world.anchor, world.spent.openings + 1);
        if lives.is_empty() && world.device.is_honest() {
            let detail = "VIOLATION: an honest device is refused".into();
            self.add("the store is opened".into(), Err(detail));
        }
        for (mut life, old_start) in lives {
            let mut world = world.clone();
            world.spent.openings += 1;
            let room = life.log_next as usize - old_start as usize + SECTORS;
            if room > setting.bounds.log_pages as usize
                && setting.rules.log_waits_for_the_checkpoint
            {
                let detail = "VIOLATION: no room for the log of a new epoch".into();
                self.add("the store is opened".into(), Err(detail));
                continue;
            }
            life.write_opening(setting, &mut world.device, old_start);
            let pending: Vec<_> = life.pending.iter().map(|e| e.map(|e| e.version)).collect();
            let what = format!(
                "the store is opened: epoch {}, pending {pending:?}, logged again",
                life.checkpoint.epoch
            );
            if setting.rules.opening_anchors_before_io {
                world.lives.push(life);
            } else {
                world.own(&mut life);
                world.lives.insert(0, life);
            }
            self.add(what, Ok(world));
        }
    }

    fn life(&mut self, number: usize) {
        self.end_of_life(number);
        let life = &self.world.lives[number];
        match life.stage {
            Stage::Opening => {
                let rules = self.setting.rules;
                let is_synced = rules.opening_syncs && rules.opening_syncs_the_log_first;
                let synced = if is_synced { "is synced, " } else { "" };
                self.step(
                    number,
                    &format!("the opening's log {synced}its checkpoint written"),
                    |life, world| {
                        if is_synced {
                            world.device.sync();
                        }
                        life.write_opened(&mut world.device);
                        life.stage = Stage::Logged;
                    },
                );
            }
            Stage::Logged if self.setting.rules.opening_syncs => {
                self.step(number, "the opening's checkpoint is synced", |life, world| {
                    world.device.sync();
                    life.stage = Stage::Durable;
                });
            }
            Stage::Logged | Stage::Durable => self.anchor_opening(number),
            Stage::Running => {
                self.journal(number);
                if !life.is_connected {
                    self.connect(number);
                }
            }
        }
        if life.serves(self.setting) {
            (0..SECTORS).for_each(|sector| self.sector(number, sector));
            self.merge(number);
        }
    }

    fn end_of_life(&mut self, number: usize) {
        let (world, setting) = (self.world, self.setting);
        let life = &world.lives[number];
        let in_flight: Vec<_> = (0..SECTORS)
            .filter_map(|sector| life.in_flight[sector].map(|write| (sector, write)))
            .filter(|(_, write)| write.progress == Progress::Issued)
            .map(|(sector, write)| life.data(setting, sector, write.entry))
            .collect();
        let mut ended = world.clone();
        ended.lives.remove(number);
        if life.is_connected
            && let Some(gateway) = &mut ended.gateway
        {
            gateway.loses(life);
        }
        if number == 0 && world.has_owner {
            ended.has_owner = false;
            ended.left = life.view.left();
        }
        let epoch = life.checkpoint.epoch;
        for image in world.device.power_cuts(&in_flight) {
            let mut cut = ended.clone();
            cut.device = image;
            self.add(format!("epoch {epoch}: power is cut"), Ok(cut));
        }
        if let Device::Honest { late, .. } = &mut ended.device {
            late.extend(in_flight);
            self.add(format!("epoch {epoch}: the process is killed"), Ok(ended));
        }
    }

    fn anchor_opening(&mut self, number: usize) {
        let life = &self.world.lives[number];
        let anchor = Anchor { flushed: life.log_next, ..life.checkpoint_anchor(&life.checkpoint) };
        let is_owned_now = self.setting.rules.opening_anchors_before_io;
        let before = self.steps.len();
        self.advance(number, anchor, "opening", |life, world| {
            life.stage = Stage::Running;
            if is_owned_now {
                world.own(life);
            }
        });
        // The owner comes first.
        for step in &mut self.steps[before..] {
            if let Ok(world) = &mut step.outcome
                && world.lives.get(number).is_some_and(|life| life.stage == Stage::Running)
            {
                world.lives.swap(0, number);
            }
        }
    }

    /// Asks the anchor to advance: it does so, or its answer is lost, or it refuses.
    fn advance(
        &mut self,
        number: usize,
        anchor: Anchor,
        of: &str,
        then: impl FnOnce(&mut Life, &mut World),
    ) {
        let (world, rules) = (self.world, self.setting.rules);
        if self.setting.policy == Policy::Never {
            self.step(number, &format!("the {of} is complete"), |life, world| {
                life.anchor = anchor;
                then(life, world);
            });
            return;
        }
        let is_next = anchor.number == world.anchor.number + 1 || !rules.anchor_compares;
        let is_repeated = anchor == world.anchor && rules.anchor_repeats_what_was_not_answered;
        if is_next && world.spent.lost_answers < self.setting.bounds.lost_answers {
            let what = format!("the anchor of the {of} advances, its answer is lost");
            self.step(number, &what, |_, world| {
                world.anchor = anchor;
                world.spent.lost_answers += 1;
            });
        }
        if is_next || is_repeated {
            self.step(number, &format!("the anchor of the {of} advances"), |life, world| {
                world.anchor = anchor;
                life.anchor = anchor;
                then(life, world);
            });
        } else if self.setting.bounds.lives == 1 {
            let detail = "VIOLATION: an honest store is refused by its anchor".into();
            self.add(format!("the anchor of the {of} does not advance"), Err(detail));
        } else {
            // Another life has taken over: this one fails for good.
            let mut world = world.clone();
            world.lives.remove(number);
            if number == 0 && world.has_owner {
                world.has_owner = false;
                world.left = self.world.lives[0].view.left();
            }
            self.add(format!("the anchor of the {of} refuses: the store has failed"), Ok(world));
        }
    }

    fn idle(&mut self, number: usize) {
        let (setting, bounds) = (self.setting, self.setting.bounds);
        let spent = self.world.spent;
        let is_asked = self.world.lives[number].is_connected && self.is_ready();
        if spent.flushes < bounds.flushes && is_asked {
            self.begin_log(number, true);
        }
        let is_noted = |write: &InFlight| write.progress == Progress::Noted;
        if self.world.lives[number].in_flight.iter().flatten().any(is_noted) {
            self.begin_log(number, false);
        }
        let is_merged = self.world.lives[number].pending == [None; SECTORS];
        if spent.checkpoints < bounds.checkpoints && is_merged {
            let mut probe = self.world.clone();
            if probe.lives[number].begin_checkpoint(setting, &mut self.world.device.clone()) {
                self.step(number, "a checkpoint begins", |life, world| {
                    world.spent.checkpoints += 1;
                    life.begin_checkpoint(setting, &mut world.device);
                });
            }
        }
    }

    fn journal(&mut self, number: usize) {
        let setting = self.setting;
        match self.world.lives[number].journal.clone() {
            Journal::Idle => self.idle(number),
            Journal::Log { is_flush, latest, frees, flushed } => {
                let what = if setting.rules.flush_syncs { "the log is synced" } else { "no sync" };
                let anchors = is_flush && setting.policy == Policy::EveryFlush;
                self.step(number, what, |life, world| {
                    if setting.rules.flush_syncs {
                        world.device.sync();
                    }
                    life.intents_ready();
                    if setting.layout == Layout::Placed {
                        life.used &= !frees;
                    }
                    life.flushed = flushed;
                    life.journal = Journal::Idle;
                    if is_flush && !(anchors && setting.rules.flush_anchors_before_it_answers) {
                        life.acknowledge_flush(setting, &world.device, latest);
                        world.tell(setting, life, latest);
                    }
                    if anchors {
                        life.journal = Journal::Flushed { latest };
                    }
                });
                if anchors && !setting.rules.anchor_comes_after_sync {
                    let anchor = self.world.lives[number].flush_anchor(flushed);
                    self.advance(number, anchor, "flush, not synced,", |_, _| {});
                }
            }
            Journal::Flushed { latest } => {
                let anchor =
                    self.world.lives[number].flush_anchor(self.world.lives[number].flushed);
                self.advance(number, anchor, "flush", |life, world| {
                    life.journal = Journal::Idle;
                    life.acknowledge_flush(setting, &world.device, latest);
                    world.tell(setting, life, latest);
                });
            }
            Journal::Leaves { start, chain } => {
                let what = if setting.rules.checkpoint_syncs_leaves_first {
                    "the checkpoint's leaves are synced, its page is written"
                } else {
                    "the checkpoint's page is written"
                };
                self.step(number, what, |life, world| {
                    if setting.rules.checkpoint_syncs_leaves_first {
                        world.device.sync();
                    }
                    let checkpoint = life.write_checkpoint(&mut world.device, start, chain);
                    life.journal = Journal::Page(checkpoint);
                });
            }
            Journal::Page(checkpoint) => {
                self.step(number, "the checkpoint is synced", |life, world| {
                    if setting.rules.checkpoint_is_durable_before_the_anchor {
                        world.device.sync();
                    }
                    life.flushed = life.flushed.max(checkpoint.log_start);
                    life.journal = Journal::Written(checkpoint);
                });
            }
            Journal::Written(checkpoint) => {
                let anchor = self.world.lives[number].checkpoint_anchor(&checkpoint);
                self.advance(number, anchor, "checkpoint", |life, _| {
                    life.view.settle();
                    life.end_checkpoint(setting, checkpoint);
                });
            }
        }
    }

    fn begin_log(&mut self, number: usize, is_flush: bool) {
        let setting = self.setting;
        let mut probe = self.world.lives[number].clone();
        if probe.begin_log(setting, &mut self.world.device.clone(), is_flush) {
            let what = if is_flush { "a flush writes the log" } else { "intents are logged" };
            self.step(number, what, |life, world| {
                world.spent.flushes += u8::from(is_flush);
                life.begin_log(setting, &mut world.device, is_flush);
                if is_flush && !setting.rules.milestone_follows_the_sync {
                    world.tell_early(life);
                }
            });
        }
    }

    fn sector(&mut self, number: usize, sector: usize) {
        let setting = self.setting;
        let life = &self.world.lives[number];
        match life.in_flight[sector] {
            None if !self.is_ready() => {
                self.send_again(number, sector);
                if !setting.rules.reads_wait_for_what_is_sent_again {
                    self.read(number, sector);
                }
            }
            None => {
                self.read(number, sector);
                let slot = life.free_slot(setting, sector);
                if let Some(slot) = slot
                    && self.world.spent.writes < setting.bounds.writes
                {
                    let version = self.world.version + 1;
                    let what = format!("version {version} of sector {sector} is to be written");
                    self.step(number, &what, |life, world| {
                        world.spent.writes += 1;
                        world.version = version;
                        if let Some(gateway) = &mut world.gateway {
                            gateway.sends(sector, version);
                        }
                        life.begin(setting, sector, version, slot);
                    });
                }
                if setting.layout == Layout::InPlace {
                    self.refresh(number, sector);
                }
            }
            Some(InFlight { entry, progress: Progress::Ready }) => {
                let what = format!("version {} of sector {sector} is issued", entry.version);
                self.step(number, &what, |life, world| {
                    life.view.issued(sector, entry.version);
                    if let Some(write) = &mut life.in_flight[sector] {
                        write.progress = Progress::Issued;
                    }
                    if !world.device.is_honest() {
                        let (address, page) = life.data(setting, sector, entry);
                        world.device.write(address, page);
                    }
                });
            }
            Some(InFlight { entry, progress: Progress::Issued }) => {
                let what = format!("version {} of sector {sector} has ended", entry.version);
                self.step(number, &what, |life, world| {
                    let (address, page) = life.data(setting, sector, entry);
                    world.device.write(address, page);
                    life.end(setting, sector);
                    if let Some(gateway) = &mut world.gateway {
                        gateway.hears(sector);
                    }
                });
            }
            Some(_) => {}
        }
    }
}

impl World {
    /// A life takes over the store.
    fn own(&mut self, life: &mut Life) {
        let left = match self.has_owner.then(|| self.lives.first()).flatten() {
            Some(owner) => owner.view.left(),
            None => self.left,
        };
        life.view = View::after(left);
        self.has_owner = true;
    }
}
