//! The protocol that keeps sectors fresh over crashes (`docs/understand/crash-consistency.md`),
//! searched exhaustively in small worlds: two sectors, two or three writes, any crash, and a device
//! that is honest or answers with any page that was ever written to it. Each rule of the protocol
//! is also left out in turn; the search must then find a run that violates a promise. `make
//! freshness-model` prints all runs.

mod device;
mod gateway;
mod life;
mod milestone;
mod model;
mod opening;
mod reading;
mod resent;
mod rules;
mod search;
mod shared;
mod spec;
mod variants;

use model::World;
use rules::{Bounds, Layout, Policy, Rules, Setting};
use search::{Found, search};
use variants::{Adversary, ONE_LIFE};

/// More states than any search here has, except the larger worlds.
const STATES_MAX: usize = 40_000_000;

fn look(is_honest: bool, setting: Setting) -> Found {
    search(World::created(is_honest, &setting.bounds), STATES_MAX, |world: &World| {
        world.steps(&setting)
    })
}

fn keeps_its_promises(adversary: Adversary, policy: Policy, layouts: &[Layout], bounds: Bounds) {
    for layout in layouts.iter().copied() {
        let setting = Setting { layout, policy, rules: Rules::ALL, bounds };
        match look(adversary.is_honest(), setting) {
            Found::Nothing { states } => {
                println!("{adversary:?}, {policy:?}, {layout:?}: {states} states");
            }
            Found::Violation { trace, .. } => {
                panic!("{adversary:?}, {policy:?}, {layout:?}:\n{}", trace.join("\n"))
            }
        }
    }
}

/// Adversaries of a gateway that keeps running.
const GATEWAYS: [Adversary; 4] =
    [Adversary::None, Adversary::Unanchored, Adversary::DeviceBetween, Adversary::DeviceUnanchored];
const BOTH: &[Layout] = &[Layout::Placed, Layout::InPlace];
/// Everything that can happen: a merge, a checkpoint, two openings.
const ALL: Bounds = Bounds { checkpoints: 1, openings: 2, ..ONE_LIFE };
/// Interrupted openings.
const OPENINGS: Bounds = Bounds { merges: 0, openings: 3, ..ONE_LIFE };

#[test]
fn every_crash_leaves_flushed_data_and_causes_no_false_error() {
    for policy in [Policy::EveryFlush, Policy::Rare] {
        keeps_its_promises(Adversary::None, policy, BOTH, ALL);
    }
    let lost_answers = Bounds { lost_answers: 1, ..OPENINGS };
    keeps_its_promises(Adversary::None, Policy::EveryFlush, BOTH, lost_answers);
}

#[test]
fn a_store_without_an_anchor_survives_honest_crashes() {
    keeps_its_promises(Adversary::Unanchored, Policy::Never, BOTH, ALL);
    keeps_its_promises(Adversary::Unanchored, Policy::Never, BOTH, OPENINGS);
}

#[test]
fn a_device_that_is_rolled_back_is_noticed() {
    for policy in [Policy::EveryFlush, Policy::Rare] {
        keeps_its_promises(Adversary::Device, policy, BOTH, OPENINGS);
        keeps_its_promises(Adversary::Device, policy, &[Layout::Placed], ALL);
    }
    let refresh = Bounds { refreshes: 1, ..ONE_LIFE };
    keeps_its_promises(Adversary::Device, Policy::EveryFlush, &[Layout::InPlace], refresh);
}

#[test]
fn only_one_of_two_openings_of_a_store_can_flush() {
    let fork = Bounds { lives: 2, merges: 0, flushes: 2, openings: 2, ..ONE_LIFE };
    keeps_its_promises(Adversary::Device, Policy::EveryFlush, BOTH, fork);
    let third = Bounds { writes: 1, openings: 3, ..fork };
    keeps_its_promises(Adversary::Device, Policy::EveryFlush, BOTH, third);
}

#[test]
fn a_gateway_reads_the_last_acknowledged_versions_over_restarts() {
    let one_write = Bounds { gateways: 1, writes: 1, ..ALL };
    let openings = Bounds { gateways: 1, writes: 1, ..OPENINGS };
    let two_writes = Bounds { gateways: 1, openings: 2, ..OPENINGS };
    for bounds in [one_write, openings, two_writes] {
        for adversary in GATEWAYS {
            keeps_its_promises(adversary, adversary.policy(), BOTH, bounds);
        }
    }
}

#[test]
#[ignore = "takes ten minutes and ten gigabytes"]
fn larger_worlds() {
    let three_writes = Bounds { writes: 3, flushes: 2, ..ALL };
    keeps_its_promises(Adversary::None, Policy::EveryFlush, BOTH, three_writes);
    keeps_its_promises(Adversary::Device, Policy::EveryFlush, BOTH, three_writes);
}

#[test]
fn every_rule_is_needed() {
    let rules = format!("{:?}", Rules::ALL);
    let names = rules.trim_start_matches("Rules {").trim_end_matches('}').split(',');
    let names: Vec<_> = names.filter_map(|rule| Some(rule.split(':').next()?.trim())).collect();
    let left_out: Vec<_> = variants::all().iter().map(|variant| variant.rule).collect();
    for name in names {
        assert!(left_out.contains(&name), "no variant leaves out {name}");
    }
    let mut holds = Vec::new();
    for variant in variants::all() {
        let mut rules = Rules::ALL;
        (variant.leave_out)(&mut rules);
        let (layout, policy) = (variant.layout, variant.adversary.policy());
        let setting = Setting { layout, policy, rules, bounds: variant.bounds };
        let rule = variant.rule.replace('_', " ");
        match look(variant.adversary.is_honest(), setting) {
            Found::Violation { trace, states }
                if trace.last().is_some_and(|last| last.contains(variant.violation)) =>
            {
                println!("without \"{rule}\" ({layout:?}, {states} states):");
                for line in trace {
                    println!("    {line}");
                }
            }
            found => holds.push(format!("{rule}: {found:?}")),
        }
    }
    assert!(holds.is_empty(), "no violation found, or another one:\n{}", holds.join("\n"));
}
