//! A daemon that is stopped and goes on while it waits for a card's answer keeps the card.

mod running;

use std::process::Command;
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use sealane_engine::accelerator::Device;
use sealane_proto::aead::Secret;

use running::Running;

#[test]
fn a_signal_does_not_end_a_request() {
    let card = Running::start(&[]);
    let device = card.connect();
    let process = Pid::from_child(&card.process);
    kill_process(process, Signal::STOP).unwrap();
    let loading = thread::spawn(move || device.load(&Secret::take(&mut [7; 32])));
    thread::sleep(Duration::from_millis(100));
    // Another process has to let this one go on.
    let script = format!("kill -STOP {0}; sleep 0.1; kill -CONT {0}", std::process::id());
    assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
    thread::sleep(Duration::from_millis(100));
    kill_process(process, Signal::CONT).unwrap();
    loading.join().unwrap().expect("the card's answer");
}
