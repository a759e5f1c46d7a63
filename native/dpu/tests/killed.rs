//! A gateway's thread notices that a card has died without waiting for a job's deadline.

mod running;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use sealane_engine::accelerator::{Broken, Device, SealJob};
use sealane_proto::aead::Secret;
use sealane_proto::sector::DATA_BYTES;

use running::Running;

#[test]
fn the_death_of_a_card_wakes_its_queues_with_and_without_jobs() {
    let card = Running::start(&[]);
    let device = card.connect();
    let key = device.load(&Secret::take(&mut [7; 32])).unwrap();
    let (mut busy, mut idle) = (device.queue().unwrap(), device.queue().unwrap());
    let process = Pid::from_child(&card.process);
    // It will not end the job.
    kill_process(process, Signal::STOP).unwrap();
    busy.submit(&SealJob { key, nonce: [1; 12], aad: &[9; 33], plain: &[2; DATA_BYTES] }).unwrap();
    busy.ring();
    for queue in [&mut busy, &mut idle] {
        queue.hear();
        assert_eq!(queue.poll(&mut Vec::new()), Ok(()));
    }
    kill_process(process, Signal::KILL).unwrap();
    for queue in [&mut busy, &mut idle] {
        let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
        let mut bell = [PollFd::from_borrowed_fd(queue.as_fd(), PollFlags::IN)];
        assert_eq!(poll(&mut bell, Some(&patience)), Ok(1), "not noticed");
        queue.hear();
        let mut done = Vec::new();
        assert_eq!(queue.poll(&mut done), Err(Broken::Gone));
        assert_eq!(done, []);
    }
}
