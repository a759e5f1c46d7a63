//! Which losses say something about the path.

use sealane_proto::aead::Secret;
use sealane_proto::congestion::{Algorithm, Domain, Rules};
use sealane_proto::session::{Marks, Session, SessionConfig, SessionKeys, Steering};

use crate::is_unit;
use crate::pair::{MILLISECOND, Pair, UNIT, config, receive, send};

fn pair(congestion: Option<Algorithm>) -> Pair {
    let domain = Domain {
        line_bytes_per_second: 12_500_000,
        near_rtt: MILLISECOND,
        far_rtt: 10 * MILLISECOND,
        packet_bytes: 0,
    };
    let steering = Steering {
        congestion: congestion.map(|algorithm| (algorithm, domain)),
        marks: Marks::PhantomQueues,
        ..Steering::default()
    };
    let end = |index: u64| {
        let secret = |direction: u64| Secret::take(&mut [direction as u8 + 1; 32]);
        let keys = SessionKeys {
            send: secret(index),
            receive: secret(1 - index),
            token_seed: [index as u8; 32],
        };
        Session::new(SessionConfig { slots: 64, ..config(index) }, steering, &keys, 0)
    };
    Pair::of([0, 1].map(end)).establish()
}

/// Packets lost, and those of them that say something about the path, after half of the units of a
/// few milliseconds were lost.
fn after_a_burst(congestion: Option<Algorithm>) -> (u64, u64) {
    let mut pair = pair(congestion);
    for _ in 0..60 {
        pair.ends[1].post_receive(receive(0, 200 * UNIT), pair.now).unwrap();
        pair.ends[0].post_send(send(0, 200 * UNIT), pair.now).unwrap();
    }
    let mut units = 0;
    pair.run_filtered(25 * MILLISECOND, |_, datagram| {
        units += u64::from(is_unit(datagram));
        !is_unit(datagram) || units % 2 == 0
    });
    pair.run(1_000 * MILLISECOND);
    let found = pair.ends[0].statistics();
    (found.lost_packets, found.clear_losses)
}

#[test]
fn losses_by_which_the_controller_finds_an_overflowed_buffer_say_nothing() {
    let (lost, clear) = after_a_burst(Some(Algorithm::Uno(Rules::DEFAULT)));
    assert!(lost >= 5, "{lost}");
    assert_eq!(clear, 0);
    let (lost, clear) = after_a_burst(None);
    assert!(lost >= 10 && clear == lost, "{clear} of {lost}");
}
