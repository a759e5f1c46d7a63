//! Measures how many commands of hosts a namespace executes, and for how long.

use sealane_proto::link::Nanos;

use crate::clock;

/// Measurements of hosts' commands, taken while there is a watcher.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct HostLoad {
    /// Number of commands that have ended.
    pub ended: u64,
    /// Number of commands being executed.
    pub running: u64,
    /// Total duration of all commands so far.
    pub time: Nanos,
}

/// Load of a namespace.
#[derive(Debug, Default)]
pub(super) struct Load {
    running: u64,
    /// Start of the current busy period, in which at least one command is running.
    busy_since: Nanos,
    /// Total duration of earlier busy periods.
    busy: Nanos,
    /// Number of background jobs that watch the load; without any, `host` isn't updated.
    watchers: usize,
    host: HostLoad,
    /// Time up to which `host` is updated.
    seen: Nanos,
}

impl Load {
    // Called for each command, so both read the clock only if necessary.

    pub(super) fn begin(&mut self) {
        self.see();
        self.running += 1;
        if self.running == 1 {
            self.busy_since = clock::now();
        }
    }

    pub(super) fn end(&mut self) {
        if self.watchers > 0 {
            self.see();
            self.host.ended += 1;
        }
        self.running -= 1;
        if self.running == 0 {
            self.busy += clock::now().saturating_sub(self.busy_since);
        }
    }

    /// Begins or ends the measurement for one watcher.
    pub(super) fn watch(&mut self, is_watched: bool) {
        if is_watched {
            if self.watchers == 0 {
                self.seen = clock::now();
            }
            self.watchers += 1;
        } else {
            self.watchers -= 1;
        }
    }

    /// The measurements made while there was a watcher.
    pub(super) fn watched(&mut self) -> HostLoad {
        self.see();
        HostLoad { running: self.running, ..self.host }
    }

    /// Total time during which at least one command was being executed.
    pub(super) fn busy(&self) -> Nanos {
        let running =
            if self.running > 0 { clock::now().saturating_sub(self.busy_since) } else { 0 };
        self.busy + running
    }

    fn see(&mut self) {
        if self.watchers > 0 {
            let now = clock::now();
            self.host.time += self.running * now.saturating_sub(self.seen);
            self.seen = now;
        }
    }
}
