//! Jobs on a store whose upkeep the test controls piece by piece, and on real stores.

use std::io;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sealane_proto::nvme::Reason;
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::status::Status;

use super::status::FINDINGS_MAX;
use super::*;
use crate::storage::store::{BlockStore, StoreChannel};
use crate::storage::stores::fresh_store::Trust;
use crate::storage::stores::in_place_store::{InPlaceStore, raw_blocks};
use crate::storage::stores::memory::MemoryStore;
use crate::storage::target::tests::hosts::{Host, controller, plain, sealed};
use crate::storage::target::tests::store::ShuffledStore;
use crate::storage::upkeep::{Finding, Report, Upkeep};

const BLOCKS: u64 = 40;
const PIECE: u64 = 4;

/// Sends the result that ends a piece.
type Ends = Sender<io::Result<Report>>;

/// A store whose pieces begin and end under the test's control.
#[derive(Debug)]
struct Stepped {
    store: ShuffledStore,
    steps: Mutex<Option<Steps>>,
}

#[derive(Debug)]
struct Steps {
    begun: Sender<Range<u64>>,
    ends: Receiver<io::Result<Report>>,
    /// The results of checking its structure, part by part; the last is used first.
    structure: Vec<Report>,
    repairs: Receiver<io::Result<()>>,
}

impl Upkeep for Steps {
    fn next_piece(&mut self, lba: u64) -> Option<Range<u64>> {
        (lba < BLOCKS).then(|| lba..lba + PIECE)
    }

    fn scrub_structure(&mut self, report: &mut Report) -> io::Result<bool> {
        *report = self.structure.pop().unwrap_or_default();
        Ok(!self.structure.is_empty())
    }

    fn repair(&mut self) -> io::Result<()> {
        self.repairs.try_recv().expect("nothing is to be repaired")
    }

    fn scrub(&mut self, piece: Range<u64>, report: &mut Report) -> io::Result<()> {
        self.begun.send(piece).expect("the test listens");
        *report = self.ends.recv().expect("the test goes on")?;
        Ok(())
    }

    fn has_fast_path(&self) -> bool {
        false
    }

    fn refresh(&mut self, _piece: Range<u64>, _report: &mut Report) -> io::Result<()> {
        unreachable!("it has no fast path")
    }
}

impl BlockStore for Stepped {
    fn block_bytes(&self) -> usize {
        self.store.block_bytes()
    }

    fn block_count(&self) -> u64 {
        self.store.block_count()
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        self.store.open()
    }

    fn upkeep(&self) -> io::Result<Option<Box<dyn Upkeep>>> {
        let steps = self.steps.lock().expect("steps").take();
        Ok(steps.map(|steps| Box::new(steps) as Box<dyn Upkeep>))
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        self.store.statistics()
    }
}

struct World {
    namespace: Arc<Namespace>,
    begun: Receiver<Range<u64>>,
    ends: Ends,
    // Dropped last: its pieces wait for the fields above.
    jobs: Jobs,
}

impl World {
    fn new() -> Self {
        Self::with(Vec::new(), None)
    }

    /// A world whose store reports `structure` (the last first), and whose repair ends with
    /// `repair`.
    fn with(structure: Vec<Report>, repair: Option<io::Result<()>>) -> Self {
        let (begun, pieces) = channel();
        let (ends, results) = channel();
        let (repaired, repairs) = channel();
        if let Some(end) = repair {
            repaired.send(end).expect("it is kept");
        }
        let store = ShuffledStore::new(BLOCKS as usize, false, 1);
        let steps = Mutex::new(Some(Steps { begun, ends: results, structure, repairs }));
        let namespace = Arc::new(Namespace::new(Box::new(Stepped { store, steps })).unwrap());
        let jobs = Jobs::new(Arc::clone(&namespace));
        Self { namespace, begun: pieces, ends, jobs }
    }

    fn scrub(&self, start: JobStart) {
        self.jobs.start(JobKind::Scrub, start).expect("start");
    }

    /// Waits for a piece to begin.
    fn piece(&self) -> Range<u64> {
        self.begun.recv_timeout(Duration::from_secs(20)).expect("a piece begins")
    }

    fn no_piece(&self) -> bool {
        self.begun.recv_timeout(Duration::from_millis(30)).is_err()
    }

    fn end_piece(&self, report: Report) {
        self.ends.send(Ok(report)).expect("the job waits");
    }

    fn order(&self, order: Order) {
        self.jobs.order(JobKind::Scrub, order).expect("order");
    }

    fn status(&self) -> JobStatus {
        self.jobs.list().remove(0)
    }

    fn over(&self) -> JobStatus {
        over(&self.jobs)
    }
}

