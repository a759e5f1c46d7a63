//! Rings of sites: results and durations.

use sealane_proto::link::{LinkConfig, Loss, Nanos};
use sealane_proto::session::Reliability;

use super::{CODED, MILLISECOND, PERCENT};
use crate::{Ring, RingError, RingOutcome, RingReceive, RingSend, Rule, Scenario, Site, run_ring};

/// All-reduce around the ring on an array of `sites` segments, one message per segment.
fn all_reduce(sites: u64, segment_bytes: u64) -> Vec<Site> {
    let range = |segment: u64| segment * segment_bytes..(segment + 1) * segment_bytes;
    let site = |rank: u64| {
        let mut site = Site { sends: Vec::new(), receives: Vec::new() };
        for step in 0..2 * (sites - 1) {
            let sent = (rank + 2 * sites - step) % sites;
            let received = (rank + 2 * sites - step - 1) % sites;
            site.sends.push(RingSend { range: range(sent), after: step as u32 });
            let is_combined = step < sites - 1;
            site.receives.push(RingReceive { range: range(received), is_combined });
        }
        site
    };
    (0..sites).map(site).collect()
}

fn add(ours: &mut [u8], theirs: &[u8]) {
    ours.iter_mut().zip(theirs).for_each(|(a, b)| *a = a.wrapping_add(*b));
}

fn run(ring: &Ring, arrays: &mut [Vec<u8>]) -> RingOutcome {
    let outcome = run_ring(ring, arrays, &add).expect("a valid ring");
    for session in &outcome.sessions {
        assert_eq!(session.violations, [], "{ring:?}");
    }
    outcome
}

#[test]
fn every_site_gets_the_sum_of_all_over_lossy_links() {
    for (sites, reliability) in [(2, CODED), (3, Reliability::SelectiveRepeat), (5, CODED)] {
        let segment_bytes = 10_001;
        let path = LinkConfig {
            loss: Loss::Independent(5 * PERCENT),
            duplicate_parts_per_billion: PERCENT,
            corrupt_parts_per_billion: PERCENT,
            ..Scenario::small(0).forward
        };
        let ring = Ring {
            session: Scenario {
                reliability,
                forward: path,
                backward: path,
                ..Scenario::small(sites)
            },
            sites: all_reduce(sites, segment_bytes),
            repeats: 1,
        };
        let length = sites * segment_bytes;
        let mut arrays: Vec<Vec<u8>> = (1..=sites)
            .map(|rank| (0..length).map(|at| (at * rank % 251) as u8).collect())
            .collect();
        let sum = arrays.iter().skip(1).fold(arrays[0].clone(), |mut sum, array| {
            add(&mut sum, array);
            sum
        });

        let outcome = run(&ring, &mut arrays);

        assert!(arrays.iter().all(|array| *array == sum), "{sites} sites");
        assert_eq!(outcome.completion_nanos.len(), 1);
        let lost: u64 = outcome.sessions.iter().map(|one| one.forward.lost_packets).sum();
        assert!(lost > 0, "nothing was lost: the losses were not tried");
    }
}

/// Checks that a ring without losses takes as long as its steps. `step_nanos` gives the time of a
/// step from (injection, one-way delay); the last step ends with its arrival.
fn assert_steps(depth: u16, step_nanos: impl Fn(Nanos, Nanos) -> Nanos) {
    let (sites, units): (u64, u64) = (4, 512);
    let session = Scenario { depth, slots: 16, ..Scenario::fast(1) };
    let delay = session.forward.delay_nanos;
    let ring = Ring { session, sites: all_reduce(sites, units * 4096), repeats: 3 };

    let outcome = run(&ring, &mut []);

    // 83 bytes per packet for header, descriptor, tag, IP and UDP.
    let injection = units * (4096 + 83) * 8 * 1_000_000_000 / 400_000_000_000;
    let steps = 2 * (sites - 1);
    let expected = (steps - 1) * step_nanos(injection, delay) + injection + delay;
    for found in outcome.completion_nanos {
        // The first packets of a message leave as one burst.
        let is_close = found.abs_diff(expected) < steps * 20_000;
        assert!(is_close, "depth {depth}: {found} ns, {expected} expected");
    }
}

#[test]
fn without_loss_a_step_takes_injection_and_half_a_round_trip() {
    assert_steps(16, |injection, delay| injection + delay);
}

#[test]
fn a_site_that_has_one_message_out_waits_for_its_acknowledgement() {
    assert_steps(1, |injection, delay| injection + 2 * delay);
}

#[test]
fn links_lose_apart_and_a_seed_decides() {
    let lossy = |seed| {
        let mut session = Scenario::fast(seed);
        session.forward.loss = Loss::Independent(PERCENT / 10);
        let ring = Ring { session, sites: all_reduce(3, 1 << 20), repeats: 20 };
        run(&ring, &mut [])
    };
    let outcome = lossy(1);
    let losses: Vec<u64> = outcome.sessions.iter().map(|one| one.forward.lost_packets).collect();
    assert!(losses.iter().all(|lost| *lost > 0) && losses[0] != losses[1], "{losses:?}");
    let fastest: Nanos = 4 * 12 * MILLISECOND;
    assert!(outcome.completion_nanos.iter().all(|nanos| *nanos > fastest));
    assert_eq!(outcome, lossy(1), "the same seed, the same ring");
    assert_ne!(outcome.completion_nanos, lossy(2).completion_nanos);
}

#[test]
fn rings_that_cannot_be_are_refused() {
    let good = Ring { session: Scenario::small(1), sites: all_reduce(3, 100), repeats: 1 };
    let refused = |change: &dyn Fn(&mut Ring), arrays: usize| {
        let mut ring = good.clone();
        change(&mut ring);
        run_ring(&ring, &mut vec![vec![0; 300]; arrays], &add).expect_err("a bad ring")
    };
    assert_eq!(refused(&|ring| ring.sites.truncate(1), 3), RingError::Sites(1));
    assert_eq!(
        refused(&|ring| ring.repeats = 0, 3),
        RingError::Messages { messages: 4, repeats: 0 }
    );
    let later = |ring: &mut Ring| ring.sites[1].sends[2].range.end += 1;
    assert_eq!(refused(&later, 3), RingError::Unequal(1));
    let falling = |ring: &mut Ring| ring.sites[0].receives[0].range.start = 301;
    assert_eq!(refused(&falling, 3), RingError::Unequal(0));
    assert_eq!(refused(&|_| (), 2), RingError::Array(2));
    let beyond = |ring: &mut Ring| ring.sites = all_reduce(3, 101);
    assert_eq!(refused(&beyond, 3), RingError::Array(0));
    let slots = |ring: &mut Ring| ring.session.depth = 0;
    assert!(matches!(refused(&slots, 3), RingError::Scenario(_)));
}

#[test]
fn a_site_that_waits_for_what_never_comes_is_found() {
    let mut ring = Ring { session: Scenario::fast(1), sites: all_reduce(2, 4096), repeats: 1 };
    ring.sites[0].sends[1].after = 3;
    let outcome = run_ring(&ring, &mut [], &add).expect("a valid ring");
    assert_eq!(outcome.completion_nanos, []);
    let rules: Vec<Rule> = outcome.sessions[0].violations.iter().map(|one| one.rule).collect();
    assert!(rules.contains(&Rule::CompletedOnce), "{rules:?}");
}
