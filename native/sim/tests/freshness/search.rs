//! Breadth-first search of all states that a model can reach, for the shortest path to a violation.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

/// A step: its description, and the state after it or the violation.
pub struct Step<S> {
    pub what: String,
    pub outcome: Result<S, String>,
}

/// The result of a search.
#[derive(Debug)]
pub enum Found {
    /// No violation in this many states.
    Nothing { states: usize },
    /// The shortest run that ends in a violation: its steps, then the violation.
    Violation { trace: Vec<String>, states: usize },
}

fn fingerprint(state: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    state.hash(&mut hasher);
    hasher.finish()
}

/// Visits every state. Two states with the same 64-bit hash are taken for one: with 10^7 states,
/// that happens once in 10^5 searches.
///
/// # Panics
/// If there are more than `states_max` states, as the search would not be exhaustive.
pub fn search<S: Hash + Clone>(
    initial: S,
    states_max: usize,
    steps: impl Fn(&S) -> Vec<Step<S>>,
) -> Found {
    let mut seen = HashSet::from([fingerprint(&initial)]);
    // Origin of each state: index of the previous state, and number of the step taken there.
    let mut origins: Vec<(usize, usize)> = vec![(0, 0)];
    let mut layer = vec![(0, initial.clone())];
    while !layer.is_empty() {
        let mut next = Vec::new();
        for (index, state) in layer {
            for (number, step) in steps(&state).into_iter().enumerate() {
                match step.outcome {
                    Err(violation) => {
                        let mut trace = replay(&initial, &origins, index, &steps);
                        trace.extend([step.what, violation]);
                        return Found::Violation { trace, states: origins.len() };
                    }
                    Ok(state) if seen.insert(fingerprint(&state)) => {
                        assert!(origins.len() < states_max, "more than {states_max} states");
                        next.push((origins.len(), state));
                        origins.push((index, number));
                    }
                    Ok(_) => {}
                }
            }
        }
        layer = next;
    }
    Found::Nothing { states: origins.len() }
}

fn replay<S: Clone>(
    initial: &S,
    origins: &[(usize, usize)],
    mut index: usize,
    steps: impl Fn(&S) -> Vec<Step<S>>,
) -> Vec<String> {
    let mut numbers = Vec::new();
    while index != 0 {
        let (before, number) = origins[index];
        numbers.push(number);
        index = before;
    }
    let mut state = initial.clone();
    let mut trace = Vec::new();
    for number in numbers.into_iter().rev() {
        let step = steps(&state).swap_remove(number);
        trace.push(step.what);
        state = step.outcome.unwrap_or_else(|_| unreachable!("a step that was taken before"));
    }
    trace
}