fn over(jobs: &Jobs) -> JobStatus {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let status = jobs.list().remove(0);
        if status.state.is_over() {
            return status;
        }
        assert!(Instant::now() < deadline, "{status:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn read(bytes: u64) -> Report {
    Report { checked: PIECE, bytes, ..Report::default() }
}

#[test]
fn processes_all_pieces_and_reports_its_position() {
    let world = World::new();
    world.scrub(JobStart::default());
    for start in (0..BLOCKS).step_by(PIECE as usize) {
        assert_eq!(world.piece(), start..start + PIECE);
        let status = world.status();
        assert_eq!((status.state, status.position), (JobState::Running, start));
        world.end_piece(read(10));
    }
    let status = world.over();
    assert_eq!((status.state, status.position, status.total), (JobState::Finished, BLOCKS, BLOCKS));
    assert_eq!((status.checked, status.bytes, status.found), (BLOCKS, 100, 0));
}

#[test]
fn pauses_after_its_piece_and_resumes_at_its_position() {
    let world = World::new();
    world.scrub(JobStart { position: 8, is_paused: true, ..JobStart::default() });
    assert!(world.no_piece());
    assert_eq!((world.status().state, world.status().active), (JobState::Paused, 0));
    world.order(Order::Resume);
    assert_eq!(world.piece(), 8..12);
    world.order(Order::Pause);
    world.end_piece(read(0));
    assert!(world.no_piece());
    assert_eq!((world.status().state, world.status().position), (JobState::Paused, 12));
    world.order(Order::Resume);
    assert_eq!(world.piece(), 12..16);
    world.order(Order::Cancel);
    world.end_piece(read(0));
    let status = world.over();
    assert_eq!((status.state, status.position), (JobState::Cancelled, 16));
    assert!(status.active > 0);
    let late = world.jobs.order(JobKind::Scrub, Order::Resume).expect_err("over");
    assert_eq!(late.id(), "volume.job.over");
}

#[test]
fn waits_for_its_rate_which_can_change_while_it_waits() {
    let world = World::new();
    world.scrub(JobStart { bytes_per_second: 1, ..JobStart::default() });
    world.piece();
    world.end_piece(read(1_000_000));
    assert!(world.no_piece(), "due in eleven days");
    assert_eq!(world.status().bytes_per_second, 1);
    world.order(Order::Rate(0));
    assert_eq!(world.piece(), 4..8);
    world.order(Order::Cancel);
    world.end_piece(read(0));
    assert_eq!(world.over().bytes_per_second, 0);
}

#[test]
fn a_host_waits_for_the_current_piece_and_not_for_the_next() {
    let world = World::new();
    let host = controller(1, &world.namespace);
    let mut host = Host::connect(&host, 1, false);
    world.scrub(JobStart::default());
    assert_eq!(world.piece(), 0..4);
    let write = |lba, blocks| HostCommand::Write { lba, data: plain(1, blocks), is_forced: false };
    assert_eq!(host.write(4, plain(1, 4)), Status::SUCCESS, "a write of other blocks doesn't wait");
    assert_eq!(host.read(0, 4), plain(0, 4), "nor does a read");
    // It covers a block of the current piece and one of the next.
    let tag = host.submit(write(3, 2));
    while !world.namespace.statistics().contains(&("contended", 1)) {
        std::thread::yield_now();
    }
    world.end_piece(read(0));
    assert_eq!(host.finish(tag).0, Status::SUCCESS);
    assert_eq!(world.piece(), 4..8, "the job waited for the host");
    world.order(Order::Cancel);
    world.end_piece(read(0));
}

#[test]
fn ends_also_while_it_waits_for_a_host_and_leaves_no_range_locked() {
    let store = ShuffledStore::new(BLOCKS as usize, false, 1);
    let (begun, pieces) = channel();
    let (_ends, results) = channel();
    let steps =
        Mutex::new(Some(Steps { begun, ends: results, structure: vec![], repairs: channel().1 }));
    let stepped = Box::new(Stepped { store: store.clone(), steps });
    let namespace = Arc::new(Namespace::new(stepped).unwrap());
    let controller = controller(1, &namespace);
    let mut host = Host::connect(&controller, 1, false);
    store.hold(true);
    let tag = host.submit(HostCommand::Write { lba: 0, data: plain(1, 1), is_forced: false });
    while store.submitted() == 0 {
        std::thread::yield_now();
    }
    let jobs = Jobs::new(Arc::clone(&namespace));
    jobs.start(JobKind::Scrub, JobStart::default()).expect("start");
    assert!(pieces.recv_timeout(Duration::from_millis(30)).is_err(), "the host has the range");
    jobs.end();
    assert_eq!(jobs.list()[0].state, JobState::Interrupted);
    store.hold(false);
    assert_eq!(host.finish(tag).0, Status::SUCCESS);
    assert_eq!(host.write(0, plain(2, 8)), Status::SUCCESS, "no earlier request is waiting");
}

#[test]
fn all_findings_are_counted_and_the_first_ones_reported() {
    let world = World::new();
    world.scrub(JobStart::default());
    let finding = |lba| Finding {
        reason: Reason::SectorStale,
        lba: Some(lba),
        detail: "sector: rolled back".into(),
        is_known: false,
    };
    world.piece();
    world.end_piece(Report { findings: (0..60).map(finding).collect(), ..Report::default() });
    world.piece();
    world.end_piece(Report { findings: (60..90).map(finding).collect(), ..Report::default() });
    world.piece();
    world.order(Order::Cancel);
    world.end_piece(Report::default());
    let status = world.over();
    assert_eq!((status.found, status.findings.len()), (90, FINDINGS_MAX));
    let events = world.namespace.events().take();
    assert_eq!(events.len(), FINDINGS_MAX);
    let last = &events[FINDINGS_MAX - 1];
    assert_eq!((last.kind, last.reason, last.lba), ("found", "sector.stale", Some(63)));
    assert_eq!(last.detail, "scrub: sector: rolled back");
}

fn known(is_known: bool) -> Report {
    let detail = "page 3 of nodes: rolled back".into();
    let finding = Finding { reason: Reason::StoreDamaged, lba: None, detail, is_known };
    Report { findings: vec![finding], ..Report::default() }
}

fn end_all_pieces(world: &World) {
    for _ in 0..BLOCKS / PIECE {
        world.piece();
        world.end_piece(read(0));
    }
}

#[test]
fn the_structure_is_checked_last_and_findings_with_known_contents_are_then_repaired() {
    let world = World::with(vec![known(false), known(true), Report::default()], Some(Ok(())));
    world.scrub(JobStart::default());
    end_all_pieces(&world);
    let status = world.over();
    assert_eq!((status.state, status.found, status.repaired), (JobState::Finished, 2, 1));
    let events = world.namespace.events().take();
    let kinds: Vec<_> = events.iter().map(|event| event.kind).collect();
    assert_eq!(kinds, ["found", "found", "repaired"]);
}

#[test]
fn a_finding_whose_repair_fails_is_not_counted_as_repaired() {
    let gone = Err(io::Error::other("the anchor doesn't answer"));
    let world = World::with(vec![known(true)], Some(gone));
    world.scrub(JobStart::default());
    end_all_pieces(&world);
    let status = world.over();
    assert_eq!((status.state, status.found, status.repaired), (JobState::Finished, 1, 0));
    let events = world.namespace.events().take();
    assert_eq!(events[1].detail, "scrub: repair: the anchor doesn't answer");
}

#[test]
fn a_failed_device_ends_it() {
    let world = World::new();
    world.scrub(JobStart::default());
    world.piece();
    world.ends.send(Err(io::ErrorKind::NotConnected.into())).expect("the job waits");
    let status = world.over();
    assert_eq!((status.state, status.position), (JobState::Failed, 0));
    assert!(!status.detail.is_empty());
    // Its range has been released.
    let controller = controller(1, &world.namespace);
    let written = Host::connect(&controller, 1, false).write(0, plain(1, 8));
    assert_eq!(written, Status::SUCCESS);
}

#[test]
fn one_of_each_kind_runs_and_only_if_the_store_supports_it() {
    let world = World::new();
    let start = |kind| world.jobs.start(kind, JobStart::default());
    let refused = start(JobKind::Refresh).expect_err("no fast path");
    assert_eq!(refused.id(), "volume.job.unsupported");
    // That took the store's only upkeep.
    let world = World::new();
    world.scrub(JobStart::default());
    world.piece();
    let second = world.jobs.start(JobKind::Scrub, JobStart::default()).expect_err("a second one");
    assert_eq!(second.id(), "volume.job.running");
    let none = world.jobs.order(JobKind::Refresh, Order::Pause).expect_err("none");
    assert_eq!(none.id(), "volume.job.over");
    world.order(Order::Cancel);
    world.end_piece(read(0));
    let plain = Namespace::new(Box::new(MemoryStore::new(10, false))).unwrap();
    let jobs = Jobs::new(Arc::new(plain));
    let refused = jobs.start(JobKind::Scrub, JobStart::default()).expect_err("nothing to check");
    assert_eq!(refused.id(), "volume.job.unsupported");
}

#[test]
fn jobs_and_hosts_work_concurrently_and_there_are_no_false_findings() {
    let raw = Box::new(MemoryStore::new(raw_blocks(BLOCKS), true));
    let store = InPlaceStore::create(raw, BLOCKS, &Trust::default()).expect("store");
    let namespace = Arc::new(Namespace::new(Box::new(store)).unwrap());
    let jobs = Jobs::new(Arc::clone(&namespace));
    let controller = controller(1, &namespace);
    let mut host = Host::connect(&controller, 1, true);
    let mut iv = 0;
    for round in 0..6 {
        for kind in [JobKind::Scrub, JobKind::Refresh] {
            jobs.start(kind, JobStart::default()).expect("start");
        }
        while jobs.list().iter().any(|job| !job.state.is_over()) || iv < round * 20 {
            let data = (0..10).flat_map(|offset| sealed(iv * 100 + offset + 1)).collect();
            assert_eq!(host.write(iv * 7 % (BLOCKS - 10), data), Status::SUCCESS);
            iv += 1;
        }
        for job in jobs.list() {
            assert_eq!((job.state, job.found), (JobState::Finished, 0), "{job:?}");
        }
    }
}
