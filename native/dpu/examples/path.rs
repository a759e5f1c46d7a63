//! Processor time that a write of one sector costs a gateway's thread, without an accelerator: the
//! target is in this process. `path SECONDS` prints nanoseconds.

#[path = "../tests/volume/mod.rs"]
mod volume;

use std::time::Duration;

use sealane_engine::storage::stores::memory::MemoryStore;

use volume::{SECTORS, connect, namespace, plan};

fn main() {
    let seconds = std::env::args().nth(1).and_then(|text| text.parse().ok());
    let duration = Duration::from_secs(seconds.expect("path SECONDS"));
    let (volume, namespace) = (volume::volume(), namespace(MemoryStore::new(SECTORS, true)));
    for (epoch, duration) in [(1, Duration::from_millis(200)), (2, duration)] {
        let (controller, fd, back) = connect(&namespace, epoch);
        let result = volume.run_load(fd, back, &plan(true, 1, duration, 1)).expect("it writes");
        controller.close();
        if epoch == 2 {
            println!("{:.1}", result.cpu.as_nanos() as f64 / result.commands as f64);
        }
    }
}
