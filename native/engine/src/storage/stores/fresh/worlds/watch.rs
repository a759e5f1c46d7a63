//! Bounds the duration of a world: one that hangs is reported and fails the run.

use std::collections::BTreeMap;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// No world takes this long on any machine: they take milliseconds.
const WORLD_MAX: Duration = Duration::from_mins(2);
/// How often the durations are checked.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The running worlds and their start times.
#[derive(Debug, Default)]
pub struct Watch {
    under_way: Mutex<BTreeMap<u64, Instant>>,
}

impl Watch {
    /// Runs the world of this seed under watch.
    pub fn watched<T>(&self, seed: u64, world: impl FnOnce() -> T) -> T {
        self.with(|under_way| under_way.insert(seed, Instant::now()));
        let outcome = world();
        self.with(|under_way| under_way.remove(&seed));
        outcome
    }

    /// Watches until the returned value is dropped. A hanging thread can't be stopped, so the
    /// process exits after reporting which world hangs.
    pub fn begin(self: &Arc<Self>) -> Sender<()> {
        let (watching, is_over) = channel();
        let watch = Arc::clone(self);
        std::thread::spawn(move || {
            while is_over.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
                if let Some(seed) = watch.overdue(Instant::now()) {
                    eprintln!("a world hangs\nSEED={seed} make freshness-world shows this world");
                    std::process::exit(1);
                }
            }
        });
        watching
    }

    /// A world that has taken too long.
    fn overdue(&self, now: Instant) -> Option<u64> {
        let is_overdue = |begun: Instant| now.saturating_duration_since(begun) > WORLD_MAX;
        self.with(|worlds| {
            worlds.iter().find(|(_, begun)| is_overdue(**begun)).map(|(seed, _)| *seed)
        })
    }

    fn with<T>(&self, work: impl FnOnce(&mut BTreeMap<u64, Instant>) -> T) -> T {
        work(&mut self.under_way.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[test]
fn a_world_that_hangs_is_found_and_one_that_ended_is_not() {
    let watch = Watch::default();
    watch.watched(1, || ());
    watch.watched(2, || {
        let now = Instant::now();
        assert_eq!(watch.overdue(now), None);
        assert_eq!(watch.overdue(now + 2 * WORLD_MAX), Some(2));
    });
    assert_eq!(watch.overdue(Instant::now() + 2 * WORLD_MAX), None);
}
